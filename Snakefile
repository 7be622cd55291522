"""Measure what changed, draw and report: snakemake --cores 1. Rules are in workflow/rules, the grid in config/."""

from snakemake.utils import min_version

min_version("9.27")


# A config file or --config that brings its own grid stands alone: nothing of the default config leaks into it.
if "grid" not in config:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"


rule all:
    input:
        [paths.report(PLATFORM)] if SHARE is None else shared_out(),
        [paths.quality(PLATFORM)] if TRAINING.finals and SHARE is None else [],
        [paths.perft(PLATFORM)] if TRAINING.adaptations and SHARE is None else [],
    localrule: True


include: "workflow/rules/measure.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/perft.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/report.smk"


onsuccess:
    print(f"Report: {paths.report(PLATFORM)}" if SHARE is None else f"Share {SHARE} is measured.")
    if SHARE is None:
        print(progress.closing(PLATFORM))


onerror:
    print("Some cells were not measured. `moe-routing-bench status` lists what remains; run the same command to go on.")
