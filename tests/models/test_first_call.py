"""in_channels=-1: a model finds the channels of its features at the first call, or in the weights it loads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch_geometric import seed_everything
from torch_geometric.nn import GCN

from diffusion_mp import from_pyg
from diffusion_mp.models import CertifiedDIFFormer, DIFFormer, DiffusionGNN, PDETransformer, SGFormer
from model_cases import MODELS, Case

NAMES = [name for name, case in MODELS.items() if {"x", "edge_index"} <= set(case.names)]


def lazy(case: Case, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model of a case, whose constructor is told -1 in place of the channels of x."""
    cls = type(case.model())
    init = cls.__init__

    def told(self: nn.Module, in_channels: int, *args: object, **options: object) -> None:
        init(self, -1 if type(self) is cls and in_channels == 8 else in_channels, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(cls, "__init__", told)
        return case.model()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_finds_its_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS[name]
    known, inputs = case.model().eval(), case.inputs(12)
    model = lazy(case, monkeypatch).double().eval()
    assert any(map(is_lazy, model.parameters()))
    loaded = copy.deepcopy(model)
    model.reset_parameters()
    model.float()(**inputs)
    assert model.in_channels == 8
    assert not any(map(is_lazy, model.parameters()))
    # What a model is that knew from the start: the same names, the same numbers.
    for each in (model, known):  # drawn anew
        seed_everything(0)
        each.reset_parameters()
    torch.testing.assert_close(model.state_dict(), known.state_dict())
    # Weights that are there before the first call say what x has to be.
    loaded.load_state_dict(known.state_dict())
    with pytest.raises(ValueError, match=r"x must have 8 channels|\[num_nodes, 8\]|\[8, 8\]"):
        loaded.float()(**{**inputs, "x": inputs["x"][:, :5]})
    torch.testing.assert_close(loaded(**inputs), known(**inputs))
    model.load_state_dict(known.state_dict())
    torch.testing.assert_close(model(**inputs), known(**inputs))
    with pytest.raises(ValueError, match="x must have 8 channels"):
        model(**{**inputs, "x": inputs["x"][:, :5]})


def test_sparse_features_and_pygs_weights() -> None:
    x, edges = torch.randn(9, 8).relu(), torch.randint(9, (2, 20))
    theirs = GCN(8, 6, 2, 3)
    theirs(x, edges)
    ours = DiffusionGNN(-1, 6, 3, conv="gcn", dropout=0.0)
    ours.load_state_dict(from_pyg(ours, theirs.state_dict()))
    torch.testing.assert_close(ours(x, edges), theirs(x, edges))
    for model in (DIFFormer(-1, 6, 3), SGFormer(-1, 6, 3, gnn="residual"), DiffusionGNN(-1, 6, 3)):
        first = model.eval()(x.to_sparse_csr(), edges)
        torch.testing.assert_close(model(x, edges), first)


def test_what_is_not_found_later() -> None:
    with pytest.raises(ValueError, match=r"hidden_channels must be at least 1; got -1"):
        DIFFormer(8, -1, 3)
    with pytest.raises(ValueError, match=r"in_channels must be at least 1; got -1"):
        PDETransformer(-1, 8, 3, max_length=5)
    with pytest.raises(ValueError, match=r"x must be given, or the model called once"):
        CertifiedDIFFormer(-1, 8, 3).certificate()
    model = CertifiedDIFFormer(-1, 8, 3)
    assert model.certificate(torch.randn(5, 4), torch.tensor([[0, 1], [1, 0]])).holds
    assert model.in_channels == 4
