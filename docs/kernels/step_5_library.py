"""Step 5: variants, ping-pong and clusters: the library's kernel. Run it: `python docs/kernels/step_5_library.py`.

Experts have 256 rows in the mean, and hardly any has a multiple of 128. The library's tile has variants: an expert's rows are shared evenly by
its tiles, each of which multiplies no more than the next multiple of 8 tokens. Two warpgroups take tiles in turn (ping-pong), one in its main
loop while the other stores; or two blocks of a cluster each load half of the weights for both (multicast). `cute_experts.choose_tile` knows
which of them has been faster at which sizes; this step times both.

New: nothing to write; `GroupedGemm` and `Tile` say what runs, `grouped_gemm.compile_for` compiles it.
"""

from common import COLUMNS, EXPERTS, INNER, run

from moe_routing_kernels.gemm.sm90 import grouped_gemm
from moe_routing_kernels.gemm.sm90.tile import GroupedGemm, Tile

VARIANTS = {
    "5 ping-pong": Tile(2, 2, 176, pingpong=True, narrowest=88),
    "5 clusters": Tile(2, 2, 160, narrowest=80, cluster=2),
}

if __name__ == "__main__":
    for name, tile in VARIANTS.items():
        compiled = grouped_gemm.compile_for("sm_90a", "bf16", GroupedGemm(COLUMNS, INNER, EXPERTS, "", tile))

        def kernel(x, offsets, w, out, blocks, compiled=compiled):
            compiled(x, None, offsets, w, None, out, blocks)

        run(name, kernel, 132)
