"""Packages of somebody else that several benches compare with, each pinned.

Most are installed without what they depend on: their pins are older than what works, and of vLLM, SGLang and MSLK only a library of
kernels and a few files are loaded (`peers.loading`).
"""

from moe_routing_bench.benches.bench import Peer


def pinned(module: str, distribution: str, version: str) -> Peer:
    """A package at the version that its implementation was written for."""
    return Peer(module, distribution, f"pip install --no-deps {distribution}=={version}")


VLLM = pinned("vllm", "vllm", "0.33.0")
SGLANG = pinned("sgl_kernel", "sglang-kernel", "0.4.3")
SGLANG_FILES = Peer("sglang", "sglang", "pip install --no-deps sglang==0.5.23 sglang-kernel==0.4.3")
TRITON_KERNELS = pinned("triton_kernels", "sglang-kernel", "0.4.3")  # the package carries OpenAI's kernels
DEEPGEMM = pinned("deep_gemm", "tokenspeed-deepgemm", "2.5.0.post20260629")
MSLK = pinned("mslk", "mslk-cuda", "1.1.0")
HUMMING = pinned("humming", "humming-kernels", "0.1.19")
GROUPED_MM_BF16 = Peer("grouped_mm_bf16", "grouped-mm-bf16", "pip install -e '.[peers]'")
DEEP_EP = pinned("deep_ep", "tokenspeed-deepep", "1.2.1.post20251110")
