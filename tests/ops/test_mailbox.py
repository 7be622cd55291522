"""What ranks store into each other's memory: where everything lies, what the kernels compile to, and what is refused. On GPUs: tests/gpu/expert_parallel.py."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mailbox_messages import Messages
from moe_routing_kernels import ops
from moe_routing_kernels.errors import UserError
from moe_routing_kernels.exchange import Letters, mailbox
from moe_routing_kernels.exchange.mailbox import Mailbox
from moe_routing_kernels.ops import ep


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SIZES = [
    (2, 64, 4096, 7168, 8, 2, 132, 4),
    (2, 4, 5, 24, 3, 4, 1, 1),
    (8, 32, 128, 7168, 8, 2, 132, 2),
    (3, 1, 1, 10, 1, 2, 2, 1),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_parts_of_the_memory_follow_each_other_and_are_aligned(sizes: tuple[int, ...]) -> None:
    letters = Letters(*sizes)
    ranks, _, tokens, hidden, top_k, itemsize, blocks, parts = sizes
    rows, choices = ranks * tokens * hidden * itemsize, ranks * tokens * top_k * 4
    flags = (2 + parts) * ranks * blocks * 4  # out, read, and the parts of the way back
    starts = [0, letters.sums_at, letters.ids_at, letters.weights_at, letters.flags_at, letters.bytes]
    for start, after, size in zip(starts, starts[1:], [rows, rows, choices, choices, flags], strict=False):
        assert start % 16 == 0 and size <= after - start < size + 16


COMPILE = """
import json, re, sys
from moe_routing_kernels.cute.rows import row_tiling
from moe_routing_kernels.exchange import cute_back, cute_exchange
found = []
for ranks, tokens, hidden, dtype in json.loads(sys.argv[1]):
    letters, tiling = cute_exchange.choose(ranks, 4, tokens, hidden, 3, dtype, 132)
    covered = tiling.blocks(tokens) * (tiling.threads // tiling.lanes) >= tokens * tiling.tiles
    part, tiles = cute_back.tiles_of_a_part(tiling, letters), tokens * tiling.tiles
    covered &= letters.parts * part >= tiles > (letters.parts - 1) * part  # none is empty
    kernels = [cute_exchange.compile_out("sm_90a", dtype, letters, tiling, keep=True)]
    kernels += [cute_back.compile_back("sm_90a", dtype, letters, tiling, add, keep=True) for add in (False, True)]
    choices, of_choices = cute_exchange.of_choices(ranks, 4, tokens, hidden, 3, dtype, 132)
    assert choices.hidden == 4
    kernels += [cute_back.compile_back("sm_90a", "fp32", choices, of_choices, False, keep=True)]
    kernels += [cute_exchange.compile_read("sm_90a", letters, keep=True)]
    for kernel in kernels:
        text = re.sub(r"//.*", "", kernel.__ptx__)
        found.append({
            "blocks": letters.blocks, "covered": covered, "parts": letters.parts, "threads": tiling.threads, "vectors": tiling.vectors,
            "releases": text.count("st.release.sys"), "acquires": text.count("ld.acquire.sys"), "fences": text.count("fence.acq_rel.sys"),
            "barriers": text.count("bar.sync"), "local": text.count("st.local"),
        })
print(json.dumps(found))
"""


@pytest.mark.slow
def test_kernels_signal_and_wait_at_system_scope() -> None:
    """Between two barriers of the block: one release per way, and acquires alone are waited for. No more blocks than multiprocessors."""
    pytest.importorskip("cutlass")
    cases = [(2, 4096, 7168, "bf16"), (2, 128, 2048, "fp16"), (4, 3, 24, "fp32"), (8, 64, 2880, "bf16")]
    done = subprocess.run([sys.executable, "-c", COMPILE, json.dumps(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5 * len(cases)
    for kernel in found:
        assert kernel["releases"] == kernel["fences"] == 1 and kernel["acquires"] == 2 and kernel["barriers"] == 2
        assert kernel["local"] == 0 and 1 <= kernel["blocks"] <= 132 and kernel["covered"]
    assert [found[5 * i]["parts"] for i in range(len(cases))] == [4, 1, 1, 1]  # 8 turns of all groups, and one
    assert [found[i]["vectors"] for i in (0, 5)] == [
        7,
        1,
    ]  # many rows, and few: of at most 8 the most that cover a row of 896 vectors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"most_tokens": 0}, "most_tokens"),
        ({"hidden": 2.5}, "hidden"),
        ({"top_k": True}, "top_k"),
        ({"experts": -1}, "experts"),
        ({"dtype": torch.float64}, "dtype"),
        ({}, "GPUs by NVIDIA"),
    ],
)
def test_a_mailbox_says_what_it_does_not_take(change: dict[str, object], said: str, one_rank: None) -> None:
    if not change and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    sizes = {"most_tokens": 4, "hidden": 16, "top_k": 2, "experts": 3} | change
    with pytest.raises(UserError, match=said):
        Mailbox(**sizes)  # type: ignore[arg-type]


def test_the_rank_with_fewest_multiprocessors_decides_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs that differ in them alone; any other size must be the same."""
    group = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    same = (64, 4096, 8, 2, 0)

    def agreed(*ranks: tuple[int, ...]) -> int:
        gathered = torch.tensor(ranks).flatten()
        monkeypatch.setattr(dist, "all_gather_into_tensor", lambda every, own, group: every.copy_(gathered))
        return mailbox._agreed(ranks[0], group, torch.device("cpu"))  # type: ignore[arg-type]

    assert agreed((*same, 132), (*same, 114), (*same, 144)) == 114
    with pytest.raises(UserError, match="top_k of rank 2: got 6; allowed: 8, as rank 0 has"):
        agreed((*same, 132), (*same, 132), (64, 4096, 6, 2, 0, 132))


def test_a_mailbox_needs_a_group() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        Mailbox(4, 16, 2, 3)


class Group:
    group_name = "of this test"


def made(tokens: int = 4) -> Mailbox:
    """A mailbox without memory: what its checks read."""
    box = Mailbox.__new__(Mailbox)
    box.letters, box.dtype, box.group = Letters(2, 3, tokens, 16, 2, 2, 1, 1), torch.bfloat16, Group()  # type: ignore[assignment]
    return box


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"x": torch.empty(4, 16, dtype=torch.float16)}, "mailbox"),
        ({"x": torch.empty(4, 32, dtype=torch.bfloat16)}, "mailbox"),
        ({"ids": torch.empty(4, 3)}, "mailbox"),
        ({"local": 4}, "mailbox"),
        ({"x": torch.empty(5, 16, dtype=torch.bfloat16)}, "at most 4 tokens"),
        ({"most_tokens": 4}, "most_tokens"),
    ],
)
def test_a_mailbox_says_which_layers_it_is_not_for(change: dict[str, object], said: str | None) -> None:
    given = {
        "x": torch.empty(4, 16, dtype=torch.bfloat16),
        "ids": torch.empty(4, 2),
        "local": 3,
        "most_tokens": None,
        "group": Group(),
    } | change
    if said is None:
        made().check(**given)  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=said):
        made().check(**given)  # type: ignore[arg-type]


def test_a_layer_goes_by_its_mailbox(one_rank: None) -> None:
    """Without gradients nothing is copied."""
    torch.manual_seed(5)
    x, logits, w13, w2 = torch.randn(7, 16), torch.randn(7, 6), torch.randn(6, 16, 16), torch.randn(6, 16, 8)
    box = Messages(7, 16, 2, 6, torch.float32)
    with torch.no_grad():
        got = ep.layer(x, logits, w13, w2, 2, residual=x, mailbox=box)  # type: ignore[arg-type]
    torch.testing.assert_close(got, ops.layer(x, logits, w13, w2, 2, residual=x))
    assert box.layer[2:4] == (6, None) and box.calls == ["out", "back"]


def test_mailboxes_in_one_memory_do_not_overlap() -> None:
    """Each has rows, ids and weights of its own, where the kernels of all ranks store them: at addresses that are as far apart on each."""
    box = made()
    box._choices = Letters(2, 3, 4, 4, 2, 4, 1, 1)
    size = box.letters.bytes + box._choices.bytes
    box._memory, box._place = torch.zeros(3 * size, dtype=torch.uint8), (torch.tensor([1000, 5000]), 1, 30, 40)
    own = [box.numbered(i) for i in range(3)]
    for i, each in enumerate(own):
        for part in (each.rows, each.ids, each.weights):
            part.fill_(i + 1)
        assert each._place[0].tolist() == [1000 + i * size, 5000 + i * size] and each._place[1:] == (1, 30, 40)
        assert (each._place_of_choices[0] - each._place[0]).tolist() == [box.letters.bytes] * 2
        assert each.rows.data_ptr() == box._memory.data_ptr() + i * size
    assert size % 16 == 0
    for i, each in enumerate(own):
        assert all((part == i + 1).all() for part in (each.rows, each.ids, each.weights))
        assert each.rows.shape == (8, 16) and each.ids.shape == each.weights.shape == (8, 2)


def test_a_rank_that_did_not_come_is_named() -> None:
    box = made()
    box._said, box._seconds = torch.tensor([2]).numpy(), 1.5
    with pytest.raises(RuntimeError, match=r"rank 1 did not come .* 1\.5 seconds"):
        box.out(torch.empty(0), torch.empty(0), torch.empty(0))
