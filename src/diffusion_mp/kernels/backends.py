"""``Backends``: the modules that can compute an operation."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from diffusion_mp.kernels import gpu
from diffusion_mp.kernels.dispatch import Implementation, always, choose
from diffusion_mp.kernels.precision import without_autocast


class Backends(NamedTuple):
    """An operation, and modules whose functions of one name take the same arguments."""

    operation: str
    cpu: ModuleType
    triton: str | None = None
    """The name of a module that is imported when it runs; ``None``: there is none."""
    widest: float = gpu.WIDEST
    """Channels of a row that the Triton kernels take at most."""

    def run(self, function: str, backend: str, *args: Any) -> Any:
        """``function`` of the backend that was named, or of the first that does not decline; without autocast."""
        table = {"cpu": Implementation(getattr(self.cpu, function), always)}
        if self.triton is not None:
            table = {"triton": gpu.kernel(self.triton, function, self.widest)} | table
        with without_autocast(next(arg for arg in args if isinstance(arg, Tensor))):
            return choose(self.operation, backend, table, *args)(*args)
