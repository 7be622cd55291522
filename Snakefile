"""Measure what changed, draw and report: snakemake --cores 1. The rules are in workflow/, the grid is in config/."""


include: "workflow/Snakefile"


workflow.default_target = "all"  # an included file sets none
