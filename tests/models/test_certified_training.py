"""The energy of a certified network on real data: at every layer of every step of training it falls."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from diffusion_mp.data import random_split_per_class
from diffusion_mp.graph import Graph
from diffusion_mp.models import CertifiedDIFFormer
from diffusion_mp.testing.laws import seeded
from diffusion_mp_experiments.graphs import load_digits, load_planetoid

STEPS = 300
OPTIONS = {"digits": {"constraint": "sphere", "mu": 20.0}, "Cora": {"constraint": "ball", "mu": 10.0, "heads": 2}}


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["single", "double"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_energy_never_rises_in_three_hundred_steps_of_adam(name, dtype, limit, data_root) -> None:
    """Attention, graph and constraint together, in training and evaluation in turn; and training works."""
    data = load_digits() if name == "digits" else load_planetoid(data_root / "Planetoid", name)
    data = random_split_per_class(data.y, 5, 500, None, torch.Generator().manual_seed(0)).apply_to(data)
    x, graph = data.x.to(dtype), Graph(data.num_nodes, data.edge_index)
    with seeded(0):
        model = CertifiedDIFFormer(x.size(1), 32, int(data.y.max()) + 1, 6, dropout=0.2, **OPTIONS[name]).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        worst = -1.0
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = cross_entropy(model.train()(x, graph)[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            energies = model.train(step % 2 == 0).energies(x, graph)
            worst = max(worst, float((energies.diff() / energies[:-1].abs()).max()))
            assert worst <= limit, step
    right = (model.eval()(x, graph).argmax(1) == data.y)[data.test_mask].double().mean()
    print(f"{name}, {dtype}: largest relative rise {worst:.3g}, test accuracy {float(right):.3f}")
    assert right > (0.85 if name == "digits" else 0.5)  # it has learned, from 5 labels per class
