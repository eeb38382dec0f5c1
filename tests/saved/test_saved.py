"""State dicts of an earlier version load, with every key, and the modules answer as they did."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_mp import DIFFormerConv, GCNConv, UniformDiffusivity, load
from diffusion_mp.diffusivities import ScaledDiffusivity, SumDiffusivity

from .saved_modules import CASES

SAVED: dict[str, Any] = torch.load(
    Path(__file__).with_name("modules.pt"), weights_only=True
)


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


def test_arguments_of_numpy_and_enums_and_views_of_one_tensor(
    tmp_path: Path, no_typecheck: None
) -> None:
    conv = DIFFormerConv(
        4, 4, kernel=StrEnum("Kernel", ["simple"]).simple, beta=np.float64(0.3)
    )
    scales = torch.tensor([0.1, 0.9, 0.5])
    uniform = UniformDiffusivity()
    for module in (
        conv,
        SumDiffusivity(
            [ScaledDiffusivity(part, uniform) for part in (scales[:2], scales[::2])]
        ),
    ):
        module.save(tmp_path / "a model")
        torch.testing.assert_close(
            load(tmp_path / "a model").state_dict(), module.state_dict()
        )
        assert repr(load(tmp_path / "a model")) == repr(module)


def test_a_path_that_is_no_file_is_refused_and_leaves_nothing(
    tmp_path: Path, no_typecheck: None
) -> None:
    with pytest.raises(IsADirectoryError, match="path must name a file"):
        GCNConv(2, 2).save(tmp_path)
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))
    with pytest.raises(TypeError, match="path must be the path of a file; got None"):
        GCNConv(2, 2).save(None)  # type: ignore[arg-type]
