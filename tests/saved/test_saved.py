"""State dicts of an earlier version load, with every key, and the modules answer as they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .saved_modules import CASES

SAVED: dict[str, Any] = torch.load(Path(__file__).with_name("modules.pt"), weights_only=True)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("name", SAVED["states"])
def test_a_saved_state_gives_the_saved_output(name: str) -> None:
    build, answer = CASES[name]
    module = build().double().eval()
    module.load_state_dict(SAVED["states"][name])
    with torch.no_grad():
        out = answer(module, SAVED["inputs"])
    # Labels spread in single precision, whose sums may come in another order.
    close = 1e-12 if out.dtype == torch.float64 else 4 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, SAVED["outputs"][name], rtol=close, atol=close)


def test_every_case_is_saved() -> None:
    assert set(CASES) == set(SAVED["states"]) == set(SAVED["outputs"])
