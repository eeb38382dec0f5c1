"""ONNX of every model, run by onnxruntime on graphs of other sizes than the exported one's.

Run by `export/test_onnx.py` in a process without the runtime shape checks, whose wrappers cannot be captured.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch.utils._pytree import tree_leaves

from diffusion_mp.export import in_plain_torch
from model_cases import MODELS

# Several graphs in one layer; what else is written out, the quick run compares in export/test_formulas.py.
QUICK = ("difformer-graphs",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_onnx_of_a_model_is_the_model_on_graphs_of_all_sizes(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    model = case.model().eval()
    program = torch.export.export(model, (), case.inputs(12), dynamic_shapes=case.sizes)
    written = in_plain_torch(program)
    assert not any("diffusion_mp" in str(node.target) for node in every_node(written))
    torch.onnx.export(written, f=tmp_path / "model.onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in (12, 23, 40):
        inputs = case.inputs(size)
        want = tree_leaves(model(**inputs))
        torch.testing.assert_close(tree_leaves(written.module()(**inputs)), want)
        parts = zip(session.get_inputs(), tree_leaves(inputs), strict=True)
        found = session.run(None, {part.name: value.numpy() for part, value in parts})
        torch.testing.assert_close([torch.from_numpy(part) for part in found], want)


def every_node(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    graphs = (module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule))
    return [node for graph in graphs for node in graph.nodes]
