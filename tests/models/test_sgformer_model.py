"""SGFormer and DIFFormer against their equations: the branches of the one, the source of the other."""

import pytest
import torch
from torch.nn.functional import layer_norm, relu

from diffusion_mp.layers import SGFormerConv
from diffusion_mp.models import DIFFormer, SGFormer
from helpers import built, close, randn

EDGES = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 0]])  # node 4 is isolated


def build(**options) -> SGFormer:
    options = {"gnn": "gcn", "num_gnn_layers": 2} | options
    return built(lambda: SGFormer(4, 6, 3, **options)).double().eval()


@pytest.mark.parametrize("shared_encoder", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_equation_of_the_slides(alpha: float, shared_encoder: bool) -> None:
    model = build(alpha=alpha, beta=0.2, shared_encoder=shared_encoder)
    x = randn(5, 4, seed=1)
    encoders = [model.encoder, model.encoder if shared_encoder else model.gnn_encoder]
    initial, read = (relu(layer_norm(each[0](x), [6])) for each in encoders)
    attention = layer_norm(model.conv(initial), [6])
    first, second = model.gnn.convs
    heard = second(relu(first(read, EDGES)), EDGES)
    close(model(x, EDGES), model.decoder((1 - alpha) * attention + alpha * heard))
    close(model(x), model.decoder(attention))
    # With an empty list of edges the GNN reads every node.
    assert torch.allclose(model(x, EDGES[:, :0]), model(x)) == (alpha == 0)


def test_the_dropouts_are_separate_and_one_stands_for_both() -> None:
    assert build(dropout=0.3).gnn.dropout == 0.3
    model = build(dropout=0.3, gnn_dropout=0.1)
    assert (model.conv.dropout, model.dropout, model.gnn.dropout) == (0.3, 0.3, 0.1)


def test_the_layer_mixes_what_it_heard_with_the_source() -> None:
    """The source is the state itself where none is passed."""
    conv = SGFormerConv(4, 4, 2, beta=0.4).double()
    x = randn(5, 4, seed=1)
    values = conv.value(x).unflatten(1, (2, 4))
    for source in (None, x.cos()):
        out, coupling = conv(x, source=source, return_coupling=True)
        kept = x if source is None else source
        close(out, 0.4 * (coupling @ values).mean(1) + 0.6 * kept)


def test_the_source_of_difformer_has_weight_one() -> None:
    """Footnote 4 to Eq. 10 of Wu, Wipf & Yan (2025)."""
    options = {"tau": 0.5, "leak": 0.2, "layer_norm": False, "graph": None}
    model = DIFFormer(4, 6, 3, 3, source=True, **options).double().eval()
    x = randn(9, 4)
    out, couplings = model(x, return_coupling=True)
    source = z = model.encoder(x).relu()
    for coupling in couplings:
        dense = coupling.to_dense()[0]
        degree = dense.sum(1, keepdim=True)
        z = z - 0.5 * ((degree + 0.2) * z - dense @ z - source)
    close(out, model.decoder(z))
