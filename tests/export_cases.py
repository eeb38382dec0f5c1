"""torch.export of every model, strict and not, for graphs of all sizes, and what is made of exported programs.

Run by `test_compile.py` in a process without the runtime shape checks, whose wrappers cannot be captured.
"""

import io
from typing import Any

import pytest
import torch
from torch.export import export
from torch.testing import assert_close

from model_cases import FEW, MODELS

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# What the quick run exports, and what it leaves to .ci/run.
QUICK = ("difformer", "certified", "gat")


def marked(
    name: str,
    *more: Any,
    quick: tuple[str, ...] = QUICK,
    otherwise: Any = pytest.mark.exhaustive,
) -> Any:
    return pytest.param(name, *more, marks=() if name in quick else otherwise)


# Strict capture takes the paths of torch.compile below, so most models wait for the slow run.
STRICT = [
    marked(name, True, quick=("difformer",), otherwise=pytest.mark.slow)
    for name in MODELS
]


@pytest.mark.parametrize(
    ("name", "strict"), [*(marked(name, False) for name in MODELS), *STRICT]
)
def test_an_exported_model_is_the_model_on_graphs_of_all_sizes(name, strict):
    case = MODELS[name]
    model = case.model().eval()
    program = export(
        model, (), case.inputs(12), dynamic_shapes=case.sizes, strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in (*FEW, 12, 23, 40):
        inputs = case.inputs(size)
        assert_close(loaded(**inputs), model(**inputs))


@pytest.mark.parametrize(
    "name", [marked(name, otherwise=pytest.mark.slow) for name in MODELS]
)
def test_a_model_is_compiled_once_more_when_its_sizes_change_and_never_again(
    name,
):
    """torch.compile takes the first sizes as fixed, and the second ones as a sign that they are not."""
    case = MODELS[name]
    compiled = torch.compile(case.model().eval(), fullgraph=True, backend="eager")
    torch._dynamo.utils.counters.clear()
    for size in (12, 23, 40, 33):
        compiled(**case.inputs(size))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
