"""Activations of experts, of g = x W1^T and u = x W3^T, and their names.

`swiglu` silu(g) * u (Shazeer 2020, arXiv 2002.05202); `geglu` gelu(g) * u, the gelu made of
tanh (Gemma); `relu2` relu(x W13^T)^2, without a gate (So et al. 2021, arXiv 2109.08668; Nemotron). Three clamp: g' = min(g, limit),
u' = u clamped to limit in size. `swiglu_oai` is that of gpt-oss: g' sigmoid(1.702 g') (u' + 1) with limit 7, and biases before it and
after W2; `swiglu_oai_unbiased` is the same without biases (MiniMax-M3); `swiglu_limit<number>`, such as `swiglu_limit10`, is silu(g') u'
with that limit (DeepSeek-V4, GLM-5.3-Flash, Hy4).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moe_routing_kernels.errors import bad, near


@dataclass(frozen=True)
class Activation:
    """What an expert computes of g, and of u where it is gated: value(g') (u' + shift), or value(g') where nothing is gated.

    `value` is "sigmoid", g sigmoid(alpha g); "gelu", the gelu made of tanh; or "relu2", relu(g)^2. With a `limit` g' is min(g, limit)
    and u' is u clamped to -limit .. limit, without one they are g and u. `biased`: both products of the expert have biases.
    """

    value: str
    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0
    gated: bool = True
    biased: bool = False


_NAMED: Mapping[str, Activation] = MappingProxyType(
    {
        "swiglu": Activation("sigmoid"),
        "geglu": Activation("gelu"),
        "relu2": Activation("relu2", gated=False),
        # of gpt-oss's modeling file in transformers
        "swiglu_oai": Activation("sigmoid", 1.702, 7.0, 1.0, biased=True),
        "swiglu_oai_unbiased": Activation("sigmoid", 1.702, 7.0, 1.0),
    }
)
ACTIVATIONS = tuple(_NAMED)
LIMITED = "swiglu_limit<number>"  # how the names that `LIMITS` matches are written in messages
# A number above zero in its only spelling: no sign, exponent, leading zero or trailing zero; at most six digits on either side of the point.
LIMITS = r"swiglu_limit(?=[0-9.]*[1-9])((?:0|[1-9][0-9]{0,5})(?:\.[0-9]{0,5}[1-9])?)"


def activation_of(name: str) -> Activation:
    """The activation of a name of `ACTIVATIONS`, or that `LIMITS` matches. Raises `UserError` for any other."""
    if isinstance(name, str):
        if name in _NAMED:
            return _NAMED[name]
        if match := re.fullmatch(LIMITS, name):
            return Activation("sigmoid", limit=float(match[1]))
    limited = str(name).startswith("swiglu_limit")
    hint = "such as swiglu_limit10 or swiglu_limit7.5" if limited else near(name, ACTIVATIONS)
    raise bad("activation", name, ", ".join((*ACTIVATIONS, LIMITED)), hint)


def limited_name(limit: float) -> str:
    """The name of the activation silu(min(g, limit)) times u clamped to -limit .. limit. Raises `UserError` for a limit without a name."""
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    name = f"swiglu_limit{f'{limit:.6f}'.rstrip('0').removesuffix('.')}" if number else ""
    if not re.fullmatch(LIMITS, name) or activation_of(name).limit != limit:
        raise bad("limit of swiglu", limit, "a number above 0 and below a million, with at most six decimal places")
    return name
