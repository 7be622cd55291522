"""A small language model: pre-norm, RMSNorm, RoPE, causal attention, and an MoE in place of every FFN.

Suffixes: B sequences, S positions, D model width, N heads, C head width.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.grid.run_spec import BYTES, DENSE, Run
from moe_routing_bench.quality.moe_layer import Experts, MoE, compute_dtype
from moe_routing_bench.quality.stage_clock import NO_CLOCK, Clock
from moe_routing_kernels.routers import learned, zoo

IGNORED = -100  # target of padding
GATE = 99  # the stream of draws of a shared expert's gate: no layer has as many routers


def turns(positions_S: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, width / 2) of the rotary position embedding (2104.09864) with base 10,000."""
    rate = torch.exp(torch.arange(width // 2, device=positions_S.device) * (-2 * math.log(10_000.0) / width))
    angle = positions_S[:, None] * rate
    return angle.cos(), angle.sin()


def rotate(x_BNSC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the angle of the position."""
    half = x_BNSC.shape[-1] // 2
    left, right = x_BNSC[..., :half].float(), x_BNSC[..., half:].float()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(x_BNSC.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, dim: int, heads: int, depth: int, kind: str = "plain") -> None:
        """There are no biases; the output weights start smaller in a deeper model, as in GPT-2. `kind` is one of `run_spec.ATTENTIONS`."""
        super().__init__()
        width = dim // heads
        self.q_norm, self.k_norm = [nn.RMSNorm(width) if kind == "qk_norm" else nn.Identity() for _ in range(2)]
        # a sigmoid of it is a key's own share: a half at first
        self.own_N11 = nn.Parameter(torch.zeros(heads, 1, 1)) if kind == "key_shift" else None
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """y (B, S, D)."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BSD).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.own_N11 is not None:
            before = torch.cat([k[:, :, :1], k[:, :, :-1]], 2)
            k = torch.lerp(before, k, self.own_N11.sigmoid().to(k.dtype))
        y_BNSC = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y_BNSC.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """The baseline without routing: one SwiGLU network."""

    clock: Clock = NO_CLOCK

    def __init__(self, dim: int, hidden: int, depth: int) -> None:
        """Build it as one expert of width `hidden`."""
        super().__init__()
        self.expert = Experts(1, dim, hidden, depth)

    def forward(self, x_BSD: Tensor, token_ids_BS: Tensor, positions_S: Tensor) -> Tensor:
        """y (B, S, D)."""
        x_BSD = self.clock.mark(x_BSD, "experts", "rest")
        y_TD = self.expert.padded(x_BSD.to(compute_dtype(x_BSD)).flatten(0, 1)[None])[0]
        return self.clock.mark(y_TD.to(x_BSD.dtype).view_as(x_BSD), "rest", "experts")


class Block(nn.Module):
    """The parts of x + attention(norm(x)) and x + ffn(norm(x)), which `TinyLM.hidden` puts together."""

    def __init__(self, dim: int, heads: int, depth: int, ffn: MoE | Dense, attention: str = "plain") -> None:
        """`ffn` also takes token ids and positions, as some routers look at them."""
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.ffn = Attention(dim, heads, depth, attention), ffn

    def attend(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after attention (B, S, D), and its norm, which the ffn is given."""
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD), cos, sin)
        return x_BSD, self.norm2(x_BSD)


def loss(model: "TinyLM", x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
    """The mean cross-entropy in nats over all targets that are not `IGNORED`, from the last hidden state (B, S, D)."""
    logits = model.logits(x_BSD).flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BS.flatten(), ignore_index=IGNORED)


class TinyLM(nn.Module):
    """Tokens (V of them) to logits of the next token.

    `attend` and `loss` are the parts between the MoE layers, as functions that an engine may compile.
    """

    attend: Callable[[Block, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = staticmethod(Block.attend)
    loss: Callable[["TinyLM", Tensor, Tensor], Tensor] = staticmethod(loss)

    def __init__(
        self, dim: int, heads: int, ffns: Sequence[MoE | Dense], vocabulary: int = BYTES, attention: str = "plain"
    ) -> None:
        """Build one block per ffn."""
        super().__init__()
        self.head_width = dim // heads
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, len(ffns), ffn, attention) for ffn in ffns)
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        learned.join(self.routers)

    @property
    def ffns(self) -> list[MoE | Dense]:
        """The layer of each block, first to last."""
        return [block.ffn for block in self.blocks]  # type: ignore[misc]

    @property
    def layers(self) -> list[MoE]:
        """The MoE layers, first to last; none in a dense model."""
        return [ffn for ffn in self.ffns if isinstance(ffn, MoE)]

    @property
    def routers(self) -> list[nn.Module]:
        """All routers, those of one layer after another."""
        return [router for layer in self.layers for router in layer.routers]

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Logits (B, S, V) of ids (B, S) int64."""
        return self.logits(self.hidden(ids_BS))

    def hidden(self, ids_BS: Tensor) -> Tensor:
        """The residual stream (B, S, D) after the last block, of ids (B, S) int64."""
        positions_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        cos, sin = turns(positions_S, self.head_width)
        x_BSD = self.embedding(ids_BS)
        block: Block
        for block in self.blocks:  # type: ignore[assignment]
            x_BSD, normed_BSD = self.attend(block, x_BSD, cos, sin)
            x_BSD = x_BSD + block.ffn(normed_BSD, ids_BS, positions_S)
        return x_BSD

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Logits (B, S, V) of the last hidden state (B, S, D)."""
        return self.head(self.norm(x_BSD))

    def router_loss(self) -> Tensor:
        """What the routers add to the loss of the last forward pass: a scalar, the sum over all layers."""
        terms = [term for layer in self.layers for losses in layer.losses for term in losses.values()]
        return torch.stack([term.float() for term in terms]).sum() if terms else self.head.weight.new_zeros(())


def build(run: Run, frequencies: Sequence[int]) -> TinyLM:
    """The model of a run; routers that ask for them get the `frequencies` (V) of the training tokens.

    All weights but those of the routers are drawn in the same order whatever the router is, so models of one seed and
    of equal widths start equal. Raises `UserError` for a router that cannot be built.
    """
    torch.manual_seed(run.seed)
    ffns = [_dense(run) if run.router == DENSE else _moe(run, layer, frequencies) for layer in range(run.layers)]
    return TinyLM(run.dim, run.heads, ffns, run.vocabulary, run.attention)


def balances(run: Run) -> bool:
    """Whether a router of the run asks for the frequencies of tokens."""
    return run.router != DENSE and any("frequencies" in rule.options for rule in zoo.by_layer(run.router, run.layers))


@contextlib.contextmanager
def own_draws(seed: int, layer: int, number: int = 0) -> Iterator[None]:
    """Random numbers inside come from a stream of their own, so that what is drawn outside does not depend on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1_000_003 * (1 + layer) + 7919 * number)
        yield


def _dense(run: Run) -> Dense:
    equal = run.top_k if run.match == "active_flops" else run.experts
    return Dense(run.dim, equal * run.expert_hidden + run.shared_hidden, run.layers)


def _moe(run: Run, layer: int, frequencies: Sequence[int]) -> MoE:
    rules = zoo.by_layer(run.router, run.layers)
    rule = rules[layer]
    known = {"frequencies": list(frequencies), "sequence": run.sequence, "vocabulary": run.vocabulary}
    options = {name: value for name, value in known.items() if name in rule.options}
    options |= {"shared": True} if run.shared_gate == "joint" else {}
    # An option belongs to the layers whose rules have it; what none has is refused by `build`.
    strange = {name for name in run.options if not any(name in other.options for other in rules)}
    options |= {name: value for name, value in run.options.items() if name in rule.options or name in strange}
    top_k = rule.top_k or run.top_k

    def router(number: int) -> nn.Module:
        with own_draws(run.seed, layer, number):
            # A rule without a router network has none in a model whose other layers have one, too.
            network = run.network if rule.load().takes_network or "+" not in run.router else "linear"
            return learned.build(rule.name, run.dim, run.experts, top_k, network, **options)

    routers = [router(0)]
    routers += [router(number) for number in range(1, int(routers[0].passes))]  # type: ignore[arg-type]
    hidden = run.expert_hidden * run.top_k // top_k if run.match == "active_flops" else run.expert_hidden
    experts = Experts(run.experts, run.dim, hidden, run.layers)
    shared = Experts(1, run.dim, run.shared_hidden, run.layers) if run.shared_hidden else None
    gate = None
    if run.shared_gate == "gated":
        with own_draws(run.seed, layer, GATE):
            gate = learned.last_layer(run.dim, 1)
    share = max(1, top_k // len(routers))
    return MoE(routers, experts, share, run.capacity_factor, run.drop_policy, shared, gate)


def parameters(model: TinyLM) -> tuple[int, int]:
    """All parameters, and those that a token meets when each layer gives it k experts (each of two passes, k/2)."""
    total = sum(p.numel() for p in model.parameters())
    idle = 0.0
    for layer in model.layers:
        weights = sum(p.numel() for p in layer.experts.parameters())
        idle += weights * (1 - layer.top_k * len(layer.routers) / layer.count)
    return total, total - round(idle)


def flops_per_token(model: TinyLM, run: Run, active: int) -> int:
    """FLOPs of a training step per byte.

    Each active weight takes 6 (the embedding is looked up, not multiplied). Causal attention takes 6 S D per layer:
    scores and values, once forwards and twice backwards, half of them masked.
    """
    again = sum(
        (len(layer.routers) - 1) * p.numel()  # a layer of two passes has its shared expert in both
        for layer in model.layers
        for part in (layer.shared, layer.gate)
        if part is not None
        for p in part.parameters()
    )
    return 6 * (active + again - model.embedding.weight.numel()) + 6 * run.layers * run.sequence * run.dim
