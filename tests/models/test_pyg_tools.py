"""What PyG does to any model: it explains it by a mask of the edges, and lists its modules."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import summary

from model_cases import MODELS

READ_EDGES = [name for name, case in MODELS.items() if {"x", "edge_index"} <= set(case.names) and name != "mlp"]


@pytest.mark.parametrize("name", READ_EDGES)
def test_the_edges_of_a_model_are_explained(name: str) -> None:
    case = MODELS[name]
    model, inputs = case.model().eval(), case.inputs(12)
    before = model(**inputs)
    explainer = Explainer(
        model,
        GNNExplainer(epochs=2),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "graph", "return_type": "raw"},
    )
    mask = explainer(**inputs).edge_mask
    assert mask.shape == inputs["edge_index"].shape[1:]
    assert mask.unique().numel() > 2
    assert torch.equal(model(**inputs), before)


@pytest.mark.parametrize("name", ["gcn", "gps", "certified-options"])
def test_a_mask_is_a_weight_of_the_edges(name: str) -> None:
    case = MODELS[name]
    model, inputs = case.model().eval(), case.inputs(12)
    mask = torch.rand(inputs["edge_index"].size(1), generator=torch.Generator().manual_seed(0))
    expected = model(**inputs, edge_weight=mask)
    assert not torch.allclose(model(**inputs), expected)
    set_masks(model, mask, inputs["edge_index"], apply_sigmoid=False)
    torch.testing.assert_close(model(**inputs), expected)
    clear_masks(model)
    set_masks(model, mask.logit(), inputs["edge_index"])
    torch.testing.assert_close(model(**inputs), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_summarised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG draws the table with another package, which need not be there."""
    monkeypatch.setitem(sys.modules, "tabulate", SimpleNamespace(tabulate=lambda rows, **_: str(rows)))
    case = MODELS[name]
    model = case.model().eval()
    assert type(model).__name__ in summary(model, **case.inputs(12))
