"""Compile our kernels for an architecture without a GPU, every n-th case of each, and print one JSON line per case: PTX and SASS facts.

A program of its own: a mistake in DSL code can abort the process, and kept PTX and cubins are written to the working
directory. SASS comes from the nvdisasm that triton ships; without it the counts are null.
"""

import gc
import itertools
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_routing_kernels.combine import cute_combine
from moe_routing_kernels.cute.cache import DTYPES
from moe_routing_kernels.experts import Experts, cute_quantised
from moe_routing_kernels.formats.weights import WEIGHTS
from moe_routing_kernels.gate import cute_gate, rule_of
from moe_routing_kernels.gemm.sm90 import fp8, grouped_gemm, loads, quantised, training, wgrad
from moe_routing_kernels.gemm.sm90.dequantise import subtracts
from moe_routing_kernels.gemm.sm90.fp8_mainloop import LOADERS, Fp8Gemm
from moe_routing_kernels.gemm.sm90.quantised_layout import Codes
from moe_routing_kernels.gemm.sm90.quantised_mainloop import BATCHES
from moe_routing_kernels.gemm.sm90.quantised_tile import K16, QuantisedGemm
from moe_routing_kernels.gemm.sm90.tile import REGISTERS, GroupedGemm, Tile
from moe_routing_kernels.gemm.sm90.training import TrainingGemm
from moe_routing_kernels.gemm.sm90.wgrad_tile import EPI_COLUMNS, WgradGemm
from moe_routing_kernels.pack import cute_pack, cute_pack_bulk, cute_pack_fp8
from moe_routing_kernels.permute import Permute, cute_permute
from moe_routing_kernels.router import cute_gemm, cute_router

INSTRUCTION = 16  # bytes
# operation, dtype, hidden, top_k, padding rows checked per group
CASES = [
    ("pack", "bf16", 4096, 8, 0),
    ("pack", "bf16", 7168, 8, 10),
    ("pack", "fp32", 2048, 2, 2),
    ("pack", "fp16", 100, 3, 4),
    ("pack", "bf16", 4096, 1, 2),
    ("pack", "bf16", 13, 32, 0),
    ("combine", "bf16", 4097, 6, 0),
    ("combine", "bf16", 2048, 1, 0),
    ("combine", "fp16", 7168, 2, 0),
    ("combine", "fp32", 2048, 32, 0),
    ("combine", "bf16", 4096, 8, 0),
    ("pack", "bf16", 2880, 2, 0),
    ("pack", "bf16", 2688, 1, 3),
    ("combine", "bf16", 2880, 2, 0),
    ("combine", "bf16", 2880, 4, 0),
    ("combine", "bf16", 2688, 1, 0),
]
# hidden, elements that share a scale, top_k, padding rows checked per group
FP8_PACKS = [
    (4096, 128, 8, 0),
    (7168, 128, 8, 10),
    (2880, 128, 4, 2),
    (13, 128, 32, 0),
    (7168, 7168, 8, 10),
    (32768, 32768, 2, 0),
    (8191, 8191, 8, 1),
    (2880, 64, 4, 2),
    (4096, 8, 2, 0),
    (4096, 768, 2, 1),
]
# dtype, hidden, top_k, padding rows checked per piece
BULK_PACKS = [
    ("bf16", 2880, 2, 0),
    ("bf16", 4096, 8, 0),
    ("bf16", 7168, 8, 10),
    ("fp32", 2048, 3, 2),
    ("fp16", 2880, 32, 1),
    ("bf16", 2688, 2, 16),
    ("bf16", 2880, 4, 0),
]
# router, dtype, tokens, experts, top_k
GATES = [
    ("softmax_topk_renorm", "fp32", 16384, 128, 8),
    ("softmax_topk", "bf16", 64, 60, 4),
    ("softmax_topk_renorm", "fp32", 65536, 8, 8),
    ("softmax_topk_renorm", "fp32", 4096, 256, 8),
    ("softmax_topk", "fp32", 16384, 72, 3),
    ("sigmoid_renorm", "bf16", 16384, 512, 22),
    ("deepseek_v3", "fp16", 16384, 256, 8),
    ("sqrtsoftplus_renorm", "fp32", 16384, 384, 6),
    ("softmax_topk_renorm", "fp32", 16384, 1024, 32),
    ("llama4", "bf16", 1, 1, 1),
    ("llama4", "fp32", 64, 1024, 8),
    ("softmax_topk", "fp32", 16384, 128, 16),
    ("softmax_topk_renorm", "fp32", 16384, 512, 10),
    ("deepseek_v2", "fp32", 16384, 160, 6),
    ("sigmoid_renorm", "fp32", 16384, 896, 16),
    ("softmax_topk", "bf16", 16384, 384, 16),
]
# router, tokens, hidden, experts, top_k
ROUTERS = [
    ("softmax_topk_renorm", 64, 2048, 128, 8),
    ("softmax_topk_renorm", 16384, 2048, 128, 8),
    ("deepseek_v3", 64, 7168, 256, 8),
    ("softmax_topk_renorm", 64, 2048, 32, 8),
]
# tokens, experts, top_k, layout
PERMUTES = [
    (16, 8, 2, "compact"),
    (512, 128, 8, "block128"),
    (16384, 1024, 8, "compact"),
    (524288, 60, 8, "padded"),
    (36044, 512, 10, "compact"),
    (8192, 1024, 32, "block128"),
    (16384, 8, 2, "compact"),
    (135168, 60, 8, "compact"),
    (133120, 256, 8, "compact"),
]
# dtype, gemm
GEMMS = [
    ("bf16", GroupedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 144))),
    ("bf16", GroupedGemm(7168, 2048, 256, "", Tile(2, 2, 160))),
    ("fp16", GroupedGemm(184, 352, 60, "geglu", Tile(1, 2, 48))),
    ("bf16", GroupedGemm(2880, 2880, 2, "relu2", Tile(1, 2, 24))),
    ("fp16", GroupedGemm(40, 64, 1024, "", Tile(1, 1, 16))),
    ("bf16", GroupedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 192, pingpong=True), top_k=8)),
    ("bf16", GroupedGemm(2048, 768, 128, "", Tile(1, 1, 8), waits="rows")),
    ("bf16", GroupedGemm(768, 2048, 128, "swiglu", Tile(1, 2, 24), top_k=8, signals="early")),
    ("fp16", GroupedGemm(184, 360, 5, "geglu", Tile(1, 1, 8), top_k=3)),
    ("bf16", GroupedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 144), top_k=8)),
    ("fp16", GroupedGemm(2048, 768, 128, "", Tile(2, 2, 176, lag=2, by_warp=True), biased=True)),
    ("bf16", GroupedGemm(2048, 768, 128, "", Tile(2, 2, 192, pingpong=True), waits="rows")),
    ("bf16", GroupedGemm(776, 360, 5, "swiglu", Tile(2, 2, 176, pingpong=True), top_k=8, signals="early")),
    ("bf16", GroupedGemm(2048, 768, 128, "", Tile(2, 2, 192, pingpong=True, narrowest=96))),
    ("bf16", GroupedGemm(2880, 2880, 128, "swiglu_oai", Tile(2, 2, 144), top_k=4, biased=True)),
    ("bf16", GroupedGemm(2880, 2880, 128, "swiglu_oai", Tile(1, 2, 48), biased=True)),
    ("fp16", GroupedGemm(2880, 2880, 128, "", Tile(2, 2, 176, pingpong=True), biased=True)),
    ("bf16", GroupedGemm(184, 1032, 5, "swiglu", Tile(2, 2, 176, narrowest=168, cluster=2), top_k=8)),
    ("fp16", GroupedGemm(2048, 768, 128, "", Tile(2, 2, 176, pingpong=True, narrowest=168, cluster=2))),
    ("fp16", GroupedGemm(184, 352, 60, "swiglu_limit7.5", Tile(1, 1, 8), top_k=3)),
    ("bf16", GroupedGemm(192, 1032, 5, "swiglu", Tile(2, 2, 176, narrowest=168, cluster=2, lag=2, by_warp=True), 8)),
    ("bf16", GroupedGemm(3072, 7168, 384, "swiglu_limit10", Tile(2, 2, 144))),
    ("bf16", GroupedGemm(776, 360, 5, "swiglu", Tile(2, 2, 176, narrowest=168), top_k=8)),
]
# dtype, gemm
CHAINED_GEMMS = [  # that overlap with the previous kernel and with the next one
    ("bf16", GroupedGemm(2048, 768, 128, "", Tile(1, 1, 8), waits="rows", signals="late")),
    ("bf16", GroupedGemm(768, 2048, 128, "swiglu", Tile(1, 1, 8), top_k=8, waits="offsets", signals="early")),
]
QUANTISED_GEMMS = [  # of every format, first and second, with few rows and many, in turns
    cute_quantised.gemms(Experts(*sizes, dtype, dtype, name, activation=activation))[place]
    for (dtype, name), (sizes, activation, place) in zip(
        (
            (dtype, name)
            for dtype in ("bf16", "fp16")
            for name, weight_format in WEIGHTS.items()
            if cute_quantised.takes(weight_format, dtype)
        ),
        itertools.cycle(
            [
                ((8, 2048, 768, 128), "swiglu", 0),
                ((8, 2048, 768, 128), "swiglu", 1),
                ((2048, 360, 776, 128), "relu2", 0),
                ((512, 2880, 2880, 128), "swiglu_oai", 1),
                ((128 * 100, 2880, 2880, 128), "swiglu_oai", 0),
            ]
        ),
        strict=False,
    )
] + [
    QuantisedGemm(768, 2048, 128, "swiglu", Tile(2, 2, 128, pingpong=True), codes=Codes("int", bits, zeros, 32, "bf16"))
    for bits in (4, 8)
    for zeros in (False, True)
]
FP8_GEMMS = [
    Fp8Gemm(768, 1024, 128, "swiglu", Tile(2, 2, 128)),
    Fp8Gemm(2048, 384, 128, "", Tile(1, 2, 8)),
    Fp8Gemm(2880, 1440, 128, "swiglu_oai", Tile(2, 2, 96), biased=True),
    Fp8Gemm(320, 1024, 128, "swiglu", Tile(2, 2, 128), upright=True),
    Fp8Gemm(272, 384, 128, "", Tile(2, 2, 128), upright=True),
    Fp8Gemm(768, 1024, 128, "swiglu", Tile(2, 2, 128), upright=True, quantises=True),
    Fp8Gemm(320, 1024, 128, "geglu", Tile(2, 2, 128), upright=True, quantises=True),
    Fp8Gemm(2688, 928, 128, "relu2", Tile(2, 2, 128), upright=True, quantises=True),
    Fp8Gemm(2048, 384, 128, "", Tile(2, 2, 64), upright=True),
    Fp8Gemm(768, 1024, 128, "swiglu", Tile(2, 2, 64), upright=True, quantises=True),
    Fp8Gemm(2048, 2048, 256, "swiglu_limit10", Tile(2, 2, 128), upright=True, quantises=True),
    Fp8Gemm(768, 1024, 128, "swiglu", Tile(2, 2, 128), upright=True, quantises=True, lead=1),
    Fp8Gemm(768, 1024, 128, "swiglu", Tile(4, 2, 128, across=True), upright=True, quantises=True, lead=3),
    Fp8Gemm(320, 1024, 128, "geglu", Tile(4, 2, 128, across=True), upright=True, quantises=True),
    Fp8Gemm(2048, 384, 128, "", Tile(4, 2, 128, across=True), upright=True, lead=1),
    Fp8Gemm(2048, 384, 128, "", Tile(3, 2, 128, across=True), upright=True, lead=1),
]
TRAINING_GEMMS = [
    ("bf16", TrainingGemm(768, 2048, 128, "swiglu", Tile(2, 2, 176, pingpong=True, narrowest=168))),
    ("bf16", TrainingGemm(768, 2048, 128, "", Tile(2, 2, 128, pingpong=True), dgrad=True, derivative="swiglu")),
    ("fp16", TrainingGemm(264, 72, 5, "", Tile(2, 2, 112), dgrad=True, derivative="geglu")),
    ("bf16", TrainingGemm(2048, 1536, 128, "", Tile(2, 2, 176, pingpong=True), dgrad=True)),
    ("fp16", TrainingGemm(264, 72, 5, "geglu", Tile(1, 1, 8))),
    (
        "bf16",
        TrainingGemm(
            2048,
            4096,
            256,
            "",
            Tile(2, 2, 128, pingpong=True),
            dgrad=True,
            derivative="swiglu_limit10",
            weighted=True,
        ),
    ),
    ("bf16", TrainingGemm(264, 72, 5, "", Tile(1, 2, 24), dgrad=True, derivative="swiglu", weighted=True)),
    ("bf16", TrainingGemm(2048, 4096, 256, "swiglu_limit10", Tile(2, 2, 176, pingpong=True, narrowest=168))),
    ("fp16", TrainingGemm(264, 72, 5, "", Tile(2, 2, 112), dgrad=True, derivative="swiglu_oai_unbiased")),
]
# dtype, gemm
WGRAD_GEMMS = [
    ("bf16", WgradGemm(1536, 2048, 128, 2, 192)),
    ("fp16", WgradGemm(24, 72, 5, 3, 128)),
    ("bf16", WgradGemm(136, 264, 1024, 2, 128)),
]


# Yields a cubin, is sent its SASS, or None where there is no disassembler, and returns the facts.
Facts = Generator[bytes, str | None, dict[str, object]]


def disassemble(arch: str, cubins: list[bytes]) -> list[str | None]:
    """SASS of cubins, in one run of the disassembler: starting takes it longer than most kernels do."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        return [None] * len(cubins)
    codes = [instructions(cubin) for cubin in cubins]
    path = Path("kernels.bin")
    path.write_bytes(b"".join(codes))
    command = [tool, "--binary", arch.upper().replace("_", "").replace("A", "a"), path]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = iter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s.*;.*$", listing, re.M))
    texts = ["\n".join(itertools.islice(lines, len(code) // INSTRUCTION)) for code in codes]
    assert all(texts) and not any(lines), "one line per instruction"
    return texts


def instructions(cubin: bytes) -> bytes:
    """The sections of an ELF file (of 64 bits) that hold instructions."""
    (offset,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, offset + size * index) for index in range(count)]
    names_at = headers[names][4]
    return b"".join(
        cubin[start : start + length]
        for name, _, _, _, start, length in headers
        if cubin.startswith(b".text.", names_at + name)
    )


def facts(arch: str, operation: str, dtype: str, hidden: int, top_k: int, checked_rows: int) -> Facts:
    """Compile one case and count what matters in its PTX and SASS."""
    if operation == "pack":
        tiling = cute_pack.choose_tiling(16384, hidden, dtype, top_k)
        kernel = cute_pack.compile_for(arch, dtype, top_k, tiling, checked_rows, keep=True)
    else:
        tiling = cute_combine.choose_tiling(16384, hidden, dtype, top_k)
        weights = dtype if top_k == 1 else "fp32"  # each in some of the cases
        kernel = cute_combine.compile_for(arch, dtype, top_k, tiling, top_k == 2, weights, keep=True)
    sass = yield kernel.__cubin__
    count = (lambda pattern: None) if sass is None else (lambda pattern: len(re.findall(pattern, sass)))
    at_once = max(1, cute_combine.LOADS_IN_FLIGHT // tiling.vectors)  # rows that a thread loads before it adds them up
    return {
        "case": f"{operation}-{dtype}-H{hidden}-k{top_k}-checked_rows{checked_rows}",
        "operation": operation,
        "vector_bytes": tiling.width * DTYPES[dtype].width // 8,
        "vectors": tiling.vectors,
        "top_k": top_k,
        "ptx_wide_loads": len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", kernel.__ptx__)),
        "ptx_wide_stores": len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", kernel.__ptx__)),
        "wide_loads": count(r"LDG\S*\.128"),
        "wide_stores": count(r"STG\S*\.128"),
        "ahead": sass and len(re.findall(r"LDG\S*\.128", sass.partition("FFMA")[0])),
        "least_ahead": min(top_k, at_once) * tiling.vectors if operation == "combine" and top_k > 1 else 0,
        "local": count(r"\b(?:LDL|STL)\b"),
        "registers": count(r"$") and max(map(int, re.findall(r"\bR(\d+)\b", sass or ""))) + 1,
    }


def dependent(arch: str, top_k: int, hidden: int) -> Facts:
    """Compile a combine that starts before the rows are there, with a residual: what it loads ahead of its wait, and behind it."""
    tiling = cute_combine.choose_tiling(1, hidden, "bf16", top_k)
    kernel = cute_combine.compile_for(arch, "bf16", top_k, tiling, True, "fp32", True, keep=True)
    sass = yield kernel.__cubin__
    return spills(sass, f"dependent-H{hidden}-k{top_k}", "dependent") | {
        "counted": sass and [half.count("LDG") for half in sass.split("ACQBULK")],
        "counted_expected": sass and [2 * math.ceil(top_k / 4) + 1, top_k],
    }


def signalling_permute(arch: str, tokens: int) -> Facts:
    """Compile a permute whose last kernel lets the next one start: of one block, and of several."""
    config, _ = cute_permute.config_of(Permute(tokens, 128, 8, rows=0), arch)
    kernel = cute_permute.compile_for(arch, 128, replace(config, signals=True), "int32", keep=True)
    sass = yield kernel.__cubin__
    return spills(sass, f"signalling_permute-T{tokens}", "signalling_permute") | {
        "counted": sass and sass.count("PREEXIT"),
        "counted_expected": sass and (1 if config.single_block else 2),
    }


def pack_fp8(arch: str, hidden: int, group: int, top_k: int, checked_rows: int) -> Facts:
    """Compile one pack to fp8."""
    tiling = cute_pack_fp8.choose_tiling(16384, hidden, group)
    layout = cute_pack_fp8.scale_layout(tiling, group)
    kernel = cute_pack_fp8.compile_for(arch, layout, top_k, tiling, checked_rows, keep=True)
    wide, converts = r"ld\.global\S*no_allocate\S*v4\.b32", r"cvt\.rn\.satfinite\.e4m3x2"
    return spills(
        (yield kernel.__cubin__), f"pack_fp8-H{hidden}-group{group}-k{top_k}-checked_rows{checked_rows}", "pack_fp8"
    ) | {
        "vectors": tiling.vectors,
        "whole_vectors": tiling.width == 8,
        "wide_loads": len(re.findall(wide, kernel.__ptx__)),
        "conversions": len(re.findall(converts, kernel.__ptx__)),
    }


def pack_bulk(arch: str, dtype: str, hidden: int, top_k: int, checked_rows: int) -> Facts:
    """Compile one pack by bulk copies; how often it issues, awaits and counts them, and how often it should."""
    config = cute_pack_bulk.bulk_config(arch, hidden, dtype, top_k, halved=top_k == 2 and not checked_rows)
    assert config is not None
    kernel = cute_pack.compile_for(arch, dtype, top_k, config, checked_rows, keep=True)
    patterns = {
        "loads": r"cp\.async\.bulk\.shared",
        "stores": r"cp\.async\.bulk\.global",
        "arrivals": r"mbarrier\.arrive\.expect_tx",
        "waits": r"mbarrier\.try_wait",
        "groups": r"cp\.async\.bulk\.commit_group",
        "frees": r"cp\.async\.bulk\.wait_group\.read\s+0;",
    }
    return spills(
        (yield kernel.__cubin__), f"pack_bulk-{dtype}-H{hidden}-k{top_k}-checked_rows{checked_rows}", "pack_bulk"
    ) | {
        "bulk": {name: len(re.findall(pattern, kernel.__ptx__)) for name, pattern in patterns.items()},
        "bulk_expected": dict.fromkeys(patterns, 1) | {"stores": top_k + checked_rows},
    }


def spills(sass: str | None, case: str, operation: str) -> dict[str, object]:
    """Local memory and registers of a kernel whose accesses follow from its shape class."""
    return {
        "case": case,
        "operation": operation,
        "vector_bytes": None,
        "local": None if sass is None else len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "registers": max(map(int, re.findall(r"\bR(\d+)\b", sass or "R0"))) + 1,
    }


def async_copies(kernel: Any) -> int:
    """Asynchronous copies of 16 bytes in a kernel's text."""
    return len(re.findall(r"cp\.async\.\w+\.shared\S*\s+\[[^]]+\], \[[^]]+\], 16", kernel.__ptx__))


def gate(arch: str, router: str, dtype: str, tokens: int, experts: int, top_k: int) -> Facts:
    """Compile one gate; how many asynchronous copies of 16 bytes it has, and how many of them the packed variant's rows are.

    And how many wide loads the threshold variant has, and how many vectors a lane holds.
    """
    rule = rule_of(router)
    config = cute_gate.choose(dtype, tokens, experts, top_k, rule)
    kernel = cute_gate.compile_for(arch, dtype, experts, top_k, rule, config, keep=True)
    groups = experts // cute_gate.VECTOR if config.staged else 0
    return spills((yield kernel.__cubin__), f"gate-{router}-{dtype}-T{tokens}-E{experts}-k{top_k}", "gate") | {
        "async_copies": async_copies(kernel),
        "ring": groups // config.threads_per_token,
        "rounds": 1,
        "looped": groups // math.gcd(groups, 32),  # a row of the last, partial tile
        "counted": config.threshold
        and len(re.findall(r"ld\.global\S*no_allocate\S*\.(?:v[24]\.b32|b64)", kernel.__ptx__)),
        "counted_expected": config.threshold
        and -(-experts // 128) * min(config.tokens_per_thread, 2 * config.together),
    }


def router(arch: str, rule: str, tokens: int, hidden: int, experts: int, top_k: int) -> Facts:
    """Compile one fused router; how many asynchronous copies of 16 bytes it has, and how many loads of a thread are a chunk."""
    known = rule_of(rule)
    config = cute_router.choose(tokens, hidden, experts, known)
    kernel = cute_router.compile_for(arch, "bf16", hidden, experts, top_k, known, config, keep=True)
    return spills((yield kernel.__cubin__), f"router-{rule}-T{tokens}-H{hidden}-E{experts}-k{top_k}", "router") | {
        "async_copies": async_copies(kernel),
        "ring": config.in_flight * (cute_gemm.tiles_of(experts) + 2 * config.row_tiles),
        "rounds": 2 if config.chunks > config.in_flight else 1,  # the first loads, and those within the loop
    }


def permute(arch: str, tokens: int, experts: int, top_k: int, layout: str) -> Facts:
    """Compile one permute."""
    align = int(layout.removeprefix("block")) if layout.startswith("block") else 1
    problem = Permute(tokens, experts, top_k, rows=0, padded=layout == "padded", align=align)
    config, _ = cute_permute.config_of(problem, arch)
    ids = "int64" if layout == "block128" else "int32"  # each in some of the cases
    kernel = cute_permute.compile_for(arch, experts, config, ids, keep=True)
    return spills((yield kernel.__cubin__), f"permute-T{tokens}-E{experts}-k{top_k}-{layout}", "permute")


def gemm(arch: str, dtype: str, gemm: GroupedGemm) -> Facts:
    """Compile one grouped GEMM: its matrix instructions, its loads by tensor maps, and its waits for matrix instructions."""
    kernel = grouped_gemm.compile_for(arch, dtype, gemm, keep=True)
    sass = yield kernel.__cubin__
    tile, variants = gemm.tile, len(gemm.tile.n_sizes)
    patterns = {
        **{rf"HGMMA\.64x{width}x16\.F32": 4 * tile.m_atoms for width in tile.n_sizes},
        "HGMMA": 4 * tile.m_atoms * variants,
        "UTMALDG": 1 if gemm.top_k else 3 if gemm.waits == "rows" else 2,
        r"LDGSTS\.E\.BYPASS\.128": math.ceil(tile.tokens / loads.ROWS) if gemm.top_k else 0,
        r"WARPGROUP\.DEPBAR": min(2, gemm.k_tiles) * variants,  # more where the instructions wait for each other
        r"BAR\.ARV": 1 + variants if tile.pingpong else variants if tile.lag else 0,
        "PREEXIT": int(bool(gemm.signals)),
        "ACQBULK": int(bool(gemm.waits)),
    }
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", kernel.__ptx__))
    barriers = [int(constants[name]) for name in re.findall(r"mbarrier\.init\S*\s+\[[^]]+\], (%r\d+);", kernel.__ptx__)]
    case = f"gemm-{dtype}-{gemm.columns}x{gemm.inner}-E{gemm.experts}-{gemm.activation}-{tile}-k{gemm.top_k}"
    return spills(sass, case, "gemm") | {
        "most_registers": gemm.registers[1] if tile.warpgroups > 1 else 255,
        "counted": sass and {pattern: len(re.findall(pattern, sass)) for pattern in patterns},
        "counted_expected": sass and patterns,
        "bulk": {count: barriers.count(count) for count in barriers},  # arrivals that the barriers of a stage wait for
        "bulk_expected": dict.fromkeys((gemm.arrivals, 4 * tile.sharing * tile.cluster), gemm.stages),
    }


def quantised_gemm(arch: str, gemm: QuantisedGemm) -> Facts:
    """Compile one GEMM of quantised weights: matrix instructions whose left operand is in registers, and their waits."""
    kernel = quantised.compile_for(arch, gemm.codes.dtype, gemm, keep=True)
    sass = yield kernel.__cubin__
    tile, variants = gemm.tile, len(gemm.tile.n_sizes)
    offsets = (tile.m_atoms if gemm.codes.zeros else 1) if subtracts(gemm.codes) else 0
    patterns = {
        **{rf"HGMMA\.64x{width}x16\.F32\S* R\d+, R\d+, gdesc": K16 * tile.m_atoms for width in tile.n_sizes},
        "HGMMA": K16 * tile.m_atoms * variants,
        r"WARPGROUP\.DEPBAR": (BATCHES + 1) * variants,  # more where the instructions wait for each other
    }
    if gemm.few:
        patterns = {
            "HGMMA": 0,
            r"HMMA\.16816\.F32": K16 * (tile.m_atoms + offsets),
            r"LDSM\.16\.M88\.4": K16 // 2,
        }
        if gemm.codes.kind == "int" and subtracts(gemm.codes):
            patterns["HMUL2"] = 0  # no weight is scaled
    patterns |= {
        "UTMALDG": 2,  # halves of a stage are as wide as a swizzled box
        r"BAR\.ARV": 1 + variants if tile.pingpong else variants if tile.lag else 0,
        "UBLKCP": gemm.tile_m_blocks * (2 if gemm.waits else 1),
        "PREEXIT": int(bool(gemm.signals)),
        "ACQBULK": int(bool(gemm.waits)),
    }
    shared = 65536 // (gemm.resident * gemm.threads)
    return spills(sass, f"quantised-{gemm}", "quantised_gemm") | {
        "most_registers": gemm.registers[1] if gemm.moves_registers else shared // 8 * 8,
        "counted": sass and {pattern: len(re.findall(pattern, sass)) for pattern in patterns},
        "counted_expected": sass and patterns,
    }


def fp8_gemm(arch: str, gemm: Fp8Gemm) -> Facts:
    """Compile one GEMM of 8-bit floats: matrix instructions of 32, the first of a stage on zeros, and copies of scales."""
    kernel = fp8.compile_for(arch, "bf16", gemm, keep=True)
    sass, tile = (yield kernel.__cubin__), gemm.tile
    wide, mmas = (gemm.mma_rows, gemm.sums) if gemm.upright else (tile.tokens, tile.m_atoms)
    if wide > 128:  # a loop for each place where the second block's scales begin
        mmas = 2 * mmas
    patterns = {
        rf"QGMMA\.64x{wide}x32\.F32\.E4M3\.E4M3": 4 * mmas,
        r"QGMMA\S* R\d+, gdesc\[\S+\], RZ, !UPT": mmas,
        r"WARPGROUP\.DEPBAR": mmas,  # more where the instructions wait for each other
        r"F2FP\.SATFINITE\.E4M3": 64 * wide // 2 // 128 * mmas // (2 if gemm.gated else 1) if gemm.quantises else 0,
        r"F2F\.": 0,  # conversions of one number
        "UTMALDG": 2,
        r"BAR\.ARV": mmas // gemm.sums if gemm.lead else 0,
        r"LDGSTS\.E \[": math.ceil(tile.tokens / LOADERS),  # of 4 bytes
    }
    return spills(sass, f"fp8-{gemm}", "fp8_gemm") | {
        "most_registers": gemm.registers[1],
        "counted": sass and {pattern: len(re.findall(pattern, sass)) for pattern in patterns},
        "counted_expected": sass and patterns,
    }


def training_gemm(arch: str, dtype: str, gemm: TrainingGemm) -> Facts:
    """Compile one grouped GEMM of training: matrix instructions, of which the backward ones read weights as they lie in memory."""
    kernel = training.compile_for(arch, dtype, gemm, keep=True)
    sass = yield kernel.__cubin__
    tile, variants = gemm.tile, len(gemm.tile.n_sizes)
    every = 4 * tile.m_atoms * variants
    patterns = {
        r"HGMMA\.64x\d+x16\.F32": every,
        r"HGMMA.*\.tnspA": every if gemm.dgrad else 0,
        r"HGMMA.*\.tnspB": 0,
        r"WARPGROUP\.DEPBAR": min(2, gemm.k_tiles) * variants,  # more where the instructions wait for each other
    }
    case = f"training-{dtype}-{gemm}"
    return spills(sass, case, "training_gemm") | {
        "most_registers": gemm.registers[1] if tile.warpgroups > 1 else 255,
        "counted": sass and {pattern: len(re.findall(pattern, sass)) for pattern in patterns},
        "counted_expected": sass and patterns,
    }


def wgrad_gemm(arch: str, dtype: str, gemm: WgradGemm) -> Facts:
    """Compile one gradient of weights: matrix instructions of whole steps and of the last, and stores by tensor maps."""
    kernel = wgrad.compile_for(arch, dtype, gemm, keep=True)
    sass = yield kernel.__cubin__
    patterns = {
        rf"HGMMA\.64x{gemm.columns}x16\.F32.*\.tnspA\.tnspB": 5 * gemm.m_atoms,
        r"WARPGROUP\.DEPBAR": 2,  # more where the instructions wait for each other
        "UTMALDG": (gemm.rows + gemm.columns) // 64,  # elements that a swizzled box is wide
        "UTMASTG": gemm.columns // EPI_COLUMNS,
    }
    return spills(sass, f"reduction-{dtype}-{gemm}", "reduction") | {
        "most_registers": REGISTERS[1],
        "counted": sass and {pattern: len(re.findall(pattern, sass)) for pattern in patterns},
        "counted_expected": sass and patterns,
    }


def compiled(arch: str, step: int) -> Iterator[dict[str, object]]:
    """The facts of every `step`-th case of each kernel: compiling one takes a second and a half."""
    chosen = list(started(arch, step))
    for case, sass in zip(chosen, disassemble(arch, [next(case) for case in chosen]), strict=True):
        try:
            case.send(sass)
        except StopIteration as end:
            yield end.value


def started(arch: str, step: int) -> Iterator[Facts]:
    """Those cases, not begun."""
    older = arch == "sm_80"  # it has no conversion to e4m3 and no bulk copies
    for function, cases in (
        (gate, GATES),
        (router, ROUTERS if arch == "sm_90a" else ROUTERS[-1:]),
        (permute, PERMUTES),
        (dependent, ((8, 2048), (1, 7168)) if arch == "sm_90a" else ()),
        (signalling_permute, ((1,), (512,)) if arch == "sm_90a" else ()),
        (pack_fp8, () if older else FP8_PACKS),
        (pack_bulk, () if older else BULK_PACKS),
        (gemm, GEMMS if arch == "sm_90a" else ()),
        (gemm, CHAINED_GEMMS if arch == "sm_90a" else ()),
        (quantised_gemm, [(gemm,) for gemm in QUANTISED_GEMMS] if arch == "sm_90a" else ()),
        (fp8_gemm, [(gemm,) for gemm in FP8_GEMMS] if arch == "sm_90a" else ()),
        (training_gemm, TRAINING_GEMMS if arch == "sm_90a" else ()),
        (wgrad_gemm, WGRAD_GEMMS if arch == "sm_90a" else ()),
        (facts, CASES),
    ):
        many = function is quantised_gemm and step > 1  # their tiles recur with a period of 5
        for case in cases if len(cases) < 3 else cases[:: 13 if many else step]:
            yield function(arch, *case)


if __name__ == "__main__":
    gc.disable()  # the compiler makes many small objects and few cycles: searching them takes an eighth of the time
    for case in compiled(sys.argv[1], int(sys.argv[2])):
        print(json.dumps(case), flush=True)
