"""Arguments of every operation: what exported programs put in its place, and torch's checks of it, are called with."""

from typing import Any

import torch
from torch import Tensor

from diffusion_mp.export.plain import FORMULAS
from diffusion_mp.graph.ops import Compressed, Pattern
from diffusion_mp.kernels import linear_attention, pairwise
from diffusion_mp.kernels.linear_attention import Terms, linear_rows
from diffusion_mp.kernels.neumann.stencil import Stencil
from diffusion_mp.kernels.pairwise.scores import SCORES, Weighting
from diffusion_mp.kernels.sparse_flow import Features, sparse_flow_potentials
from diffusion_mp.kernels.sparse_flow.rows import Circuit, RowProblem
from diffusion_mp.kernels.spmm import Rows

N = 13
H = 2
BATCHES = {"one graph": None, "ragged": torch.tensor([0, 5, 5, 6, 13])}
DERIVED = (
    linear_attention._backward,
    linear_attention._backward_of_one,
    pairwise._backward,
)
OPERATIONS = {operation.name: operation for operation in (*FORMULAS, *DERIVED)}


def draw(*shape: int) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.double
    )


def arguments(ptr: Tensor | None) -> dict[str, list[tuple[Any, ...]]]:
    """Some of every operation, by its name."""
    q = draw(N, H, 3)
    k = draw(N, H, 4)[..., :3]
    v = draw(N, H, 5)
    few = draw(N, H, 1)
    source, target = torch.randint(
        N, (2, 40), generator=torch.Generator().manual_seed(0)
    )
    rows = Compressed(target, source, N)
    cols = Compressed(source, target, N)
    entries = Pattern(rows, cols).both_ways()
    weight = draw(40, H)
    prior = (draw(40, 1) > -1).double()
    shift = draw(N, H)
    features = Features(q, k, draw(N, H, 2), draw(N, H, 7)[..., :2])
    lam = shift.exp()
    leak = 0.1 * shift.abs()
    terms = sparse_flow_potentials(*features, lam, leak, ptr).terms
    without_friction = Features(q, k, q[..., :0], k[..., :0])
    mixed = Terms(ptr, 1.0, 0.5, True)
    alike = Terms(ptr, 1.0, 0.0, True)
    scores = draw(40, H), draw(40, 2 * H)[:, :H]

    def log_sum(x: Tensor) -> Tensor:
        return torch.stack(
            [x[target == node].logsumexp(0) for node in range(N)]
        ).nan_to_num(neginf=0.0)

    stencils = [
        Stencil([1, 3], kind, ptr)
        for kind in ("symmetric", "replicate", "drop", "periodic", "causal")
    ]
    return {
        "spmm": [(entries, weight, v), (entries.T, weight[:, :1], v)],
        "sddmm": [(entries, q, k)],
        "row_sums": [(Rows.of(rows), weight)],
        "at_rows": [(Rows.of(rows), shift)],
        "edge_softmax": [
            (Rows.of(rows), scores[0], None),
            (Rows.of(rows), scores[0], prior),
        ],
        "linear_product": [(q, k, v, ptr)],
        "linear_attention": [
            (q, k, v, mixed._replace(unit=unit)) for unit in (True, False)
        ],
        "linear_attention_backward": [
            (v, q, k, v, linear_rows(q, k, v, mixed, backend="cpu"), mixed),
        ],
        "linear_attention_of_one_backward": [
            (q, q, linear_rows(q, q, q, terms, backend="cpu"), terms)
            for terms in (mixed, alike)
        ],
        "pairwise_attention": [
            *((q, k, v, Weighting(None, None, ptr, score)) for score in SCORES),
            (q, k, v[..., :0], Weighting(None, None, ptr, "sigmoid", False)),
        ],
        "pairwise_product": [
            (q, k, v, Weighting(shift, None, ptr, "exp")),
            (q, k, v, Weighting(shift, few[..., 0], ptr, "sigmoid", False)),
            (q, q, v, Weighting(None, None, ptr, "sigmoid", mutual=True)),
        ],
        "pairwise_backward": [
            (v, shift, q, k, v, Weighting(shift, few[..., 0], ptr, "sigmoid", False)),
            (v, shift, q, k, v, Weighting(shift, None, ptr, "exp")),
        ],
        "sparse_flow_potentials": [
            (Circuit(*f, lam, leak), ptr) for f in (features, without_friction)
        ],
        "sparse_flow_product": [
            (features, v, terms, ptr, transpose) for transpose in (False, True)
        ],
        "sparse_flow_support": [
            (
                RowProblem(*scores, log_sum(-scores[0]), log_sum(scores[1]), lam, leak),
                target,
            )
        ],
        "neumann_product": [
            (v, draw(2, H), s, transpose)
            for s in stencils
            for transpose in (False, True)
        ],
        "neumann_inner": [(q, k, s) for s in stencils],
        "neumann_transform": [
            (v, kind, inverse, ptr)
            for kind in (False, True)
            for inverse in (False, True)
        ],
    }
