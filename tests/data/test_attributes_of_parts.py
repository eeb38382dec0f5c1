"""Attributes of any kind in the parts of a graph: cut, copied as they are, or refused by their name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from test_partition_loader import DATA, EDGES, NODES
from torch import Tensor
from torch.testing import assert_close
from torch_geometric.data import Data

from diffusion_mp import DIFFormer, full_graph_inference
from diffusion_mp.data import RandomPartitionLoader
from diffusion_mp.graph.sparse_rows import select_rows
from helpers import built

SPARSE = {
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "coo": Tensor.to_sparse_coo,
    "uncoalesced": lambda x: torch.sparse_coo_tensor(
        torch.cat([x.to_sparse().indices()] * 2, 1),
        torch.cat([x.to_sparse().values() / 2] * 2),
        x.shape,
    ),
}


def features(rows: int = NODES, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 7, generator=generator, dtype=dtype)
    x = x * (torch.rand(rows, 7, generator=generator) < 0.3)
    x[3:5] = 0
    return x


def parts(data: Data, **options: Any) -> list[Data]:
    return list(RandomPartitionLoader(data, 4, **options))


def with_(**attributes: Any) -> Data:
    data = DATA.clone()
    data.update(attributes)
    return data


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"halo": True, "degrees": "full"}, {"num_workers": 1}]
)
def test_sparse_features_are_cut(layout, dtype, options):
    x = features(dtype=dtype)
    sparse = SPARSE[layout](x)
    edge_attr = features(EDGES)
    model = built(lambda: DIFFormer(7, 8, 3)).to(dtype).eval()
    data = with_(
        x=sparse,
        edge_weight=DATA.edge_weight.to(dtype),
        edge_attr=SPARSE[layout](edge_attr),
    )
    for part in parts(data, **options):
        assert part.x.layout == sparse.layout
        assert torch.equal(part.x.to_dense(), x[part.n_id])
        assert torch.equal(part.edge_attr.to_dense(), edge_attr[part.e_id])
        out = model(part.x, part.edge_index, part.edge_weight)
        expected = model(x[part.n_id], part.edge_index, part.edge_weight)
        assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("rows", [[], [0], [3, 4], [5, 5, 0, 9], list(range(NODES))])
@pytest.mark.parametrize("narrow", [False, True])
def test_rows_of_a_sparse_matrix(layout, rows, narrow):
    x = features()
    sparse = SPARSE[layout](x)
    if narrow and layout == "csr":
        bounds = sparse.crow_indices().int()
        columns = sparse.col_indices().int()
        sparse = torch.sparse_csr_tensor(bounds, columns, sparse.values(), size=x.shape)
    chosen = select_rows(sparse, torch.tensor(rows, dtype=torch.long))
    assert torch.equal(chosen.to_dense(), x[rows])
    assert chosen.layout == sparse.layout


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("block_size", [1, 7, 1000])
def test_inference_by_blocks_takes_sparse_features(layout, block_size):
    x = features()
    model = built(lambda: DIFFormer(7, 8, 3)).eval()
    expected = model(x, DATA.edge_index, DATA.edge_weight)
    out = full_graph_inference(
        model,
        SPARSE[layout](x),
        DATA.edge_index,
        DATA.edge_weight,
        block_size=block_size,
    )
    assert_close(out, expected, rtol=1e-4, atol=1e-5)


DTYPES = (
    torch.float64,
    torch.float16,
    torch.int8,
    torch.bool,
    torch.complex64,
)
KINDS: dict[str, Any] = {
    "an array": np.arange(NODES),
    "an array of rows": np.arange(2.0 * NODES).reshape(NODES, 2),
    "an array of words": np.array([f"node {i}" for i in range(NODES)]),
    "an array of objects": np.array([{"node": i} for i in range(NODES)], dtype=object),
    "a list": list(range(NODES)),
    "a tuple": tuple(range(NODES)),
    "a cube": torch.rand(NODES, 2, 3),
    "no columns": torch.rand(NODES, 0),
    **{
        str(dtype): torch.arange(NODES, dtype=torch.int32).to(dtype) for dtype in DTYPES
    },
}


def listed(value: Any) -> list[Any]:
    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_attributes_of_nodes_are_cut(kind, workers):
    value = KINDS[kind]
    for part in parts(with_(extra=value), num_workers=workers):
        assert isinstance(part.extra, type(value)) or isinstance(value, tuple)
        assert getattr(part.extra, "dtype", None) == getattr(value, "dtype", None)
        assert listed(part.extra) == [
            listed(value)[node] for node in part.n_id.tolist()
        ]


def test_attributes_of_edges_are_cut():
    value = np.arange(EDGES)
    for part in parts(
        with_(
            edge_year=value,
            edge_words=[str(i) for i in value],
            edge_id=torch.arange(EDGES),
        )
    ):
        assert part.edge_year.tolist() == part.e_id.tolist() == part.edge_id.tolist()
        assert part.edge_words == [str(i) for i in part.e_id.tolist()]


OF_THE_GRAPH: list[Any] = [
    3,
    "a graph",
    torch.tensor(3.0),
    np.float32(3),
    [1, 2, 3],
    {"a": 1},
    torch.rand(5, 5),
    np.arange(5),
]


@pytest.mark.parametrize("value", OF_THE_GRAPH, ids=lambda value: type(value).__name__)
def test_attributes_of_the_graph_stay(value):
    assert all(part.extra is value for part in parts(with_(extra=value)))


def test_nodes_without_features():
    data = Data(edge_index=DATA.edge_index, num_nodes=NODES)
    assert sorted(torch.cat([part.n_id for part in parts(data)]).tolist()) == list(
        range(NODES)
    )
    assert all(part.num_nodes == NODES // 4 for part in parts(Data(num_nodes=NODES)))


class Frame:
    """What a table of pandas or a SparseTensor looks like: a shape, and rows that nobody here knows how to select."""

    shape = (NODES, 3)


REFUSED: dict[str, Callable[[], Data]] = {
    "a matrix of SciPy": lambda: with_(extra=scipy.sparse.eye(NODES).tocsr()),
    "a frame": lambda: with_(extra=Frame()),
    "an adjacency": lambda: with_(extra_adj=torch.eye(NODES).to_sparse_csr()),
    "blocks": lambda: with_(extra=torch.eye(NODES).to_sparse_bsr((2, 2))),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_nobody_can_cut_is_named(kind):
    with pytest.raises(TypeError, match=r"data\.extra"):
        parts(REFUSED[kind]())
