"""The HTML report: findings in words, figures, all rows, what was not ok, provenance, method."""
