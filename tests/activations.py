"""Names of activations that tests draw from: those of the table, and one of each kind that has a number."""

from moe_routing_kernels.activations import ACTIVATIONS, activation_of

EVERY = (*ACTIVATIONS, "swiglu_limit10")
GATED = tuple(name for name in EVERY if activation_of(name).gated)
UNBIASED = tuple(name for name in EVERY if not activation_of(name).biased)
