"""Whole layers of other packages, behind our router where they have none."""
