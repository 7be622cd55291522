"""What every rule of the zoo promises, as functions that fail with AssertionError: of a rule and of a planted fault alike.

A toy layer stands for the model: expert e is one random matrix, so that its output moves with ids and weights and its
gradient reaches the router as it would in a model.
"""

import copy
from dataclasses import replace

import torch
from torch import nn

from moe_routing_bench.quality.token_dispatch import place
from moe_routing_kernels.routers.learned import ZOO, Learned, SoftRouting, build

BATCH, SEQUENCE, DIM, EXPERTS, VOCABULARY = 3, 16, 12, 8, 32
LIMIT = 9  # rows of an expert where a test sets a capacity: at k = 2 three quarters of the mean load
OPTIONS = {
    "hash_random": {"vocabulary": VOCABULARY},
    "deepseek_v4_hash": {"vocabulary": VOCABULARY},
    "hash_balanced": {"frequencies": [1 / (1 + token) for token in range(VOCABULARY)]},
    "soft_moe": {"sequence": SEQUENCE},
    "token_rounding": {"tile": 8},
    "pseudo_expert_choice": {"picks": 3},
}


class Toy(nn.Module):
    """The MoE layer around a rule, with one router a pass."""

    def __init__(self, routers: list[Learned]):
        super().__init__()
        self.routers, first = nn.ModuleList(routers), routers[0]
        rng = torch.Generator().manual_seed(3)
        self.extra, self.limit, self.policy = first.extra, None, "position"
        self.register_buffer("experts", torch.randn(first.experts, DIM, DIM, generator=rng) / DIM**0.5)
        self.register_buffer("consts", torch.randn(len(self.extra), DIM, generator=rng))

    def forward(self, x, token_ids, positions):
        """Output (B, S, D) and the routing of each pass."""
        routings = []
        for router in self.routers:
            routing = router(x, token_ids, positions)
            if self.limit is not None and not isinstance(routing, SoftRouting):
                routing = self.seated(router, routing)
            x, routings = self.mix(x.float(), routing) + (x if len(self.routers) > 1 else 0), [*routings, routing]
        return x, routings

    def seated(self, router, routing):
        """The routing with weight 0 for choices beyond the capacity of a true expert, as the layer of a model seats them."""
        policy = router.seated_by if self.policy == "position" else self.policy
        kept = place(routing.ids, routing.weights, len(self.experts), self.limit, policy, padded=True).kept_TK
        free = routing.ids >= len(self.experts)
        return replace(routing, weights=routing.weights * (kept | free))

    def mix(self, x, routing):
        if isinstance(routing, SoftRouting):
            slots = torch.einsum("bsn,bsd->bnd", routing.dispatch, x)
            owner = torch.arange(slots.shape[1]) // (slots.shape[1] // len(self.experts))
            return torch.einsum(
                "bsn,bnd->bsd", routing.combine, torch.einsum("bnd,nde->bne", slots, self.experts[owner])
            )
        flat = x.flatten(0, 1)
        kinds = {"zero": lambda i: flat * 0, "copy": lambda i: flat, "const": lambda i: self.consts[i].expand_as(flat)}
        kinds["shared"] = lambda i: flat * self.consts[i]
        outputs = [flat @ one for one in self.experts] + [kinds[kind](i) for i, kind in enumerate(self.extra)]
        every = torch.stack([*outputs, flat * 0], 1)  # the last is what id -1 finds
        picked = every[torch.arange(len(flat))[:, None], routing.ids.long()]
        return (picked * routing.weights[:, :, None]).sum(1).view_as(x)


def make(name, network="linear", seed=0, cls=None, **options):
    """A toy layer of a rule, or of a class in its place, with random parameters: some rules start at zero, where all ties."""
    torch.manual_seed(seed)
    line = ZOO[name]
    count = (cls or line.load()).passes
    routers = [
        build(name, DIM, EXPERTS, line.top_k or 2, network, **{**OPTIONS.get(name, {}), **options})
        for _ in range(count)
    ]
    if cls is not None:
        for router in routers:
            router.__class__ = cls
    with torch.no_grad():
        for router in routers:
            for parameter in router.parameters():
                parameter.copy_(
                    torch.randn_like(parameter) / max(1, parameter.shape[-1] if parameter.ndim else 1) ** 0.5
                )
    return Toy(routers)


def data(seed=1, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, SEQUENCE, DIM, generator=rng).to(dtype)
    return x, torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=rng), torch.arange(SEQUENCE)


def run(toy, inputs, training, seed=5):
    """Forward of a copy, whose state stays behind, with the same noise for the same seed."""
    torch.manual_seed(seed)
    return copy.deepcopy(toy).train(training)(*inputs)


def router_learns(toy, learns):
    """The layer's output, without any loss of the router, gives a gradient to every router, or to none."""
    out, _ = toy.train()(*data())
    if learns:
        assert out.requires_grad, "the router gets no gradient"
        out.square().mean().backward()
        for router in toy.routers:
            grads = [p.grad for p in router.parameters()]
            assert any(g is not None and g.abs().max() > 1e-8 for g in grads), "the router gets no gradient"
            assert all(g is None or g.isfinite().all() for g in grads), "a gradient is not finite"
    else:
        assert not out.requires_grad, "a router that does not learn has a gradient"


def losses_have_gradients(toy, names):
    """Each of the named losses is there, is a finite scalar, and on its own moves the router; in evaluation there is none."""
    _, routings = toy.train()(*data())
    for router, routing in zip(toy.routers, routings, strict=True):
        assert set(routing.losses) == set(names), f"losses {sorted(routing.losses)}"
        for name, loss in routing.losses.items():
            assert loss.shape == () and loss.isfinite() and loss.requires_grad, f"loss {name} has no gradient"
            grads = torch.autograd.grad(loss, list(router.parameters()), retain_graph=True, allow_unused=True)
            assert any(g is not None and g.abs().max() > 0 for g in grads), f"loss {name} has no gradient"
            assert all(g is None or g.isfinite().all() for g in grads), f"loss {name} has a gradient that is not finite"
    assert all(routing.losses == {} for routing in toy.eval()(*data())[1])


def well_formed(toy, sums, training):
    """Shapes, dtypes, ids in range and distinct, no weight without an expert, and the sum rule of the weights."""
    inputs = data()
    for router, routing in zip(toy.routers, run(toy, inputs, training)[1], strict=True):
        tokens = BATCH * SEQUENCE
        assert routing.scores.shape == (tokens, router.experts) and routing.scores.dtype == torch.float32
        assert (routing.scores >= 0).all() and torch.allclose(routing.scores.sum(1), torch.ones(tokens)), (
            "scores sum to 1"
        )
        if isinstance(routing, SoftRouting):
            assert routing.dispatch.shape == routing.combine.shape and routing.combine.shape[2] % router.experts == 0
            assert routing.dispatch.dtype == routing.combine.dtype == torch.float32
            assert torch.allclose(routing.dispatch.sum(1), torch.ones(())), "dispatch sums to 1 over tokens"
            weights = routing.combine.flatten(0, 1)
        else:
            ids, weights = routing.ids, routing.weights
            assert ids.shape == weights.shape and ids.shape[0] == tokens
            assert ids.dtype == torch.int32 and weights.dtype == torch.float32
            assert ids.min() >= -1 and ids.max() < router.experts + len(router.extra), "an id is out of range"
            ranked = ids.sort(1).values
            assert not ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)).any(), "duplicate ids"
            assert (weights[ids < 0] == 0).all(), "a weight without an expert"
        total, (least, most) = weights.sum(1), sums
        assert weights.isfinite().all() and (least < 0 or (weights >= 0).all()), "a negative weight"
        assert (total >= least - 1e-5).all() and (total <= most + 1e-5).all(), (
            f"weights do not sum to {least} to {most}"
        )


def bias_only_selects(toy):
    """A bias equal for all experts changes nothing; an uneven one changes ids, but no weight where the ids are the same."""
    plain = run(toy, data(), False)[1][0]
    toy = copy.deepcopy(toy)
    router = toy.routers[0]
    router.bias.fill_(0.25)
    even = run(toy, data(), False)[1][0]
    assert torch.equal(plain.ids, even.ids) and torch.allclose(plain.weights, even.weights), (
        "the bias leaks into the weights"
    )
    router.bias.copy_(0.2 * torch.randn(len(router.bias), generator=torch.Generator().manual_seed(8)))
    uneven = run(toy, data(), False)[1][0]
    (a, at), (b, bt) = plain.ids.sort(1), uneven.ids.sort(1)
    same = (a == b).all(1)
    assert not same.all() and same.any(), "the bias does not select"
    before, after = plain.weights.gather(1, at)[same], uneven.weights.gather(1, bt)[same]
    assert torch.allclose(before, after), "the bias leaks into the weights"
    assert torch.allclose(plain.scores, uneven.scores), "the bias leaks into the scores"


def sees_later_tokens(toy, training, own_sequence=False):
    """Whether outputs up to a position move when what comes after it, in every sequence, is drawn again.

    With `own_sequence` one sequence is drawn again, and its own outputs are compared.
    """
    inputs, others = data(1), data(2)
    before, _ = run(toy, inputs, training)
    each = [slice(b, b + 1) for b in range(BATCH)]
    every = (
        [(which, which) for which in each]
        if own_sequence
        else [(which, slice(None)) for which in (slice(None), each[-1])]
    )
    for end in (SEQUENCE // 2,) if own_sequence else (1, SEQUENCE // 2, SEQUENCE - 1):
        for which, looked_at in every:
            x, token_ids = inputs[0].clone(), inputs[1].clone()
            x[which, end:], token_ids[which, end:] = others[0][which, end:], others[1][which, end:]
            after, _ = run(toy, (x, token_ids, inputs[2]), training)
            if not torch.allclose(before[looked_at, :end], after[looked_at, :end], rtol=1e-4, atol=1e-5):
                return True
    return False


def sees_other_sequences(toy, training):
    """Whether the outputs of the last sequence move when those before it are drawn again."""
    inputs, others = data(1), data(2)
    x, token_ids = (torch.cat([new[:-1], old[-1:]]) for new, old in zip(others[:2], inputs[:2], strict=True))
    before, after = (run(toy, one, training)[0] for one in (inputs, (x, token_ids, inputs[2])))
    return not torch.allclose(before[-1], after[-1], rtol=1e-4, atol=1e-5)


def causality_is(toy, causal, training, own_sequence=False):
    """The outputs up to a position depend on later tokens exactly where the table says so."""
    found = not sees_later_tokens(toy, training, own_sequence)
    assert found == causal, (
        f"{'causal' if found else 'sees later tokens'} in {'training' if training else 'evaluation'}"
    )


def train_steps(toy, steps):
    """Steps of SGD with fresh data, each followed by `after_step`."""
    optimiser = torch.optim.SGD(
        [p for p in toy.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))], lr=0.1
    )
    for step in range(steps):
        torch.manual_seed(step)
        out, routings = toy.train()(*data(100 + step))
        loss = out.square().mean() + sum(sum(routing.losses.values()) for routing in routings)
        if loss.requires_grad:
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        for router in toy.routers:
            router.after_step()


def state_survives(toy, fresh):
    """After some steps and a forward pass, `fresh` with its state goes on exactly like it, steps of state included."""
    train_steps(toy, 3)
    toy.train()(*data(50))  # statistics that no step has used yet
    fresh.load_state_dict(toy.state_dict())
    for training in (True, False):
        assert torch.equal(run(toy, data(), training)[0], run(fresh, data(), training)[0]), "another output"
    for one in (toy, fresh):
        for router in one.routers:
            router.after_step()
    for (name, a), b in zip(toy.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b), f"another {name} after a step"


def shapes_are_static(toy, training):
    """Everything runs on tensors without data, as under capture: what looks at values or waits for the host raises."""
    inputs = [one.to("meta") for one in data()]
    for router in copy.deepcopy(toy).train(training).to("meta").routers:
        try:
            routing = router(*inputs)
            router.after_step()
        except (NotImplementedError, RuntimeError) as error:
            raise AssertionError(f"depends on data: {error}") from error
        assert all(getattr(routing, name).is_meta for name in vars(routing) if name != "losses"), "left the device of x"


def half_precision_is_widened(toy, training):
    """bf16 input, also under autocast, routes like the same numbers in float32."""
    x, token_ids, positions = data(dtype=torch.bfloat16)
    wide = run(toy, (x.float(), token_ids, positions), training)[1][0]
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(5)
        narrow = copy.deepcopy(toy.routers[0]).train(training)(x, token_ids, positions)
    for name in ("dispatch", "combine", "scores") if isinstance(wide, SoftRouting) else ("ids", "weights", "scores"):
        assert torch.equal(getattr(wide, name), getattr(narrow, name)), f"other {name} in bf16"
