"""What models with a ``task`` predict for graphs and for pairs of nodes, beside what they predict for nodes."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAE, GCN

import diffusion_mp as dm
from diffusion_mp.layers import LaplacianEncoder, from_pyg
from diffusion_mp.models.pde_transformer import SITES
from diffusion_mp.testing.laws import seeded
from helpers import built, close

MODELS = {
    "DIFFormer": lambda **o: dm.DIFFormer(5, 8, 3, 2, graph="sum", **o),
    "NodeFormer": lambda **o: dm.NodeFormer(
        5, 8, 3, 2, num_features=6, num_samples=0, **o
    ),
    "SGFormer": lambda **o: dm.SGFormer(5, 8, 3, **o),
    "GCN": lambda **o: dm.DiffusionGNN(5, 8, 3, 2, conv="gcn", dropout=0.0, **o),
    "GIN": lambda **o: dm.DiffusionGNN(5, 8, 3, 2, conv="gin", dropout=0.0, **o),
    "CertifiedDIFFormer": lambda **o: dm.CertifiedDIFFormer(5, 8, 3, 3, **o),
    "CertifiedTransformer": lambda **o: dm.CertifiedTransformer(
        5, 8, 3, 2, attention="all", mlp_channels=4, **o
    ),
    "SFiFormer": lambda **o: dm.SFiFormer(5, 8, 3, 2, **o),
}
SIZES = (4, 1, 7)


@pytest.fixture(params=MODELS)
def make(request):
    build = MODELS[request.param]
    return lambda task, **o: built(lambda: build(task=task, **o)).double().eval()


def molecules(generator) -> list[tuple[Tensor, Tensor]]:
    graphs = []
    for size in SIZES:
        pairs = torch.randint(size, (2, 2 * size), generator=generator)
        x = torch.randn(size, 5, dtype=torch.float64, generator=generator)
        graphs.append((x, torch.cat([pairs, pairs.flip(0)], 1).unique(dim=1)))
    return graphs


def joined(graphs) -> tuple[Tensor, Tensor, Tensor]:
    sizes = torch.tensor(SIZES)
    starts = sizes.cumsum(0) - sizes
    edges = torch.cat(
        [edges + start for (_, edges), start in zip(graphs, starts, strict=True)], 1
    )
    return (
        torch.cat([x for x, _ in graphs]),
        edges,
        torch.arange(len(SIZES)).repeat_interleave(sizes),
    )


def test_the_head_reads_the_mean_of_its_nodes(make, generator):
    model = make("graph")
    graphs = molecules(generator)
    x, edges, batch = joined(graphs)
    states = []
    model.head.register_forward_pre_hook(lambda head, args: states.append(args[0]))
    out = model(x, edges, batch=batch)
    means = torch.stack([states[0][batch == graph].mean(0) for graph in range(3)])
    close(out, model.head.mlp(means))
    close(out, torch.cat([model(x, edges) for x, edges in graphs]))
    nothing = model(x, edges, batch=2 * batch)[1]  # of a graph without nodes
    close(nothing, model.head.mlp(torch.zeros_like(means[1])))


@pytest.mark.parametrize("head", ["dot", "mlp"])
def test_pairs_are_scored_by_inner_products(make, head, generator):
    model = make("link", head=head)
    (_, _), (_, _), (x, edges) = molecules(generator)
    states = []
    model.head.register_forward_pre_hook(lambda head, args: states.append(args[0]))
    pairs = torch.randint(7, (2, 9), generator=generator)
    scores = model(x, edges, edge_label_index=pairs)
    (z,) = states
    products = z @ z.t()
    if head == "mlp":
        embedding = model.head.mlp(z)
        products = embedding @ embedding.t() / 3**0.5
    close(scores, products[pairs[0], pairs[1]])
    close(scores, model(x, dm.Graph(7, edges), edge_label_index=pairs.flip(0)))
    close(model.encode(x, edges), z)
    close(model.decode(z, pairs), scores)
    close(model.decode(z, pairs[:, :2]), scores[:2])


def test_states_are_encoded_from_all_inputs_of_a_call(generator):
    *_, (x, edges) = molecules(generator)
    model = built(
        lambda: dm.GatedGCN(5, 8, 3, 2, edge_dim=2, pe_channels=3, task="link")
    )
    model.double().eval()
    inputs = {
        "edge_weight": torch.rand(edges.size(1), dtype=torch.float64),
        "edge_attr": torch.randn(edges.size(1), 2, dtype=torch.float64),
        "pe": torch.randn(7, 4, dtype=torch.float64),
        "batch": torch.zeros(7, dtype=torch.long),
    }
    scores = model.decode(model.encode(x, edges, **inputs), edges)
    close(scores, model(x, edges, **inputs, edge_label_index=edges))
    with pytest.raises(ValueError, match="edge_attr must be passed"):
        model.encode(x, edges, pe=inputs["pe"])
    with pytest.raises(TypeError, match="takes no edge_label_index"):
        model.encode(x, edges, **inputs, edge_label_index=edges)


def test_a_gcn_for_links_is_the_graph_autoencoder_of_pyg(generator):
    *_, (x, edges) = molecules(generator)
    theirs = GAE(GCN(5, 8, 2, 3)).double().eval()
    ours = dm.DiffusionGNN(5, 8, 3, 2, task="link").double().eval()
    ours.load_state_dict(from_pyg(ours, theirs.encoder.state_dict()))
    z = theirs.encode(x, edges)
    close(ours.encode(x, edges), z)
    close(ours.decode(z, edges), theirs.decode(z, edges, sigmoid=False))


@pytest.mark.usefixtures("no_typecheck")
def test_tasks_for_nodes_take_no_pairs_and_those_of_links_need_them(make, generator):
    *_, (x, edges) = molecules(generator)
    with pytest.raises(
        ValueError, match="task must be one of 'node', 'graph', 'link'; got 'edge'"
    ):
        make("edge")
    for task in ("node", "graph"):
        with pytest.raises(ValueError, match="edge_label_index belongs to task='link'"):
            make(task)(x, edges, edge_label_index=edges)
        with pytest.raises(ValueError, match="encode belongs to task='link'"):
            make(task).encode(x, edges)
        with pytest.raises(ValueError, match="decode belongs to task='link'"):
            make(task).decode(x, edges)
    with pytest.raises(ValueError, match="edge_label_index is needed for a link task"):
        make("link")(x, edges)
    with pytest.raises(ValueError, match="head must be one of 'dot', 'mlp'; got 'sum'"):
        make("link", head="sum")
    for head, channels in (("dot", 3), ("mlp", 8)):
        with pytest.raises(ValueError, match=f"z must have {channels} channels"):
            make("link", head=head).decode(x, edges)


def test_a_model_of_pairs_is_certified_without_any(generator):
    """Its layers can be, and run for that: the head needs pairs to score."""
    *_, (x, edges) = molecules(generator)
    model = dm.DiffusionGNN(x.size(1), 8, 3, num_layers=2, conv="appnp", task="link")
    certificate = dm.certify(model, Data(x=x.float(), edge_index=edges))
    assert not certificate
    assert {"convs.0", "convs.1"} <= set(certificate.layers)


DRAWN = {name: partial(build, task="graph") for name, build in MODELS.items()}
DRAWN |= {
    f"PDETransformer, {place}": partial(
        dm.PDETransformer, [11], 6, 4, 2, 3, max_length=20, placement=place
    )
    for place in (*SITES, None)
}
DRAWN["LaplacianEncoder"] = partial(LaplacianEncoder, 4, 5)


@pytest.mark.parametrize("name", DRAWN)
def test_parameters_are_drawn_anew_in_the_order_of_the_constructor(name):
    model = built(DRAWN[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(17.0)
    with seeded(0):
        model.reset_parameters()
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
