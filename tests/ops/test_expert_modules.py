"""Experts modules of the transformers library: which activation is recognised, weights that lie otherwise, and their copies."""

import copy
import gc
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moe_routing_kernels.ops import expert_modules, weight_layouts
from moe_routing_kernels.ops import transformers as ours

pytest.importorskip("transformers")
SIZES = {
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "swiglu_limit": 0.75,
    "swiglu_alpha": 1.702,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "moe_num_experts": 5,
    "moe_hidden_size": 16,
    "post_norm_eps": 1e-6,
}
OTHERS, NORMED = "its activation is none of ours", "has post_expert_norm.weight besides its weights"
# class, what its config has besides, activation, or why there is none
CLASSES = {
    "qwen3": ("qwen3_moe.Qwen3MoeExperts", {}, "swiglu"),
    "qwen3_tanh": ("qwen3_moe.Qwen3MoeExperts", {"hidden_act": "gelu_pytorch_tanh"}, "geglu"),
    "qwen3_erf": ("qwen3_moe.Qwen3MoeExperts", {"hidden_act": "gelu"}, OTHERS),
    "deepseek_v4": ("deepseek_v4.DeepseekV4Experts", {}, "swiglu_limit0.75"),
    "hy_v4": ("hy_v4.HYV4Experts", {}, "swiglu_limit0.75"),
    "glm5_next": ("glm5_next.Glm5NextTextExperts", {}, "swiglu_limit0.75"),
    "minimax_m3": ("minimax_m3_vl.MiniMaxM3VLExperts", {"swiglu_limit": 7.0}, "swiglu_oai_unbiased"),
    "minimax_m3_other_limit": ("minimax_m3_vl.MiniMaxM3VLExperts", {"swiglu_limit": 6.9}, OTHERS),
    "gpt_oss": ("gpt_oss.GptOssExperts", {"swiglu_limit": 7.0}, "swiglu_oai"),
    "gpt_oss_other_alpha": ("gpt_oss.GptOssExperts", {"swiglu_limit": 7.0, "swiglu_alpha": 1.7}, OTHERS),
    "gpt_oss_other_limit": ("gpt_oss.GptOssExperts", {"swiglu_limit": 50.0}, OTHERS),
    "privacy_filter": ("openai_privacy_filter.OpenAIPrivacyFilterExperts", {"swiglu_limit": 7.0}, "swiglu_oai"),
    "aria": ("aria.AriaExperts", {}, "swiglu"),
    "nemotron_h": ("nemotron_h.NemotronHExperts", {}, "relu2"),
    "nemotron_h_silu": ("nemotron_h.NemotronHExperts", {"mlp_hidden_act": "silu"}, OTHERS),
    "muse_spark": ("muse_spark.MuseSparkExperts", {}, NORMED),
}


def module_of(name, implementation="eager", **more):
    """An experts module in float32, drawn so that some sums are beyond the limit."""
    path, other, _ = CLASSES[name]
    folder, kind = path.split(".")
    module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[kind])
    options = SIZES | other | more
    torch.manual_seed(17)
    found = getattr(module, kind)(SimpleNamespace(**options, _experts_implementation=implementation))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(0, 1.5)
    return found


def inputs(dtype=torch.float32):
    """Tokens, ids and weights."""
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(9, 16, generator=rng).to(dtype).requires_grad_()
    ids = torch.rand(9, 5, generator=rng).topk(2).indices
    return x, ids, torch.rand(9, 2, generator=rng).to(dtype).requires_grad_()


def run(module, implementation, given, scale=1.0):
    """Output and gradients of tokens, their weights and parameters."""
    module.config._experts_implementation = implementation
    output = module(*given)
    wanted = [one for one in (given[0], given[2], *module.parameters()) if one.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.square().sum() * scale, wanted)]


@pytest.fixture(autouse=True)
def options(monkeypatch):
    """What one test registers is not another's."""
    monkeypatch.setitem(ours._options, "copies", None)


def copies():
    """How many copies there are."""
    return sum(map(len, weight_layouts._copies.values()))


def close(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("name", CLASSES)
def test_modules_are_recognised_and_right(name):
    """Output and all gradients as the library's loop has them, recognised or not."""
    module, wanted, given = module_of(name), CLASSES[name][2], inputs()
    found = expert_modules.activation(module)
    reason = wanted if wanted in (OTHERS, NORMED) else ""
    assert found == ("" if reason else wanted, reason) and ours.unsupported(module) == (reason or None)
    close(run(module, ours.register(copies=True), given), run(module, "eager", given))


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
@pytest.mark.parametrize("copies", [None, False, True], ids=lambda kept: f"copies-{kept}")
@pytest.mark.parametrize("name", CLASSES)
def test_in_inference_modules_are_right(name, copies):
    module, given = module_of(name), inputs()
    with torch.no_grad():
        want = module(*given)
        module.config._experts_implementation = ours.register(copies=copies)
        for _ in range(2):
            torch.testing.assert_close(module(*given), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize(("limit", "recognised"), [(0.75, False), (16.0, False), (40.0, True)])
def test_attributes_alone_decide_nothing(limit, recognised):
    """A module with a limit that clamps behind its activation, as Step-3.7 does: by one in ten million where the limit is 16, and by
    nothing that float64 can show where it is 40."""
    module = module_of("deepseek_v4", swiglu_limit=limit)
    assert expert_modules.activation(module) == (f"swiglu_limit{limit:g}", "")

    def behind(sums):
        gate, up = sums.chunk(2, -1)
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)

    module._apply_gate = behind
    assert (expert_modules.activation(module)[1] == "") == recognised


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda module: setattr(module, "limit", 6.0), OTHERS),
        (lambda module: setattr(module, "alpha", 1.0), OTHERS),
        (lambda module: setattr(module, "act_fn", torch.nn.ReLU()), OTHERS),
        (lambda module: setattr(module, "_apply_gate", lambda sums: sums.chunk(2, -1)[0]), OTHERS),
        (lambda module: setattr(module, "is_concatenated", True), OTHERS),
        (
            lambda module: module.register_parameter("scale", torch.nn.Parameter(torch.ones(1))),
            "has scale besides its weights",
        ),
        (lambda module: module.register_buffer("mask", torch.ones(1)), "has mask besides its weights"),
        (lambda module: setattr(module, "has_post_expert_norm", True), "normalises what each expert gives"),
        (
            lambda module: setattr(module, "_apply_gate", lambda sums: 1 / 0),
            "its activation cannot be tried: ZeroDivisionError",
        ),
        (lambda module: setattr(module, "_apply_gate", lambda sums: sums.float()), OTHERS),
    ],
    ids=["limit", "alpha", "act_fn", "function", "layout", "parameter", "buffer", "norm", "error", "shape"],
)
def test_a_module_that_is_changed_is_tried_again(change, reason):
    module = module_of("gpt_oss")
    module.act_fn = torch.nn.SiLU()
    plain = type(module)._apply_gate
    module._apply_gate = lambda sums: plain(module, sums) * (module.act_fn(torch.ones(1)) > 0.9).logical_not()
    assert expert_modules.activation(module) == ("swiglu_oai", "")
    change(module)
    assert expert_modules.activation(module) == ("", reason) and ours.unsupported(module) == reason


def test_an_activation_without_the_biases_that_a_module_has():
    module = module_of("qwen3")
    module.has_bias = True
    for name in ("gate_up_proj", "down_proj"):
        module.register_parameter(f"{name}_bias", torch.nn.Parameter(torch.zeros(5, 48 if name != "down_proj" else 16)))
    assert expert_modules.activation(module) == ("", "its activation is swiglu, with biases")


def replaced(module):
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach() + 1)


def shared(module):
    """Another parameter in the same memory, written as often."""
    old = module.down_proj
    new = module.down_proj = torch.nn.Parameter(old.data)
    while new._version < old._version:
        new.add_(1)
    assert new._version == old._version > 0


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.gate_up_proj.mul_(2),
        lambda module: module.down_proj[1].zero_(),
        lambda module: module.gate_up_proj_bias.add_(1),
        lambda module: module.gate_up_proj.view(-1)[:40].copy_(torch.ones(40)),
        lambda module: module.load_state_dict({name: one * 2 for name, one in module.state_dict().items()}),
        lambda module: module.load_state_dict(
            {name: one * 2 for name, one in module.state_dict().items()}, assign=True
        ),
        lambda module: setattr(module.down_proj, "data", module.down_proj.data + 1),
        lambda module: [setattr(module.down_proj, "data", module.down_proj.data + 1) for _ in range(4)],
        lambda module: torch.utils.swap_tensors(module.down_proj, torch.nn.Parameter(torch.ones(5, 24, 16))),
        lambda module: module.to(torch.float64),
        lambda module: module.half().float(),
        lambda module: torch.optim.SGD(module.parameters(), 0.1).step(),
        replaced,
        shared,
    ],
    ids=[
        "add",
        "row",
        "bias",
        "view",
        "load",
        "assign",
        "data",
        "data_again",
        "swap",
        "double",
        "half",
        "optimiser",
        "parameter",
        "shared",
    ],
)
def test_a_copy_is_never_older_than_its_weights(change):
    module = module_of("gpt_oss")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    x, ids, weights = inputs()
    ours.register(copies=True)
    with torch.no_grad():
        ours.experts(module, x, ids, weights)
        change(module)
        x, weights = x.to(module.down_proj.dtype), weights.to(module.down_proj.dtype)
        module.config._experts_implementation = "eager"
        want = module(x, ids, weights)
        found = ours.experts(module, x, ids, weights)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
def test_a_copy_has_the_dtype_that_is_asked_for():
    """In inference without autocast, with it, and without again; autocast leaves float64 alone, as it does products of torch."""
    module, given = module_of("gpt_oss"), inputs()
    ours.register(copies=True)
    with torch.no_grad():
        want = ours.experts(module, *given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = ours.experts(module, *given)
        assert not torch.equal(narrow, want) and float((narrow - want).norm()) < 0.03 * float(want.norm())
        assert torch.equal(ours.experts(module, *given), want)
        module, given = module.double(), inputs(torch.float64)
        want = ours.experts(module, *given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(ours.experts(module, *given), want)


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
def test_what_torch_does_not_count_is_forgotten_by_hand():
    module, given = module_of("gpt_oss"), inputs()
    ours.register(copies=True)
    with torch.no_grad():
        ours.experts(module, *given)
        module.down_proj.data.mul_(3)
        ours.forget(module)
        want = module(*given)
        torch.testing.assert_close(ours.experts(module, *given), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


# Writes that torch does not count: through .data, as merged adapters are written, and by others that share the memory.
UNCOUNTED = {
    "scaled": lambda module: module.down_proj.data.mul_(3),
    "merged": lambda module: setattr(module.gate_up_proj, "data", module.gate_up_proj.data.add_(0.5)),
    "sent": lambda module: module.gate_up_proj.data.copy_(torch.ones(()) / 8),
    "shared": lambda module: torch.from_dlpack(module.down_proj.detach()).mul_(3),
    "numpy": lambda module: module.down_proj.detach().numpy().__imul__(3),
    "bias": lambda module: module.gate_up_proj_bias.data.mul_(3),
}


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
@pytest.mark.parametrize("asked", [{}, {"copies": False}], ids=["default", "without"])
@pytest.mark.parametrize("frozen", [False, True], ids=["no_grad", "frozen"])
@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
def test_no_write_is_missed_unless_copies_are_asked_for(write, frozen, asked):
    """What a user gets who asks for nothing is right after any write."""
    module, given, before = module_of("gpt_oss").requires_grad_(not frozen), inputs(), copies()
    ours.register(**asked)
    with torch.set_grad_enabled(frozen):
        first = ours.experts(module, *given)
        write(module)
        module.config._experts_implementation = "eager"
        want, found = module(*given).detach(), ours.experts(module, *given).detach()
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert not torch.allclose(first, want, rtol=1e-2) and copies() == before


def test_what_copies_would_bring_and_cost_is_told_once():
    ours.register()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for module in [module_of("gpt_oss", intermediate_size=44) for _ in range(2)] * 2:
            ours.experts(module, *inputs())
        ours.register(copies=False)
        ours.experts(module_of("gpt_oss", intermediate_size=36), *inputs())
        ours.experts(module_of("qwen3"), *inputs())
    (message,) = [str(entry.message) for entry in caught if "layout" in str(entry.message)]
    for part in ("GptOssExperts", "torch's grouped GEMMs", "register(copies=True)", "forget(model)", ".data"):
        assert part in message


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
def test_copies_live_as_long_as_weights_that_are_frozen():
    """One for each of two weights; dropped with the module, and where the weights are trained; none of a module that is copied."""
    gc.collect()
    before, module, given = copies(), module_of("gpt_oss"), inputs()
    ours.register(copies=True)
    with torch.inference_mode():
        ours.experts(module, *given)
        ours.experts(module, *given)
    assert copies() == before + 2
    copy.deepcopy(module)
    assert copies() == before + 2
    ours.experts(module, *given)
    assert copies() == before, "trained weights are rearranged in the graph"
    module.requires_grad_(False)
    (gradient,) = torch.autograd.grad(ours.experts(module, *given).sum(), given[0])
    assert gradient.any() and copies() == before + 2
    del module
    gc.collect()
    assert copies() == before


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
def test_a_copy_made_in_inference_mode_takes_part_in_a_graph():
    module, given = module_of("gpt_oss").requires_grad_(False), inputs()
    ours.register(copies=True)
    with torch.inference_mode():
        ours.experts(module, *given)
    close(run(module, ours.NAME, given), run(module, "eager", given))


def test_without_copies_torch_multiplies():
    module, given, before = module_of("gpt_oss"), inputs(), copies()
    ours.register(copies=False)
    try:
        with torch.no_grad():
            assert ours.unsupported(module) == "its weights lie otherwise, and no copies are kept"
            torch.testing.assert_close(ours.experts(module, *given), module(*given), rtol=1e-4, atol=1e-3)
        assert ours.unsupported(module) is None, "of weights that are trained none are kept"
        module.gate_up_proj.requires_grad_(False)
        close(run(module, ours.NAME, given), run(module, "eager", given))
        assert copies() == before
    finally:
        ours.register(copies=True)


def test_a_copy_is_announced_once():
    ours.register(copies=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        modules = [module_of("gpt_oss", intermediate_size=52) for _ in range(2)]
        for module in modules * 2:
            ours.experts(module, *inputs())
    (one,) = [str(one.message) for one in said if "layout" in str(one.message)]
    assert "GptOssExperts" in one and "0.0 MiB" in one and "copies=False" in one


def test_rows_of_no_expert_add_nothing_to_gradients_of_biases(monkeypatch):
    """Ids beyond the experts, as expert-parallel models have them: what grouped products leave in rows of no expert is poison."""
    module, (x, ids, weights) = module_of("gpt_oss_other_alpha"), inputs()
    ids = ids.masked_fill(ids == 3, 5)
    keep = (ids < 5).unsqueeze(-1)
    grouped = F.grouped_mm

    def poisoned(rows, weight, offs):
        out = grouped(rows, weight, offs=offs)
        return torch.where(torch.arange(len(rows))[:, None] < offs[-1], out, torch.nan)

    found = run_with_ids(module, ours.experts, x, ids, weights)
    monkeypatch.setattr(F, "grouped_mm", poisoned)
    again = run_with_ids(module, ours.experts, x, ids, weights)
    want = run_with_ids(module, lambda module, *given: by_hand(module, *given, keep), x, ids.clamp_max(4), weights)
    for one in (found, again):
        close(one, want)


def run_with_ids(module, function, x, ids, weights):
    output = function(module, x, ids, weights)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *module.parameters()])]


def by_hand(module, x, ids, weights, keep):
    """Every choice of every token, those of no expert times zero."""
    sums = torch.einsum("th,tkhn->tkn", x, module.gate_up_proj[ids]) + module.gate_up_proj_bias[ids]
    y = torch.einsum("tki,tkih->tkh", module._apply_gate(sums), module.down_proj[ids]) + module.down_proj_bias[ids]
    return (y * weights.unsqueeze(-1) * keep).sum(1)


@pytest.mark.parametrize(("name", "limits"), [("qwen3", [None]), ("gpt_oss", [7.0]), ("deepseek_v4", [0.75, 6.0, 2.5])])
def test_compiled_whole_modules_are_right(name, limits):
    """In training weights are rearranged in the graph; another limit is another graph."""
    module, given = module_of(name), inputs()
    module.config._experts_implementation = ours.register(copies=True)
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: ours.experts(module, *given), fullgraph=True, backend="aot_eager")
    for limit in limits:
        if limit is not None:
            module.limit = limit
        want = run(module, "eager", given)
        output = compiled(*given)
        wanted = [given[0], given[2], *module.parameters()]
        close([output.detach(), *torch.autograd.grad(output.square().sum(), wanted)], want)


@pytest.mark.filterwarnings("ignore:.*keeps its weights in another layout")
@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16], ids=lambda dtype: f"scores-{dtype}")
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=lambda dtype: f"weights-{dtype}")
@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16], ids=lambda dtype: f"tokens-{dtype}")
@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=lambda dtype: f"cast-{dtype}")
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v4", "gpt_oss", "gpt_oss_other_limit"])
def test_mixed_dtypes(name, cast, tokens, weights, scores):
    """The result has the tokens' dtype, gradients those of what they are of; without autocast products have the weights' dtype.

    Numbers are those of the library's loop under autocast, of the module in float32 without: it refuses two dtypes there.
    """
    module = module_of(name).to(weights)
    x, ids, scales = inputs()
    given = x.detach().to(tokens).requires_grad_(), ids, scales.detach().to(scores).requires_grad_()
    ours.register(copies=True)
    with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
        output = ours.experts(module, *given)
    wanted = [given[0], given[2], *module.parameters()]
    gradients = torch.autograd.grad(output.float().square().sum() * 1e-3, wanted)
    assert output.dtype == tokens and [one.dtype for one in gradients] == [one.dtype for one in wanted]
    plain = copy.deepcopy(module).float()
    exact = x.detach().to(tokens).float().requires_grad_(), ids, scales.detach().to(scores).float().requires_grad_()
    want = run(plain, "eager", exact, 1e-3)
    for got, right in zip([output, *gradients], want, strict=True):
        assert float((got.detach().float() - right).norm()) < 0.03 * float(right.norm())
