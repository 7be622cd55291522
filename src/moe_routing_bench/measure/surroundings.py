"""Settings of the process that all implementations of a cell share: compared after every step of an implementation, and put back.

One that is changed and left so would change the times, or the values, of the others.
"""

import contextlib
import gc
import locale
import os
import resource
import signal
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import overrides
from torch.utils import _python_dispatch

from moe_routing_bench.measure import process_state
from moe_routing_bench.measure.candidate import Failure, Ruined

_DENORMAL = 1e-40  # of float32
_PASSES = 3  # over settings that depend on each other, as those of TF32 do
_GUARDS: list[Any] = []  # a mode ends with the object that began it
Known = list[Any]


class Setting(NamedTuple):
    """Its name, a function that reads it, and one that puts it back; one that says what is wrong with what it is, given that and what
    it was, where not every change is.
    """

    name: str
    ask: Callable[[], Any]
    put: Callable[[Any], object]
    harm: Callable[[Any, Any], str | None] | None = None

    def changed(self, now: Any, was: Any) -> str | None:
        """What is wrong, in words."""
        return self.harm(now, was) if self.harm else f"{self.name} is {_shown(now)}, no longer {_shown(was)}"


def _flags(place: str, *names: str) -> Iterator[Setting]:
    """Flags of a part of `torch.backends`, those that this torch has. torch refuses to read some while others contradict them."""
    part: Any = torch.backends
    for step in place.split(".") if place else ():
        part = getattr(part, step, None)
    path = f"torch.backends.{place}" if place else "torch.backends"

    def ask(name: str) -> Any:
        try:
            return getattr(part, name)
        except RuntimeError:
            return "a contradiction"

    for name in names:
        with contextlib.suppress(RuntimeError):
            if getattr(part, name, None) is not None:
                yield Setting(
                    f"{path}.{name}",
                    lambda name=name: ask(name),
                    lambda was, name=name: setattr(part, name, was),
                )


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast() -> tuple[Any, ...]:
    """Whether it is on, and its dtype, for a CPU and for a GPU."""
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))


def _put_autocast(was: tuple[Any, ...]) -> None:
    for device, (enabled, dtype) in zip(("cpu", "cuda"), was, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _put_inference_mode(was: bool) -> None:
    guard = torch.inference_mode(was)
    guard.__enter__()
    _GUARDS.append(guard)


def _modes() -> tuple[int, ...]:
    """The modes of torch that see every operation: of functions, and of the dispatcher."""
    stacks = (overrides._get_current_function_mode_stack(), _python_dispatch._get_current_dispatch_mode_stack())
    return tuple(id(mode) for stack in stacks for mode in stack)


def _put_modes(was: tuple[int, ...]) -> None:
    """Take off what came on top; what is gone is gone."""
    torch.set_default_device(None)
    while (stack := overrides._get_current_function_mode_stack()) and id(stack[-1]) not in was:
        overrides._pop_mode()
    while (stack := _python_dispatch._get_current_dispatch_mode_stack()) and id(stack[-1]) not in was:
        _python_dispatch._pop_mode()


def _module_hooks() -> list[dict]:
    """The hooks that every `torch.nn.Module` calls."""
    module = torch.nn.modules.module
    return [hooks for name, hooks in sorted(vars(module).items()) if name.startswith("_global_") and name[-1] == "s"]


def _put_module_hooks(was: list[dict]) -> None:
    for hooks, known in zip(_module_hooks(), was, strict=True):
        hooks.clear()
        hooks.update(known)


def _keeps_denormals() -> bool:
    return bool((torch.tensor(_DENORMAL, device="cpu") * 1).item())


def _gpu() -> tuple[int, int]:
    """The current device and its current stream."""
    if not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def _put_gpu(was: tuple[int, int]) -> None:
    torch.cuda.set_device(was[0])
    torch.cuda.set_stream(torch.cuda.default_stream())


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _put_handlers(was: dict[int, Any]) -> None:
    for number, handler in was.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: not one of Python
            signal.signal(number, handler)


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = tuple(sorted(number for name, number in vars(resource).items() if name.startswith("RLIMIT_")))


def _put_limits(was: tuple[tuple[int, int], ...]) -> None:
    for limit, known in zip(_LIMITS, was, strict=True):
        with contextlib.suppress(OSError, ValueError):  # a hard limit does not rise again
            resource.setrlimit(limit, known)


def _monitors() -> tuple[str | None, ...]:
    """The tools that watch every line of Python, from 3.12 on."""
    monitoring = getattr(sys, "monitoring", None)
    return tuple(monitoring.get_tool(i) for i in range(6)) if monitoring else ()


def _put_monitors(was: tuple[str | None, ...]) -> None:
    for i, known in enumerate(was):
        if known is None and sys.monitoring.get_tool(i) is not None:  # type: ignore[attr-defined]
            sys.monitoring.free_tool_id(i)  # type: ignore[attr-defined]


def _put_priority(was: int) -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, was)


def _put_collector(was: tuple[bool, tuple[int, int, int], list, int]) -> None:
    (gc.enable if was[0] else gc.disable)()
    gc.set_threshold(*was[1])
    gc.callbacks[:] = was[2]
    gc.set_debug(was[3])


_SETTINGS: tuple[Setting, ...] = (
    Setting("the modes of torch", _modes, _put_modes),  # first: a mode sees what the others ask
    Setting("torch.is_inference_mode_enabled()", torch.is_inference_mode_enabled, _put_inference_mode),
    Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch.is_grad_enabled()", torch.is_grad_enabled, torch.set_grad_enabled),
    *_flags("", "fp32_precision"),
    *_flags("mkldnn", "enabled", "deterministic", "allow_tf32"),
    *_flags("mkldnn.matmul", "fp32_precision"),
    *_flags("cudnn", "enabled", "benchmark", "deterministic", "allow_tf32"),
    *_flags("cuda.matmul", "fp32_precision", "allow_fp16_accumulation"),
    *_flags(
        "cuda.matmul",
        "allow_tf32",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
    ),
    Setting(
        "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    Setting(
        "the library of products",
        torch._C._get_blas_preferred_backend,
        torch._C._set_blas_preferred_backend,
    ),
    *(
        Setting(f"torch.backends.cuda.{name}_sdp_enabled()", getattr(torch.backends.cuda, f"{name}_sdp_enabled"), put)
        for name, put in (
            ("flash", torch.backends.cuda.enable_flash_sdp),
            ("mem_efficient", torch.backends.cuda.enable_mem_efficient_sdp),
            ("math", torch.backends.cuda.enable_math_sdp),
        )
    ),
    Setting(
        "torch.are_deterministic_algorithms_enabled()",
        _deterministic,
        lambda was: torch.use_deterministic_algorithms(was[0], warn_only=was[1]),
    ),
    Setting("autocast", _autocast, _put_autocast),
    Setting("torch.is_anomaly_enabled()", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    Setting("the hooks of all modules", lambda: [dict(hooks) for hooks in _module_hooks()], _put_module_hooks),
    Setting("whether denormals are kept", _keeps_denormals, lambda was: torch.set_flush_denormal(not was)),
    Setting("the current device and stream", _gpu, _put_gpu),
    Setting("numpy.geterr()", np.geterr, lambda was: np.seterr(**was)),
    Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), lambda was: locale.setlocale(locale.LC_ALL, was)),
    Setting(
        "random numbers",
        process_state.random_states,
        process_state.put_random_states,
        process_state.harm_of_random_states,
    ),
    Setting("os.environ", process_state.variables, process_state.put_variables, process_state.harm_of_variables),
    Setting("os.getcwd()", os.getcwd, os.chdir),
    Setting("os.sched_getaffinity(0)", lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)),
    Setting("the scheduling priority", lambda: os.getpriority(os.PRIO_PROCESS, 0), _put_priority),
    Setting("the limits of resources", lambda: tuple(map(resource.getrlimit, _LIMITS)), _put_limits),
    Setting("the handlers of signals", _handlers, _put_handlers),
    Setting(
        "the timers of signals",
        lambda: tuple(any(signal.getitimer(timer)) for timer in _TIMERS),
        lambda was: [signal.setitimer(timer, 0) for timer, runs in zip(_TIMERS, was, strict=True) if not runs],
    ),
    Setting("gc", lambda: (gc.isenabled(), gc.get_threshold(), list(gc.callbacks), gc.get_debug()), _put_collector),
    Setting("sys.gettrace()", sys.gettrace, sys.settrace),
    Setting("sys.getprofile()", sys.getprofile, sys.setprofile),
    Setting("threading.gettrace()", threading.gettrace, threading.settrace),
    Setting("threading.getprofile()", threading.getprofile, threading.setprofile),
    Setting("sys.monitoring", _monitors, _put_monitors),
    Setting("tracemalloc.is_tracing()", tracemalloc.is_tracing, lambda was: tracemalloc.stop()),
    Setting("sys.getswitchinterval()", sys.getswitchinterval, sys.setswitchinterval),
)


def surroundings() -> Known:
    """The settings of the process that all implementations share."""
    return [setting.ask() for setting in _SETTINGS]


def undisturbed(known: Known) -> None:
    """`Failure` where an implementation has changed a setting that others and times depend on; it is put back.

    Raises `Ruined` where it cannot be.
    """
    changed = []
    for setting, was in zip(
        _SETTINGS, known, strict=True
    ):  # one by one: what one of them is may depend on those before
        if (now := setting.ask()) != was:
            changed.append(setting.changed(now, was))
            setting.put(was)
    if not any(changed):
        return
    for _ in range(_PASSES):
        for setting, was in zip(_SETTINGS, known, strict=True):
            if setting.ask() != was:
                setting.put(was)
    text = " and ".join(filter(None, changed))
    left = any(setting.ask() != was for setting, was in zip(_SETTINGS, known, strict=True))
    raise Ruined("incorrect", f"{text}, for good") if left else Failure("incorrect", text)


def _shown(value: Any) -> str:
    """A short value, or that there is another one."""
    text = str(value)
    return text if len(text) <= 40 else "another"
