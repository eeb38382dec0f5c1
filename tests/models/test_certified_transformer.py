"""``CertifiedTransformer``: every block goes down its energy, before, during and after training; tasks and batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch, Data

from diffusion_mp import (
    CertifiedDIFFormer,
    CertifiedTransformer,
    EnergyTrace,
    Graph,
    certify,
)
from diffusion_mp.data import random_split_per_class
from diffusion_mp.energies.constraints import CONSTRAINTS
from diffusion_mp.errors import ConvergenceError
from diffusion_mp_experiments.graphs import (
    load_digits,
    load_heterophilous,
    load_planetoid,
    load_synmol,
    load_tu,
)
from helpers import block_runs, largest_rise

NODES = 30
FEATURES = 5
RELATIONS = 3

pytestmark = pytest.mark.usefixtures("fixed_seed")


def inputs() -> dict[str, Tensor]:
    edge_index = torch.randint(NODES, (2, 90))
    relation = torch.randint(RELATIONS, (90,))
    return {
        "x": torch.randn(NODES, FEATURES),
        "edge_index": edge_index,
        "edge_attr": torch.nn.functional.one_hot(relation, RELATIONS).float(),
    }


OPTIONS = {
    "graph alone": {},
    "relations, attention and an MLP": {
        "edge_dim": RELATIONS,
        "gate": True,
        "attention": "all",
        "heads": 2,
        "mlp_channels": 16,
        "num_blocks": 3,
        "layer_norm": True,
    },
    "neighbours on a sphere": {
        "attention": "neighbours",
        "constraint": "sphere",
        "num_layers": 4,
    },
    "directed, in a ball": {
        "symmetric": False,
        "hops": 2,
        "constraint": "ball",
        "mlp_channels": 8,
        "activation": "tanh",
    },
    "at rest": {"num_layers": None, "constraint": None},
}


def falls(model: CertifiedTransformer, graph: dict[str, Tensor]) -> None:
    energies = model.eval().energies(**graph)
    assert len(energies) == len(model.blocks)
    assert bool(
        (energies.diff(dim=1) <= 1e-5 * energies.abs().amax(1, keepdim=True)).all()
    ), energies


@torch.no_grad()
def test_an_energy_trace_sees_every_step() -> None:
    graph = inputs()
    model = CertifiedTransformer(
        FEATURES, 8, 2, edge_dim=RELATIONS, num_blocks=2, num_layers=3
    ).eval()
    with EnergyTrace(model) as trace:
        model(**graph)
    assert [record.layer for record in trace.records] == 3 * ["blocks.0.step"] + 3 * [
        "blocks.1.step"
    ]
    energy, states = block_runs(model, **graph)[0]
    with EnergyTrace(model.blocks[0], energy) as trace:
        model(**graph)
    assert trace.energies == pytest.approx(
        [float(energy(state)) for state in states[1:]]
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_every_block_goes_down_its_energy_while_it_is_trained(name: str) -> None:
    graph = inputs()
    if "edge_dim" not in OPTIONS[name]:
        del graph["edge_attr"]
    model = CertifiedTransformer(FEATURES, 8, 2, dropout=0.2, **OPTIONS[name])
    y = torch.randint(2, (NODES,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = None
    for step in range(30):
        if step % 10 == 0:
            falls(model, graph)
        loss = cross_entropy(model.train()(**graph), y)
        first = float(loss.detach()) if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < first
    assert all(parameter.grad is not None for parameter in model.parameters())
    falls(model, graph)
    certificate = certify(model, Data(**graph))
    assert certificate.holds, str(certificate)
    assert [*certificate.layers] == [
        f"blocks.{number}" for number in range(len(model.blocks))
    ]


def test_a_certificate_needs_no_data_and_names_what_is_broken() -> None:
    model = CertifiedTransformer(FEATURES, 8, 2, edge_dim=RELATIONS, mlp_channels=4)
    assert certify(model).holds
    with torch.no_grad():
        model.blocks[0].terms[0].matrix[0, 0, 0] = torch.nan
    certificate = certify(model)
    assert "blocks.0.terms.0.matrix has entries that are not finite" in (
        certificate.reason
    )
    # Of no step size it is known that energies fall.
    assert certificate.tau_max == 0.0


def test_a_step_that_has_no_limit_says_so() -> None:
    model = CertifiedTransformer(FEATURES, 8, 2, num_layers=None, mlp_channels=8)
    with torch.no_grad():
        # The energy is not bounded from below.
        model.blocks[0].terms[1].linear.weight.abs_().mul_(100)
    with pytest.raises(ConvergenceError):
        model(torch.randn(NODES, FEATURES), torch.randint(NODES, (2, 90)))


def test_edges_need_the_features_that_the_model_was_built_for() -> None:
    model = CertifiedTransformer(FEATURES, 8, 2, edge_dim=RELATIONS)
    graph = inputs()
    with pytest.raises(ValueError, match=r"edge_attr must come, \[num_edges, 3\]"):
        model(graph["x"], graph["edge_index"])
    with pytest.raises(ValueError, match="edge_attr must have 3 channels"):
        model(graph["x"], graph["edge_index"], edge_attr=torch.ones(90, 2))
    assert model(
        graph["x"], Graph(NODES, graph["edge_index"]), edge_attr=graph["edge_attr"]
    ).shape == (NODES, 2)


#: The terms that suit a data set; every one is under every constraint.
REAL: dict[str, dict[str, Any]] = {
    "Cora": {
        "attention": "neighbours",
        "mlp_channels": 16,
        "graph": "sym",
        "num_blocks": 2,
    },
    "chameleon_filtered": {
        "symmetric": False,
        "hops": 2,
        "mlp_channels": 16,
        "activation": "tanh",
    },
    "SynMol": {
        "edge_dim": 5,
        "attention": "all",
        "heads": 2,
        "num_blocks": 2,
        "layer_norm": True,
        "task": "graph",
    },
    "MUTAG": {
        "gate": True,
        "attention": "all",
        "mlp_channels": 16,
        "activation": "sigmoid",
        "task": "graph",
    },
}


def real(name: str, root: Path) -> Data:
    if name == "digits":
        return load_digits()
    if name == "Cora":
        return load_planetoid(root / "Planetoid", name)
    if name == "chameleon_filtered":
        return load_heterophilous(root / "heterophilous_npz", name)
    if name == "SynMol":
        graphs = load_synmol(root / name, "train")
    else:
        graphs = load_tu(root / "TUDataset", name)
    return Batch.from_data_list(graphs[:32])


def trained(model: nn.Module, inputs: dict[str, Any], y: Tensor, mask: Tensor):
    """Three hundred steps of Adam, which lower the loss; the number of each is yielded before it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for step in range(300):
        yield step
        optimizer.zero_grad()
        loss = cross_entropy(model.train()(**inputs)[mask], y[mask])
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert min(losses) < 0.9 * losses[0]


def test_a_model_of_categories_is_certified_without_features() -> None:
    assert certify(CertifiedTransformer([5, 2], 6, 3))


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-5), (torch.float64, 1e-12)],
    ids=["single", "double"],
)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("name", REAL)
def test_no_energy_rises_in_three_hundred_steps_of_adam(
    name: str, constraint: str | None, dtype: torch.dtype, limit: float, data_root: Path
) -> None:
    data = real(name, data_root)
    x = data.x.to(dtype)
    inputs = {"x": x / x.sum(1, keepdim=True).clamp(min=1)}
    inputs["edge_index"] = data.edge_index
    if "task" in REAL[name]:
        inputs["batch"] = data.batch
    if "edge_dim" in REAL[name]:
        inputs["edge_attr"] = data.edge_attr.to(dtype)
    y = data.y.long()
    options = {"dropout": 0.2, "constraint": constraint, **REAL[name]}
    model = CertifiedTransformer(
        x.size(1), 16, int(y.max()) + 1, num_layers=3, **options
    ).to(dtype)
    for step in trained(model, inputs, y, y >= 0):
        if step % 10 == 0:
            with torch.no_grad():
                runs = block_runs(model.train(step % 20 == 0), **inputs)
            assert max(largest_rise(*run) for run in runs) <= limit, step


LIMITS = {torch.float32: 1e-5, torch.float64: 1e-13}
DIFFORMERS = {
    "digits": {"constraint": "sphere", "mu": 20.0},
    "Cora": {"constraint": "ball", "mu": 10.0, "heads": 2},
}


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", DIFFORMERS)
def test_the_energy_of_certified_difformer_rises_neither(
    name: str, dtype: torch.dtype, data_root: Path
) -> None:
    """Trained on 5 labels per class, from which it learns."""
    data = real(name, data_root)
    generator = torch.Generator().manual_seed(0)
    data = random_split_per_class(data.y, 5, 500, None, generator).apply_to(data)
    inputs = {"x": data.x.to(dtype), "edge_index": data.edge_index}
    sizes = data.x.size(1), 32, int(data.y.max()) + 1, 6
    model = CertifiedDIFFormer(*sizes, dropout=0.2, **DIFFORMERS[name]).to(dtype)
    for step in trained(model, inputs, data.y, data.train_mask):
        energies = model.train(step % 2 == 0).energies(**inputs)
        assert (energies.diff() <= LIMITS[dtype] * energies[:-1].abs()).all(), step
    right = model.eval()(**inputs).argmax(1) == data.y
    share = right[data.test_mask].double().mean()
    assert share > (0.85 if name == "digits" else 0.5)
