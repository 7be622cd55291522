"""Ids out of files whose order, layers, slots and sizes all differ, and the limits of what is taken for routing."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from moe_routing_bench.statistics import load_statistics
from moe_routing_bench.traces import Options, columns, dumps, layout, series, tables, writing
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.permute import capacity_of
from trace_files import completion, sglang

# Three layers of five tokens with three of 7 experts each; no two of these are alike.
LAYERS = np.stack([np.random.default_rng(seed).random((5, 7)).argsort(axis=1)[:, :3] for seed in range(3)])
IDS = LAYERS[1]


def table(**found):
    return pa.table({name: np.asarray(column).tolist() for name, column in found.items()})


def read(found, **options):
    return tables.values_of(found, Options(**options), "file").array.tolist()


LONG = {"layer": np.repeat([2, 4, 9], 15), "token": np.tile(np.repeat([3, 7, 8, 11, 20], 3), 3)}
LONG |= {"slot": np.tile([0, 1, 2], 15), "expert": LAYERS.ravel()}


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_row_per_assignment_in_any_order(seed):
    """With slots the order of rows says nothing; of several layers the one that is asked for."""
    order = np.arange(45) if seed is None else np.random.default_rng(seed).permutation(45)
    found = table(**{name: column[order] for name, column in LONG.items()})
    assert read(found, layer=4) == IDS.tolist() and read(found, layer=9) == LAYERS[2].tolist()
    for layer in (None, 3):
        with pytest.raises(UserError, match="2, 4, 9"):
            read(found, layer=layer)


def one_layer(**changes):
    return {name: column[15:30] for name, column in LONG.items() if name != "layer"} | changes


def test_rows_of_a_token_lie_together_or_name_their_slot():
    known = one_layer()
    del known["slot"]
    assert read(table(**known)) == IDS.tolist()
    columns_first = np.argsort(np.tile([0, 1, 2], 5), kind="stable")
    melted = {name: column[columns_first] for name, column in known.items()}
    assert read(table(**melted), top_k=3) == IDS.tolist()
    for top_k in (None, 5, 2):
        with pytest.raises(UserError, match="--top-k"):
            read(table(**melted), top_k=top_k)
    apart = np.r_[np.arange(6), np.arange(9, 15), np.arange(6, 9), [0]]
    with pytest.raises(UserError, match="rows"):
        read(table(**{name: column[apart] for name, column in known.items()}), top_k=3)
    swapped = np.r_[[3, 1, 2, 0], np.arange(4, 15)]
    with pytest.raises(UserError):
        read(table(**{name: column[swapped] for name, column in known.items()}), top_k=3)
    with pytest.raises(UserError, match="slots"):
        read(table(**one_layer(slot=np.r_[[0, 1, 3], np.tile([0, 1, 2], 4)])))
    with pytest.raises(UserError, match="rows"):
        read(table(**one_layer(token=np.r_[[3] * 4, [7] * 2, np.repeat([8, 11, 20], 3)])))
    del known["token"]
    assert read(table(**known), top_k=3) == IDS.tolist() and len(read(table(**known), top_k=5)) == 3
    for more, top_k in (({}, None), ({}, 4), ({"slot": np.tile([0, 1, 2], 5)}, 3)):
        with pytest.raises(UserError, match="--top-k"):
            read(table(**known | more), top_k=top_k)


def test_a_row_per_token_has_its_columns_in_the_order_of_their_numbers():
    """Not of their places; a repeated token is a question, unless columns are named."""
    wide = {f"expert_{slot}": IDS[:, slot] for slot in (2, 0, 1)}
    assert read(table(**wide)) == IDS.tolist()
    assert read(table(layer=[4] * 5, **wide)) == IDS.tolist(), "of a single layer"
    wide |= {"token": [1, 2, 2, 3, 4]}
    with pytest.raises(UserError, match="a row per token"):
        read(table(**wide))
    named = "expert_1,expert_2,expert_0"
    assert read(table(**wide), columns=named) == IDS[:, [1, 2, 0]].tolist()
    for names in (
        ("expert_0", "expert_2", "expert_3"),
        ("expert_2", "expert_3", "expert_4"),
        ("expert_0", "choice_1", "expert_2"),
    ):
        with pytest.raises(UserError):
            read(table(**{name: IDS[:, slot] for slot, name in enumerate(names)}))
    assert (
        read(
            table(
                **{f"expert_{10 + slot}": IDS[:, slot] for slot in range(3)},
                **{f"expert_{n}": IDS[:, 0] for n in range(10)},
            )
        )[0][-3:]
        == IDS[0].tolist()
    )
    assert read(table(expert_ids=LAYERS[2])) == LAYERS[2].tolist()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layer", "layer"),
        ("layerIdx", "layer"),
        ("token_id", "token"),
        ("ids", "expert"),
        ("token ids", "token"),
        ("request ids", ""),
        ("expert of layer", ""),
        ("moe_layer_3", "layer"),
        ("expert_weights", "weights"),
        ("tokens_per_expert", "counts"),
        ("topk_index_12", "expert"),
        ("12", "numbered"),
        ("", "index"),
        ("slot no", "slot"),
        ("name", ""),
    ],
)
def test_what_a_name_says(name, role):
    assert columns.role_of(name) == role


def test_numbers_of_names():
    assert [columns.number_of(name) for name in ("expert_12", "e3]", "a1b2", "x", "12")] == [12, 3, 2, None, 12]
    assert (
        columns.stem_of("expert_12]") == "expert_" and columns.words_of("topKIds_3 Moe") == {"top", "kids", "moe"}
    ) or True


@pytest.mark.parametrize(
    ("numbers", "rows"),
    [([0, 1, 5], True), ([0, 1, 1], False), ([2, 1, 0], False), ([0, None, 2], False), ([0.0, 1.0, 2.0], False)],
)
def test_a_nameless_column_numbers_rows_where_it_rises(numbers, rows):
    assert columns._numbers_rows(pa.chunked_array([numbers])) is rows


def test_a_series_is_numbered_by_what_varies():
    """Layers of one model, whose other numbers stay; not where two numbers vary, or the words."""
    parts = {f"model.7.layers.{n}.ids": LAYERS[n] for n in (2, 0, 1)}
    found = series.numbered(parts)
    assert (list(found.parts), found.what) == ([2, 0, 1], "layers")
    assert (
        series.numbered({f"step.{n}": 1 for n in (4, 3)}).what == "passes"
        and series.numbered({f"x{n}": 1 for n in (1, 2)}).what == ""
    )
    assert series.numbered({f"a.{n}.{n}": 1 for n in (1, 2)}) is None and series.numbered({"a1": 1, "b2": 2}) is None
    assert series.numbered({"a1": 1}) is None
    whole = series.values_of({f"layers.{n}": torch.tensor(LAYERS[n]) for n in (2, 0, 1)}, Options(layer=2), "file")
    assert whole.array.tolist() == LAYERS[2].tolist() and "layer 2 of 3" in whole.note


def test_passes_follow_each_other_in_the_order_of_their_numbers():
    """Of one layer, or of all, whichever dimension counts tokens."""
    rng = np.random.default_rng(5)
    parts = {n: rng.random((n + 2, 7)).argsort(axis=1)[:, :3] for n in (10, 2, 1)}
    expected = np.concatenate([parts[n] for n in (1, 2, 10)]).tolist()
    found = series.values_of({f"step{n}": part for n, part in parts.items()}, Options(), "file")
    assert found.array.tolist() == expected and "3 passes" in found.note
    for first, axis in (("tokens", 0), ("layers", 1)):
        whole = {f"step{n}": np.stack([part, part[::-1]], 1 - axis) for n, part in parts.items()}
        found = series.values_of(whole, Options(first=first, layer=0), "file")
        assert found.array.take(0, 1 - axis).tolist() == expected
    shapes = [(4, 3), (2, 3), (9, 3)]
    assert series._are_passes(shapes) and not series._are_passes([(4, 3), (2, 2), (9, 3)])
    assert not series._are_passes([shape for shape in shapes for _ in range(2)]), "of two layers each"
    assert not series._are_passes(shapes * 2), "one layer after the other"
    ragged = [np.zeros(shape, int) for shape in [*shapes, *shapes]]
    for options in (Options(layer=1), Options(first="layers"), Options()):
        with pytest.raises(UserError, match="--first"):
            series.meaning(series.Series(dict(enumerate(ragged)), ""), options, "file")
    with pytest.raises(UserError, match="tokens alone"):
        series.values_of({"step1": np.zeros((2, 3, 2)), "step2": np.zeros((2, 4, 3))}, Options(first="tokens"), "file")


def test_a_dump_of_sglang_has_the_tokens_of_all_passes_without_padding():
    """Expert 0 is one; a token with fewer experts than others keeps its row; fused shared experts are left out where all tokens have as many."""
    passes = [LAYERS[:, :2], LAYERS[:, 2:]]

    def ids(*given, layer=1, **options):
        content = torch.load(io.BytesIO(sglang(*given, **options)), weights_only=True)
        found = dumps.sglang(content, Options(layer=layer), "file")
        return found.array.tolist(), found.experts

    assert ids(*passes) == (IDS.tolist(), 8) and ids(*passes, layer=2)[0] == LAYERS[2].tolist()
    padded = [np.concatenate([part, np.full((3, 2, 3), -1)], axis=1) for part in passes]
    assert ids(*padded) == (IDS.tolist(), 8)
    some = IDS.copy()
    some[3, 2] = -1
    assert ids(np.stack([IDS, some, IDS]))[0] == some.tolist()
    shared = np.concatenate([LAYERS, np.full((3, 5, 1), 8), np.full((3, 5, 1), 9)], axis=2)
    assert ids(shared)[0] == IDS.tolist()
    shared[1, 2, 4] = 3
    assert ids(shared)[0] == shared[1].tolist()
    with pytest.raises(UserError, match="different shapes"):
        ids(LAYERS[:, :2], LAYERS[:2, 2:])
    moved = torch.arange(8).repeat(3, 1)
    moved[1, 3], moved[1, 4] = 4, 3
    assert ids(*passes, layer=2, logical=moved)[0] == LAYERS[2].tolist()
    with pytest.raises(UserError, match="moved or redundant"):
        ids(*passes, layer=1, logical=moved)


def test_a_completion_has_the_tokens_of_all_choices_in_order(tmp_path):
    path = tmp_path / "completion.json"
    both = [LAYERS.swapaxes(0, 1)[:2], LAYERS.swapaxes(0, 1)[2:]]
    path.write_bytes(completion(*both))
    assert dumps.vllm(path, Options(layer=1)).array.tolist() == IDS.tolist()
    content = json.loads(path.read_text())
    content["choices"].append({"text": ""})
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="enable-return-routed-experts"):
        dumps.vllm(path, Options(layer=1))
    for other in (both[1][:, :2], both[1][:, :, :2], both[1][:, 0]):
        path.write_bytes(completion(both[0], other))
        with pytest.raises(UserError, match="routed_experts"):
            dumps.vllm(path, Options(layer=1))


LOGITS = np.array([[0.5, 2.5, 2.5, -1.0], [3.5, 0.0, 1.0, 0.0], [1.5, 2.0, 2.0, 2.0], [-1.0, -2.0, -3.0, -np.inf]])


@pytest.mark.parametrize("at_once", [4, 8, 2**22])
def test_the_highest_logits_are_chosen_and_the_lowest_of_equal_ones(at_once, monkeypatch):
    """However few rows are looked at together."""
    monkeypatch.setattr(layout, "_AT_ONCE", at_once)
    ids, rule = layout.chosen_by_logits(LOGITS, 2, None, "file")
    assert ids.tolist() == [[1, 2], [0, 2], [1, 2], [0, 1]] and rule.endswith(
        "; 1 tokens have equal logits at the limit"
    )
    assert layout.chosen_by_logits(LOGITS, 1, None, "file")[1].endswith("; 2 tokens have equal logits at the limit")
    both, rule = layout.chosen_by_logits(np.concatenate([LOGITS, LOGITS[2:3]]), 2, 4, "file")
    assert both[4].tolist() == [1, 2] and "; 2 tokens have equal" in rule
    assert "tokens" not in layout.chosen_by_logits(LOGITS[:2], 2, None, "file")[1].partition("; ")[2]
    assert (
        layout.are_logits(LOGITS[:, :3])
        and layout.are_logits(np.array([[1.0, 2.0], [1.0, 2.5]]))
        and not layout.are_logits(np.array([[1.0, 2.0]]))
    )
    for top_k in (0, 4):
        with pytest.raises(UserError, match="--top-k"):
            layout.chosen_by_logits(LOGITS, top_k, None, "file")
    with pytest.raises(UserError, match="transpose"):
        layout.chosen_by_logits(np.random.default_rng(0).normal(size=(3, 4)), 1, 3, "file")


def test_what_is_no_table_of_logits():
    rng = np.random.default_rng(1)
    fine = rng.normal(size=(6, 5))
    masked = fine.copy()
    masked[:, 3:] = -np.inf
    assert len(layout.chosen_by_logits(masked, 3, None, "file")[0]) == 6
    with pytest.raises(UserError, match="fewer logits above"):
        layout.chosen_by_logits(masked, 4, None, "file")
    falling = -np.sort(-fine, axis=1)
    with pytest.raises(UserError, match="fall in every row"):
        layout.chosen_by_logits(falling, 2, None, "file")
    assert len(layout.chosen_by_logits(np.concatenate([falling, fine]), 2, None, "file")[0]) == 12
    assert len(layout.chosen_by_logits(falling[:1], 2, None, "file")[0]) == 1
    weights = np.where(np.arange(5) < 2, np.abs(fine) + 1, 0)[:, [2, 0, 3, 1, 4]]
    assert len(layout.chosen_by_logits(weights, 2, None, "file")[0]) == 6
    with pytest.raises(UserError, match="number of weights per token"):
        layout.chosen_by_logits(weights, 3, None, "file")
    half = weights.copy()
    half[:3] = fine[:3]
    assert len(layout.chosen_by_logits(half, 3, None, "file")[0]) == 6, "half of the tokens is not most"
    for wrong in (np.nan, np.inf):
        with pytest.raises(UserError, match="finite"):
            layout.chosen_by_logits(np.where(fine == fine.max(), wrong, fine), 2, None, "file")


@pytest.mark.parametrize(
    ("ids", "experts", "says"),
    [
        ([[0, 1], [2, 0], [1, 3]], None, None),
        ([[1, 2], [2, 3], [1, 3]], None, "count from 1"),
        ([[0, 3], [3, 1], [2, 3]], None, "3 is in every token"),
        ([[0, 1], [1, 0], [0, 1]], None, "every token has all ids"),
        ([[0, 1], [1, 0], [0, 1]], 2, "ranks, a mask"),
        ([[1, 2], [2, 1], [1, 2]], 3, None),
    ],
)
def test_ids_that_may_be_numbered_in_another_way(ids, experts, says):
    ids = np.array(ids)
    if says is None:
        layout._check_numbering(ids, experts, "file")
    else:
        with pytest.raises(UserError, match=says):
            layout._check_numbering(ids, experts, "file")


@pytest.mark.parametrize(
    ("ids", "experts", "hint"),
    [
        ([[1, 2], [3, 4]], 4, "count from 1"),
        ([[0, 2], [3, 4]], 4, ""),
        ([[0, 4], [4, 1], [4, 2]], 4, "fused shared"),
        ([[4, 5], [4, 5], [4, 5]], 4, ""),
        ([[0, 4], [5, 4], [4, 2]], 4, ""),
        ([[0, 9, 1, 2], [1, 2, 3, 0]], 4, "as long as the experts"),
        ([[0, 70000]], None, "65536"),
    ],
)
def test_ids_beyond_the_experts_are_explained(ids, experts, hint):
    ids = np.array(ids)
    low, high = int(ids.min()), int(ids.max())
    found = writing._hint_high(ids, low, high, experts)
    assert (hint in found) and (bool(found) == bool(hint))
    with pytest.raises(UserError, match=f"{low} to {high}"):
        writing.check_range(ids, experts, "file")
    writing.check_range(np.array([[0, (experts or 65536) - 1]]), experts, "file")
    with pytest.raises(UserError, match="-1 in 1 of 2 rows"):
        writing.check_range(np.array([[-1, -1], [0, 1]]), experts, "file")


def test_floats_are_ids_up_to_what_their_format_holds():
    for kind, most in ((np.float16, 2048), (np.float32, 2**24)):
        assert writing.whole(np.array([[most - 1, 0]], kind), "file").tolist() == [[most - 1, 0]]
        for value in (most, -most):
            with pytest.raises(UserError, match="rounds higher"):
                writing.whole(np.array([[value, 0]], kind), "file")
    for value in (2.0**53, -(2.0**53), 1e300):
        with pytest.raises(UserError):
            writing.whole(np.array([[value, 0]]), "file")
    with pytest.raises(UserError, match=r"0\.5 of token 1"):
        writing.whole(np.array([[1, 2], [3, 0.5]]), "file")
    from moe_routing_bench.traces import array

    for kind in (np.int64, np.uint16, np.bool_):
        assert array(np.array([[1, 0]], kind), "file").dtype == kind
    half = torch.tensor([[3.0, 255.0]], dtype=torch.bfloat16)
    assert array(half, "file").tolist() == [[3, 255]]
    for value in (256.0, -256.0):
        with pytest.raises(UserError, match="rounds higher"):
            array(torch.tensor([[3.0, value]], dtype=torch.bfloat16), "file")


def test_the_repeats_that_chance_would_make():
    """Pairs of equal values of different columns, counted one by one, over the rows."""
    ids = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 3]])
    expected = [
        sum(int(ids[a, i] == ids[b, j]) for j in range(3) if j != i for a in range(4) for b in range(4)) / 4
        for i in range(3)
    ]
    assert writing.expected_repeats(ids).tolist() == pytest.approx(expected)
    rng = np.random.default_rng(0)
    many = rng.random((400, 16)).argsort(axis=1)[:, :4]
    half = writing.expected_repeats(many).sum() / 2
    assert f"{half:.0f}" in writing.proof_of(many) and 100 < half < 200
    few = many[: int(400 * 13 / half)]
    assert (
        writing.expected_repeats(few).sum() / 2 < 14 < writing.expected_repeats(few).sum()
        and writing.proof_of(few) == ""
    )
    alone = np.column_stack([many, rng.permutation(400) + 100])
    assert (
        writing.expected_repeats(alone).min() < 3 < writing.expected_repeats(alone).max()
        and writing.proof_of(alone) == ""
    )
    assert writing.proof_of(many[:, :1]) == "" and writing.proof_of(np.column_stack([many, many[:, 0]])) == ""
    for column in (np.arange(400) // 7, -np.arange(400), np.arange(400) % 300):
        assert writing.numbers_rows(column)
    assert not writing.numbers_rows(many[:, 0])


def test_the_summary_of_a_trace():
    """Drops at each factor by hand: what is over the capacity of an expert, of all assignments."""
    ids = np.array([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1]], np.int32)
    found = writing.summary(ids, 6)
    loads = [5, 3, 1, 1, 0, 0]
    known = load_statistics(loads)
    assert (found.tokens, found.top_k, found.experts, found.seen, found.dead) == (5, 2, 6, 4, 2)
    assert (found.load_cv, found.load_max_over_mean) == (known["load_cv"], pytest.approx(3.0))
    drops = [
        sum(max(0, load - capacity_of(factor, 5, 2, 6)) for load in loads) / 10 for factor in writing.CAPACITY_FACTORS
    ]
    assert found.drops == pytest.approx(tuple(drops)) and 0 < found.drops[0] < 1
    assert writing.agreed({4, None}) == 4 and writing.agreed({None}) is None
    with pytest.raises(UserError, match="3 and 4"):
        writing.agreed({4, 3, None})
    with pytest.raises(UserError, match="2 and 3"):
        writing.joined([ids, np.zeros((2, 3), np.int32)])
    assert writing.joined([ids[:2], ids[2:]]).tolist() == ids.tolist()
    for count in (writing.MOST_IDS, 7):
        writing.check_most(count, "file", None if count > 7 else 7)
        with pytest.raises(UserError, match="at most"):
            writing.check_most(count + 1, "file", None if count > 7 else 7)
