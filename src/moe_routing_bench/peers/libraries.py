"""Compiled operators of other packages, loaded from their shared libraries without importing the packages.

vLLM and SGLang register their CUDA kernels with torch when a library is loaded. Their Python packages ask for much more than the
kernels do, and for other versions of torch.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Library:
    """A shared library within a package, by its path there, and the namespace below ``torch.ops`` that it registers."""

    package: str
    path: str
    namespace: str

    def missing(self) -> str | None:
        """Why there is no such library, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self._file() is None:
            return f"{self.package} is installed without {self.path}: it is of another version, or not for CUDA"
        return None

    def operators(self) -> Any:
        """Its operators, as attributes. Raises FileNotFoundError where there is none, OSError where it cannot be loaded."""
        import torch

        if (file := self._file()) is None:
            raise FileNotFoundError(f"{self.package} has no {self.path}")
        torch.ops.load_library(file)  # loads a library once
        return getattr(torch.ops, self.namespace)

    def _file(self) -> Path | None:
        spec = importlib.util.find_spec(self.package)
        folders = (Path(folder) for folder in (spec and spec.submodule_search_locations) or ())
        return next((folder / self.path for folder in folders if (folder / self.path).is_file()), None)


VLLM = Library("vllm", "_moe_C_stable_libtorch.abi3.so", "_moe_C")
VLLM_ROWS = Library("vllm", "_C_stable_libtorch.abi3.so", "_C")  # activations, and quantised rows
SGLANG = Library("sgl_kernel", "sm90/common_ops.abi3.so", "sgl_kernel")
LIBRARIES = {"vLLM": VLLM, "SGLang": SGLANG}  # of kernels that both have, with one interface
MSLK = Library("mslk", "mslk.so", "mslk")
