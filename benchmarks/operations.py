"""What benchmarks/kernels.py measures: operations, their inputs for N nodes, and ways to compute them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import textbook
import torch
from batches import batch_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch_geometric.utils import coalesce
from torch_geometric.utils import spmm as pyg_spmm

from diffusion_mp import (
    Diffusivity,
    GaussianDiffusivity,
    SigmoidDiffusivity,
    SimpleDiffusivity,
    SoftmaxDiffusivity,
)
from diffusion_mp.couplings import LogLowRankCoupling, SparseFlowCoupling
from diffusion_mp.diffusivities.kernelized_softmax import attention_features
from diffusion_mp.energies import GaussianPenalty
from diffusion_mp.graph import Graph
from diffusion_mp.kernels.linear_attention import linear_attention
from diffusion_mp.kernels.neumann import neumann_product
from diffusion_mp.kernels.pairwise import pairwise_attention
from diffusion_mp.kernels.spmm import spmm


class Way(NamedTuple):
    """A way to compute an operation."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Any] | None = None
    """Computes the gradients from the inputs and the gradient of the result; by default autograd does."""
    largest: int = sys.maxsize
    """The largest number of nodes that is worth the wait and the memory."""
    trains: bool = True
    """Whether a backward pass makes sense."""


class Operation(NamedTuple):
    """Something to compute, and ways to do it."""

    inputs: Callable[[int, torch.Generator], list[Any]]
    leaves: int
    """The number of inputs, from the first on, whose gradients are computed."""
    ways: dict[str, Way]
    sizes: tuple[int, ...]
    """Numbers of nodes."""
    compiled: bool = False
    """Whether ``torch.compile`` makes one function of each way."""


def states(
    *heads_and_channels: int, scale: float = 1.0
) -> Callable[[int, torch.Generator], list[Any]]:
    """Queries, keys and values [N, H, D]; the first two are scaled."""

    def make(n: int, generator: torch.Generator) -> list[Any]:
        q, k, v = (
            torch.randn(n, *heads_and_channels, generator=generator) for _ in range(3)
        )
        return [q * scale, k * scale, v]

    return make


def by_head(x: Tensor) -> Tensor:
    """[N, H, D] → [1, H, N, D]."""
    return x.transpose(0, 1).unsqueeze(0)


def by_node(x: Tensor) -> Tensor:
    """Invert `by_head`."""
    return x.squeeze(0).transpose(0, 1)


def linear_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The two matrix products that linear attention cannot do without."""
    q, k, v = (by_head(x) for x in (q, k, v))
    return by_node(q @ (k.transpose(2, 3) @ v))


def linear_products_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> list[Tensor]:
    """The four matrix products of its backward pass, and the one that is computed again."""
    q, k, v, grad = (by_head(x) for x in (q, k, v, grad))
    kv = k.transpose(2, 3) @ v
    qg = q.transpose(2, 3) @ grad
    return [grad @ kv.transpose(2, 3), v @ qg.transpose(2, 3), k @ qg]


def tiled_products(q: Tensor, k: Tensor, v: Tensor, rows: int = 1024) -> Tensor:
    """The two matrix products of pairwise attention, a tile of rows at a time."""
    q, k, v = (by_head(x) for x in (q, k, v))
    return by_node(
        torch.cat(
            [(part @ k.transpose(2, 3)) @ v for part in q.split(rows, dim=2)], dim=2
        )
    )


def tiled_products_backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rows: int = 1024
) -> list[Tensor]:
    """The four matrix products of its backward pass, and the scores again."""
    q, k, v, grad = (by_head(x) for x in (q, k, v, grad))
    dq = torch.empty_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for part in torch.arange(q.size(2)).split(rows):
        tile = slice(int(part[0]), int(part[-1]) + 1)
        scores = q[:, :, tile] @ k.transpose(2, 3)
        weights = grad[:, :, tile] @ v.transpose(2, 3)
        dv += scores.transpose(2, 3) @ grad[:, :, tile]
        dq[:, :, tile] = weights @ k
        dk += weights.transpose(2, 3) @ q[:, :, tile]
    return [dq, dk, dv]


def noisy(
    n: int, generator: torch.Generator, samples: int = 10, features: int = 32
) -> list[Any]:
    """NodeFormer's queries, keys and values, directions and noise."""
    noise = torch.empty(n, 4, samples).exponential_(generator=generator).log_().neg_()
    return [
        *states(4, 32, scale=32**-0.5)(n, generator),
        torch.randn(features, 32, generator=generator),
        noise,
    ]


def nodeformer(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, noise: Tensor, tau: float
) -> Tensor:
    """The library's NodeFormer: in log space, the samples accumulated."""
    log_q, log_k, weight = attention_features(
        q / math.sqrt(tau), k / math.sqrt(tau), projection
    )
    return LogLowRankCoupling(log_q, log_k, None, weight + noise / tau).matmul(v)


def batched(
    name: str, heads: int, scale: float = 1.0
) -> Callable[[int, torch.Generator], list[Any]]:
    """Return queries, keys and values of graphs as large as the graphs of a data set, and the batch."""

    def make(n: int, generator: torch.Generator) -> list[Any]:
        return [*states(heads, 64, scale=scale)(n, generator), batch_of(name, n)]

    return make


def linear(q: Tensor, k: Tensor, v: Tensor, graph: Graph | None = None) -> Tensor:
    """The library's DIFFormer-s."""
    return linear_attention(q, k, v, graph and graph.segments, constant=1.0, unit=True)


def pairwise(
    q: Tensor, k: Tensor, v: Tensor, graph: Graph | None = None, *, score: str
) -> Tensor:
    """The library's DIFFormer-a, and softmax attention."""
    return pairwise_attention(q, k, v, graph and graph.segments, score=score)


def gaussian(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The library's Gaussian attention."""
    return GaussianPenalty().attention(q, k, normalize=True).matmul(v)


def one_state(
    scale: float = 1.0, data: str | None = None
) -> Callable[[int, torch.Generator], list[Any]]:
    """A state [N, 64], and the batch if there is one."""

    def make(n: int, generator: torch.Generator) -> list[Any]:
        return [
            torch.randn(n, 64, generator=generator) * scale,
            *([] if data is None else [batch_of(data, n)]),
        ]

    return make


def of_one_state(
    diffusivity: Diffusivity, x: Tensor, graph: Graph | None = None
) -> Tensor:
    """The library's attention of a state with itself, as a user calls it."""
    return diffusivity(x, graph) @ x


def traced_of_one_state(diffusivity: Diffusivity, x: Tensor) -> Tensor:
    """The same by the method that ``torch.compile`` traces, [N, 1, 64]."""
    return diffusivity(x).matmul(x.unsqueeze(1))


def circuits(n: int, generator: torch.Generator, size: int = 512) -> list[Any]:
    """Return queries, keys and values of graphs of ``size`` nodes, features of their frictions, row boundaries."""
    q, k, v = states(4, 16, scale=0.5)(n, generator)
    friction_q, friction_k, _ = states(4, 16, scale=0.5)(n, generator)
    return [q, k, v, friction_q, friction_k, torch.arange(0, n + 1, size)]


def sparse_flow(
    q: Tensor, k: Tensor, v: Tensor, friction_q: Tensor, friction_k: Tensor, ptr: Tensor
) -> Tensor:
    """The library's sparse flow: every row solved exactly."""
    return SparseFlowCoupling(
        q, k, friction_q, friction_k, ptr, lam=1 / int(ptr[1]), alpha=0.1
    ).matmul(v)


def edges(channels: int, degree: int) -> Callable[[int, torch.Generator], list[Any]]:
    """Weights of a random graph without parallel edges, values, and the graph."""

    def make(n: int, generator: torch.Generator) -> list[Any]:
        graph = Graph(
            n, coalesce(torch.randint(n, (2, degree * n), generator=generator))
        )
        graph.csr.ptr, graph.csc.ptr  # noqa: B018 (sorted once, as a layer does)
        weight = torch.rand(graph.num_edges, 1, generator=generator)
        return [weight, torch.randn(n, 1, channels, generator=generator), graph]

    return make


def torch_product(weight: Tensor, v: Tensor, graph: Graph) -> Tensor:
    """PyG's product of a sparse matrix, which is torch's."""
    p = graph.pattern
    size = (graph.num_nodes, graph.num_nodes)
    values = weight[p.by_row.order, 0]
    matrix = torch.sparse_csr_tensor(
        p.by_row.ptr, p.by_row.other, values, size=size, check_invariants=False
    )
    return pyg_spmm(matrix, v.squeeze(1))


def sequence(n: int, generator: torch.Generator) -> list[Any]:
    """A sequence of 128 channels, and α."""
    return [torch.randn(n, 1, 128, generator=generator), torch.full((1, 1), 0.1)]


def copied(*tensors: Tensor) -> Any:
    """Copy the data: whatever moves data has to read it and write it once."""
    return tensors[0].clone()


SIGMOID = partial(pairwise, score="sigmoid")
SOFTMAX = partial(pairwise, score="exp")
LINEAR = {
    "textbook": Way(textbook.linear_attention),
    "library": Way(linear),
    "its products alone": Way(linear_products, linear_products_backward),
}
QUADRATIC = {"its products alone": Way(tiled_products, tiled_products_backward)}
SIGMOIDS = {
    "textbook": Way(textbook.sigmoid_attention, largest=16_384),
    "library": Way(SIGMOID),
    **QUADRATIC,
}
SOFTMAXES = {
    "library": Way(SOFTMAX),
    "torch's fused attention": Way(
        lambda q, k, v: by_node(
            scaled_dot_product_attention(by_head(q), by_head(k), by_head(v), scale=1.0)
        )
    ),
    **QUADRATIC,
}
BATCHED = {
    "linear_attention": {
        "textbook, padded": Way(textbook.padded_linear_attention),
        "library": Way(linear),
    },
    "sigmoid_attention": {
        "textbook, padded": Way(textbook.padded_sigmoid_attention),
        "library": Way(SIGMOID),
    },
    "softmax_attention": {
        "library": Way(SOFTMAX),
        "torch's fused attention, padded": Way(textbook.padded_softmax_attention),
        "torch's fused attention, nested": Way(textbook.nested_softmax_attention),
    },
}
SEQUENCES = {
    "textbook": Way(textbook.sequence_diffusion),
    "library": Way(lambda v, alpha: neumann_product(v, alpha, (1,), "symmetric")),
}
SPARSE = {
    "textbook": Way(textbook.sparse_product),
    "library": Way(lambda weight, v, graph: spmm(graph.pattern, weight, v)),
    # Torch's gradient of the weights goes through a dense matrix.
    "torch's own": Way(torch_product, largest=20_000),
}
SMALL = (100, 300, 1_000, 2_708, 4_096)
# A state that is q, k and v: the diffusivity, the scale of the state, the textbook's, for one graph and for a batch.
OF_ONE = {
    "linear": (
        SimpleDiffusivity(),
        1.0,
        textbook.linear_attention_of_one,
        textbook.padded_linear_attention_of_one,
    ),
    "sigmoid": (
        SigmoidDiffusivity(normalize=None),
        0.35,
        textbook.sigmoid_attention_of_one,
        textbook.padded_sigmoid_attention_of_one,
    ),
    "softmax": (
        SoftmaxDiffusivity(64, normalize=None),
        1.0,
        textbook.softmax_attention_of_one,
        textbook.padded_softmax_attention_of_one,
    ),
    "gaussian": (
        GaussianDiffusivity(normalize=None, measure="distance"),
        0.35,
        textbook.gaussian_attention_of_one,
        None,
    ),
}

OPERATIONS = {
    "linear_attention": Operation(
        states(1, 64),
        3,
        LINEAR,
        (100, 500, 1_000, 2_708, 10_000, 100_000, 262_144, 1_000_000),
    ),
    "linear_attention_4_heads": Operation(
        states(4, 64), 3, LINEAR, (100, 1_000, 2_708, 10_000, 65_536)
    ),
    "sigmoid_attention": Operation(
        states(1, 64, scale=0.35), 3, SIGMOIDS, (*SMALL, 16_384)
    ),
    "sigmoid_attention_4_heads": Operation(
        states(4, 64, scale=0.35), 3, SIGMOIDS, SMALL
    ),
    "softmax_attention": Operation(
        states(1, 64, scale=0.35), 3, SOFTMAXES, (*SMALL, 16_384)
    ),
    "softmax_attention_4_heads": Operation(
        states(4, 64, scale=0.35), 3, SOFTMAXES, SMALL
    ),
    "gaussian_attention": Operation(
        states(1, 64, scale=0.35),
        3,
        {"textbook": Way(textbook.gaussian_attention), "library": Way(gaussian)},
        SMALL,
    ),
    **{
        f"{kind}_{data}{'_4_heads' if heads > 1 else ''}": Operation(
            batched(data, heads, 1.0 if kind == "linear_attention" else 0.35),
            3,
            ways,
            (num_nodes,),
        )
        for kind, ways in BATCHED.items()
        for data, num_nodes in (("MUTAG", 3_371), ("PROTEINS", 7_265), ("ZINC", 3_000))
        for heads in ((1, 4) if kind == "linear_attention" or data == "MUTAG" else (1,))
    },
    **{
        f"{kind}_attention_of_one_state": Operation(
            one_state(scale),
            1,
            {
                "textbook": Way(other),
                "library": Way(partial(of_one_state, diffusivity)),
            },
            (100, 300, 1_000, 2_708, 10_000, 65_536) if kind == "linear" else SMALL,
        )
        for kind, (diffusivity, scale, other, _) in OF_ONE.items()
    },
    **{
        f"{kind}_attention_of_one_state_{data}": Operation(
            one_state(scale, data),
            1,
            {
                "textbook, padded": Way(other),
                "library": Way(partial(of_one_state, diffusivity)),
            },
            (num_nodes,),
        )
        for kind, (diffusivity, scale, _, other) in OF_ONE.items()
        if other is not None
        for data, num_nodes in (("MUTAG", 3_371), ("PROTEINS", 7_265))
    },
    **{
        f"{kind}_attention_of_one_state,_compiled": Operation(
            one_state(scale),
            1,
            {
                "textbook": Way(other),
                "library": Way(partial(traced_of_one_state, diffusivity)),
            },
            (100, 300, 1_000),
            compiled=True,
        )
        for kind, (diffusivity, scale, other, _) in OF_ONE.items()
    },
    "nodeformer": Operation(
        noisy,
        3,
        {
            "textbook": Way(partial(textbook.nodeformer, tau=0.25)),
            "library": Way(partial(nodeformer, tau=0.25)),
        },
        (100, 1_000, 10_000, 200_000),
    ),
    "sparse_flow": Operation(
        circuits,
        5,
        {
            "textbook": Way(textbook.sparse_flow, largest=512, trains=False),
            "library": Way(sparse_flow),
        },
        (512, 1_024, 4_096, 16_384),
    ),
    "sequence_diffusion": Operation(
        sequence,
        2,
        {**SEQUENCES, "a copy": Way(copied, copied)},
        (100, 1_000, 10_000, 100_000, 1_000_000),
    ),
    "sequence_diffusion,_compiled": Operation(
        sequence, 2, SEQUENCES, (100, 1_000), compiled=True
    ),
    "sparse_product": Operation(
        edges(64, 16), 2, SPARSE, (100, 1_000, 10_000, 100_000)
    ),
    "sparse_product_128_channels": Operation(
        edges(128, 20), 2, SPARSE, (2_708, 200_000)
    ),
}
