"""Fill the kernel cache with the CuTe DSL kernels of a cell. Needs no GPU."""

from moe_routing_bench.benches import BENCHES, composite
from moe_routing_bench.grid import Cell, Job


def precompile(job: Job, arch: str) -> None:
    """Compile what the job's implementations launch on `arch` (such as sm_90a), the kernels of their stages included."""
    for name in job.implementations:
        for bench, way, cell in _stages(job.cell, name):
            module, options = BENCHES[bench].load(way), BENCHES[bench][way].options
            if not (hasattr(module, "supports") and module.supports(cell, **options)):
                module.precompile(cell, arch, **options)


def _stages(cell: Cell, name: str) -> list[tuple[str, str, Cell]]:
    """The benches and implementations whose own CuTe DSL kernels run, with the cells that they see."""
    chosen = BENCHES[cell.bench][name]
    if chosen.layout is None:
        found = [(cell.bench, name, cell)]
    else:
        cells = composite.stage_cells(cell, chosen.layout)
        found = [(bench, way, cells[bench]) for bench, way in chosen.options.items() if bench in cells]
    return [(bench, way, one) for bench, way, one in found if "cutlass" in BENCHES[bench][way].requires]
