"""Answers from published rows: the nearest measured cell."""
