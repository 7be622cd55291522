"""The functions that the harness itself calls: compared after every step of an implementation, and put back where one was replaced.

They are those of the harness's own modules and classes, with their code; and of torch, numpy and the standard library those whose names
the harness's code has.
"""

import builtins
import contextlib
import importlib
import math
import os
import random
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from moe_routing_bench.measure.candidate import Failure, Ruined

_HARNESS = (
    "moe_routing_bench.measure",
    "moe_routing_bench.statistics",
    "moe_routing_bench.intervals",
    "moe_routing_bench.student",
    "moe_routing_bench.benches.checks",
)
# Where the harness finds what it calls of others. What is new in a class or in an object shadows what its base has.
_PLACES: tuple[Any, ...] = (
    builtins, math, os, random, secrets, statistics, sys, threading, time, np, torch, torch.cuda, torch.Tensor,
    torch.cuda.Event, torch.cuda.CUDAGraph, torch.cuda.Stream, torch.Generator, random.Random, secrets.SystemRandom,
)  # fmt: skip
_WHOLE = ("numpy.lib._function_base_impl", "numpy._core.fromnumeric", "numpy._core._methods")  # behind numpy's names
# What comparing tensors comes to in the dispatcher, where an extension may register a kernel of its own.
_OPERATORS = (
    "equal", "eq.Tensor", "ne.Tensor", "ne.Scalar", "eq.Scalar", "any", "any.dim", "all", "sum.dim_IntList", "sum", "copy_", "clone",
    "fill_.Scalar", "sub.Tensor", "abs", "gt.Tensor", "isnan", "item", "_local_scalar_dense", "linalg_vector_norm", "mul.Tensor",
    "mv", "addmv_", "addmv.out",
)  # fmt: skip
# Operators of tensors, which code has no names for.
_SPECIAL = {
    f"__{name}__"
    for name in ("eq", "ne", "lt", "gt", "getitem", "setitem", "bool", "and", "or", "sub", "mul", "float", "int")
}
_WRAPPED = {"manual_seed", "seed"}  # by torch's compiler, once it is loaded
_MISSING = object()
Known = tuple[list[tuple[Any, str, Any]], list[tuple[FunctionType, tuple[Any, ...]]], list[str]]


def _modules() -> list[ModuleType]:
    """Those of the harness that are loaded, and what numpy does its work in."""
    for name in _WHOLE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return [module for name, module in sorted(sys.modules.items()) if module and name.startswith((*_HARNESS, *_WHOLE))]


def _codes(function: FunctionType) -> Iterator[CodeType]:
    """The code of a function, and of those in it."""
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        yield code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _functions(place: Any) -> Iterator[FunctionType]:
    """The Python functions of a module or class."""
    for value in list(vars(place).values()):
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(inner, FunctionType):
            yield inner


def _body(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def originals() -> Known:
    """What the harness calls, as it is now: to be asked before an implementation may replace any of it."""
    modules = _modules()
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    ours = [
        place for place in (*modules, *classes) if getattr(place, "__module__", place.__name__).startswith(_HARNESS)
    ]
    asked = {
        name for place in ours for function in _functions(place) for code in _codes(function) for name in code.co_names
    } - _WRAPPED | _SPECIAL
    built_in = {name for name in asked if hasattr(builtins, name)}
    kept = []
    for place in (*modules, *classes):
        kept += [
            (place, name, value)
            for name, value in list(vars(place).items())
            if callable(value) or isinstance(value, property)
        ]
        kept += [(place, name, _MISSING) for name in built_in - vars(place).keys()]
    for place in _PLACES:
        has = vars(place)
        kept += [(place, name, has[name]) for name in asked & has.keys() if callable(has[name])]
        if not isinstance(place, ModuleType):
            kept += [(place, name, _MISSING) for name in asked - has.keys() if hasattr(place, name)]
    functions = {
        id(value): value
        for _, _, value in kept
        for value in [getattr(value, "__func__", value)]
        if isinstance(value, FunctionType)
    }
    return kept, [(function, _body(function)) for function in functions.values()], _registered()


def _registered() -> list[str]:
    """Which kernels the dispatcher has for what the harness compares tensors with."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in _OPERATORS]


def _called(place: Any) -> str:
    name = getattr(place, "__qualname__", getattr(place, "__name__", type(place).__name__))
    return name.removeprefix("moe_routing_bench.measure.")


def genuine(known: Known) -> None:
    """`Failure` where an implementation has replaced what times and checks are taken with; it is put back.

    Raises `Ruined` where that cannot be.
    """
    kept, functions, registered = known
    replaced = []
    for place, name, original in kept:
        if vars(place).get(name, _MISSING) is original:
            continue
        replaced.append(f"{_called(place)}.{name}")
        if original is _MISSING:
            delattr(place, name)
        else:
            setattr(place, name, original)
    for function, body in functions:
        if _body(function) != body:
            replaced.append(f"the code of {function.__qualname__}")
            function.__code__, function.__defaults__, function.__kwdefaults__ = body
    if replaced:
        raise Failure("incorrect", f"{' and '.join(replaced[:3])} was replaced")
    if _registered() != registered:
        raise Ruined("incorrect", "operators of torch have other kernels than before")


def unshadowed(*objects: Any) -> None:
    """`Failure` where an object of the harness has an attribute in place of a method of its class."""
    for instance in objects:
        if shadows := vars(instance).keys() & {name for name, value in vars(type(instance)).items() if callable(value)}:
            for name in shadows:
                delattr(instance, name)
            raise Failure("incorrect", f"{type(instance).__name__}.{', '.join(sorted(shadows))} was replaced")
