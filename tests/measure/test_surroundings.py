"""What all implementations of a process share: each setting that one changes is said and put back."""

import gc
import locale
import os
import random
import resource
import signal
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_routing_bench.measure import process_state, surroundings
from moe_routing_bench.measure.candidate import Failure, Ruined


class Seen(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeenBelow(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


HELD: list[torch.inference_mode] = []  # a mode ends with the object that began it


def watch_python() -> None:
    if not hasattr(sys, "monitoring"):
        pytest.skip("from Python 3.12 on")
    sys.monitoring.use_tool_id(3, "another")


CHANGES = {
    "torch.get_num_threads()": lambda: torch.set_num_threads(torch.get_num_threads() + 2),
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.is_grad_enabled()": lambda: torch.set_grad_enabled(False),
    "torch.is_inference_mode_enabled()": lambda: HELD.append(torch.inference_mode()) or HELD[-1].__enter__(),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch.backends.mkldnn.deterministic": lambda: setattr(torch.backends.mkldnn, "deterministic", True),
    "torch.backends.cudnn.enabled": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "torch.backends.cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "torch.backends.cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "torch.backends.cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "torch.backends.cuda.matmul.allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: setattr(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "torch.backends.cuda.matmul.fp32_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.backends.cuda.flash_sdp_enabled()": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch.are_deterministic_algorithms_enabled()": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "torch.is_anomaly_enabled()": lambda: torch.autograd.set_detect_anomaly(True),
    "the hooks of all modules": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    "the modes of torch": lambda: Seen().__enter__(),
    "the modes of torch ": lambda: SeenBelow().__enter__(),
    "the modes of torch  ": lambda: torch.set_default_device("meta"),
    "numpy.geterr()": lambda: np.seterr(divide="raise"),
    "os.environ: OMP_NUM_THREADS": lambda: os.environ.update(OMP_NUM_THREADS="63", A_NEW_NAME="1"),
    "os.environ: OMP_NUM_THREADS ": lambda: os.environ.pop("OMP_NUM_THREADS"),
    "the locale": lambda: locale.setlocale(
        locale.LC_NUMERIC, "C.UTF-8" if locale.setlocale(locale.LC_NUMERIC) == "C" else "C"
    ),
    "os.getcwd()": lambda: os.chdir("/"),
    "the handlers of signals": lambda: signal.signal(signal.SIGUSR2, lambda *_: None),
    "the timers of signals": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000),
    "the limits of resources": lambda: resource.setrlimit(
        resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
    ),
    "gc": gc.disable,
    "gc ": lambda: gc.set_threshold(1),
    "gc  ": lambda: gc.callbacks.append(lambda *_: None),
    "sys.gettrace()": lambda: sys.settrace(lambda *_: None),
    "sys.getprofile()": lambda: sys.setprofile(lambda *_: None),
    "threading.gettrace()": lambda: threading.settrace(lambda *_: None),
    "sys.monitoring": watch_python,
    "tracemalloc.is_tracing()": tracemalloc.start,
    "sys.getswitchinterval()": lambda: sys.setswitchinterval(1e-6),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_is_put_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "the limits of resources" and resource.getrlimit(resource.RLIMIT_CORE)[0] == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    known = surroundings.surroundings()
    surroundings.undisturbed(known)
    CHANGES[name]()
    with pytest.raises(Failure) as failure:
        surroundings.undisturbed(known)
    assert failure.value.status == "incorrect" and name.strip() in failure.value.reason
    assert not isinstance(failure.value, Ruined)
    surroundings.undisturbed(known)


def test_denormals_are_kept_again() -> None:
    known = surroundings.surroundings()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush them")
    with pytest.raises(Failure, match="denormals are kept is False, no longer True"):
        surroundings.undisturbed(known)
    surroundings.undisturbed(known)


def test_cores_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the process may use."""
    cores = [{0, 1}]
    monkeypatch.setattr(surroundings.os, "sched_getaffinity", lambda process: cores[0])
    monkeypatch.setattr(surroundings.os, "sched_setaffinity", lambda process, chosen: cores.__setitem__(0, chosen))
    known = surroundings.surroundings()
    cores[0] = {1}
    with pytest.raises(Failure, match=r"^os.sched_getaffinity\(0\) is \{1\}, no longer \{0, 1\}$"):
        surroundings.undisturbed(known)
    assert cores == [{0, 1}]


def test_what_cannot_be_put_back_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lower priority, of a process without privileges."""
    nice = [0]

    def refuse(*_) -> None:
        raise PermissionError

    monkeypatch.setattr(surroundings.os, "getpriority", lambda *_: nice[0])
    monkeypatch.setattr(surroundings.os, "setpriority", refuse)
    known = surroundings.surroundings()
    nice[0] = 10
    with pytest.raises(Ruined, match="the scheduling priority is 10, no longer 0, for good"):
        surroundings.undisturbed(known)


def test_a_library_may_add_a_variable_which_others_do_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is imported, as Liger does."""
    known = surroundings.surroundings()
    monkeypatch.setenv("A_NEW_NAME", "1")
    surroundings.undisturbed(known)
    assert "A_NEW_NAME" not in os.environ


def test_random_numbers_go_on_where_they_were() -> None:
    """An implementation may draw some, as tuners do: others find the same ones."""
    known = surroundings.surroundings()
    drawn = [random.random(), np.random.random(), float(torch.rand(()))]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    surroundings.undisturbed(known)
    assert drawn == [random.random(), np.random.random(), float(torch.rand(()))]


def test_variables_are_named_and_long_values_not_shown() -> None:
    """Which may be passwords."""
    text = (
        process_state.harm_of_variables({"A": "key" * 9, "B": "63", "NEW": "x"}, {"A": "", "B": "1", "GONE": "x"}) or ""
    )
    assert all(part in text for part in ("A is", "B is '63'", "'1'", "GONE was removed", "NEW was added"))
    assert "keykey" not in text


def test_a_compiler_may_note_where_its_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    known = surroundings.surroundings()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/cache")
    surroundings.undisturbed(known)
