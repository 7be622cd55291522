"""Seed documents, replayed: what each publishes and what a run of its config measured, in columns that are never mixed."""
