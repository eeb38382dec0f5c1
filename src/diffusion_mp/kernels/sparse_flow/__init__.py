"""Sparse flow: every row of attention is the exact solution of a small convex problem (SFi-Former)."""

from functools import partial

from jaxtyping import Float
from torch import Tensor

from diffusion_mp.kernels.operation import Backend, Wide, empty_like, operation
from diffusion_mp.kernels.sparse_flow import reference, tiled
from diffusion_mp.kernels.sparse_flow.reference import (
    EdgeFlow,
    entries,
    log_entries,
    sparse_flow_edges,
)
from diffusion_mp.kernels.sparse_flow.rows import (
    Circuit,
    Features,
    RowPotentials,
    RowTerms,
    empty_potentials,
)

__all__ = [
    "EdgeFlow",
    "Features",
    "RowPotentials",
    "RowTerms",
    "entries",
    "log_entries",
    "sparse_flow_edges",
    "sparse_flow_potentials",
    "sparse_flow_product",
]

# One name in the environment selects the backend of all four operations.
declare = partial(operation, family="sparse_flow")
# The other terms are constants: see `RowPotentials`.
DIFFERENTIATED = "features v terms.a terms.w terms.rho terms.nu"


@declare(
    "sparse_flow_potentials",
    formula=reference.sparse_flow_potentials,
    cpu=tiled.potentials,
)
def _potentials(circuit: Circuit, ptr: Tensor | None) -> RowPotentials:
    return empty_potentials(circuit.lam)


@declare(
    "sparse_flow_potentials_backward",
    formula=(_potentials, "circuit"),
    cpu=tiled.potentials_backward,
)
def _potentials_backward(
    grad_a: Tensor,
    grad_w: Tensor,
    grad_rho: Tensor,
    grad_nu: Tensor,
    grad_log_mu: Tensor,
    circuit: Circuit,
    out: RowPotentials,
    ptr: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # An operation of its own, so that torch.compile has one node for the backward pass too.
    return empty_like(*circuit)


@declare(
    "sparse_flow_product",
    formula=reference.sparse_flow_product,
    cpu=tiled.product,
    dtype="v",
)
def _product(
    features: Features,
    v: Wide,
    terms: RowTerms,
    ptr: Tensor | None,
    transpose: bool,
) -> Tensor:
    return empty_like(v)


@declare(
    "sparse_flow_product_backward",
    formula=(_product, DIFFERENTIATED),
    cpu=tiled.product_backward,
)
def _product_backward(
    grad: Tensor,
    features: Features,
    v: Tensor,
    terms: RowTerms,
    ptr: Tensor | None,
    transpose: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # Lift and reach are constant where the gradient exists, and ``best`` is a number of a node.
    return empty_like(*features, v, *terms[:4])


# The fields that the backward pass does not take have no gradient: see `RowPotentials`.
_potentials.derivatives({"circuit": _potentials_backward})
_product.derivatives({DIFFERENTIATED: _product_backward})


def sparse_flow_potentials(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    friction_q: Float[Tensor, "N H G"],
    friction_k: Float[Tensor, "N H G"],
    lam: Float[Tensor, "N H"],
    leak: Float[Tensor, "N H"],
    ptr: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> RowPotentials:
    r"""Solve the flow problem of every row i over the nodes j of i's graph (SFi-Former, Eqs. 6, 8, 9).

        min ½Σ_j r_ij z_j² + λ_i Σ_j f_ij|z_j| + (α/2)(Σ_j z_j − 1)²

    The resistances are r = softmax_j(−q_i·k_j), the frictions f = softmax_j(q̃_i·k̃_j). Without friction features (G =
    0) f = 1/n. Newton's method on the potential finds the exact solution (S3 of docs/errata.md), in O(N²) time and O(N)
    memory, also in the backward pass, in at least float32.

    Args:
        q: features of the receivers.
        k: features of the senders.
        friction_q: q̃, friction features of the receivers.
        friction_k: k̃, friction features of the senders.
        lam: λ ≥ 0 of every row.
        leak: 1/α of every row; 0 conserves the flow exactly.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        q, k: [N, H, F].
        friction_q, friction_k: [N, H, G].
        lam, leak: [N, H].
        output: [N, H] in every field.

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.ones(6, 2), torch.zeros(6, 2))  # every row sums to one
        >>> torch.allclose(sparse_flow_product(q, k, q, k, torch.ones(6, 2, 1), rows.terms), torch.ones(6, 2, 1))
        True
    """
    circuit = Circuit(q, k, friction_q, friction_k, lam, leak)
    return _potentials(circuit, ptr, backend=backend)


def sparse_flow_product(
    q: Float[Tensor, "N H F"],
    k: Float[Tensor, "N H F"],
    friction_q: Float[Tensor, "N H G"],
    friction_k: Float[Tensor, "N H G"],
    v: Float[Tensor, "N H D"],
    terms: RowTerms,
    ptr: Tensor | None = None,
    *,
    transpose: bool = False,
    backend: Backend = "auto",
) -> Float[Tensor, "N H D"]:
    r"""Multiply values by the flows of all pairs of a graph, out_i = Σ_j z_ij v_j.

    The terms of row i give z_ij from the scores q_i·k_j and q̃_i·k̃_j, see `RowTerms`. The result has the dtype of
    ``v``.

    Args:
        q: features of the receivers.
        k: features of the senders.
        friction_q: q̃, friction features of the receivers.
        friction_k: k̃, friction features of the senders.
        v: values.
        terms: ``terms`` of the result of :func:`sparse_flow_potentials` for the same features.
        ptr: row boundaries [B + 1] of a ragged batch, on the CPU. By default all rows are one graph.
        transpose: whether out_i is Σ_j z_ji v_j instead. The terms still belong to the rows of z.
        backend: how to compute it; ``"auto"`` takes the first backend that supports the arguments, see
            `kernels.operation`.

    Shapes:
        q, k: [N, H, F].
        friction_q, friction_k: [N, H, G].
        v, output: [N, H, D].

    Examples:
        >>> rows = sparse_flow_potentials(q, k, q, k, torch.zeros(6, 2), torch.zeros(6, 2))
        >>> found = sparse_flow_product(q, k, q, k, k, rows.terms)
        >>> softmax = torch.einsum("ihf,jhf->hij", q, k).softmax(2)  # the limit without frictions and leak
        >>> torch.allclose(found, torch.einsum("hij,jhd->ihd", softmax, k), atol=1e-5)
        True
    """
    features = Features(q, k, friction_q, friction_k)
    return _product(features, v, terms, ptr, transpose, backend=backend)
