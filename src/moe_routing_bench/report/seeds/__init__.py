"""Seed documents, replayed: what each publishes beside what a run of its config measured, in columns that are never mixed."""
