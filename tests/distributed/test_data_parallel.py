"""DDP: in an epoch of Lightning every node is in one part; parameters of every model have the mean of the gradients."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from ranks import on_ranks
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing import assert_close
from torch.utils._pytree import tree_map
from torch_geometric.data import Data

from diffusion_mp.data import RandomPartitionLoader
from diffusion_mp.graph import Graph
from diffusion_mp.models import DIFFormer
from diffusion_mp.testing.laws import seeded
from diffusion_mp_experiments.train import node_cross_entropy
from model_cases import MODELS

NODES = 120
EPOCHS = 2
RATE = 0.1


def example():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(NODES, 5, generator=generator, dtype=torch.float64),
        y=torch.randint(3, (NODES,), generator=generator),
        edge_index=torch.randint(NODES, (2, 700), generator=generator),
        train_mask=torch.rand(NODES, generator=generator) < 0.5,
    )


def loss_of(model, batch):
    logits = model(batch.x, Graph.from_data(batch))
    return node_cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])


class Trained(pl.LightningModule):
    """Every process writes down which nodes came in which epoch, and its weights in the end."""

    def __init__(self, folder):
        super().__init__()
        with seeded(0):
            self.model = DIFFormer(5, 8, 3).double()
        self.folder = folder
        self.visited = [[] for _ in range(EPOCHS)]

    def training_step(self, batch, _):
        self.visited[self.current_epoch].append(batch.n_id)
        return loss_of(self.model, batch)

    def configure_optimizers(self):
        return SGD(self.parameters(), RATE)

    def on_train_end(self):
        torch.save(
            {"seen": self.visited, "model": self.model.state_dict()},
            self.folder / f"{self.global_rank}.pt",
        )


@pytest.mark.slow
def test_lightning_shares_the_parts_of_an_epoch(tmp_path):
    module = Trained(tmp_path)
    alone = module.model
    optimizer = SGD(module.parameters(), RATE)
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "strategy": "ddp_spawn",
    }
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=2,
        **options,
    )
    trainer.fit(Trained(tmp_path), RandomPartitionLoader(example(), 6))
    first, second = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )

    loader = RandomPartitionLoader(example(), 6)
    for epoch in range(EPOCHS):
        parts = list(loader)
        visited = [first["seen"][epoch], second["seen"][epoch]]
        assert torch.equal(
            torch.cat(visited[0] + visited[1]).sort().values, torch.arange(NODES)
        )
        for step, ours in enumerate(zip(*visited, strict=True)):
            theirs = parts[2 * step : 2 * step + 2]
            assert all(
                torch.equal(n_id, part.n_id)
                for n_id, part in zip(ours, theirs, strict=True)
            )
            optimizer.zero_grad()
            (sum(loss_of(alone, part) for part in theirs) / 2).backward()
            optimizer.step()
    for name, value in alone.state_dict().items():
        assert torch.equal(first["model"][name], second["model"][name])
        assert_close(first["model"][name], value, rtol=1e-12, atol=1e-12)


#: What does not stand by itself.
OF_EDGES = ("edge_index", "edge_weight", "edge_attr")

#: Message passing alone says so in a sentence.
NEED_EDGES = (
    "gatedgcn",
    "gcn",
    "sgc",
    "gin",
    "gat",
    "appnp",
    "gcnii",
    "gcn-links",
    "sfi-former-options",
    "certified-transformer",
    "certified-transformer-diagonal",
    "certified-transformer-identity",
)


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).square().mean().backward()
    named = model.named_parameters()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in named
    }


def compare(case, edges):
    every = [case.inputs(size) for size in (12, 23)]
    every = [
        {name: part for name, part in inputs.items() if edges or name not in OF_EDGES}
        for inputs in every
    ]
    # Ranks differ in what they use: one whose graphs have no edges leaves the weights of a graph term alone.
    together = DistributedDataParallel(
        case.model().double(), find_unused_parameters=True
    )
    for _ in range(2):
        alone = [
            gradients(copy.deepcopy(together.module), inputs)
            for inputs in map(doubled, every)
        ]
        got = gradients(together, doubled(every[get_rank()]))
        for name, grad in got.items():
            mean = torch.stack(
                [grads[name.removeprefix("module.")] for grads in alone]
            ).mean(0)
            assert_close(grad, mean, rtol=1e-9, atol=1e-12)


def doubled(inputs):
    return tree_map(
        lambda part: part.double() if part.is_floating_point() else part, inputs
    )


def train_all():
    failed = {}
    for name, case in MODELS.items():
        if not any(True for _ in case.model().parameters()):
            continue
        without = {"x", "edge_index"} <= set(case.names) and name not in NEED_EDGES
        for edges in (True, False) if without else (True,):
            try:
                compare(case, edges)
            except Exception as error:
                failed[name, "with edges" if edges else "without"] = str(error)[:300]
    assert not failed, failed


@pytest.mark.exhaustive
def test_all_models_train_in_two_processes(tmp_path):
    on_ranks(train_all, 2, tmp_path, seconds=120)
