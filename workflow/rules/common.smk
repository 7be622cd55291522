"""Validate the config, expand the grid once, and name what the rules share."""

import json
import os
import re
import shlex
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod

from moe_routing_bench.benches import plugins
from moe_routing_bench.study import progress
from moe_routing_bench.study.request import groups_of, jobs_of, last
from moe_routing_bench.quantities import count
from moe_routing_bench.packages import KERNELS, PACKAGE
from moe_routing_bench.config import load as bench_config
from moe_routing_kernels.errors import UserError, writing
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.grid.settings import Settings
from moe_routing_bench.quality import plan
from moe_routing_kernels import files
from moe_routing_bench.quality import code
from moe_routing_bench.store import paths, platforms, project_files
from moe_routing_bench.store.project_files import installed, name_commit, own_or_shipped, shipped

if prefix := workflow.modifier.path_modifier.prefix:
    raise WorkflowError(f"error: a module's prefix: got {prefix!r}; allowed: none; hint: give the run a --directory")

if DeploymentMethod.CONDA in workflow.deployment_settings.deployment_method:
    if installed():
        raise WorkflowError(
            "error: --sdm: got 'conda'; allowed in a checkout; hint: activate the package's environment"
        )
    # environment.yml has what the package needs, but not the package, and Snakemake takes PYTHONPATH from jobs. The rest of
    # the prefix is Snakemake's own.
    shell.prefix(f"set -euo pipefail; export PYTHONPATH={shlex.quote(str(PACKAGE.parent))}; ")

try:
    for path in workflow.configfiles:  # Snakemake takes the last of two equal keys
        bench_config.read_mapping(Path(path))
    SETTINGS = bench_config.load(config)
    ASKED_PLATFORM = SETTINGS.pop("platform", None)
    platforms.prepare_jobs(ASKED_PLATFORM or SETTINGS["device"])
    if ASKED_PLATFORM is None:
        # Decided once, by the process that the user started: Snakemake hands --config on to its jobs, some of which a cluster
        # runs where there is another GPU, or none.
        ASKED_PLATFORM = platforms.current()
        workflow.config_settings.config_args = [*workflow.config_settings.config_args, f"platform={ASKED_PLATFORM}"]
    SETTINGS = bench_config.on(SETTINGS, ASKED_PLATFORM)
    JOBS = {(job.cell.bench, job.name): job for job in jobs_of(SETTINGS)}
    TRAINING = plan.expand(SETTINGS.get("quality", []), SETTINGS.get("perft", []))
    SHARE = SETTINGS.pop("share", None)
    FAMILIES = groups_of(SHARE, [job.cell.family for job in JOBS.values()])
    LABELS = groups_of(SHARE, [run.label for run in TRAINING.finals.values()])
except UserError as error:
    raise WorkflowError(f"error: {error}") from None

PLATFORM = paths.folder(ASKED_PLATFORM, SETTINGS.get("run"))
THREADS = Settings(**SETTINGS["measure"]).cpu_threads
CONFIG_JSON = json.dumps(SETTINGS, sort_keys=True, separators=(",", ":"))


def without_specs(record):
    """Shorten the JSON texts in what Snakemake prints of a command that was ended or has failed: the job's name says which it was."""
    for name in ("msg", "shellcmd"):
        if isinstance(text := getattr(record, name, None), str):
            setattr(record, name, re.sub(r"'\{\".*?\}'", "'{...}'", text))
    return True


logger.addFilter(without_specs)


def keep_inputs():
    """Write what was asked for, and which code measures it, as files that change only with their content.

    A thousand jobs then have one input each, and nothing depends on times or on Snakemake's own records, which may get lost.
    """
    files.keep(last(PLATFORM), f"{CONFIG_JSON}\n")
    files.keep(paths.asked(PLATFORM), "".join(f"{name}\n" for name in sorted(job.name for job in JOBS.values())))
    for bench in {job.cell.bench for job in JOBS.values()}:
        files.keep(paths.code(PLATFORM, bench), project_files.code_hashes(project_files.code_files(bench)))
    if SETTINGS.get("accuracy"):
        files.keep(paths.code(PLATFORM, "experts"), project_files.code_hashes(project_files.code_files("experts")))
    for job in {plugins.references(job): job for job in JOBS.values()}.values():
        for reference, hashes in plugins.codes(job).items():
            files.keep(paths.plugin_code(PLATFORM, reference), hashes)
    if TRAINING.finals:
        files.keep(
            paths.code(PLATFORM, "quality"), project_files.code_hashes(project_files.named(code.training_files()))
        )
    if TRAINING.adaptations:
        files.keep(
            paths.code(PLATFORM, "perft"), project_files.code_hashes(project_files.named(code.adaptation_files()))
        )


name_commit()
if workflow.is_main_process:  # a job elsewhere writes its outputs, and nothing else
    try:
        files.check_writable(Path(".snakemake/locks/here"))  # where Snakemake itself ends in a traceback
        with writing(paths.results(PLATFORM)):
            keep_inputs()
    except UserError as error:
        raise WorkflowError(f"error: {error}") from None
    threads = count(THREADS, "CPU thread")
    logger.info(f"{PLATFORM}: {len(JOBS)} cells are asked for, with {threads}; the report is {paths.report(PLATFORM)}")
else:  # it runs one cell: a warm server would be of use to none after it, and end with it while others call
    os.environ.setdefault("MOE_ROUTING_BENCH_WORKER", "cold")
# Rows of training runs are reported when this config makes them, or when they are stored.
PLANNED = {"quality": TRAINING.finals, "perft": TRAINING.adaptations}
SOURCES = paths.reported(PLATFORM) | {name for name, runs in PLANNED.items() if runs}
REPORTED = [figure.name for figure in FIGURES.values() if figure.source in SOURCES]


wildcard_constraints:
    platform=re.escape(PLATFORM),  # no run makes the results of two platforms
    bench="[a-z]+",
    cell="[^/]+",
    run="[^/]+",


def spec_of(wildcards):
    """Everything but code that a cell's measurement depends on, as one JSON text; of a trace it holds the hash."""
    return JOBS[wildcards.bench, wildcards.cell].spec


def code_of(wildcards):
    """What says which code measures a cell: that of its bench, and of all that it has from other packages."""
    platform, job = wildcards.platform, JOBS[wildcards.bench, wildcards.cell]
    others = [str(paths.plugin_code(platform, one)) for one in plugins.references(job)]
    return [str(paths.code(platform, job.cell.bench)), *others]


def cells_of(wildcards):
    """The file of every cell of the grid."""
    return [str(path) for path in paths.cell_files(wildcards.platform, list(JOBS.values()))]


def shared_out():
    """The files of this share's cells, training runs, timings and adaptations."""
    mine = {name for name, run in TRAINING.finals.items() if run.label in LABELS}
    adapted = [name for name, one in TRAINING.adaptations.items() if one.base in mine]
    return [
        *[paths.cell_file(PLATFORM, job) for job in JOBS.values() if job.cell.family in FAMILIES],
        *[paths.run_file(PLATFORM, name) for name in sorted(mine)],
        *[paths.timing_file(PLATFORM, name) for name in TRAINING.timing if name in mine],
        *[paths.perft_file(PLATFORM, name) for name in adapted],
    ]


def profiles_of(wildcards):
    """The profiles of the layers of the grid, if they are asked for."""
    layers = [job for job in JOBS.values() if job.cell.bench == "layer"] if SETTINGS.get("profile") else []
    return [str(paths.profile_folder(wildcards.platform, job)) for job in layers]


def accuracy_of(wildcards):
    """The accuracy of quantised weights, if it is asked for."""
    return [str(paths.accuracy(wildcards.platform))] if SETTINGS.get("accuracy") else []


def pilots_of(wildcards):
    """The runs by which a run's learning rate is chosen."""
    return [str(paths.run_file(wildcards.platform, name)) for name in TRAINING.runs[wildcards.run].pilots]


def perft_pilots_of(wildcards):
    """The same for an adaptation."""
    pilots = TRAINING.all_adaptations[wildcards.run].run.pilots
    return [str(paths.perft_file(wildcards.platform, name)) for name in pilots]
