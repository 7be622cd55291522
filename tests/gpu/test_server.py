"""The warm server forks, so nothing that it imports beforehand may initialise CUDA."""

import subprocess
import sys

import pytest
import torch

from moe_routing_bench.measure import server

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED


def test_preloading_leaves_cuda_alone() -> None:
    """The driver is not initialised, and a child that is forked afterwards computes."""
    code = f"""
import ctypes, os, runpy, sys
runpy.run_path({server.__file__!r})["preload"]()
state = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p()))
child = os.fork()
if not child:
    import torch
    os._exit(int(torch.ones(3, device="cuda").sum().item()))
print(state, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == [str(NOT_INITIALISED), "3"], ended.stderr
