"""`RandomPartitionLoader`: batches are pieces of the graph, all of it once, as PyG would cut them."""

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from compared_parts import compare
from torch import Tensor
from torch.multiprocessing import get_context
from torch.utils.data import DistributedSampler
from torch_geometric.data import Batch, Data
from torch_geometric.utils import subgraph

from diffusion_mp.data import PartOf, RandomPartitionLoader
from diffusion_mp.graph import Graph
from subrun import run_program

NODES = 60
EDGES = 600


def example(nodes: int = NODES, edges: int = EDGES, seed: int = 0) -> Data:
    """Features, labels, masks and all kinds of edge attributes; every number tells where it came from."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(nodes, generator=generator)
    return Data(
        x=torch.arange(3.0 * nodes).view(nodes, 3),
        y=torch.arange(nodes) % 3,
        edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
        edge_weight=torch.rand(edges, generator=generator),
        edge_attr=torch.arange(2.0 * edges).view(edges, 2),
        train_mask=order < nodes // 4,
        val_mask=order >= nodes // 2,
        name="a graph",
    )


DATA = example()


@pytest.mark.parametrize(
    "options",
    [{"num_parts": 7}, {"batch_size": 10}, {"num_parts": 1}, {"num_parts": 15}],
)
def test_an_epoch_is_every_node_once_with_the_edges_that_pyg_keeps(
    options,
):
    """The published irreproducible numbers came from batches whose x and edge_index disagreed (ERRATA C1)."""
    batches = list(RandomPartitionLoader(DATA, **options))
    assert torch.equal(
        torch.cat([batch.n_id for batch in batches]).sort().values, torch.arange(NODES)
    )
    for batch in batches:
        expected, weight, mask = subgraph(
            batch.n_id,
            DATA.edge_index,
            DATA.edge_weight,
            relabel_nodes=True,
            num_nodes=NODES,
            return_edge_mask=True,
        )
        assert torch.equal(batch.edge_index, expected)
        assert torch.equal(batch.edge_weight, weight)
        assert torch.equal(batch.edge_attr, DATA.edge_attr[mask])
        assert torch.equal(batch.e_id, mask.nonzero().flatten())
        for name in ("x", "y", "train_mask", "val_mask"):
            assert torch.equal(batch[name], DATA[name][batch.n_id])
        assert batch.num_nodes == batch.batch_size == len(batch.n_id)
        assert batch.name == "a graph"
        assert batch.train_mask.any()
        arriving = torch.isin(DATA.edge_index[1], batch.n_id).sum()
        assert batch.kept_edges == pytest.approx(int(mask.sum()) / int(arriving))
        assert len(batches) == 1 or not mask.all()


@pytest.mark.parametrize(
    ("batch_size", "sizes"),
    [(20, [20, 20, 20]), (21, [20, 20, 20]), (19, [15] * 4), (99, [60])],
)
def test_batches_are_even_and_never_empty(batch_size, sizes):
    """The released code has an empty batch where batch_size divides N (ERRATA D12)."""
    loader = RandomPartitionLoader(DATA, batch_size=batch_size)
    assert len(loader) == len(sizes)
    assert [batch.num_nodes for batch in loader] == sizes


def test_seed_and_epoch_determine_the_partition():
    def parts(seed: int, *epochs: int) -> list[list[list[int]]]:
        loader = RandomPartitionLoader(DATA, 4, seed=seed)
        found = []
        for epoch in epochs:
            loader.set_epoch(epoch)
            found += [[batch.n_id.tolist() for batch in loader] for _ in range(2)]
        return found

    first, second, *others = parts(3, 0, 0, 1)
    assert first != second
    assert others[:3] == [first, second, second]
    assert parts(3, 1)[0] == second
    assert parts(4, 0)[0] not in (
        first,
        second,
    )  # nor is seed 4, epoch 0 seed 3, epoch 1


def test_workers_change_nothing_and_nothing_touches_the_global_state_or_the_data():
    state = torch.get_rng_state()
    options = {"degrees": "full", "halo": True}
    plain = RandomPartitionLoader(DATA, 5, **options)
    workers = RandomPartitionLoader(
        DATA, 5, **options, num_workers=2, persistent_workers=True, prefetch_factor=1
    )
    for _ in range(3):  # persistent workers were made before the second epoch was drawn
        compare(plain, workers)
    assert torch.equal(torch.get_rng_state(), state)
    compare([DATA], [example()])


def test_a_halo_has_all_edges_of_the_own_nodes_and_none_of_its_masks():
    """Which edges and nodes these are: test_partition.py."""
    arriving = []
    for batch in RandomPartitionLoader(DATA, 5, halo=True):
        own = batch.batch_size
        assert torch.equal(batch.x, DATA.x[batch.n_id])
        for name in ("train_mask", "val_mask"):
            assert torch.equal(batch[name][:own], DATA[name][batch.n_id[:own]])
            assert not batch[name][own:].any()
        assert batch.train_mask.any()
        assert batch.kept_edges == 1
        arriving.append(batch.e_id[batch.edge_index[1] < own])
    assert torch.equal(torch.cat(arriving).sort().values, torch.arange(EDGES))


def test_every_batch_has_a_training_node_unless_others_are_accepted():
    data = example()
    data.train_mask = torch.arange(NODES) < 6

    def counts(num_parts: int, **options: Any) -> list[int]:
        loader = RandomPartitionLoader(data, num_parts, **options)
        return [int(batch.train_mask.sum()) for batch in loader]

    for seed in range(5):
        assert counts(6, seed=seed) == [1] * 6
    assert sum(counts(7, allow_unlabelled=True)) == 6
    with pytest.raises(ValueError, match="7 parts, and 6 nodes"):
        counts(7)


def test_clusters_are_kept_together():
    """Two groups without an edge between them: no part of half the nodes loses any."""
    group = torch.arange(NODES) % 2
    data = example()
    data.edge_index = data.edge_index[
        :, group[data.edge_index[0]] == group[data.edge_index[1]]
    ]
    data.edge_weight = data.edge_attr = None
    assert [
        batch.kept_edges for batch in RandomPartitionLoader(data, 2, clusters=group)
    ] == [1, 1]
    assert all(batch.kept_edges < 1 for batch in RandomPartitionLoader(data, 2))


def test_graphs_without_edges_and_batches_of_graphs_are_cut():
    batches = list(RandomPartitionLoader(Data(x=DATA.x), 4, degrees="full"))
    assert torch.equal(
        torch.cat([batch.n_id for batch in batches]).sort().values, torch.arange(NODES)
    )
    assert all(batch.edge_index is None and batch.kept_edges == 1 for batch in batches)
    # PyG's Batch is a Data; its `batch` follows the nodes, in order, so that Graph.from_data(batch) has its graphs.
    whole = Batch.from_data_list([example(20, 50, seed) for seed in range(3)])
    for part in RandomPartitionLoader(whole, 4):
        assert torch.equal(part.batch, whole.batch[part.n_id])
        assert torch.equal(Graph.from_data(part).batch, part.batch)


def test_processes_share_the_parts_of_one_partition(
    monkeypatch,
):
    alone = [
        batch.n_id for batch in RandomPartitionLoader(DATA, 6, num_replicas=1, rank=0)
    ]
    for rank in range(3):
        loader = RandomPartitionLoader(DATA, 6, num_replicas=3, rank=rank)
        assert len(loader) == 2
        assert all(
            torch.equal(a.n_id, b) for a, b in zip(loader, alone[rank::3], strict=True)
        )
    # 3 parts would not share.
    assert len(RandomPartitionLoader(DATA, batch_size=20, num_replicas=2, rank=1)) == 2

    # Lightning starts the processes after loaders are made: how many there are is asked when it matters.
    early = RandomPartitionLoader(DATA, 6)
    uneven = RandomPartitionLoader(DATA, 5)
    assert isinstance(
        early.sampler, DistributedSampler
    )  # so that Lightning leaves it in place
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert len(early) == 3
    assert all(torch.equal(a.n_id, b) for a, b in zip(early, alone[1::2], strict=True))
    with pytest.raises(
        ValueError, match="num_parts must be a multiple of the 2 processes"
    ):
        list(uneven)


def test_a_loader_goes_to_a_process_that_shares_nothing():
    """Tensors then go by shared memory; that of a generator's state is freed before the process can read it."""
    data = example()
    data.train_mask, data.val_mask = torch.stack(
        [data.train_mask, data.val_mask]
    )  # one storage
    options = {"degrees": "full", "halo": True, "clusters": data.y}
    loader, here = (RandomPartitionLoader(data, 4, **options) for _ in range(2))
    compare(pickle.loads(pickle.dumps(loader)), here)
    here.set_epoch(0)
    context = get_context("forkserver")
    # The server may serve other tests, which begin it with that.
    context.set_forkserver_preload(["diffusion_mp"])
    process = context.Process(target=compare, args=(loader, list(here)), daemon=True)
    process.start()
    process.join(100)
    assert process.exitcode == 0


class Records(pl.LightningModule):
    """Trains a number, and writes down which nodes came in which epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, Tensor]] = []

    def training_step(self, batch: Data, _: int) -> Tensor:
        self.seen.append((self.current_epoch, batch.n_id))
        return self.scale * batch.x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def test_lightning_draws_a_new_partition_every_epoch(tmp_path):
    loader = RandomPartitionLoader(DATA, 3)
    module = Records()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    pl.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet).fit(
        module, loader
    )
    for epoch in range(2):
        loader.set_epoch(epoch)
        expected = [batch.n_id for batch in loader]
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                (n for e, n in module.seen if e == epoch), expected, strict=True
            )
        )


LIMITED = """
import resource, sys
import numpy as np, torch
from torch_geometric.data import Data
from diffusion_mp.data import RandomPartitionLoader

torch.set_num_threads(1)
nodes, edges = 100_000, 12_500_000
x = torch.from_numpy(np.memmap(sys.argv[1], np.float32, "c", shape=(nodes, 1000)))
edge_index = torch.from_numpy(np.memmap(sys.argv[2], np.int64, "c", shape=(2, edges)))
y = torch.zeros(nodes, dtype=torch.long)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + (150 << 20),) * 2)
for batch in RandomPartitionLoader(Data(x=x, y=y, edge_index=edge_index), 50):
    assert batch.x.shape == (2000, 1000) and batch.y.sum() == 0
print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="limits the memory of a process as Linux counts it"
)
def test_memory_maps_are_not_read_as_a_whole(tmp_path):
    """400 MB of features (a file of one hole) and 200 MB of edges, with 150 MB to allocate."""
    with (tmp_path / "x").open("wb") as file:
        file.truncate(400_000_000)
    source = np.tile(np.arange(100_000), 125)
    np.stack([source, np.roll(source, 1)]).tofile(tmp_path / "edges")
    assert (
        run_program("-c", LIMITED, str(tmp_path / "x"), str(tmp_path / "edges"))
        == "done\n"
    )


def test_memory_mapped_and_plain_tensors_give_the_same(tmp_path):
    data = example()
    for name in (
        "x",
        "y",
        "edge_index",
        "edge_weight",
        "edge_attr",
        "train_mask",
        "val_mask",
    ):
        np.save(tmp_path / f"{name}.npy", data[name].numpy())
        data[name] = torch.from_numpy(np.load(tmp_path / f"{name}.npy", mmap_mode="c"))
    compare(RandomPartitionLoader(data, 5), RandomPartitionLoader(DATA, 5))


def test_kept_edges_are_those_that_arrive_at_the_parts_own_nodes():
    """Node 0 is the part's own; the edge that arrives at node 1, the first of its halo, is not counted."""
    # Two edges arrive at node 0, one of them from outside the part.
    edge_index = torch.tensor([[1, 2, 0], [0, 0, 1]])
    part = Data(
        n_id=torch.tensor([0, 1]),
        batch_size=1,
        edge_index=torch.tensor([[1, 0], [0, 1]]),
        num_nodes=2,
    )
    batch = PartOf(Data(edge_index=edge_index, num_nodes=3))(part)
    assert batch.kept_edges == 0.5
