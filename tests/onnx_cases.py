"""ONNX of every model, run by onnxruntime on graphs of other sizes than the exported one's.

Run by `export/test_onnx.py` in a process without the runtime shape checks, whose wrappers cannot be captured.
"""

from functools import cache
from typing import Any

import onnxruntime
import pytest
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from diffusion_mp.export import in_plain_torch
from model_cases import FEW, MODELS

# Batches, sums over edges, and linear, pairwise and sparse attention over all pairs; the other operations are compared
# one by one in export/test_formulas.py.
WRITTEN = ("difformer-graphs", "difformer-sigmoid", "sfi-former", "gin")
QUICK = ("gin",)
SIZES = (12, 23, 40)


def quick(names: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in names else pytest.mark.slow)
        for name in MODELS
    ]


@cache
def written_out(name: str) -> torch.export.ExportedProgram:
    case = MODELS[name]
    return in_plain_torch(
        torch.export.export(
            case.model().eval(), (), case.inputs(12), dynamic_shapes=case.sizes
        )
    )


@pytest.mark.parametrize("name", quick(WRITTEN))
def test_a_program_in_plain_torch_is_the_model_on_graphs_of_all_sizes(
    name,
):
    case = MODELS[name]
    written = written_out(name)
    assert not any("diffusion_mp" in str(node.target) for node in every_node(written))
    model = case.model().eval()
    for size in (*FEW, *SIZES):
        inputs = case.inputs(size)
        assert_close(written.module()(**inputs), model(**inputs))


@pytest.mark.parametrize("name", quick(QUICK))
def test_onnx_of_a_model_is_the_model_on_graphs_of_all_sizes(name, tmp_path):
    case = MODELS[name]
    torch.onnx.export(written_out(name), f=tmp_path / "model.onnx", verbose=False)
    session = onnxruntime.InferenceSession(
        tmp_path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    model = case.model().eval()
    for size in SIZES:
        inputs = case.inputs(size)
        parts = zip(session.get_inputs(), tree_leaves(inputs), strict=True)
        found = session.run(None, {part.name: value.numpy() for part, value in parts})
        assert_close(
            [torch.from_numpy(part) for part in found], tree_leaves(model(**inputs))
        )


def every_node(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    graphs = (
        module.graph
        for module in program.graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
    )
    return [node for graph in graphs for node in graph.nodes]
