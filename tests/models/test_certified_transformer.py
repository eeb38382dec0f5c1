"""``CertifiedTransformer``: every block goes down its energy, before, during and after training; tasks and batches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Batch, Data

from diffusion_mp import CertifiedTransformer, EnergyTrace, Graph, certify
from diffusion_mp.energies.constraints import CONSTRAINTS
from diffusion_mp.errors import ConvergenceError
from diffusion_mp_experiments.graphs import (
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


def falls(model: CertifiedTransformer, given: dict[str, Tensor]) -> None:
    energies = model.eval().energies(**given)
    assert len(energies) == len(model.blocks)
    assert bool(
        (energies.diff(dim=1) <= 1e-5 * energies.abs().amax(1, keepdim=True)).all()
    ), energies


@torch.no_grad()
def test_an_energy_trace_sees_every_step() -> None:
    given = inputs()
    model = CertifiedTransformer(
        FEATURES, 8, 2, edge_dim=RELATIONS, num_blocks=2, num_layers=3
    ).eval()
    with EnergyTrace(model) as trace:
        model(**given)
    assert [record.layer for record in trace.records] == 3 * ["blocks.0.step"] + 3 * [
        "blocks.1.step"
    ]
    energy, states = block_runs(model, **given)[0]
    with EnergyTrace(model.blocks[0], energy) as trace:
        model(**given)
    assert trace.energies == pytest.approx(
        [float(energy(state)) for state in states[1:]]
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_every_block_goes_down_its_energy_while_it_is_trained(name: str) -> None:
    given = inputs()
    if "edge_dim" not in OPTIONS[name]:
        del given["edge_attr"]
    model = CertifiedTransformer(FEATURES, 8, 2, dropout=0.2, **OPTIONS[name])
    y = torch.randint(2, (NODES,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = None
    for step in range(30):
        if step % 10 == 0:
            falls(model, given)
        loss = cross_entropy(model.train()(**given), y)
        first = float(loss.detach()) if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < first
    assert all(parameter.grad is not None for parameter in model.parameters())
    falls(model, given)
    certificate = certify(model, Data(**given))
    assert certificate.holds, str(certificate)
    assert [*certificate.layers] == [
        f"blocks.{number}" for number in range(len(model.blocks))
    ]


def test_a_certificate_needs_no_data_and_names_what_is_broken() -> None:
    model = CertifiedTransformer(FEATURES, 8, 2, edge_dim=RELATIONS, mlp_channels=4)
    assert certify(model).holds
    with torch.no_grad():
        model.blocks[0].terms[0].matrix[0, 0, 0] = torch.nan
    assert (
        "blocks.0.terms.0.matrix has entries that are not finite"
        in certify(model).reason
    )


def test_a_step_that_has_no_limit_says_so() -> None:
    model = CertifiedTransformer(FEATURES, 8, 2, num_layers=None, mlp_channels=8)
    with torch.no_grad():
        # The energy is not bounded from below.
        model.blocks[0].terms[1].linear.weight.abs_().mul_(100)
    with pytest.raises(ConvergenceError):
        model(torch.randn(NODES, FEATURES), torch.randint(NODES, (2, 90)))


def test_edges_need_the_features_that_the_model_was_built_for() -> None:
    model = CertifiedTransformer(FEATURES, 8, 2, edge_dim=RELATIONS)
    given = inputs()
    with pytest.raises(ValueError, match=r"edge_attr must come, \[num_edges, 3\]"):
        model(given["x"], given["edge_index"])
    with pytest.raises(ValueError, match="edge_attr must have 3 channels"):
        model(given["x"], given["edge_index"], edge_attr=torch.ones(90, 2))
    assert model(
        given["x"], Graph(NODES, given["edge_index"]), edge_attr=given["edge_attr"]
    ).shape == (NODES, 2)


REAL = {  # the terms that suit a data set; every one is under every constraint
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
    if name == "Cora":
        return load_planetoid(root / "Planetoid", name)
    if name == "chameleon_filtered":
        return load_heterophilous(root / "heterophilous_npz", name)
    if name == "SynMol":
        graphs = load_synmol(root / name, "train")
    else:
        graphs = load_tu(root / "TUDataset", name)
    return Batch.from_data_list(graphs[:32])


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
    keys = [
        "x",
        "edge_index",
        *(["batch"] * ("task" in REAL[name])),
        *(["edge_attr"] * (name == "SynMol")),
    ]
    inputs = {
        key: data[key].to(dtype) if data[key].is_floating_point() else data[key]
        for key in keys
    }
    inputs["x"] = inputs["x"] / inputs["x"].sum(1, keepdim=True).clamp(min=1)
    options = {"dropout": 0.2, "constraint": constraint, **REAL[name]}
    model = CertifiedTransformer(
        data.x.size(1), 16, int(data.y.max()) + 1, num_layers=3, **options
    ).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(300):
        if step % 10 == 0:
            with torch.no_grad():
                rises = [
                    largest_rise(*run)
                    for run in block_runs(model.train(step % 20 == 0), **inputs)
                ]
            assert max(rises) <= limit, step
        loss = cross_entropy(model.train()(**inputs), data.y.long())
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert min(losses) < 0.9 * losses[0]
