"""Configs: what is read, what is refused and in which words, and that the shipped ones are what their comments say."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from moe_routing_bench import study
from moe_routing_bench.config import load as config
from moe_routing_bench.config import presets, sections
from moe_routing_bench.config.axes import AXES
from moe_routing_bench.config.expand import expand
from moe_routing_bench.grid.cell import Settings
from moe_routing_bench.grid.run_spec import Adaptation, Run
from moe_routing_bench.store import paths, project_files
from moe_routing_bench.study import jobs_of
from moe_routing_bench.study import models as models_of
from moe_routing_kernels import formats
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
ENTRY = {"benches": ["gate"], "tokens": [64], "experts": [8], "top_k": [2]}


@pytest.fixture(scope="module")
def models():
    return presets.load(ROOT / paths.MODELS)


def test_defaults_are_filled_in():
    assert config.load({"grid": [ENTRY]}) == {"seed": 17, "device": "auto", "measure": {}, "grid": [ENTRY]}


def test_a_gpu_is_no_platform_of_device_cpu():
    assert config.load({"grid": [ENTRY], "device": "cpu", "platform": "cpu"})["platform"] == "cpu"
    with pytest.raises(UserError, match=r"config.platform: got 'nvidia-h200'; allowed: cpu, as device is cpu"):
        config.load({"grid": [ENTRY], "device": "cpu", "platform": "nvidia-h200"})


def test_shares_hold_whole_families_each_once(models):
    """Of every number of shares; those of the published grid are of about equal size."""
    families = [job.cell.family for job in expand(config.load(ROOT / "config/h200.yaml"), models)]
    for shares in (1, 2, 3, 8):
        parts = [study.groups_of(f"{number}/{shares}", families) for number in range(1, shares + 1)]
        assert sorted(family for part in parts for family in part) == sorted(set(families))
        sizes = [sum(family in part for family in families) for part in parts]
        assert max(sizes) - min(sizes) <= 2, sizes
    assert study.groups_of(None, families) == set(families)
    with pytest.raises(UserError, match=r"config.share: got '3/2'; allowed: 1/2 to 2/2"):
        study.groups_of("3/2", families)


def test_a_later_file_overrides_an_earlier_one(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(yaml.safe_dump({"measure": {"min_blocks": 5, "warmup_ms": 1}, "grid": [ENTRY]}))
    second.write_text("measure: {warmup_ms: 2}\nseed: 3\n")
    loaded = config.load([first, second])
    assert loaded["measure"] == {"min_blocks": 5, "warmup_ms": 2} and loaded["seed"] == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sed": 1}, ["config key", "'sed'", "did you mean 'seed'?"]),
        ({"measure": {"warmup": 1}}, ["config.measure key", "'warmup_ms'"]),
        ({"measure": {"min_blocks": 0}}, ["config.measure.min_blocks", "got 0", "from 1 to 1000000"]),
        ({"device": "gpu"}, ["config.device", "'gpu'", "auto"]),
        ({"seed": True}, ["config.seed", "got True", "integer"]),
        ({"grid": []}, ["config.grid", "got []"]),
        ({"grid": [{**ENTRY, "token": [1]}]}, ["config.grid[0] key", "did you mean 'tokens'?"]),
        ({"grid": [ENTRY, {"tokens": [1]}]}, ["config.grid[1]", "no 'benches'"]),
        ({"grid": [{**ENTRY, "tokens": 64}]}, ["config.grid[0].tokens", "got 64", "write [64]"]),
        ({"grid": [{**ENTRY, "tokens": [0]}]}, ["config.grid[0].tokens[0]", "got 0", "from 1 to 2147483647"]),
        ({"grid": [{**ENTRY, "capacity_factor": ["nil"]}]}, ["capacity_factor[0]", "'nil'", "or none"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(change, words):
    with pytest.raises(UserError) as caught:
        config.load({"grid": [ENTRY], **change})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "a: [", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="config file"):
        config.load(path)
    with pytest.raises(UserError, match="readable"):
        config.load(tmp_path / "absent.yaml")


def test_the_schema_file_is_that_of_the_models():
    assert (ROOT / sections.SCHEMA).read_text() == sections.text(), "run: python -m moe_routing_bench.config.sections"


def test_the_schema_says_what_each_section_has():
    schema = yaml.safe_load(sections.text())
    entry, measure = schema["$defs"]["GridEntry"]["properties"], schema["$defs"]["Measure"]["properties"]
    assert {name: one["default"] for name, one in measure.items()} == asdict(Settings())
    assert set(entry) == {"benches", "implementations", "twins", "shared_experts"} | {
        n for n, one in AXES.items() if one.scope != "config"
    }
    assert entry["tokens"]["items"]["minimum"] == 1 and entry["dtype"]["items"]["enum"] == list(formats.PLAIN)
    assert "enum" not in entry["router"]["items"], "a router is added without writing the schema again"
    runs, adaptations = (schema["$defs"][f"{name}Entry"]["properties"] for name in ("Training", "Adaptation"))
    assert {field.name for field in fields(Run)} - set(runs) == {"purpose", "pilots", "keep_weights", "lr_source"}
    assert {field.name for field in fields(Adaptation)} - set(adaptations) == {"run"}


@pytest.mark.parametrize(
    ("name", "cells", "compiled"),
    [
        ("config", 22, 1),
        ("h200", 198, 7),
        ("layers", 13, 0),
        ("decode", 7, 0),
        ("quantised", 23, 0),
        ("quantised-decode", 12, 0),
        ("quantised-floats", 22, 0),
        ("layers-full", 34, 0),
        ("model", 4, 0),
        ("training", 3, 0),
        ("h200-full", 4293, 0),
    ],
)
def test_shipped_configs_expand_to_the_stated_cells(models, name, cells, compiled):
    jobs = expand(config.load(ROOT / f"config/{name}.yaml"), models)
    assert len(jobs) == cells
    assert sum("torch_compile" in job.implementations for job in jobs) == compiled
    assert all(len(job.implementations) > 1 or job.cell.bench == "permute" for job in jobs), "nothing compiled alone"


def test_presets_are_whole_or_say_why_not(models):
    entry = {"benches": ["layer"], "tokens": [64]}
    for name, preset in models.items():
        effective = config.load({"grid": [{**entry, "model": [name]}]})
        if preset.unsupported:
            with pytest.raises(UserError, match="grid model"):
                expand(effective, models)
        else:
            assert len(expand(effective, models)) == 1
    assert models["deepseek-v3"].router == "deepseek_v3" and models["olmoe-1b-7b"].intermediate == 1024


def test_a_preset_without_an_axis_is_refused(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text("mine: {hidden: 8}\n")
    with pytest.raises(UserError, match="no intermediate"):
        presets.load(path)


def test_presets_of_a_user_s_own_file_join_the_project_s(tmp_path, monkeypatch):
    """A name that both have is refused; the project's own file may be named."""
    own = tmp_path / "mine.yaml"
    sizes = "{hidden: 64, intermediate: 32, experts: 4, top_k: 2, router: softmax_topk, activation: swiglu}"
    own.write_text(f"mine: {sizes}\n")
    entry = {"benches": ["layer"], "tokens": [64], "model": ["mine"]}
    monkeypatch.chdir(ROOT)
    (job,) = jobs_of(config.load({"models": str(own), "grid": [entry]}))
    assert (job.cell.model, job.cell.hidden) == ("mine", 64)
    assert list(models_of("config/models.yaml")) == list(models_of())
    with pytest.raises(UserError, match="grid model: got 'mine'"):
        jobs_of(config.load({"grid": [entry]}))
    own.write_text(f"mixtral-8x7b: {sizes}\n")
    with pytest.raises(
        UserError, match=r"model in .*mine.yaml: got 'mixtral-8x7b'; allowed: a new name; hint: config/models"
    ):
        models_of(own)
    with pytest.raises(UserError, match=r"config file: got 'absent\.yaml'"):
        models_of("absent.yaml")


def test_code_files_follow_what_a_bench_is_made_of():
    gate, pack, layer = (set(project_files.code_files(bench)) for bench in ("gate", "pack", "layer"))
    assert all(Path(name).is_file() for name in gate | pack | layer)
    has = lambda files, part: any(part in name for name in files)  # noqa: E731
    assert not has(gate, "routers/learned.py") and not has(gate, "routers/rules/")
    assert has(gate, "routers/formulas.py") and has(gate, "measure/worker.py") and not has(gate, "benches/pack")
    assert has(pack, "cute/cache.py") and has(gate, "gate/__init__.py") and not has(pack, "composite.py")
    assert has(layer, "composite.py") and has(layer, "benches/routing") and has(layer, "benches/gate")
    assert not has(layer, "figures/") and not has(layer, "cli/") and not has(layer, "fields.py")


def test_what_a_config_says_of_a_cpu_stands_in_there_and_only_there():
    small = {"grid": [ENTRY], "measure": {"min_blocks": 5}}
    loaded = config.load({"grid": [ENTRY, ENTRY], "measure": {"max_seconds": 1}, "cpu": small})
    there = {"seed": 17, "device": "auto"}
    assert config.on(loaded, "nvidia-h200") == there | {"grid": [ENTRY, ENTRY], "measure": {"max_seconds": 1}}
    assert config.on(loaded, "cpu") == there | small
    assert config.on(config.load({"grid": [ENTRY], "cpu": {"grid": [ENTRY]}}), "cpu")["measure"] == {}
    with pytest.raises(UserError, match=r'config.cpu: got "no'):
        config.load({"grid": [ENTRY], "cpu": {"measure": {}}})
