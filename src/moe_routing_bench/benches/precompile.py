"""Fill the kernel cache with the CuTe DSL kernels of a cell. Needs no GPU."""

from moe_routing_bench.benches import BENCHES, composite
from moe_routing_bench.grid import Cell, Job

NAME = "cute"


def precompile(job: Job, arch: str) -> None:
    """Compile what the job's `cute` implementation launches on `arch` (such as sm_90a), its stages' kernels included."""
    if NAME not in job.implementations:
        return
    for bench, cell in _stages(job.cell):
        module = BENCHES[bench].load(NAME)
        if not (hasattr(module, "supports") and module.supports(cell)):
            module.precompile(cell, arch)


def _stages(cell: Cell) -> list[tuple[str, Cell]]:
    """The benches whose own kernels run, with the cells that they see."""
    chosen = BENCHES[cell.bench][NAME]
    if chosen.layout is None:
        return [(cell.bench, cell)]
    cells = composite.stage_cells(cell, chosen.layout)
    return [(bench, cells[bench]) for bench, name in chosen.options.items() if bench in cells and name == NAME]
