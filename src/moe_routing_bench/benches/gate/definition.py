"""What `gate` computes, on what, and when an answer is right.

Inputs: logits (T, E) N(0, 1) in the cell's dtype; bias (E,) float32 for rules with a selection bias.
Outputs: topk_ids (T, k) int32, topk_weights (T, k) float32, in any order within a row.
"""

import math

import torch
from torch import Tensor

from moe_routing_bench.benches.checks import Assignment, Check, Cost, both, close, nbytes, tolerance
from moe_routing_bench.grid.cell import Cell
from moe_routing_bench.workload.draw import draw_bias, generator, randn
from moe_routing_kernels.gate import Gate
from moe_routing_kernels.routers import ROUTERS


def problem(cell: Cell) -> Gate:
    """The sizes and formats of a cell."""
    return Gate(cell.tokens, cell.experts, cell.top_k, cell.dtype, cell.router)


def build(cell: Cell, seed: int, device: str) -> dict[str, Tensor]:
    """Draw the inputs of one seed."""
    rng = generator(seed, device)
    inputs = {"logits": randn((cell.tokens, cell.experts), cell.dtype, rng)}
    if ROUTERS[cell.router].bias:
        inputs["bias"] = draw_bias(cell.experts, rng)
    return inputs


def empty_outputs(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the right shape, not initialised."""
    shape, device = (cell.tokens, cell.top_k), next(iter(inputs.values())).device
    return {
        "topk_ids": torch.empty(shape, dtype=torch.int32, device=device),
        "topk_weights": torch.empty(shape, dtype=torch.float32, device=device),
    }


def reference(cell: Cell, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rule in float64."""
    ids, weights = ROUTERS[cell.router].load()(inputs["logits"].double(), cell.top_k, inputs.get("bias"))
    return {"topk_ids": ids, "topk_weights": weights}


def check(
    cell: Cell,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    expected: dict[str, Tensor],
    *,
    index_in_score: bool = False,
    rounded_weights: bool = False,
) -> Check:
    """Rows are compared as sets of (id, weight). Another id is a declared tie when its score (plus bias) is equal, or that of its group.

    With a bias, experts of equal biased score weigh differently: a tied row's weights are those that the rule gives its choice.
    An implementation may declare that it keeps an expert's index in the lowest bits of a float32 score (`index_in_score`), and
    that it rounds weights to the dtype of the logits (`rounded_weights`): its limits are wider by as much, and by no more.
    """
    resolution = _resolution(cell) if index_in_score else 0.0
    ids, weights = outputs["topk_ids"], outputs["topk_weights"]
    ordered, place = ids.long().sort(dim=1)
    if malformed := no_choice(ordered, cell.experts):
        return malformed
    want_ids, want_place = expected["topk_ids"].long().sort(dim=1)
    want = expected["topk_weights"].gather(1, want_place)
    got = weights.gather(1, place)
    rows, limit = (ordered != want_ids).any(1), tolerance("fp32", ROUNDINGS)
    if bool(rows.any()):
        key = _key(cell, inputs["logits"].double(), inputs.get("bias"))
        (chosen, rank), (best, want_rank) = (key.gather(1, ids).sort(1) for ids in (ordered, want_ids))
        unequal = rows & (((chosen - best).abs() > _TIE + resolution * best.abs()).any(1) | _many_groups(cell, ordered))
        equal = rows & ~unequal
        if "bias" in inputs:
            want[equal] = _weights_of(cell, inputs["logits"][equal], inputs["bias"], ordered[equal]).to(want.dtype)
        else:  # experts of equal score weigh the same: by rank
            got[equal], want[equal] = got.gather(1, rank)[equal], want.gather(1, want_rank)[equal]
        if bool(unequal.any()):
            near = _TIE + resolution * float(best.abs().max())
            logits, theirs = inputs["logits"][unequal].double(), ordered[unequal]
            excused, weights = if_moved(cell, logits, inputs.get("bias"), theirs, near / 2)
            if wrong := int((excused != theirs).any(1).sum()):
                error = f"topk_ids: {wrong} of {len(ids)} rows hold other experts"
                return Check(mismatches=wrong, ties=int(rows.sum()) - wrong, error=error)
            want[unequal], limit = weights.to(want.dtype), limit + near
    limit += resolution + (tolerance(cell.dtype) if rounded_weights else 0.0)
    return both(close(got, want, limit, "topk_weights"), Check(ties=int(rows.sum())))


def if_moved(
    cell: Cell, logits: Tensor, bias: Tensor | None, theirs: Tensor, bound: Tensor | float
) -> tuple[Tensor, Tensor]:
    """What the rule chooses, ids that rise and their weights, once logits (n, E) are moved by at most `bound` towards a choice of `theirs`.

    These are raised and all others lowered. A rule that first chooses groups may have groups that tie, whose experts have other scores: those
    of `theirs` are lowered less, and groups more that would have had a better expert.
    """
    size, key = _group_size(cell), _key(cell, logits, bias)
    better = key.unflatten(1, (-1, size)).amax(2) > key.gather(1, theirs).amin(1, keepdim=True)
    groups = (
        torch.where(better, -1.0, -1 / 3).to(logits).scatter(1, theirs // size, 1 / 3 if size < cell.experts else -1.0)
    )
    moved = logits + bound * groups.repeat_interleave(size, 1).scatter(1, theirs, 1.0)
    ids, weights = ROUTERS[cell.router].load()(moved, cell.top_k, bias)[:2]
    ids, place = ids.long().sort(1)
    return ids, weights.gather(1, place)


def _key(cell: Cell, logits: Tensor, bias: Tensor | None) -> Tensor:
    """What the rule chooses experts by: their scores, plus the bias of one that has it."""
    score = ROUTERS[cell.router].score(logits)
    return score if bias is None else score + bias.double()


def _many_groups(cell: Cell, ordered: Tensor) -> Tensor:
    """Whether ids (T, k) that rise are of more groups than the rule keeps: experts of equal score are then no tie."""
    groups = 1 + ((ordered // _group_size(cell)).diff(dim=1) > 0).sum(1)
    return groups > ROUTERS[cell.router].options.get("keep_groups", 1)


def _group_size(cell: Cell) -> int:
    """Experts of a group, of which the rule chooses some before it chooses experts; all of them where it does not."""
    return cell.experts // ROUTERS[cell.router].options.get("groups", 1)


def _weights_of(cell: Cell, logits: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    """Weights (n, k) that the rule gives ids (n, k), which rise within a row: a bias of its own for each token leaves it no other
    choice, in an order of the rule's own."""
    forced = torch.full(logits.shape, -1e3, dtype=torch.float64, device=logits.device).scatter_(
        1, ids, bias.double().expand(len(ids), -1).gather(1, ids)
    )
    chosen, weights = ROUTERS[cell.router].load()(logits.double(), cell.top_k, forced)[:2]
    return weights.gather(1, chosen.argsort(1))


def no_choice(ordered: Tensor, experts: int) -> Check | None:
    """Why ids (T, k), in rising order within a row, are no choice of distinct experts, or None."""
    outside = (ordered < 0) | (ordered >= experts)
    if bool(outside.any()):
        return Check(mismatches=int(outside.sum()), error="topk_ids: ids out of range or not written")
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return Check(error="topk_ids: a row holds an expert twice")
    return None


def _resolution(cell: Cell) -> float:
    """Relative distance at which two logits count as equal where the lowest ceil(log2 E) of the 23 mantissa bits of a float32
    score hold the expert's index. bf16 and fp16 logits have those bits free.

    The row's `ties` counts the tokens that it decided, `rel_l2_error` shows what it cost.
    """
    return 2.0 ** (math.ceil(math.log2(max(cell.experts, 2))) - 23) if cell.dtype == "fp32" else 0.0


_TIE = 1e-6  # scores this near are equal in the float32 in which every implementation compares them
ROUNDINGS = 16  # of a float32 weight: exponentials and logarithms of a few roundings each, a sum, a quotient, a scale


def assignment(cell: Cell, inputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Assignment:
    """Expert ids (T, k) and weights (T, k) that the rule chooses."""
    return Assignment(expected["topk_ids"], expected["topk_weights"])


def cost(cell: Cell, inputs: dict[str, Tensor], outputs: dict[str, Tensor], expected: dict[str, Tensor]) -> Cost:
    """Read every score once, write ids and weights once."""
    return Cost(nbytes(*inputs.values()), nbytes(*outputs.values()))
