"""The released forms of DIFFormer, NodeFormer and SGFormer: textbook formulas of named tensors, and PyG's own class."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import elu, relu
from torch_geometric.nn.models.sgformer import SGFormer as PyGSGFormer

from diffusion_mp import DIFFormer, NodeFormer, SGFormer
from diffusion_mp.models import DiffusionGNN, released_state_dict
from diffusion_mp.runtime.noise import dropout
from helpers import agree, randn, refuses

DOUBLE = torch.float64
NODES = 13
CHANNELS = 5
HIDDEN = 6
CLASSES = 3
WIDE = 22  # so that dropout leaves no row of zeros, for which PyG puts a direction of its own
Tensors = dict[str, Tensor]


def linears(names: dict[str, tuple[int, int]]) -> Tensors:
    made: Tensors = {}
    for seed, (name, (wide, narrow)) in enumerate(names.items()):
        made[f"{name}.weight"] = randn(wide, narrow, seed=seed) / narrow**0.5
        made[f"{name}.bias"] = 0.3 * randn(wide, seed=100 + seed)
    return made


def norms(*names: str) -> Tensors:
    parts = [f"{name}.{part}" for name in names for part in ("weight", "bias")]
    return {
        part: 1 + 0.2 * randn(HIDDEN, seed=200 + seed)
        for seed, part in enumerate(parts)
    }


def directed_edges(*, loops: bool) -> Tensor:
    """Distinct pairs, in one direction each; without loops node 12 neither sends nor receives."""
    generator = torch.Generator().manual_seed(7)
    # Long ways, so that steps count.
    dense = torch.rand(NODES, NODES, generator=generator).triu(1).tril(2) > 0.2
    dense[:, -1] = False
    dense[4, 1] = True
    if loops:
        dense.fill_diagonal_(True)
    return dense.nonzero().t()


EDGES = directed_edges(loops=False)
LOOPED = directed_edges(loops=True)


def matrix(edges: Tensor, weight: Tensor | None = None) -> Tensor:
    """a_ij of the edges j → i."""
    weight = torch.ones(edges.size(1), dtype=DOUBLE) if weight is None else weight
    return torch.zeros(NODES, NODES, dtype=DOUBLE).index_put(
        (edges[1], edges[0]), weight, accumulate=True
    )


def over_roots(a: Tensor, received: Tensor, sent: Tensor) -> Tensor:
    """a_ij / √(received_i sent_j), and 0 where a degree is."""
    received, sent = (
        torch.where(d > 0, d, torch.inf).rsqrt() for d in (received, sent)
    )
    return received[:, None] * a * sent[None]


def linear(p: Tensors, name: str, x: Tensor) -> Tensor:
    return x @ p[f"{name}.weight"].T + p.get(
        f"{name}.bias", torch.zeros((), dtype=DOUBLE)
    )


def by_head(p: Tensors, name: str, x: Tensor, heads: int) -> Tensor:
    return linear(p, name, x).reshape(len(x), heads, -1).transpose(0, 1)


def normed(p: Tensors, name: str, x: Tensor) -> Tensor:
    if f"{name}.weight" not in p:
        return x
    centred = x - x.mean(1, keepdim=True)
    return (
        centred
        / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        * p[f"{name}.weight"]
        + p[f"{name}.bias"]
    )


def assert_same(
    model: nn.Module,
    released: Tensors,
    inputs: Tensors,
    call,
    expected,
    after=lambda out: out,
) -> None:
    """``expected(tensors, **inputs)`` is what ``model`` computes with them; with all gradients."""
    model.double()
    leaves = {
        name: tensor.clone().requires_grad_()
        for name, tensor in (released | inputs).items()
        if "running" not in name and "num_" not in name
    }
    arguments = {name: leaves[name] for name in inputs}

    def tensors() -> Tensors:
        # Training moves the statistics in place.
        return {name: leaves.get(name, t.clone()) for name, t in released.items()}

    def ours() -> Tensor:
        state = released_state_dict(model, tensors())
        return after(functional_call(model, state, call(**arguments)))

    answers = []
    for compute in (ours, lambda: expected(tensors(), **arguments)):
        torch.manual_seed(0)
        answers.append(compute())
    agree(*answers, leaves.values(), (1e-10, 1e-10), unused=True)


def difformer_tensors(
    layers: int, heads: int, *, use_weight: bool = True, use_bn: bool = True
) -> Tensors:
    letters = "qkv" if use_weight else "qk"
    names = {"fcs.0": (HIDDEN, CHANNELS), "fcs.1": (CLASSES, HIDDEN)}
    names |= {
        f"convs.{k}.W{w}": (heads * HIDDEN, HIDDEN)
        for k in range(layers)
        for w in letters
    }
    return linears(names) | (
        norms(*(f"bns.{k}" for k in range(layers + 1))) if use_bn else {}
    )


def difformer(
    p: Tensors,
    x: Tensor,
    graph: Tensor | None,
    *,
    layers: int,
    heads: int,
    kernel: str = "simple",
    tau: float = 0.5,
    graph_weight: float | None = None,
    drop: Callable[[Tensor], Tensor] = lambda z: z,
) -> Tensor:
    """Eqs. 53–64 with what docs/errata.md says of the released code (D1, D2, D17, D20)."""
    z = drop(relu(normed(p, "bns.0", linear(p, "fcs.0", x))))
    for k in range(layers):
        q, key = (by_head(p, f"convs.{k}.W{letter}", z, heads) for letter in "qk")
        if f"convs.{k}.Wv.weight" in p:
            values = by_head(p, f"convs.{k}.Wv", z, heads)
        else:
            values = z.expand(heads, -1, -1)
        if kernel == "simple":
            scores = (
                1 + (q / q.square().sum().sqrt()) @ (key / key.square().sum().sqrt()).mT
            )
        else:
            scores = (q @ key.mT).sigmoid()
        coupling = scores / scores.sum(2, keepdim=True)
        if graph is not None:
            a, b = (1, 1) if graph_weight is None else (1 - graph_weight, graph_weight)
            coupling = a * coupling + b * graph
        z = drop(
            normed(p, f"bns.{k + 1}", tau * (coupling @ values).mean(0) + (1 - tau) * z)
        )
    return linear(p, "fcs.1", z)


RELEASED = {
    "tau": 0.5,
    "projection": "separate",
    "transform": True,
    "qkv_bias": True,
    "graph": "sum",
    "self_loops": "keep",
    "degrees": "count",
    "dropout_on": "state",
    "layer_norm": True,
    "activation": None,
    "source": False,
}


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "simple", "heads": 1},
        {"kernel": "simple", "heads": 3, "graph_weight": 0.3, "tau": 0.2},
        {"kernel": "sigmoid", "heads": 2, "graph_weight": 0.7},
        {"kernel": "sigmoid", "heads": 1, "tau": 1.0},
        {"heads": 2, "transform": False, "layer_norm": False, "graph": None},
        {"heads": 2, "dropout": 0.4},
    ],
)
def test_difformer(options) -> None:
    """On a directed weighted graph; the fifth has ``use_weight=False, use_bn=False, use_graph=False``."""
    rate = options.get("dropout", 0.0)
    simple = options.get("kernel", "simple") == "simple"
    options = RELEASED | {"normalize": "frobenius" if simple else None} | options
    model = DIFFormer(CHANNELS, HIDDEN, CLASSES, 2, **options).train(rate > 0)
    names = {"kernel", "heads", "graph_weight", "tau"}
    told = {name: options[name] for name in names & options.keys()}
    received = matrix(EDGES).sum(1)

    def expected(p: Tensors, x: Tensor, weight: Tensor) -> Tensor:
        graph = over_roots(matrix(EDGES, weight), received, received)
        if options["graph"] is None:
            graph = None
        drop = partial(dropout, rate=rate)
        return difformer(p, x, graph, layers=2, drop=drop, **told)

    inputs = {
        "x": randn(NODES, CHANNELS, seed=1),
        "weight": randn(EDGES.size(1), seed=2).abs() + 0.1,
    }
    tensors = difformer_tensors(
        2,
        options["heads"],
        use_weight=options["transform"],
        use_bn=options["layer_norm"],
    )
    assert_same(model, tensors, inputs, lambda x, weight: (x, EDGES, weight), expected)


def nodeformer(
    p: Tensors,
    x: Tensor,
    directions: list[Tensor],
    hops: list[Tensor],
    *,
    heads: int,
    tau: float,
    gate: str,
    jk: bool,
) -> Tensor:
    """Algorithm 1 of the slides with what docs/errata.md says of the released code (N4, N6, N7)."""
    z = elu(normed(p, "bns.0", linear(p, "fcs.0", x)))
    states = [z]
    for k, omega in enumerate(directions):
        scale = (tau * HIDDEN**0.5) ** -0.5
        q, key = (
            scale * by_head(p, f"convs.{k}.W{letter}", z, heads) for letter in "qk"
        )
        values = by_head(p, f"convs.{k}.Wv", z, heads)
        features = []
        for part, over in ((q, (2,)), (key, (1, 2))):
            along = part @ omega.T
            exponent = (
                along
                - part.square().sum(2, keepdim=True) / 2
                - along.amax(over, keepdim=True)
            )
            features.append((exponent.exp() + 1e-6) / omega.size(0) ** 0.5)
        scores = features[0] @ features[1].mT
        coupling = scores / scores.sum(2, keepdim=True)
        for hop, adjacency in enumerate(hops):
            b = p[f"convs.{k}.b"][hop]
            b = b.sigmoid() if gate == "sigmoid" else b
            coupling = coupling + b[:, None, None] * over_roots(
                adjacency, adjacency.sum(1), adjacency.sum(0)
            )
        heads_apart = (coupling @ values).transpose(0, 1).reshape(NODES, -1)
        z = normed(p, f"bns.{k + 1}", linear(p, f"convs.{k}.Wo", heads_apart) + z)
        states.append(z)
    return linear(p, "fcs.1", torch.cat(states, 1) if jk else z)


@pytest.mark.parametrize(
    ("order", "heads", "gate", "jk"),
    [
        (1, 1, "sigmoid", False),
        (2, 3, "sigmoid", True),
        (3, 2, "identity", False),
        (0, 2, "sigmoid", True),
    ],
)
def test_nodeformer(order: int, heads: int, gate: str, jk: bool) -> None:
    tau = 0.25
    layers = 2
    names = {
        "fcs.0": (HIDDEN, CHANNELS),
        "fcs.1": (CLASSES, HIDDEN * (layers + 1 if jk else 1)),
    }
    for k in range(layers):
        names |= {f"convs.{k}.W{letter}": (heads * HIDDEN, HIDDEN) for letter in "qkv"}
        names[f"convs.{k}.Wo"] = (HIDDEN, heads * HIDDEN)
    tensors = linears(names) | norms("bns.0", "bns.1", "bns.2")
    tensors |= {
        f"convs.{k}.b": randn(order, heads, seed=60 + k)
        for k in range(layers if order else 0)
    }
    options = {
        "heads": heads,
        "tau": tau,
        "num_features": 7,
        "powers": "reach",
        "direction": "directed",
        "stabilizer": 1e-6,
        "relational_bias": "sym" if order else None,
        "hops": order or 1,
        "jump": "cat" if jk else None,
        "gate": None if gate == "identity" else "sigmoid",
        "qkv_bias": True,
        "projection": "separate",
        "logits": "scaled_dot",
        "normalize": None,
    }
    model = NodeFormer(CHANNELS, HIDDEN, CLASSES, layers, **options).eval()
    directions = [
        buffer.double()
        for name, buffer in model.named_buffers()
        if name.endswith("directions")
    ]
    # The random features stay those of the model.
    model.load_state_dict(released_state_dict(model, tensors))
    hops = [matrix(LOOPED)]
    for _ in range(order - 1):
        hops.append((hops[-1] @ hops[-1] > 0).double())

    def expected(p: Tensors, x: Tensor) -> Tensor:
        return nodeformer(
            p, x, directions, hops[:order], heads=heads, tau=tau, gate=gate, jk=jk
        )

    inputs = {"x": randn(NODES, CHANNELS, seed=1)}
    assert_same(model, tensors, inputs, lambda x: (x, LOOPED), expected)


def statistics(tensors: Tensors) -> Tensors:
    return {
        name: randn(*tensor.shape, seed=seed).abs() + 0.5
        if "running" in name
        else tensor
        for seed, (name, tensor) in enumerate(tensors.items())
    }


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("layers", "heads", "gnn_layers", "aggregate", "weight"),
    [(1, 1, 3, "add", 0.8), (3, 2, 1, "cat", 0.5)],
)
def test_sgformer_of_pyg(
    layers, heads, gnn_layers, aggregate, weight, training, monkeypatch
) -> None:
    """PyG's class itself, whose attention makes ones of the default dtype; in training with the dropout of torch."""
    for module in ("sgformer", "gnn"):
        monkeypatch.setattr(f"diffusion_mp.models.{module}.dropout", torch_dropout)
    options = {
        "trans_num_layers": layers,
        "trans_num_heads": heads,
        "trans_dropout": 0.3,
        "gnn_num_layers": gnn_layers,
        "gnn_dropout": 0.2,
        "graph_weight": weight,
        "aggregate": aggregate,
    }
    theirs = PyGSGFormer(CHANNELS, WIDE, CLASSES, **options).double().train(training)
    model = SGFormer.like_pyg(CHANNELS, WIDE, CLASSES, **options).train(training)
    batch = torch.zeros(NODES, dtype=torch.long)

    def expected(p: Tensors, x: Tensor) -> Tensor:
        return functional_call(theirs, p, (x, EDGES, batch))

    tensors = statistics(theirs.state_dict())
    inputs = {"x": randn(NODES, CHANNELS, seed=1)}

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, EDGES

    # As PyG returns the logits.
    assert_same(model, tensors, inputs, call, expected, lambda out: out.log_softmax(1))


def test_sgformer_of_the_code_for_large_graphs() -> None:
    """``W`` where PyG has ``lin``, and biases; its Frobenius norm is that of tests/diffusivities/test_sgformer.py."""
    sizes = CHANNELS, HIDDEN, CLASSES
    layers = {"trans_num_layers": 1, "gnn_num_layers": 2}
    plain = SGFormer.like_pyg(*sizes, **layers)
    released = {
        name.replace("attns.0.", "convs.0.W").replace("lin", "W"): tensor
        for name, tensor in STATE.items()
    }
    for k in range(2):
        bias = released.pop(f"graph_conv.convs.{k}.bias")
        released[f"graph_conv.convs.{k}.W.bias"] = bias
    expected = released_state_dict(plain, STATE)
    loaded = released_state_dict(plain, released)
    assert all(loaded[name] is tensor for name, tensor in expected.items())
    model = SGFormer.like_pyg(*sizes, normalize="frobenius", qkv_bias=True, **layers)
    assert model.conv.diffusivity.normalize == "frobenius"
    biases = {f"trans_conv.convs.0.W{letter}.bias": randn(HIDDEN) for letter in "qkv"}
    loaded = released_state_dict(model, released | biases)
    assert loaded["conv.diffusivity.query.bias"] is biases["trans_conv.convs.0.Wq.bias"]
    assert loaded["conv.value.bias"] is biases["trans_conv.convs.0.Wv.bias"]


def small(**options) -> DIFFormer:
    options = {"heads": 2, "normalize": "frobenius"} | RELEASED | options
    return DIFFormer(CHANNELS, HIDDEN, CLASSES, options.pop("num_layers", 2), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"qkv_bias": False}, r"alone has \['convs\.0\.Wq\.bias', .* qkv_bias=True"),
        ({"transform": False}, r"'convs\.0\.Wv\.weight', .* transform=True"),
        ({"projection": None, "normalize": None}, "projection='separate'"),
        ({"layer_norm": False}, r"'bns\.0\.weight', .* layer_norm=True"),
        ({"num_layers": 3}, r"model alone \['convs\.2\..*as many layers"),
        ({"task": "link", "head": "mlp"}, r"'fcs\.1\.weight', .* task='node'"),
        ({"heads": 3}, r"'convs\.0\.Wq\.weight'.*\[12, 6\], but .*\[18, 6\]"),
        (".bias", r"model alone \['fcs\.0\.bias'"),
        ("Wv.weight", r"model alone \['convs\.0\.Wv\.weight', .* transform=True"),
        ("bns.2.bias", r"model alone \['bns\.2\.bias'\], .* layer_norm=True"),
    ],
)
def test_an_option_that_does_not_fit_the_checkpoint_is_named(
    options, words: str
) -> None:
    """An option of the model that differs; or the end of the names of tensors that the checkpoint lacks."""
    lacking, options = (
        (options, {}) if isinstance(options, str) else ("nothing", options)
    )
    tensors = {
        name: tensor
        for name, tensor in difformer_tensors(2, 2).items()
        if not name.endswith(lacking)
    }
    with pytest.raises(ValueError, match=words):
        released_state_dict(small(**options), tensors)


STATE = PyGSGFormer(
    CHANNELS, HIDDEN, CLASSES, trans_num_layers=1, gnn_num_layers=2
).state_dict()
SMALL_GRAPHS = {
    name.replace("graph_conv", "gnn"): tensor for name, tensor in STATE.items()
}
GATED = difformer_tensors(2, 2) | {"gate.weight": torch.ones(1)}
GCN = SGFormer(CHANNELS, HIDDEN, CLASSES, gnn="gcn")
OTHER = DiffusionGNN(CHANNELS, HIDDEN, CLASSES)
CAT = SGFormer(CHANNELS, HIDDEN, CLASSES, aggregate="cat").double()
test_refusals = refuses(
    (lambda: CAT(randn(NODES, CHANNELS)), "aggregate='cat' .* Pass edge_index"),
    (
        lambda: released_state_dict(small(), GATED),
        r"released alone has \['gate\.weight'\]",
    ),
    (lambda: released_state_dict(GCN, STATE), "without .*gnn='residual'"),
    (
        lambda: released_state_dict(GCN, SMALL_GRAPHS),
        r"released alone has \['gnn\.convs\.0\.bias'",
    ),
    (
        lambda: released_state_dict(OTHER, {}),
        "model must be one of DIFFormer, NodeFormer, SGFormer",
    ),
    (lambda: released_state_dict(small(), "model.pkl"), "released must be a dict"),
    (
        lambda: released_state_dict(small(), {"epoch": 3}),
        r"released\['epoch'\] must be a tensor",
    ),
)
