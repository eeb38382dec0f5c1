"""A thousand training steps, each on another batch of small graphs: memory does not grow, and nothing is kept of them.

In a process of its own, whose resident size is read as it goes.
"""

from pathlib import Path

import pytest

from subrun import run_program

STATM = Path("/proc/self/statm")
PROGRAM = f"""
import os, sys
import torch
from torch_geometric.data import Batch, Data
from diffusion_mp import *

def resident():
    return int(open("{STATM}").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def batches(generator):
    while True:
        sizes = torch.randint(5, 40, (24,), generator=generator).tolist()
        graphs = []
        for n in sizes:
            ends = torch.randint(n, (2, 2 * n), generator=generator)
            graphs.append(Data(x=torch.randn(n, 7, generator=generator), edge_index=ends, num_nodes=n))
        yield Batch.from_data_list(graphs), torch.randint(2, (len(sizes),), generator=generator)

torch.set_num_threads(1)
torch.manual_seed(0)
model = eval(sys.argv[1])
given = sys.argv[2]
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
sizes = []
for step, (batch, y) in enumerate(batches(torch.Generator().manual_seed(0))):
    edges = (Graph.from_data(batch),) if given == "Graph" else (batch.edge_index, None, batch.batch)
    optimizer.zero_grad()
    rows = model(batch.x, *edges)
    logits = rows.new_zeros(len(y), 2).index_add(0, batch.batch, rows)
    torch.nn.functional.cross_entropy(logits, y).backward()
    optimizer.step()
    if step % 100 == 99:
        sizes.append(resident())
    if step == int(sys.argv[3]) - 1:
        break
print(*sizes)
"""

MODELS = {
    "difformer-s": "DIFFormer(7, 16, 2, dropout=0.1)",
    "difformer-a": "DIFFormer(7, 16, 2, kernel='sigmoid')",
    "nodeformer": "NodeFormer(7, 16, 2, 1, heads=2)",
    "gat": "DiffusionGNN(7, 16, 2, conv='gat', heads=2)",
}


@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="the resident size is read from /proc")
@pytest.mark.parametrize("given", ["edge_index", "Graph"])
@pytest.mark.parametrize("name", MODELS)
def test_memory_does_not_grow_over_a_thousand_steps(name, given):
    """In the first 300 steps the allocator finds its sizes. A batch has about 40 KB: 700 kept ones would be 28 MiB."""
    sizes = [
        float(size)
        for size in run_program("-c", PROGRAM, MODELS[name], given, "1000").split()
    ]
    assert max(sizes[-3:]) - max(sizes[:3]) < 4, sizes
