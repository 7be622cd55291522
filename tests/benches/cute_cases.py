"""Compile pack and combine for one architecture without a GPU and print one JSON line a case: PTX and SASS facts.

A program of its own: a mistake in DSL code can abort the process, and kept PTX and cubins are written to the working
directory. SASS comes from the nvdisasm that triton ships; without it the counts are null.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from moe_routing_bench import cute_support
from moe_routing_bench.benches.combine import cute_combine
from moe_routing_bench.benches.pack import cute_pack

# operation, dtype, hidden, top_k, padding rows checked a group
CASES = [
    ("pack", "bf16", 4096, 8, 0),
    ("pack", "bf16", 7168, 8, 10),
    ("pack", "fp32", 2048, 2, 2),
    ("pack", "fp16", 100, 3, 4),
    ("pack", "bf16", 13, 32, 0),
    ("combine", "bf16", 4096, 8, 0),
    ("combine", "bf16", 2048, 1, 0),
    ("combine", "fp16", 7168, 2, 0),
    ("combine", "fp32", 2048, 32, 0),
    ("combine", "bf16", 4097, 6, 0),
]


def disassemble(cubin: bytes) -> str | None:
    """SASS of a cubin, or None where there is no disassembler."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        return None
    path = Path("kernel.cubin")
    path.write_bytes(cubin)
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


def facts(arch: str, operation: str, dtype: str, hidden: int, top_k: int, slab: int) -> dict[str, object]:
    """Compile one case and count what matters in its PTX and SASS."""
    if operation == "pack":
        tiling = cute_pack.choose_tiling(16384, hidden, dtype)
        kernel = cute_pack.compile_for(arch, dtype, top_k, tiling, slab, keep=True)
    else:
        tiling = cute_combine.choose_tiling(16384, hidden, dtype, top_k)
        kernel = cute_combine.compile_for(arch, dtype, top_k, tiling, keep=True)
    sass = disassemble(kernel.__cubin__)
    count = (lambda pattern: None) if sass is None else (lambda pattern: len(re.findall(pattern, sass)))
    return {
        "case": f"{operation}-{dtype}-H{hidden}-k{top_k}-slab{slab}",
        "operation": operation,
        "vector_bytes": tiling.width * cute_support.DTYPES[dtype].width // 8,
        "vectors": tiling.vectors,
        "top_k": top_k,
        "ptx_wide_loads": len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", kernel.__ptx__)),
        "ptx_wide_stores": len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", kernel.__ptx__)),
        "wide_loads": count(r"LDG\S*\.128"),
        "wide_stores": count(r"STG\S*\.128"),
        "local": count(r"\b(?:LDL|STL)\b"),
        "registers": count(r"$") and max(map(int, re.findall(r"\bR(\d+)\b", sass or ""))) + 1,
    }


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(facts(sys.argv[1], *case)), flush=True)
