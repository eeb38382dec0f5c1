"""The scripts for newcomers are short, run as they stand, and find something."""

import pytest
import torch
from torch_geometric import loader, typing
from torch_geometric.utils import k_hop_subgraph

from .blocks import ROOT, blocks

STORIES = ["index", "concepts", "training", "large-graphs"]
# What a script has to reach, as `share`: chance is 10, 25, 50, 50, 50, 0 and 50 %; the last one trains nothing.
STARTED = [0.8, 0.7, 0.9, 0.9, 0.6, 0.3, 0.75, None]
SCRIPTS = [
    pytest.param(script, found, id=f"{page}-{number}")
    for page, results in (("getting-started", STARTED), ("write-your-own", [None] * 4))
    for number, (script, found) in enumerate(zip(blocks(ROOT / f"docs/{page}.md"), results, strict=True))
]


@pytest.mark.parametrize(("script", "at_least"), SCRIPTS)
def test_a_newcomers_script(script, at_least, capsys):
    assert len([line for line in script.splitlines() if line.strip()]) <= 25
    scope: dict[str, object] = {"__name__": "script"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(script, "script", "exec"), scope)
    assert capsys.readouterr().out
    if at_least is not None:
        assert scope["share"] >= at_least


class AllNeighbors(list):
    """The batches of PyG's `NeighborLoader` where it takes all neighbours, for where its packages are not installed."""

    def __init__(self, data, num_neighbors, batch_size, input_nodes, transform):
        for seeds in input_nodes.nonzero().flatten().split(batch_size):
            near = k_hop_subgraph(seeds, len(num_neighbors), data.edge_index)[0]
            nodes = torch.cat([seeds, near[~torch.isin(near, seeds)]])
            batch = data.subgraph(near)
            place = torch.empty(data.num_nodes, dtype=torch.long).index_put((nodes,), torch.arange(len(nodes)))
            batch.edge_index, batch.x, batch.y = place[near[batch.edge_index]], data.x[nodes], data.y[nodes]
            batch.n_id, batch.batch_size = nodes, len(seeds)
            self.append(transform(batch))


@pytest.mark.parametrize("page", STORIES)
def test_the_blocks_of_a_page_run_one_after_the_other(page, monkeypatch, tmp_path):
    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        monkeypatch.setattr(loader, "NeighborLoader", AllNeighbors)
    monkeypatch.chdir(tmp_path)  # some write files
    scope: dict[str, object] = {"__name__": page}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks(ROOT / f"docs/{page}.md"):
            exec(compile(block, page, "exec"), scope)
