"""QuACK's tuners, by modules in the place of its own."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest

from moe_routing_bench.peers import quack_tuner


@dataclass(frozen=True)
class Config:
    """QuACK's `GemmConfig`, as far as its space goes."""

    tile_n: int
    cluster_m: int = 2
    cluster_n: int = 1
    device_capacity: int = 9


SPACE = [Config(128), Config(128, 1, 2), Config(192), Config(192, device_capacity=10), Config(256, 1, 2)]
WIDE = [*SPACE, Config(128, 1, 1), Config(192, 1, 1), Config(256, 1, 1)]


def tuner(name: str, configs: list[Config]) -> SimpleNamespace:
    listed = [SimpleNamespace(kwargs={"config": config}) for config in configs]
    return SimpleNamespace(fn=SimpleNamespace(__name__=name), best_config="of another", configs=listed)


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its tuner of plain products, and where those of epilogues are made and kept."""
    plain = tuner("gemm_tuned", SPACE)
    autotune = SimpleNamespace(_MOD_TUNERS={"a digest": tuner("mod_silu", SPACE)}, get_all_configs=lambda **how: SPACE)
    modules = {
        "quack": ModuleType("quack"),
        "quack.autotuner": SimpleNamespace(AutotuneConfig=lambda config: SimpleNamespace(kwargs={"config": config})),
        "quack.gemm_interface": SimpleNamespace(gemm_tuned=plain),
        "quack.gemm_runtime": SimpleNamespace(autotune=autotune),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(plain=plain, autotune=autotune)


def test_every_configuration_of_hopper_is_tried_without_a_cluster(quack: SimpleNamespace) -> None:
    for _ in range(2):
        quack_tuner.tuner_choices()
        assert [listed.kwargs["config"] for listed in quack.plain.configs] == WIDE
        assert quack.autotune.get_all_configs(epilogue="gated") == WIDE


def test_what_the_tuners_chose(quack: SimpleNamespace) -> None:
    """Since they were asked: each sets it when it runs, and those of epilogues are made then, in the wider space."""
    choices = quack_tuner.tuner_choices()
    assert choices() == "" and not quack.autotune._MOD_TUNERS
    later = quack.autotune._MOD_TUNERS["another"] = tuner("mod_swiglu", WIDE)
    quack.plain.best_config, later.best_config = "tile_m=128", "tile_m=256"
    assert choices() == "gemm: tile_m=128; mod_swiglu: tile_m=256"
    assert quack_tuner.tuner_choices()() == ""
