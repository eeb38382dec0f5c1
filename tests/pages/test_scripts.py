"""The scripts for newcomers are short, run as they stand, and find something."""

import pytest
import torch
from torch_geometric import loader, typing
from torch_geometric.data import Data

from .blocks import ROOT, blocks

STORIES = ["index", "concepts", "training", "large-graphs", "gallery"]
# What a script has to reach, as `share`: chance is 10, 25, 50, 50, 50, 0 and 50 %; others train nothing.
STARTED = [0.8, 0.7, 0.9, 0.9, None, 0.6, 0.3, 0.75, None]
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


class Whole(list):
    """The batches of a `NeighborLoader` that finds all nodes, for where the packages that PyG's needs are absent."""

    def __init__(self, data, num_neighbors, batch_size, input_nodes, transform):
        for own in input_nodes.nonzero().split(batch_size):
            order = torch.isin(torch.arange(data.num_nodes), own).int().argsort(descending=True, stable=True)
            batch = Data(data.x[order], order.argsort()[data.edge_index], y=data.y[order], n_id=order)
            self.append(transform(batch.update({"batch_size": len(own)})))


@pytest.mark.parametrize("page", STORIES)
def test_the_blocks_of_a_page_run_one_after_the_other(page, monkeypatch, tmp_path):
    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        monkeypatch.setattr(loader, "NeighborLoader", Whole)
    monkeypatch.chdir(tmp_path)  # some write files
    (tmp_path / "zoo").symlink_to(ROOT / "zoo")
    scope: dict[str, object] = {"__name__": page}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks(ROOT / f"docs/{page}.md"):
            exec(compile(block, page, "exec"), scope)
