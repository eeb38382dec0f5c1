"""Ragged batches, and memory that is never clean by chance."""

from typing import Any

import pytest
import torch
from kernel_cases import BATCHES, boundaries
from torch import Tensor


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def batch(request: pytest.FixtureRequest) -> tuple[Tensor | None, int]:
    return boundaries(request.param)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that a number that was never written is seen."""

    def filled(new: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            tensor = new(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
