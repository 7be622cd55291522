"""Gate in CuTe DSL: scores to top-k ids and weights for any fused routing rule, in one launch.

It has three variants. Two are for rules that select by raw logits (no bias, no groups): `cute_threshold` with many experts,
`cute_packed` with fewer and float32 logits. `cute_exact` takes all else. This file selects the variant and the number of threads
per token for a shape.

Compulsory bytes: T * E * itemsize + 8 * T * k; floor at T=16384, E=128, k=8, fp32: 9.4 MB, 2.2 us at 4.25 TB/s. Bound by
instructions: about 43 per token there in the packed variant, three quarters of them at half the issue rate; 156 in the exact
variant. The threshold variant executes about 300 at E=512, k=10, which is less than the time of the bytes.

Invariant: of equal scores the lowest id wins. A token with a NaN among its scores gets ids -1 and NaN weights.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from moe_routing_kernels.cute import WARP, power_of_2
from moe_routing_kernels.cute.cache import DTYPES, cached, compile_kernel, current_arch, fake_tensor, per_problem
from moe_routing_kernels.gate import FusedRule, Gate, rule_of, unsupported
from moe_routing_kernels.gate.cute_exact import exact_warp
from moe_routing_kernels.gate.cute_packed import VECTOR, packed_warp
from moe_routing_kernels.gate.cute_primitives import THREADS
from moe_routing_kernels.gate.cute_threshold import threshold_warp
from moe_routing_kernels.target import MEASURED, Target

__all__ = [
    "Config",
    "bind",
    "choose",
    "compile_for",
    "packed_configs",
    "precompile",
    "threshold_configs",
    "unsupported",
]

ENOUGH_WARPS = 8  # per multiprocessor: fewer leave it partly idle
MOST_CHOICES = 16  # packed: sorting networks grow with k; threshold: 32 lanes hold the candidates
# threshold configurations
LEAST_EXPERTS = 128  # with fewer, lanes are idle
MANY_EXPERTS = 256  # from here on the threshold variant is selected, for all numbers of tokens and formats
FEW_TOKENS = range(1024, 4097)  # float32, fewer experts: more tokens are faster packed, fewer were not tried
MOST_EXPERTS_TOGETHER = 256  # float32: with more experts, two tokens at a time are slower
LEAST_EXPERTS_IN_TURN = 512  # 16-bit: two tokens in turn were not tried with fewer
TOKENS_IN_TURN = 16384  # 16-bit: fewer tokens are faster with a warp each
TOKENS_OF_A_WARP = ((1, 1), (2, 1), (2, 2))  # tokens of a warp, tokens at a time
# packed configurations
FEW_CHOICES = 8  # networks grow faster than rounds
MOST_THREADS = 8  # per token
MOST_GROUPS = 32  # per thread
BUSY_WARPS = 4  # per multiprocessor: one for each scheduler
SPARE_WARPS = 16  # about so many fewer, in all, keep the GPU busy as well
MANY_TOKENS = (
    32768  # with 2 threads per token they fill the GPU; a thread's stores of over 16 bytes then wait for each other
)
DIRECT = 16  # experts up to which a row is read straight from global memory


@dataclass(frozen=True)
class Config:
    """How the tokens of a warp are worked on, fixed when the kernel is compiled."""

    threads_per_token: int
    tokens_per_thread: int = 1  # one after the other; 1 in the packed variant
    threshold: bool = False  # the threshold variant: all threads of a warp share a token
    together: int = 1  # threshold variant: tokens that a warp works on at a time
    packed: bool = False  # the packed variant: expert ids in the low bits of the scores
    staged: bool = False  # packed variant: scores come through shared memory
    wide: bool = False  # offsets into scores or results need 64 bits


@cute.kernel
def gate_kernel(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    config: cutlass.Constexpr,
):
    """A warp: `config.threads_per_token` threads share `config.tokens_per_thread` tokens."""
    warp = cute.arch.block_idx()[0] * (THREADS // WARP) + cute.arch.thread_idx()[0] // WARP
    threads, tokens = config.threads_per_token, config.tokens_per_thread
    first_token = warp * (WARP // threads * tokens)
    if cutlass.const_expr(config.threshold):
        threshold_warp(logits, ids, weights, first_token, rule, tokens, config.together, config.wide)
    elif cutlass.const_expr(config.packed):
        packed_warp(logits, bias, ids, weights, first_token, rule, threads, config.staged, config.wide)
    else:
        exact_warp(logits, bias, ids, weights, first_token, rule, threads, tokens, config.wide)


@cute.jit
def gate_host(
    logits: cute.Tensor,
    bias: cute.Tensor,
    ids: cute.Tensor,
    weights: cute.Tensor,
    rule: cutlass.Constexpr,
    config: cutlass.Constexpr,
    stream: Any,
):
    gate_kernel(logits, bias, ids, weights, rule, config).launch(
        grid=(cute.ceil_div(logits.shape[0], THREADS // config.threads_per_token * config.tokens_per_thread), 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


@cached
def compile_for(
    arch: str, dtype: str, experts: int, top_k: int, rule: FusedRule, config: Config, keep: bool = False
) -> Any:
    """Compile the gate for one architecture and shape class (no GPU needed).

    The result is called with logits (T, E), bias (E,) float32 (any float32 vector of E where the rule has none), ids (T, k)
    int32, weights (T, k) float32.
    """
    tokens = cute.sym_int()
    arguments = [
        fake_tensor(DTYPES[dtype], tokens, experts),
        fake_tensor(Float32, experts),
        fake_tensor(Int32, tokens, top_k),
        fake_tensor(Float32, tokens, top_k),
        rule,
        config,
    ]
    return compile_kernel(gate_host, arguments, arch, keep)


def packed_configs(dtype: str, experts: int, top_k: int, rule: FusedRule) -> list[Config]:
    """The packed configurations that can run a shape, of rising threads per token; empty where there is none."""
    groups = experts // VECTOR
    whole = experts % (VECTOR if experts <= DIRECT else 2 * VECTOR) == 0  # else copies would halve sectors of 32 bytes
    if dtype != "fp32" or not _plain(rule) or not whole or top_k > MOST_CHOICES:
        return []
    most = min(MOST_THREADS, power_of_2(top_k))
    counts = [1 << n for n in range(most.bit_length()) if groups % (1 << n) == 0]
    return [Config(n, packed=True, staged=experts > DIRECT) for n in counts if groups <= n * MOST_GROUPS]


def threshold_configs(experts: int, top_k: int, rule: FusedRule) -> list[Config]:
    """The threshold configurations that can run a shape; empty where there is none.

    Where a warp works on several tokens at a time, each has lanes for at least 1.5 k candidates.
    """
    if not _plain(rule) or experts % VECTOR or experts < LEAST_EXPERTS or top_k > MOST_CHOICES:
        return []
    fitting = [(tokens, together) for tokens, together in TOKENS_OF_A_WARP if 3 * top_k * together <= 2 * WARP]
    return [Config(WARP, tokens, threshold=True, together=together) for tokens, together in fitting]


def _plain(rule: FusedRule) -> bool:
    """Whether the rule selects by raw logits among all experts (no bias, no groups)."""
    return rule.select == "logit" and not rule.biased and rule.groups == 1


def choose(
    dtype: str, tokens: int, experts: int, top_k: int, rule: FusedRule, multiprocessors: int = MEASURED.multiprocessors
) -> Config:
    """The configuration of a shape on a GPU with so many multiprocessors, after measurements on an H200 (docs/notebook.md).

    With many experts a warp works on a token by a threshold. Packed, few threads per token are few instructions, as long
    as there are enough warps and a thread does not hold too many scores. Exact, up to 128 experts a few threads share a token, and
    a warp works on several at once; with more, sorting that many keys per thread costs more than it saves. Few tokens are
    spread over more threads, so that the GPU is not idle.
    """
    busy, enough = WARP * (multiprocessors * BUSY_WARPS - SPARE_WARPS), multiprocessors * ENOUGH_WARPS
    by_threshold = threshold_configs(experts, top_k, rule)
    if by_threshold and (experts >= MANY_EXPERTS or (dtype == "fp32" and tokens in FEW_TOKENS)):
        tokens_of_a_warp = _tokens_of_a_warp(dtype, tokens, experts)
        fitting = (config for config in by_threshold if (config.tokens_per_thread, config.together) == tokens_of_a_warp)
        return next(fitting, by_threshold[0])
    packed = packed_configs(dtype, experts, top_k, rule)
    if packed and not _exact_is_faster(packed[-1], tokens, experts, top_k, busy):
        groups = experts // VECTOR
        for config in packed:
            threads = config.threads_per_token
            few = groups <= threads * _groups_worth_having(threads, tokens, top_k)
            if few and tokens * threads >= busy:
                return config
        return packed[-1]
    if experts > 128:
        slots = -(-experts // WARP)
        return Config(WARP, 2 if slots <= 16 and tokens >= 4 * enough else 1)
    threads = max(rule.groups, min(8, power_of_2(max(9, experts) // 8)))
    while experts > 4 * threads and threads < WARP and tokens * threads < enough * WARP:
        threads *= 2
    return Config(threads)


def _tokens_of_a_warp(dtype: str, tokens: int, experts: int) -> tuple[int, int]:
    """How many tokens a warp of the threshold variant works on, in all and at a time.

    Scores of 16 bits are often equal, so two tokens at a time seldom have enough lanes: there a warp loads a second token's scores
    while it works on the first.
    """
    if dtype == "fp32":
        return (2, 2) if tokens >= MANY_TOKENS and experts <= MOST_EXPERTS_TOGETHER else (1, 1)
    return (2, 1) if tokens >= TOKENS_IN_TURN and experts >= LEAST_EXPERTS_IN_TURN else (1, 1)


def _groups_worth_having(threads: int, tokens: int, top_k: int) -> int:
    """The most groups per thread for a number of threads per token; beyond it, twice the threads are faster."""
    many = tokens >= MANY_TOKENS
    if threads == 1:
        return 0 if many and top_k > VECTOR else DIRECT // VECTOR
    if threads == 2:
        return 16 if many else 8
    return MOST_GROUPS


def _exact_is_faster(widest: Config, tokens: int, experts: int, top_k: int, busy: int) -> bool:
    """Whether the packed variant would leave most of a GPU idle that `busy` threads keep busy, or sort too many scores for few tokens."""
    if top_k > FEW_CHOICES:
        return tokens < 16 * experts
    threads = widest.threads_per_token
    many = experts > threads * VECTOR * MOST_GROUPS // 4
    return many and threads < MOST_THREADS and 2 * tokens * threads < busy


@per_problem
def _compiled(problem: Gate, arch: str) -> Any:
    rule, shape = rule_of(problem.router), (problem.experts, problem.top_k)
    config = choose(problem.dtype, problem.tokens, *shape, rule, Target.named(arch).multiprocessors)
    wide = problem.tokens * problem.experts >= 2**31  # with fewer scores, 32-bit offsets suffice for scores and results
    return compile_for(arch, problem.dtype, *shape, rule, replace(config, wide=wide))


def precompile(problem: Gate, arch: str) -> None:
    """Put the kernel of a problem into the cache; needs no GPU."""
    _compiled(problem, arch)


def bind(
    problem: Gate, *, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor, bias: Tensor | None = None
) -> Callable[[], None]:
    """Bind logits (T, E), bias (E,) for rules that have one -> topk_ids (T, k), topk_weights (T, k)."""
    bias = logits.new_empty(problem.experts, dtype=torch.float32) if bias is None else bias
    return functools.partial(_compiled(problem, current_arch()), logits, bias, topk_ids, topk_weights)
