"""Models of the transformers library over weights that are given: one tensor holds all of them, and every model is views into it.

So implementations share the one copy, and a model takes no memory of its own. Quantised experts are not among them: these parameters of the model
have no memory at all. Read from transformers 5.17 to 5.23.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.benches.model.published_models import CONTEXT, Model
from moe_routing_kernels.formats import FORMATS

_ALIGN = 128  # elements: where every parameter begins; kernels ask for 16 bytes


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies among the weights: its first element and its shape; `expert` if it is of routed experts."""

    start: int
    shape: torch.Size
    expert: bool

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    def of(self, weights: Tensor) -> Tensor:
        """The parameter, a view into `weights` (W,)."""
        return weights[self.start : self.start + self.size].view(self.shape)


def skeleton(problem: Model, form: str) -> Any:
    """The model without weights, on the device ``meta``; `form` is the implementation of its experts."""
    import transformers  # pyright: ignore[reportMissingImports]

    family = problem.architecture.family
    config = getattr(transformers, f"{family}Config")(**problem.fields)
    with torch.device("meta"):
        made = getattr(transformers, f"{family}ForCausalLM")._from_config(
            config, attn_implementation="sdpa", experts_implementation=form
        )
    return made.eval()


def slots(model: Any, quantised: bool = False) -> dict[str, Slot]:
    """Where the parameters of a model lie, by name, in its own order; with `quantised` experts, of all others."""
    found, end = {}, 0
    inside = {f"{name}." for name, _ in experts(model)}
    for name, parameter in model.named_parameters():
        expert = any(name.startswith(one) for one in inside)
        if expert and quantised:
            continue
        found[name] = Slot(end, parameter.shape, expert)
        end = -(-(end + parameter.numel()) // _ALIGN) * _ALIGN
    return found


def experts(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules of routed experts, layer by layer, with their names; each holds gate_up_proj (E, 2 I, H) and down_proj (E, H, I)."""
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "gate_up_proj"))


def length(problem: Model) -> int:
    """Elements that the weights take."""
    last = list(slots(skeleton(problem, "eager"), problem.quantised).values())[-1]
    return last.start + last.size


def counts(problem: Model) -> tuple[int, int]:
    """Elements of the parameters that every pass reads as a whole, which are all but embeddings and routed experts; and of those among
    them that every token is multiplied with."""
    found = [(name, one) for name, one in slots(skeleton(problem, "eager")).items() if not one.expert]
    always = {name: one for name, one in found if "embed_tokens" not in name}
    products = [one.size for name, one in always.items() if len(one.shape) == 2 and "lm_head" not in name]
    return sum(one.size for one in always.values()), sum(products)


def over(problem: Model, weights: Tensor, form: str, wide: bool = False) -> Any:
    """The model whose parameters are views into `weights` (W,); with `wide` all but those of routed experts are float32 copies."""
    model = skeleton(problem, form)
    for name, slot in slots(model, problem.quantised).items():
        owner, _, own = name.rpartition(".")
        value = slot.of(weights)
        value = value.float() if wide and not slot.expert else value
        setattr(model.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))
    decoder = model.get_decoder()
    with torch.device(weights.device):  # its frequencies are computed, not learned
        decoder.rotary_emb = type(decoder.rotary_emb)(config=model.config)
    return model


def cache_shapes(problem: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of what a layer keeps of `CONTEXT` tokens: keys and values (B, heads, C, D), or what takes their place."""
    from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

    cache: Any = DynamicCache()
    ids = torch.empty((problem.sequences, CONTEXT), dtype=torch.int64, device="meta")
    first = replace(problem, architecture=replace(problem.architecture, layers=1))  # all are alike
    skeleton(first, "batched_mm").get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
    return tuple(cache.layers[0].keys.shape), tuple(cache.layers[0].values.shape)


def forward(model: Any, ids: Tensor, keys: Tensor | None, values: Tensor | None) -> dict[str, Tensor]:
    """ids (B, S) int64 behind a context whose keys and values (L, B, heads, C, D) are given -> hidden (B S, H), logits (B, V) float32.

    New keys and values are appended as in ``generate``, to copies: the context is not written.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer  # pyright: ignore[reportMissingImports]

    cache: Any = DynamicCache()
    for key, value in zip(keys, values, strict=True) if keys is not None and values is not None else ():
        layer: Any = DynamicLayer()
        layer.keys, layer.values, layer.is_initialized = key, value, True
        layer.dtype, layer.device = key.dtype, key.device
        cache.layers.append(layer)
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, -1]).float()
    return {"hidden": hidden.flatten(0, 1), "logits": logits}


def draw(problem: Model, weights: Tensor, rng: torch.Generator) -> Tensor:
    """Fill `weights` (W,): products keep the variance of what they are given, norms are 1, embeddings N(0, 1); see `definition`."""
    weights.zero_()  # also between parameters
    for name, slot in slots(skeleton(problem, "eager"), problem.quantised).items():
        view = slot.of(weights)
        if len(slot.shape) == 1:
            view.fill_(1) if name.endswith("norm.weight") else view.normal_(0, 0.1, generator=rng)
        else:
            view.normal_(0, 1 if "embed" in name else slot.shape[-1] ** -0.5, generator=rng)
    return weights


def dtype(problem: Model) -> torch.dtype:
    """The format of weights and activations."""
    return FORMATS[problem.dtype].torch_dtype
