"""What timed the rows of a run: the GPU where there is one, whatever CPU it has, or else the CPU. Pure functions."""

import pandas as pd

GPU, CPU = "gpu_name", "cpu_model"


def column(rows: pd.DataFrame) -> str:
    """The column with the names of what timed these rows: next to a GPU the CPU times nothing and sets no ceiling."""
    return GPU if rows[GPU].notna().any() else CPU


def names(rows: pd.DataFrame) -> list[str]:
    """What timed these rows, each once; none where it is not known."""
    return [str(name) for name in rows[column(rows)].dropna().unique()]
