"""`plan`: what the training runs of a config take before they start."""

from moe_routing_bench.cli.options import ConfigJson, Configs, Platform, Run
from moe_routing_bench.cli.printing import duration
from moe_routing_bench.quality import costs, run_rows
from moe_routing_bench.quality import plan as training
from moe_routing_bench.quantities import count
from moe_routing_bench.store import paths
from moe_routing_bench.study.request import config_or_last
from moe_routing_kernels.errors import bad

ENGINE = "graph,operators,compiled"  # that of a GPU


def plan(config: Configs = None, config_json: ConfigJson = None, platform: Platform = None, run: Run = None) -> None:
    """Say what the training runs of a config take of one GPU: seconds by stored speeds of their shape, else by estimates.

    Adaptations are not in it, nor timings. Runs are taken one after the other: several at once on a GPU take longer each.
    """
    effective, folder, _ = config_or_last(config, config_json, platform, run)
    runs = training.expand(effective.get("quality", []), effective.get("perft", [])).runs
    if not runs:
        raise bad("config.quality", "no runs", "at least one entry")
    stored = {paths.quality(name) for name in (folder, folder.partition(".")[0])}
    rows = [row for path in sorted(stored) if path.is_file() for row in run_rows.read(path).to_pylist()]
    entries = costs.by_entry(runs.values(), costs.speeds(rows, ENGINE))
    print(f"{'entry':<28} {'runs':>5} {'tokens each':>12} {'s each':>8} {'GPU s':>8}  speed")
    total, bases = 0.0, set()
    for (label, purpose), parts in entries.items():
        seconds, number = sum(one.runs * one.seconds for one in parts), sum(one.runs for one in parts)
        tokens, basis = parts[0].tokens, ", ".join(sorted({one.basis for one in parts}))
        name = label if purpose == "final" else f"{label} (pilots)"
        print(f"{name:<28} {number:>5} {tokens:>12,} {seconds / number:>8.1f} {seconds:>8.0f}  {basis}")
        total += seconds
        bases |= {one.basis for one in parts}
    print(f"{count(len(runs), 'run')}, {duration(total)} of one GPU")
    if costs.ESTIMATED in bases:
        print("estimated: for one NVIDIA H200, by constants that were not measured with this engine")
