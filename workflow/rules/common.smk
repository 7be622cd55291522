"""Validate the config, expand the grid once, and name what the rules share."""

import functools
import gc
import inspect
import json
import logging
import os
import re
import shlex
import sys
import time
from pathlib import Path

from snakemake.common import overwrite_function_params
from snakemake.exceptions import WorkflowError
from snakemake.io import Mtime
from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod

from moe_routing_bench.benches import plugins
from moe_routing_bench.study import progress
from moe_routing_bench.study import groups_of, jobs_of, last
from moe_routing_bench.quantities import count
from moe_routing_bench.packages import KERNELS, PACKAGE
from moe_routing_bench.config import load as bench_config
from moe_routing_kernels.errors import UserError, writing
from moe_routing_bench.figures import FIGURES
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.grid.run_spec import PACKAGES
from moe_routing_bench.quality import plan
from moe_routing_kernels import files
from moe_routing_bench.quality import code, texts
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
    TRAINING = plan.expand(SETTINGS.get("quality", []), SETTINGS.get("perft", []), ASKED_PLATFORM)
    SHARE = SETTINGS.pop("share", None)
    FAMILIES = groups_of(SHARE, [job.cell.family for job in JOBS.values()])
    LABELS = groups_of(SHARE, [run.label for run in TRAINING.finals.values()])
except UserError as error:
    raise WorkflowError(f"error: {error}") from None

PLATFORM = paths.folder(ASKED_PLATFORM, SETTINGS.get("run"))
THREADS = Settings(**SETTINGS["measure"]).cpu_threads
CONFIG_JSON = json.dumps(SETTINGS, sort_keys=True, separators=(",", ":"))
# What the commands of all cells share: Snakemake fills in the rest of each three times.
CLIENT = f"python -I -S {shlex.quote(project_files.source('measure/client.py'))}".replace("{", "{{").replace("}", "}}")
PACKAGES_MANIFEST = str(texts.folder() / PACKAGES / "manifest.json")


# A JSON text in single quotes. A search by classes of characters takes a tenth of one for the nearest end.
SPEC_BEGINS = "'{\""
SPEC = re.compile(r"'\{\"[^'\n]*(?:(?<!\})'[^'\n]*)*(?<=\})'")


def without_specs(record):
    """Shorten the JSON texts in what Snakemake prints of a command that was ended or has failed: the job's name says which it was."""
    for name in ("msg", "shellcmd"):
        if isinstance(text := getattr(record, name, None), str) and SPEC_BEGINS in text:
            setattr(record, name, SPEC.sub("'{...}'", text))
    return True


logger.addFilter(without_specs)


def inputs_to_keep():
    """What was asked for, and which code measures it: files, by path, that change only with their content.

    A thousand jobs then have one input each, and nothing depends on times or on Snakemake's own records, which may get lost.
    """
    texts = {
        last(PLATFORM): f"{CONFIG_JSON}\n",
        paths.asked(PLATFORM): "".join(f"{name}\n" for name in sorted(job.name for job in JOBS.values())),
    }
    benches = {job.cell.bench for job in JOBS.values()} | ({"experts"} if SETTINGS.get("accuracy") else set())
    for bench in benches:
        texts[paths.code(PLATFORM, bench)] = project_files.code_hashes(project_files.code_files(bench))
    for job in {plugins.references(job): job for job in JOBS.values()}.values():
        for reference, hashes in plugins.codes(job).items():
            texts[paths.plugin_code(PLATFORM, reference)] = hashes
    for kind, runs, sources in (
        ("quality", TRAINING.finals, code.training_files),
        ("perft", TRAINING.adaptations, code.adaptation_files),
    ):
        if runs:
            texts[paths.code(PLATFORM, kind)] = project_files.code_hashes(project_files.named(sources()))
    return texts


def keep_inputs():
    """Write them, with one line in place of a traceback."""
    try:
        with writing(paths.results(PLATFORM)):
            for path, text in INPUTS.items():
                files.keep(path, text)
    except UserError as error:
        raise WorkflowError(f"error: {error}") from None


def lift_default_limit():
    """Start jobs here without Snakemake's default limit of 100 a second, which one measurement at a time does not reach.

    With a limit, Snakemake looks at all waiting jobs once a second for every job that it has started so far.
    """
    limit = workflow.scheduling_settings.max_jobs_per_timespan
    if workflow.local_exec and limit and (limit.max_jobs, limit.timespan) == (100, 1):
        workflow.scheduling_settings.max_jobs_per_timespan = None


def promise_inputs(cache):
    """Plan as if the files that are missing or have another content were written now; write them when the run is under way.

    So is the list of what was asked for while one of its cells has no file, for `collect` has no input of every cell: Snakemake
    would take as long for the second rule that lists them all as for a third of the rest of a plan.

    A dry run, a summary, or a run that another one locks out, writes nothing. Snakemake drops its cache of files once it has the
    lock and is about to start jobs, which is the only such moment that a workflow learns of when it is a module of another.
    """
    if getattr(cache, "promised", False) or not cache.active:
        return
    for path, text in INPUTS.items():
        if not files.holds(path, text) or path == paths.asked(PLATFORM) and not all(map(os.path.exists, cell_files())):
            cache.exists_local[str(path)] = True
            cache.mtime[str(path)] = Mtime(local=time.time())
            cache.size[str(path)] = sys.maxsize  # too large to be compared with what a job recorded
    drop = cache.deactivate

    def deactivate():
        keep_inputs()
        lift_default_limit()
        drop()

    cache.promised, cache.deactivate = True, deactivate


def of_wildcards(function):
    """An input function whose parameters, which Snakemake asks for several times a job, are read once."""
    overwrite_function_params(function, inspect.signature(function).parameters)
    return function


def kept(*paths_of):
    """An input function for files of `INPUTS`, which need not be there yet."""
    texts = list(map(str, paths_of))

    @of_wildcards
    def names(wildcards):
        if workflow.is_main_process:
            promise_inputs(workflow.iocache)
        return texts

    return names


name_commit()
# A plan makes hundreds of objects per job, and they all stay: searching them for garbage took an eighth of its time.
gc.freeze()
gc.set_threshold(100_000, 20, 100)
INPUTS = inputs_to_keep() if workflow.is_main_process else {}
if workflow.is_main_process:  # a job elsewhere writes its outputs, and nothing else
    logging.raiseExceptions = False  # a disk without room for Snakemake's log is told in one line, below
    try:
        # Where Snakemake itself ends in a traceback.
        files.check_writable(Path(".snakemake/locks/here"))
        files.check_way(paths.results(PLATFORM))
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
    bench="[a-z_]+",
    cell="[^/]+",
    run="[^/]+",


@of_wildcards
def spec_of(wildcards):
    """Everything but code that a cell's measurement depends on, as one JSON text; of a trace it holds the hash."""
    return JOBS[wildcards.bench, wildcards.cell].spec


@functools.cache
def code_with(bench, references):
    """The input function of the cells of a bench that have these from other packages."""
    return kept(paths.code(PLATFORM, bench), *(paths.plugin_code(PLATFORM, reference) for reference in references))


@of_wildcards
def code_of(wildcards):
    """What says which code measures a cell: that of its bench, and of all that it has from other packages."""
    job = JOBS[wildcards.bench, wildcards.cell]
    return code_with(job.cell.bench, plugins.references(job))(wildcards)


@functools.cache
def cell_files():
    """The file of every cell of the grid."""
    return [str(path) for path in paths.cell_files(PLATFORM, JOBS.values())]


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


def texts_of(wildcards):
    """The manifest of the text of packages, for a run that reads it; its time does not matter, as rows hold the hash of their text."""
    return [ancient(PACKAGES_MANIFEST)] if PACKAGES in TRAINING.runs[wildcards.run].corpora else []


def perft_pilots_of(wildcards):
    """The same for an adaptation."""
    pilots = TRAINING.all_adaptations[wildcards.run].run.pilots
    return [str(paths.perft_file(wildcards.platform, name)) for name in pilots]
