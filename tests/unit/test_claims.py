"""Published figures against rows: what is reproduced, what cannot be told, and what a file of claims may say."""

import math
import re
from pathlib import Path

import pytest
import yaml
from rows import rows
from typer.testing import CliRunner

from moe_routing_bench.benches.registry import BENCHES
from moe_routing_bench.cli.claims import job_of
from moe_routing_bench.cli.main import app
from moe_routing_bench.comparison import claim_verdicts
from moe_routing_bench.config import claims as published
from moe_routing_bench.report.render import render
from moe_routing_bench.store import paths, records
from moe_routing_kernels.errors import UserError

ROOT = Path(__file__).parents[2]
BASE = {
    "id": "one",
    "who": "somebody",
    "source": "a paper",
    "statement": "It is fast.",
    "boundary": "all of it",
    "figure": 100,
    "unit": "us",
    "within": 0.05,
    "check": {"bench": "pack", "implementation": "torch", "column": "median_us", "axes": {"tokens": 1024, "skew": 0}},
}
SPEEDUP = (
    1 + [one.name for one in BENCHES["pack"].implementations].index("triton") / 2
)  # of triton in the synthetic rows


def claim(check: dict | None = None, **change: object) -> published.Claim:
    found = BASE | change
    return published.Claim(**(found | {"check": published.Check(**(BASE["check"] | (check or {})))}))


def verdict(one: published.Claim, table=None, cpu: bool = False) -> claim_verdicts.Held:
    (found,) = claim_verdicts.held([one], rows() if table is None else table, cpu)
    return found


@pytest.mark.parametrize(
    ("figure", "unit", "at_least", "ours", "expected"),
    [
        (100, "us", False, 104.9, True),
        (100, "us", False, 105.1, False),
        (100, "us", False, 94.9, False),
        (100, "us", True, 50.0, True),  # shorter is better
        (100, "us", True, 105.1, False),
        (2, "ms", True, 1.0, True),
        (2, "ms", True, 3.0, False),
        (2, "x", True, 3.0, True),  # larger is better
        (2, "x", True, 1.89, False),
        (2, "x", False, 3.0, False),
        (85, "%", True, 103.0, True),
        (300, "GB/s", True, 280.0, False),
    ],
)
def test_how_near(figure, unit, at_least, ours, expected):
    assert claim_verdicts.reproduced(claim(figure=figure, unit=unit, at_least=at_least), ours) is expected


@pytest.mark.parametrize(
    ("hardware", "gpu", "why"),
    [
        ("NVIDIA H100 (HBM3, 3.35 TB/s peak)", "NVIDIA H200", "the claim is of H100, the rows are of H200"),
        ("NVIDIA L40S or GB200", "NVIDIA H100 80GB HBM3", "the claim is of GB200 and L40S, the rows are of H100"),
        ("NVIDIA H100 80GB", "NVIDIA H100 80GB HBM3", ""),
        ("NVIDIA H100 and H200", "NVIDIA H200", ""),
        (None, "NVIDIA H200", ""),
        ("one GPU with HBM3", "NVIDIA H200", ""),
        ("NVIDIA H100", None, ""),
    ],
)
def test_a_claim_of_another_gpu_says_so(hardware, gpu, why):
    """Beside its verdict: a time of one card is not what another was said to take."""
    found = verdict(claim(hardware=hardware, figure=1), rows().assign(gpu_name=gpu))
    assert (found.verdict, found.why) == (claim_verdicts.NOT, why)


def test_as_near_as_it_asks_is_near_enough():
    assert claim_verdicts.reproduced(claim(within=0.5), 150.0) and claim_verdicts.reproduced(claim(within=0.5), 50.0)
    assert not claim_verdicts.reproduced(claim(within=0.5), 150.1)


def test_why_there_is_nothing_to_compare_with():
    """Of the implementation that ours is held against: it was not measured, or it failed; or several cells where one is meant."""
    table = rows()
    one = claim({"against": "triton"}, unit="x", figure=1)
    other = (table["bench"] == "pack") & (table["implementation"] == "triton")
    for found, why in (
        (table[~other], "not measured"),
        (table.assign(status=table["status"].mask(other, "crashed"), reason="boom"), "triton is crashed: boom"),
    ):
        held = verdict(one, found)
        assert (held.claim, held.verdict, held.why, held.cells) == (one, claim_verdicts.ABSENT, why, 0)
    several = claim({"axes": {"tokens": 1024}})
    held = verdict(several)
    assert (held.claim, held.verdict, held.cells, held.why) == (
        several,
        claim_verdicts.ABSENT,
        3,
        "3 cells match, and one is meant",
    )


def test_a_row_in_the_units_of_the_claim():
    """102.4 us for 1024 tokens in the synthetic rows of torch, half of it for the third implementation, in shares of a copy."""
    assert (verdict(claim()).verdict, verdict(claim()).ours) == ("reproduced", pytest.approx(102.4))
    assert verdict(claim(figure=0.1, unit="ms")).ours == pytest.approx(0.1024)
    share = verdict(claim({"column": "share_of_copy"}, figure=1, unit="%"))
    assert share.ours == pytest.approx(100 * 1024 * 4096 / 102.4 / 4e6) and share.cells == 1
    ratio = verdict(claim({"implementation": "triton", "against": "torch"}, figure=SPEEDUP, unit="x"))
    assert (ratio.ours, ratio.verdict) == (pytest.approx(SPEEDUP), "reproduced")


def test_several_cells():
    """Joined where the claim says how, and refused where it does not."""
    wide = {"axes": {"skew": 0}}  # 102.4 and 409.6 us
    assert verdict(claim(wide)).why == "2 cells match, and one is meant"
    for over, expected in (("gmean", 204.8), ("min", 102.4), ("max", 409.6), ("median", 256.0)):
        found = verdict(claim(wide | {"over": over}))
        assert (
            found.ours == pytest.approx(expected)
            and found.cells == 2
            and found.verdict == ("reproduced" if over == "min" else "not reproduced")
        )


def test_what_cannot_be_told_says_why():
    """Another shape, a value where none is asked for, a row without a time, a CPU; never a number."""
    crashed = rows()
    crashed.loc[crashed["bench"] == "pack", ["status", "reason"]] = ("crashed", "boom")
    for found, why in (
        (verdict(claim({"axes": {"tokens": 7}})), "not measured"),
        (verdict(claim({"axes": {"capacity_factor": 1.0}})), "not measured"),
        (verdict(claim(), crashed), "torch is crashed: boom"),
        (verdict(claim({"against": "cute"}), crashed), "torch is crashed: boom"),
        (verdict(claim(), rows(gpu=False), cpu=True), "a time on a CPU says nothing of it"),
    ):
        assert (found.verdict, found.why) == ("no rows", why) and math.isnan(found.ours)
    assert verdict(claim({"axes": {"tokens": 1024, "skew": 0, "capacity_factor": "none"}})).verdict == "reproduced"
    assert verdict(claim({"axes": {"tokens": 1024, "skew": 0, "intermediate": "none"}})).verdict == "reproduced"
    drops = verdict(claim({"column": "drop_rate", "over": "max"}, figure=1, unit="%"), rows(gpu=False), cpu=True)
    assert (drops.verdict, drops.ours) == ("not reproduced", 0), "drops are the same on every device"
    impossible = published.Claim(**{k: v for k, v in BASE.items() if k != "check"} | {"not_runnable": "another planet"})
    assert (verdict(impossible).verdict, verdict(impossible).why) == ("not runnable", "another planet")


def test_ratios_stay_on_one_card():
    """The same cell of two cards is two cells, and no ratio is formed across."""
    table = rows()
    one = claim({"implementation": "triton", "against": "torch"}, figure=SPEEDUP, unit="x")
    assert verdict(one, table.assign(gpu_uuid=None)).ours == pytest.approx(SPEEDUP), "rows of one host"
    moved = table.assign(gpu_uuid=table["implementation"].map({"torch": "GPU-1"}).fillna("GPU-2"))
    assert verdict(one, moved).verdict == "no rows"


def test_the_published_file():
    """At least twenty claims of at least ten sources; each has a check or a reason, and what is checked is a column of a row."""
    found = published.load(ROOT / paths.CLAIMS)
    assert len(found) >= 20 and len({one.who for one in found}) >= 10
    for name in (
        "QuACK",
        "SonicMoE",
        "DeepGEMM",
        "TileOPs",
        "FlashInfer",
        "Liger Kernel",
        "Hugging Face transformers",
        "predecessor",
        "this project",
    ):
        assert any(one.who == name for one in found), name
    assert all(one.check is None or one.check.column in records.COLUMNS for one in found)
    assert sum(one.check is not None for one in found) >= 20


def test_what_is_checked_can_be_measured():
    """Every claim about one cell names all of it."""
    for one in published.load(ROOT / paths.CLAIMS):
        if one.check and not one.check.over:
            job = job_of(one)
            assert {one.check.implementation, one.check.against or one.check.implementation} <= {*job.implementations}
            assert all(job.cell.get(name) == value for name, value in one.check.axes.items() if value != "none"), one.id


def test_our_own_figures_are_those_of_the_stored_rows():
    """What README and docs publish is what results/nvidia-h200 holds; none of it counts as reproduced."""
    table = records.frame(records.read(ROOT / paths.measurements("nvidia-h200")))
    ours = [one for one in published.load(ROOT / paths.CLAIMS) if one.who == "this project"]
    assert len(ours) >= 6
    assert {one.claim.id: one.verdict for one in claim_verdicts.held(ours, table)} == {one.id: "held" for one in ours}


def test_our_own_figures_are_held_or_not_and_never_reproduced():
    """In the tables of a page and of the command, too: theirs and ours stand apart."""
    own, theirs = claim(who=published.OWN), claim()
    assert [verdict(one).verdict for one in (own, theirs)] == [claim_verdicts.HELD, claim_verdicts.REPRODUCED]
    missed = [verdict(claim(who=who, figure=1)).verdict for who in (published.OWN, "somebody")]
    assert missed == [claim_verdicts.NOT_HELD, claim_verdicts.NOT]
    absent = claim({"axes": {"tokens": 7}}, who=published.OWN)
    assert verdict(absent).verdict == claim_verdicts.ABSENT


def test_the_report_has_our_own_figures_in_a_section_of_their_own(tmp_path):
    """Also where nobody else has published any; those without rows are left out."""
    table = rows().query("bench == 'pack'")
    own = [verdict(claim(who=published.OWN)), verdict(claim({"axes": {"tokens": 7}}, who=published.OWN, id="absent"))]
    for found, ids in (
        (own, {"own-figures"}),
        ([*own, verdict(claim())], {"own-figures", "published"}),
        ([verdict(claim())], {"published"}),
    ):
        render(table, {}, tmp_path / "index.html", claims=found)
        page = (tmp_path / "index.html").read_text()
        shown = set(re.findall(r'<table id="(own-figures|published|unheld)"', page))
        assert shown == ids
        counts = [
            len(re.findall("<tr><td>", page.partition(f'<table id="{name}">')[2].partition("</table>")[0]))
            for name in ids
        ]
        assert counts == [1] * len(ids)


def lacking(*names: str) -> dict[str, object]:
    return {key: value for key, value in BASE.items() if key != "check"} | {
        "not_runnable": "It is far.",
        "lacks": list(names),
    }


@pytest.mark.parametrize(
    "name", ["SonicMoE", "DeepGEMM", "Liger Kernel", "vLLM", "QuACK", "tokenspeed-deepgemm", "moe_ops", "Humming"]
)
def test_a_package_with_implementations_is_not_said_to_lack_them(name, tmp_path):
    """However it is spelt; the line names it."""
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [lacking("TileOPs", name)]}))
    with pytest.raises(UserError, match=f"lacks: got '{name}'"):
        published.load(path)


def test_what_is_lacking_is_part_of_the_reason(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [lacking("TileOPs", "Tutel")]}))
    (one,) = published.load(path)
    assert verdict(one).why == "It is far. Without an implementation here: TileOPs, Tutel."


def test_no_reason_of_the_published_file_denies_a_package_in_words_of_its_own():
    """That a package has no implementation is said by `lacks` alone, which is held against the table of implementations."""
    for one in published.load(ROOT / paths.CLAIMS):
        denied = re.search(r"\b(not|nor|neither|no)\b[^;.,]*\bimplementation", one.not_runnable)
        assert not denied or "no implementation of experts has that kernel" in one.not_runnable, one.id
    assert any(one.lacks for one in published.load(ROOT / paths.CLAIMS))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"check": BASE["check"] | {"implementation": "troch"}}, "did you mean 'torch'"),
        ({"check": BASE["check"] | {"axes": {"token": 1}}}, "did you mean 'tokens'"),
        ({"check": BASE["check"] | {"against": "nobody"}}, "implementation: got 'nobody'"),
        ({"check": BASE["check"] | {"bench": "pac"}}, "got 'pac'"),
        ({"unit": "ns"}, "allowed: us, ms, GB/s, TFLOP/s, x, %"),
        ({"check": None}, "got 'neither'"),
        ({"not_runnable": "because"}, "check and not_runnable"),
        ({"within": 0}, "within"),
        ({"figures": 1}, "figures"),
    ],
)
def test_bad_files(change, text, tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": [BASE | change]}))
    with pytest.raises(UserError) as error:
        published.load(path)
    assert text in str(error.value) and "\n" not in str(error.value)
    path.write_text(yaml.safe_dump({"claims": [BASE, BASE]}))
    with pytest.raises(UserError, match="the same id twice"):
        published.load(path)


def test_command(tmp_path, monkeypatch):
    """Measures on request what has no row, leaves what cannot be measured, and keeps the rows apart."""
    models = (ROOT / paths.MODELS).read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOE_ROUTING_BENCH_DEVICE", "cpu")
    (tmp_path / "config").mkdir()
    (tmp_path / paths.MODELS).write_text(models)
    drops = BASE | {
        "id": "drops",
        "figure": 0.5,
        "unit": "%",
        "within": 1.0,
        "at_least": True,
        "check": {
            "bench": "permute",
            "implementation": "torch",
            "column": "drop_rate",
            "axes": {"tokens": 64, "experts": 8, "top_k": 1, "capacity_factor": 1.0, "skew": 0.7},
        },
    }
    over = drops | {"id": "over", "check": drops["check"] | {"over": "max", "axes": {"tokens": 64, "experts": 9}}}
    (tmp_path / paths.CLAIMS).write_text(yaml.safe_dump({"claims": [BASE, drops, over]}))
    call = CliRunner().invoke
    with pytest.raises(UserError, match="--measure"):
        call(app, ["claims", "--platform", "cpu"], catch_exceptions=False)
    done = call(app, ["claims", "--platform", "cpu", "--measure", "--only", "drops"], catch_exceptions=False)
    assert done.exit_code == 0 and "1 claims: 1 reproduced" in done.output, done.output
    assert [path.name for path in (tmp_path / "results/cpu/claims").iterdir()] == ["drops.parquet"]
    assert not paths.measurements("cpu").exists()
    done = call(app, ["claims", "--platform", "cpu", "--measure"], catch_exceptions=False)
    assert "over: not measured: claim over: got 'the max of several cells'" in done.output
    assert "3 claims: 2 no rows, 1 reproduced" in done.output
    (tmp_path / paths.CLAIMS).write_text(yaml.safe_dump({"claims": [BASE, drops | {"who": published.OWN}, over]}))
    done = call(app, ["claims", "--platform", "cpu"], catch_exceptions=False)
    assert "2 claims: 2 no rows" in done.output and "1 figures of our own: 1 held" in done.output
    theirs, own = done.output.split("2 claims:")
    assert "drops" in own and "drops" not in theirs
    done = call(app, ["claims", "--platform", "cpu", "--only", "drops"], catch_exceptions=False)
    assert "claims:" not in done.output
    with pytest.raises(UserError, match="did you mean 'drops'"):
        call(app, ["claims", "--platform", "cpu", "--only", "drop"], catch_exceptions=False)
    with pytest.raises(UserError, match="platform: got 'cpu'; allowed: nvidia-h200; hint: ask for that GPU"):
        call(app, ["claims", "--platform", "nvidia-h200", "--measure"], catch_exceptions=False)


def test_the_report_shows_what_became_of_claims(tmp_path):
    """Those that rows could be held against; the others lie folded below. Boundary and source are in the page, escaped."""
    impossible = published.Claim(
        **{k: v for k, v in BASE.items() if k != "check"} | {"who": "<i>", "not_runnable": "another planet"}
    )
    found = [verdict(impossible), verdict(claim()), verdict(claim(figure=1))]
    table = rows().query("bench == 'pack'")
    render(table, {}, tmp_path / "index.html", claims=found)
    page = (tmp_path / "index.html").read_text()
    tables = [page.partition(f'<table id="{name}">')[2].partition("</table>")[0] for name in ("published", "unheld")]
    counts = [len(re.findall("<tr><td>.*?</tr>", table, re.DOTALL)) for table in tables]
    assert counts == [2, 1] and "<summary>1 published figure about which these rows say nothing" in page
    lines = re.findall("<tr><td>.*?</tr>", "".join(tables), re.DOTALL)
    assert [re.findall('</details></td><td class="wide">([^<]*)</td>', line)[0] for line in lines] == [
        "not reproduced",
        "reproduced",
        "not runnable: another planet",
    ]
    assert (
        "102.4\u00a0µs" in lines[0]
        and "100\u00a0µs" in lines[1]
        and "all of it Source: a paper" in lines[1]
        and "&lt;i&gt;" in lines[2]
    )
    render(table, {}, tmp_path / "index.html")
    assert not {'id="published"', 'id="unheld"'} & set(re.findall('id="[^"]*"', (tmp_path / "index.html").read_text()))


@pytest.mark.parametrize(("over", "value"), [("median", 10.0), ("gmean", 20.0), ("min", 1.0), ("max", 800.0)])
def test_cells_are_joined_as_a_claim_says(over: str, value: float) -> None:
    """Of 1, 10 and 800, whose mean is 270."""
    assert claim_verdicts._JOIN[over]([1.0, 10.0, 800.0]) == pytest.approx(value)
