"""QuACK's tuners (quack-kernels 0.6.5), which SonicMoE's products are tuned by as well: their space, and what they chose.

On Hopper their space has clusters of two tiles only. A cluster of two row tiles rounds the rows of each expert up to twice a tile, one of two
column tiles the columns, so with few rows per expert products without clusters are faster. Each configuration is therefore tried without a
cluster, too. QuACK keeps results on disk by the list of configurations, so those of its own space are not taken for these.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

_HOPPER = 9  # compute capability
_WHOLE = "with_unclustered"  # mark of what was widened


def tuner_choices() -> Callable[[], str]:
    """Widen the space of QuACK's tuners, and forget what they chose; the function that is returned says what those that have run since then
    chose."""
    _widen()
    for _, tuner in _tuners():
        tuner.best_config = None  # which each sets when it runs
    return lambda: "; ".join(f"{name}: {tuner.best_config}" for name, tuner in _tuners() if tuner.best_config)


def with_unclustered(configs: Iterable[Any]) -> list[Any]:
    """QuACK's `GemmConfig`s, and at the end each of Hopper's without a cluster, once."""
    known = list(configs)
    alone = [replace(config, cluster_m=1, cluster_n=1) for config in known if config.device_capacity == _HOPPER]
    return list(dict.fromkeys([*known, *alone]))


def _widen() -> None:
    """Once: the tuner of plain products has a list, those of epilogues ask for theirs when they are made."""
    from quack.autotuner import AutotuneConfig
    from quack.gemm_interface import gemm_tuned
    from quack.gemm_runtime import autotune

    given = autotune.get_all_configs
    if hasattr(given, _WHOLE):
        return

    def configs(*arguments: Any, **options: Any) -> list[Any]:
        return with_unclustered(given(*arguments, **options))

    setattr(configs, _WHOLE, True)
    autotune.get_all_configs = configs
    autotune._MOD_TUNERS.clear()  # made with the space as it was
    gemm_tuned.configs = [
        AutotuneConfig(config=config)
        for config in with_unclustered(known.kwargs["config"] for known in gemm_tuned.configs)
    ]


def _tuners() -> list[tuple[str, Any]]:
    """QuACK's tuners by name: that of plain products, and one per epilogue that has been tuned."""
    from quack.gemm_interface import gemm_tuned
    from quack.gemm_runtime import autotune

    epilogues = autotune._MOD_TUNERS.values()  # it has no public list of them
    return [("gemm", gemm_tuned), *((tuner.fn.__name__, tuner) for tuner in epilogues)]
