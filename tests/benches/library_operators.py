"""What the kernels of vLLM, SGLang and MSLK do, in plain torch, by the schemas that their libraries register."""

from types import SimpleNamespace

import torch
from marlin_model import marlin_gemm
from torch import Tensor


def _choose(weights, ids, scores, chosen_by, renormalize, scale=1.0) -> None:
    best = chosen_by.topk(ids.shape[1], dim=1).indices
    found = scores.gather(1, best)
    found = found / found.sum(1, keepdim=True) if renormalize else found
    ids.copy_(best), weights.copy_(found * scale)


def _softmax(weights, ids, logits, renormalize, bias) -> None:
    assert bias is None
    scores = logits.float().softmax(1)
    _choose(weights, ids, scores, scores, renormalize)


def _scored(weights, ids, scores, renormalize, scale, bias) -> None:
    _choose(weights, ids, scores, scores if bias is None else scores + bias, renormalize, scale)


def _grouped(logits, bias, groups, keep, top_k, scale) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    biased = (scores + bias).unflatten(1, (groups, -1))
    kept = biased.topk(2, dim=2).values.sum(2).topk(keep, dim=1).indices
    mask = torch.zeros(biased.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
    weights, ids = torch.empty(len(logits), top_k), torch.empty(len(logits), top_k, dtype=torch.int32)
    _choose(weights, ids, scores, biased.masked_fill(~mask[:, :, None], -torch.inf).flatten(1), True, scale)
    return weights, ids


def _sorted(ids: Tensor, experts: int, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Assignments by expert, in each expert from the first or from the last, and the first row of each expert."""
    flat = ids.flatten()
    order = (
        flat.flip(0).sort(stable=True).indices.mul(-1).add(len(flat) - 1)
        if backwards
        else flat.sort(stable=True).indices
    )
    return order, torch.cat([torch.zeros(1, dtype=torch.int64), flat.bincount(minlength=experts).cumsum(0)])


def _prepare_scatter(
    ids, assignments, expert_map, experts, local, first, inverse, workspace, sorted_ids, order, mapped
) -> None:
    assert expert_map is None and local == experts and workspace.numel() == 8 * ids.numel() + experts
    known, starts = _sorted(ids, experts)
    first.copy_(starts), order.view(-1).copy_(assignments.flatten()[known])
    inverse.view(-1)[known] = torch.arange(len(known), dtype=torch.int32)


def _permute(x, ids, assignments, expert_map, experts, local, top_k, packed, first, inverse, order, *scratch) -> None:
    _prepare_scatter(
        ids, assignments, expert_map, experts, local, first, inverse, scratch[0], scratch[1], order, scratch[3]
    )
    packed.copy_(x[order.long() // top_k])


def _unpermute(y, weights, inverse, first, top_k, combined) -> None:
    combined.copy_((y[inverse.long()].float() * weights[..., None]).sum(1))


def _align(ids, experts, block, order, blocks, total) -> None:
    known, starts = _sorted(ids, experts, backwards=True)
    order.fill_(ids.numel())
    row = 0
    for expert in range(experts):
        own = known[starts[expert] : starts[expert + 1]]
        order[row : row + len(own)] = own.int()
        blocks[row // block : -(-(row + len(own)) // block)] = expert
        row += -(-len(own) // block) * block
    total.fill_(row)
    assert len(blocks) * block == len(order) >= row


def _prepare_moe_input(ids, offsets, blockscale, up, down, tokens, inverse, experts, columns, terms) -> None:
    known, starts = _sorted(ids, experts, backwards=True)
    offsets.copy_(starts), up[:, 0].copy_(starts.diff()), tokens.copy_(known // ids.shape[1])
    inverse[known] = torch.arange(len(known), dtype=torch.int32)


def _shuffle(x, tokens, packed) -> None:
    packed.copy_(x[tokens.long()])


def _shuffle_sum(y, combined, inverse, weights) -> None:
    assert weights.dtype == combined.dtype
    rows = y[inverse.long()].float() * weights.float()[:, None]
    combined.copy_(rows.unflatten(0, (len(combined), -1)).sum(1))


def _multiply(x, weights, sizes, out) -> None:
    assert sizes.dtype == torch.int64
    for part, product, weight in zip(x.split(sizes.tolist()), out.split(sizes.tolist()), weights, strict=True):
        product.copy_(part @ weight.T)


def _preshuffle(codes, scales) -> tuple[Tensor, Tensor]:
    """Elements that are no longer in their places: turned from end to end."""
    assert codes.dtype == torch.int8 and scales.shape == (codes.shape[1] // 64, len(codes))
    return codes.flip(0, 1), scales


def _multiply_int4(x, codes, scales, zeros, sizes) -> Tensor:
    assert sizes.dtype == torch.int64 and zeros.shape == scales.shape and zeros.eq(0).all()
    there = codes.flip(1, 2)
    numbers = torch.stack([there << 4 >> 4, there >> 4], dim=-1).flatten(-2)
    dense = numbers.float() * scales.mT.float().repeat_interleave(128, -1)
    parts = zip(x.float().split(sizes.tolist()), dense, strict=True)
    return torch.cat([part @ one.T for part, one in parts]).to(x.dtype)


def _multiply_fp8(x, weights, scales, weight_scales, sizes) -> Tensor:
    assert sizes.dtype == torch.int64 and scales.shape == (len(x), 1) and weight_scales.shape == weights.shape[:2]
    assert {one.dtype for one in (scales, weight_scales)} == {torch.float32} and x.dtype == torch.float8_e4m3fn
    rows, dense = x.float() * scales, weights.float() * weight_scales[..., None]
    return torch.cat([part @ one.T for part, one in zip(rows.split(sizes.tolist()), dense, strict=True)]).bfloat16()


VLLM = SimpleNamespace(
    topk_softmax=lambda w, i, source, logits, renormalize, bias, padding: _softmax(w, i, logits, renormalize, bias),
    topk_sigmoid=lambda w, i, source, logits, renormalize, bias, scale, padding: _scored(
        w, i, logits.float().sigmoid(), renormalize, scale, bias
    ),
    topk_softplus_sqrt=lambda w, i, source, logits, renormalize, scale, bias, ids, table, padding: _scored(
        w, i, torch.nn.functional.softplus(logits.float()).sqrt(), renormalize, scale, bias
    ),
    grouped_topk=lambda logits, groups, keep, k, renormalize, scale, bias, scoring: _grouped(
        logits, bias, groups, keep, k, scale
    ),
    moe_permute_sort_workspace_size=lambda rows, experts: 8 * rows + experts,
    moe_prepare_scatter=_prepare_scatter,
    moe_permute_with_scratch=_permute,
    moe_unpermute=_unpermute,
    moe_align_block_size=lambda ids, experts, block, order, blocks, total, expert_map, scatter: _align(
        ids, experts, block, order, blocks, total
    ),
    moe_wna16_marlin_gemm=marlin_gemm,
    shuffle_rows=_shuffle,
)
SGLANG = SimpleNamespace(
    topk_softmax=lambda w, i, logits, renormalize, cap, bias: _softmax(w, i, logits, renormalize, bias),
    topk_sigmoid=lambda w, i, logits, renormalize, bias: _scored(
        w, i, logits.float().sigmoid(), renormalize, 1.0, bias
    ),
    moe_fused_gate=lambda logits, bias, groups, keep, k, shared, scale, apply: _grouped(
        logits, bias, groups, keep, k, scale
    ),
    kimi_k2_moe_fused_gate=lambda logits, bias, k, renormalize, scale, apply: _grouped(logits, bias, 1, 1, k, scale),
    moe_align_block_size=lambda ids, experts, block, order, blocks, total, sums, pad: _align(
        ids, experts - 1, block, order, blocks, total
    ),
    prepare_moe_input=_prepare_moe_input,
    shuffle_rows=_shuffle,
    apply_shuffle_mul_sum=_shuffle_sum,
)
MSLK = SimpleNamespace(
    bf16bf16bf16_grouped_stacked=_multiply,
    preshuffle_i4=_preshuffle,
    bf16i4bf16_shuffled_grouped=_multiply_int4,
    f8f8bf16_rowwise_grouped_stacked=_multiply_fp8,
)
OPERATORS = {"vllm": VLLM, "sgl_kernel": SGLANG, "mslk": MSLK}
