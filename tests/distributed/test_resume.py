"""A run over ranks goes on from what one of them saved."""

import pytest
import torch
from ranks import on_ranks
from test_node_parallel import MODELS, NODES, build, data, loss_of
from torch import distributed

from diffusion_mp.distributed import ShardedGraph, node_parallel


def trained(folder, begun, steps: range) -> None:
    """Steps of NodeFormer with noise and Adam, from the first or from a checkpoint; rank 0 writes one after each."""
    x, edge_index, weight, y, mask = data(torch.float64)
    graph = ShardedGraph(edge_index, NODES, weight, bounds=[0, 1100, NODES])
    model = build(MODELS["NodeFormer"], torch.float64, seed=distributed.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if begun is not None:
        state = torch.load(begun, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    node_parallel(model)
    labels = graph.total(mask[graph.rows].sum())
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, model(x[graph.rows], graph), y[graph.rows], mask[graph.rows], labels).backward()
        optimizer.step()
        if distributed.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step}.pt")


@pytest.mark.slow
def test_new_processes_go_on_from_what_the_first_rank_saved(tmp_path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder, begun, steps in ((whole, None, range(2)), (resumed, whole / "0.pt", range(1, 2))):
        folder.mkdir()
        on_ranks(trained, 2, folder, folder, begun, steps)
    got, expected = (torch.load(folder / "1.pt", weights_only=True)["model"] for folder in (resumed, whole))
    before = torch.load(whole / "0.pt", weights_only=True)["model"]
    assert got.keys() == expected.keys()
    assert any(not torch.equal(before[name], value) for name, value in expected.items())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12)
