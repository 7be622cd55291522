"""The HTML report: questions that its rows answer, findings in words, figures, all rows, what was not ok, provenance, method."""
