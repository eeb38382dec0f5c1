"""The laws every coupling obeys, with its own dense matrix as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from diffusion_mp.checks import check_function, check_kind, check_seed, describe
from diffusion_mp.couplings import (
    Coupling,
    LowRankCoupling,
    PooledCoupling,
    SumCoupling,
    merged,
)
from diffusion_mp.couplings.base import PROMISES
from diffusion_mp.graph.arguments import row_bounds
from diffusion_mp.testing.laws import (
    Law,
    expect,
    expect_close,
    expect_equal,
    expect_flags,
    expect_rng_untouched,
    expect_writable,
    run_laws,
    tolerance,
)


class CouplingCase:
    """A coupling, its dense matrix, and seeded values to act on."""

    def __init__(self, coupling: Coupling, ptr: Tensor | None, seed: int) -> None:
        self.coupling = coupling
        self.ptr = ptr
        self.generator = torch.Generator().manual_seed(seed)

    @cached_property
    def dense(self) -> Tensor:
        return self.coupling.to_dense()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(
            self.coupling.dtype
        )

    def values(self, heads: int | None = None, channels: int = 3) -> Tensor:
        return self.random(
            self.coupling.num_nodes,
            self.coupling.heads if heads is None else heads,
            channels,
        )

    @cached_property
    def pairs(self) -> Tensor:
        """All pairs (source, target) in random order, a few of them twice."""
        node = torch.arange(self.coupling.num_nodes)
        if node.numel():
            pairs = torch.cartesian_prod(node, node).T
        else:
            pairs = node.new_zeros(2, 0)
        pairs = pairs[:, torch.randperm(pairs.shape[1], generator=self.generator)]
        return torch.cat([pairs, pairs[:, :3]], dim=1)


def check_coupling(
    coupling: Coupling | Callable[[], Coupling],
    *,
    ptr: Tensor | None = None,
    skip: Mapping[str, str] | None = None,
    seed: int = 0,
) -> None:
    """Check a coupling with few nodes (N ≤ 30) against its own dense matrix: values, gradients, promises, algebra.

    An ``AssertionError`` has a sentence for every broken law. Tolerances are tightest in double precision.

    Args:
        coupling: the coupling, or a function that builds it.
        ptr: row boundaries [B + 1] of a ragged batch, by default ``coupling.ptr``; entries between graphs must be zero.
        skip, seed: law name → the reason why it does not apply; and the seed of the values.

    Examples:
        >>> check_coupling(lambda: UniformCoupling(6, dtype=torch.float64))
    """
    check_seed(seed)
    if not isinstance(coupling, Coupling):
        check_function(coupling, "coupling", "that builds a Coupling, or one")
        coupling = coupling()
    check_kind(
        coupling, "coupling", Coupling, "a Coupling, or a function that builds one"
    )
    case = CouplingCase(
        coupling,
        coupling.ptr if ptr is None else row_bounds(ptr, coupling.num_nodes),
        seed,
    )
    run_laws(type(coupling).__name__, COUPLING_LAWS, case, skip or {})


def _form(case: CouplingCase) -> None:
    """S says its size, heads, dtype, device, row boundaries and promises, and to_dense is [H, N, N]"""
    coupling = case.coupling
    expect(
        isinstance(coupling.num_nodes, int),
        f"num_nodes is {coupling.num_nodes!r}, expected an int",
    )
    expect(
        isinstance(coupling.heads, int), f"heads is {coupling.heads!r}, expected an int"
    )
    expect_flags(coupling, *PROMISES)
    row_bounds(coupling.ptr, coupling.num_nodes)
    got = (tuple(case.dense.shape), case.dense.dtype, case.dense.device)
    expected = (
        (coupling.heads, coupling.num_nodes, coupling.num_nodes),
        coupling.dtype,
        coupling.device,
    )
    expect(
        got == expected,
        f"to_dense() has shape, dtype and device {got}, expected {expected}",
    )
    expect(
        bool(case.dense.isfinite().all()), "to_dense() has entries that are not finite"
    )


def _views(
    case: CouplingCase, coupling: Coupling, dense: Tensor, v: Tensor
) -> list[tuple[str, str, Tensor, Tensor]]:
    """Return (name, operation in the table of tolerances, result, result of the matrix) of every method."""
    return [
        ("@ v", "product", coupling @ v, dense_product(dense, v)),
        (".degree()", "degree", coupling.degree(), dense.sum(-1).T),
        (
            ".at(pairs)",
            "entries",
            coupling.at(case.pairs),
            dense_entries(dense, case.pairs),
        ),
        (
            ".dirichlet(v)",
            "dirichlet",
            coupling.dirichlet(v),
            dense_dirichlet(dense, v),
        ),
        (
            ".laplacian(v)",
            "dirichlet",
            coupling.laplacian(v),
            dense_product(dense_laplacian(dense), v),
        ),
    ]


@torch.no_grad()
def _expect_matrix(
    case: CouplingCase, name: str, coupling: Coupling, dense: Tensor
) -> None:
    """Expect a coupling to agree with a matrix and to keep its promises."""
    expect_close(coupling.to_dense(), dense, "entries", f"{name}.to_dense()")
    for question, operation, got, expected in _views(
        case, coupling, dense, case.values(heads=coupling.heads)
    ):
        expect_close(got, expected, operation, f"{name} {question}")
    expect_promises(name, coupling, dense)


def _product(case: CouplingCase) -> None:
    """S @ v is the dense matrix times v, head by head"""
    v = case.values()
    expect_equal((case.coupling @ v).dtype, v.dtype, "the dtype of S @ v")
    expect_close(case.coupling @ v, dense_product(case.dense, v), "product", "S @ v")


def _heads_broadcast(case: CouplingCase) -> None:
    """one head of values meets every head of S, and one head of S meets every head of values"""
    for heads in (1, 3) if case.coupling.heads == 1 else (1,):
        v = case.values(heads=heads)
        expect_close(
            case.coupling @ v,
            dense_product(case.dense, v),
            "product",
            f"S @ v for v with {heads} heads",
        )


def _transpose(case: CouplingCase) -> None:
    """S.T is the transposed matrix: product, degree, entries, promises, and S.T.T is S"""
    coupling = case.coupling
    dense = case.dense.transpose(1, 2)
    _expect_matrix(case, "S.T", coupling.T, dense)
    expect_close(coupling.T.T.to_dense(), case.dense, "entries", "S.T.T.to_dense()")
    if coupling.symmetric:  # S.T may be S itself
        expect_close(
            coupling._transpose().to_dense(),
            dense,
            "entries",
            "S._transpose().to_dense()",
        )


def _degree(case: CouplingCase) -> None:
    """S.degree() is the row sums [N, H]"""
    expect_close(case.coupling.degree(), case.dense.sum(-1).T, "degree", "S.degree()")


def _at(case: CouplingCase) -> None:
    """S.at(edge_index)[e, h] is s_ij of head h with i = edge_index[1, e], j = edge_index[0, e]"""
    expect_close(
        case.coupling.at(case.pairs),
        dense_entries(case.dense, case.pairs),
        "entries",
        "S.at(pairs)",
    )
    none = case.coupling.at(case.pairs[:, :0])
    expect_equal(
        tuple(none.shape), (0, case.coupling.heads), "the shape of S.at(no pairs)"
    )


def _log_at(case: CouplingCase) -> None:
    """exp(S.log_at(edge_index)) is the entries of a non-negative S, and the gradient at positive ones is that of log"""
    if not case.coupling.nonnegative:
        return
    got = case.coupling.log_at(case.pairs).exp()
    expected = dense_entries(case.dense, case.pairs)
    expect_close(got, expected, "entries", "exp(S.log_at(pairs))")
    pairs = case.pairs[:, (expected > 0).all(1)]
    _expect_gradients(
        case,
        [
            (
                "S.log_at(pairs)",
                case.coupling.log_at(pairs),
                dense_entries(case.dense, pairs).log(),
            )
        ],
    )


def _dirichlet(case: CouplingCase) -> None:
    """S.dirichlet(x) is Σ_ij s_ij ‖x_i − x_j‖² per head, for x [N, C] and [N, H, D]"""
    for x in (case.values()[:, 0], case.values()):
        what = f"S.dirichlet(x) of a {x.dim()}-dimensional x"
        expect_close(
            case.coupling.dirichlet(x),
            dense_dirichlet(case.dense, x),
            "dirichlet",
            what,
        )


def _majorant(case: CouplingCase) -> None:
    """p = S.majorant(convex) of a symmetric, nonnegative S bounds D − S: 2 diag(p) ⪰ D − S if convex, else diag(p)"""
    if not (case.coupling.symmetric and case.coupling.nonnegative):
        return
    for convex, factor in ((True, 2.0), (False, 1.0)):
        bound = factor * torch.diag_embed(
            case.coupling.majorant(convex).detach().double().T
        )
        difference = bound - dense_laplacian(case.dense.detach().double())
        name = f"{factor:g} S.majorant({convex}) less the Laplacian"
        _expect_semidefinite(difference, name, case.coupling.dtype, bound)


def _declared_properties(case: CouplingCase) -> None:
    """what S promises (symmetric, row_stochastic, nonnegative, positive_semidefinite) its entries keep"""
    expect_promises("S", case.coupling, case.dense)


def expect_promises(name: str, coupling: Coupling, dense: Tensor) -> None:
    dense = dense.detach()
    if coupling.symmetric:
        expect_close(
            dense,
            dense.transpose(1, 2),
            "degree",
            f"{name} is declared symmetric, but s_ij against s_ji",
        )
    if coupling.row_stochastic:  # a node without senders has a zero row
        rows = dense.sum(-1)
        empty = (dense == 0).all(-1)
        expect_close(
            rows,
            (~empty).to(rows.dtype),
            "degree",
            f"{name} is declared row_stochastic, but a row sum",
        )
    if coupling.nonnegative and dense.numel():
        low = float(dense.min())
        expect(
            low >= 0,
            f"{name} is declared nonnegative, but an entry is {low:.6g}, expected ≥ 0",
        )
    if coupling.positive_semidefinite:
        expect(
            coupling.symmetric,
            f"{name} is declared positive_semidefinite, but not symmetric, expected both",
        )
        _expect_semidefinite(
            dense.double(), f"{name}, declared positive_semidefinite,", coupling.dtype
        )


def _expect_semidefinite(
    matrix: Tensor, name: str, dtype: torch.dtype, scale: Tensor | None = None
) -> None:
    """Expect eigenvalues ≥ 0, up to rounding in ``dtype`` of entries as large as those of ``scale``."""
    if matrix.numel():
        values = torch.linalg.eigvalsh(matrix)
        (rtol, atol) = tolerance("degree", dtype)
        low = float(values.min())
        largest = float((values.abs() if scale is None else scale).max())
        expect(
            low >= -atol - rtol * largest,
            f"{name} has the eigenvalue {low:.6g}, expected ≥ 0",
        )


def _metric(case: CouplingCase) -> None:
    """where S knows a metric d̄ [N, H], d̄ is positive and diag(d̄) S symmetric; S is reversible where there is one"""
    coupling = case.coupling
    metric = case.coupling.metric
    expect(
        coupling.reversible == (metric is not None),
        f"reversible is {coupling.reversible}, the metric is {metric}",
    )
    if metric is None:
        return
    expect(
        tuple(metric.shape) == (coupling.num_nodes, coupling.heads),
        f"the metric is {describe(metric)}",
    )
    expect(bool((metric > 0).all()), "an entry of the metric is not positive")
    flows = (
        (metric / metric.mean(0)).t().unsqueeze(2) * case.dense.detach().double()
    ).to(coupling.dtype)
    expect_close(
        flows, flows.transpose(1, 2), "degree", "diag(metric) S against its transpose"
    )


def _scaling(case: CouplingCase) -> None:
    """a * S has a times the entries, for a number, a 0-dimensional tensor and one number per head"""
    for a in (0.25, -1.0, case.random(), case.random(case.coupling.heads)):
        dense = case.dense * (a.reshape(-1, 1, 1) if isinstance(a, Tensor) else a)
        _expect_matrix(case, f"(a * S) for a = {a}, that", a * case.coupling, dense)


def _low_rank_form(case: CouplingCase) -> None:
    """where S promises to be low-rank its form is S, diag(e) + U Kᵀ within every graph, with its gradients"""
    if not case.coupling.low_rank:
        return
    form = case.coupling.low_rank_form(case.coupling.dtype)
    assert form is not None, "S promises to be low-rank, but has no low_rank_form"
    left, right = torch.broadcast_tensors(form.left, form.right)
    dense = LowRankCoupling(left, right, form.ptr).to_dense()
    if form.diagonal is None:
        dense = dense
    else:
        dense = dense + torch.diag_embed(form.diagonal.t())
    dense = dense.expand_as(case.dense)
    expect_close(dense, case.dense, "entries", "the low-rank form")
    _expect_gradients(case, [("the low-rank form", dense, case.dense)])


def _addition(case: CouplingCase) -> None:
    """S + R has the sum of the entries; a convex combination promises what S does, and no other one a row sum of one"""
    coupling = case.coupling
    dense = case.dense
    for other, name in ((coupling.T, "S.T"), (0.5 * coupling, "½ S")):
        total = coupling + other
        expected = dense + other.to_dense()
        _expect_matrix(case, f"(S + {name})", total, expected)
        _expect_matrix(case, f"(S + {name}).T", total.T, expected.transpose(1, 2))
    for factors in ((0.25, 0.75), (0.5,), (3.0, -1.0)):
        combined = SumCoupling([a * coupling for a in factors])
        name = " + ".join(f"{a:g} S" for a in factors)
        expect_promises(name, combined, sum(factors) * dense)
        lost = [
            name
            for name in PROMISES
            if getattr(coupling, name) and not getattr(combined, name)
        ]
        if factors == (0.25, 0.75):
            expect(not lost, f"{name} no longer promises {lost}, as S does")


def _block_diagonal(case: CouplingCase) -> None:
    """a graph of a ragged batch never meets its batch-mates: entries are exactly zero, and NaN does not travel"""
    if case.ptr is None or case.ptr.numel() < 3:
        return
    member = torch.repeat_interleave(
        torch.arange(case.ptr.numel() - 1), case.ptr.diff()
    )
    leak = case.dense.detach()[:, member[:, None] != member[None, :]]
    expect(
        bool((leak == 0).all()),
        f"{int((leak != 0).sum())} entries between different graphs are not zero",
    )
    v = case.values()
    kept = member != int(member[-1])
    poisoned = torch.where(kept[:, None, None], v, torch.nan)
    expect_close(
        (case.coupling @ poisoned)[kept],
        (case.coupling @ v)[kept],
        "rearranged",
        "S @ v beside NaN rows",
    )


def _gradients(case: CouplingCase) -> None:
    """gradients of product, degree, entries and Dirichlet energy are those of the dense matrix"""
    v = case.values().requires_grad_()
    views = _views(case, case.coupling, case.dense, v)
    turned = dense_product(case.dense.transpose(1, 2), v)
    routes = [
        ("S.T @ v", case.coupling.T @ v, turned),
        ("S.both(v, v)[1]", case.coupling.both(v, v)[1], turned),
    ]
    _expect_gradients(
        case,
        [
            *((f"S {question}", got, expected) for question, _, got, expected in views),
            *routes,
        ],
        v,
    )


def _pooled_by_blocks(case: CouplingCase) -> None:
    """sums over two blocks of the senders, merged, give each block of receivers its rows of S @ v, and all gradients"""
    coupling = case.coupling
    if not isinstance(coupling, PooledCoupling) or coupling.ptr is not None:
        return
    v = case.values().requires_grad_()
    cut = coupling.num_nodes // 3
    parts = [
        (coupling.block(rows), v[rows])
        for rows in (slice(0, cut), slice(cut, coupling.num_nodes))
    ]
    sums = merged([block.pool(values) for block, values in parts])
    got = torch.cat([block.read(sums, values) for block, values in parts])
    expected = dense_product(case.dense, v)
    expect_close(got, expected, "product", "S @ v by blocks")
    _expect_gradients(case, [("S @ v by blocks", got, expected)], v)


def _expect_gradients(
    case: CouplingCase, routes: list[tuple[str, Tensor, Tensor]], *leaves: Tensor
) -> None:
    """Expect equal gradients of (name, result, oracle) in the given leaves and in all on which either depends."""
    found = leaf_tensors(*(r[1] for r in routes), *(r[2] for r in routes))
    targets = [
        *leaves,
        *(leaf for leaf in found if all(leaf is not given for given in leaves)),
    ]
    if not targets:
        return
    nothing = 0 * sum(leaf.sum() for leaf in targets)  # which depends on all of them
    for name, got, expected in routes:
        weight = case.random(*expected.shape)
        losses = ((weight * out).sum() + nothing for out in (got, expected))
        ours_and_oracles = (
            torch.autograd.grad(loss, targets, retain_graph=True) for loss in losses
        )
        for number, (ours, oracle) in enumerate(zip(*ours_and_oracles, strict=True)):
            if number < len(leaves):
                to = "v"
            else:
                to = f"leaf {number} of shape {tuple(targets[number].shape)}"
            expect_close(
                ours, oracle, "gradient", f"the gradient of {name} with respect to {to}"
            )


def _scipy_operator(case: CouplingCase) -> None:
    """S.as_linear_operator(head) is SciPy's view of the same matrix, both ways"""
    if case.coupling.num_nodes == 0:
        return
    dtype = case.coupling.dtype
    vector = torch.randn(case.coupling.num_nodes, generator=case.generator).double()
    for head, matrix in enumerate(case.dense.detach().double()):
        operator = case.coupling.as_linear_operator(head)
        for name, expected in (
            ("matvec", matrix @ vector),
            ("rmatvec", matrix.T @ vector),
        ):
            got = torch.as_tensor(getattr(operator, name)(vector.numpy()))
            expect_close(
                got.to(dtype), expected.to(dtype), "product", f"{name} of head {head}"
            )


def _purity(case: CouplingCase) -> None:
    """a product leaves its input and the global random state alone, and repeats to the bit"""
    v = case.values()
    before = v.clone()
    with expect_rng_untouched("S @ v"):
        first = case.coupling @ v
        second = case.coupling @ v
        _ = case.coupling.degree()
    expect(torch.equal(v, before), "S @ v changed v in place")
    expect(torch.equal(first, second), "two products with the same v differ")


def _expect_writable_products(coupling: Coupling, v: Tensor) -> None:
    expect_writable(lambda: coupling @ v, "S @ v", v)
    expect_writable(lambda: coupling.T @ v, "S.T @ v", v)
    expect_writable(lambda: coupling.both(v, v)[0], "S.both(v, v)[0]", v)
    expect_writable(lambda: coupling.both(v, v)[1], "S.both(v, v)[1]", v)
    expect_writable(lambda: coupling.laplacian(v), "S.laplacian(v)", v)


def _writable(case: CouplingCase) -> None:
    """what S returns can be written to: no entry shares memory with another, with v, or with what S keeps"""
    coupling = case.coupling
    for heads in {1, coupling.heads}:
        _expect_writable_products(coupling, case.values(heads))
    x = case.values(1).squeeze(1)
    expect_writable(lambda: coupling.transformed(x, None), "S.transformed(x, None)", x)
    if coupling.heads == 1:
        expect_writable(lambda: coupling @ x, "S @ x of a state [N, C]", x)
    expect_writable(coupling.degree, "S.degree()")
    expect_writable(coupling.to_dense, "S.to_dense()")
    expect_writable(lambda: coupling.at(case.pairs), "S.at(pairs)")
    if coupling.metric is not None:
        expect_writable(lambda: cast("Tensor", coupling.metric), "S.metric")
    if coupling.nonnegative:
        expect_writable(lambda: coupling.log_at(case.pairs), "S.log_at(pairs)")
        if coupling.symmetric:
            expect_writable(lambda: coupling.majorant(True), "S.majorant(True)")
            expect_writable(lambda: coupling.majorant(False), "S.majorant(False)")
    if isinstance(coupling, PooledCoupling) and coupling.ptr is None:
        v = case.values()
        sums = coupling.pool(v)
        expect_writable(lambda: coupling.pool(v).totals, "S.pool(v)", v)
        expect_writable(
            lambda: coupling.read(sums, v), "S.read(S.pool(v), v)", v, sums.totals
        )


def _autocast(case: CouplingCase) -> None:
    """under autocast a product stays finite, in at least float32, and close"""
    if case.coupling.dtype not in (torch.float32, torch.float64):
        return
    v = case.values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.coupling @ v
    expect_equal(got.dtype, v.dtype, "the dtype of S @ v under autocast")
    expect_close(got, case.coupling @ v, "product", "S @ v under autocast")


COUPLING_LAWS: tuple[Law[CouplingCase], ...] = (
    _form,
    _product,
    _heads_broadcast,
    _transpose,
    _degree,
    _at,
    _log_at,
    _dirichlet,
    _majorant,
    _declared_properties,
    _metric,
    _low_rank_form,
    _scaling,
    _addition,
    _block_diagonal,
    _gradients,
    _pooled_by_blocks,
    _scipy_operator,
    _purity,
    _writable,
    _autocast,
)


def dense_product(dense: Tensor, v: Tensor) -> Tensor:
    """Multiply [H, N, N] by [N, H, D], broadcasting one head."""
    heads = max(dense.shape[0], v.shape[1])
    return torch.einsum(
        "hij,jhd->ihd", dense.expand(heads, -1, -1), v.expand(-1, heads, -1)
    )


def dense_entries(dense: Tensor, pairs: Tensor) -> Tensor:
    return dense[:, pairs[1], pairs[0]].T


def dense_dirichlet(dense: Tensor, x: Tensor) -> Tensor:
    """Return Σ_ij s_ij ‖x_i − x_j‖² per head, by the definition."""
    x = x.unsqueeze(1) if x.dim() == 2 else x
    return (dense * (x[:, None] - x[None, :]).square().sum(-1).permute(2, 0, 1)).sum(
        (1, 2)
    )


def dense_laplacian(dense: Tensor) -> Tensor:
    """Return D − S of every head, D the row sums."""
    return torch.diag_embed(dense.sum(-1)) - dense


def leaf_tensors(*outputs: Tensor) -> list[Tensor]:
    stack: list[Any] = [output.grad_fn for output in outputs]
    seen = {None}
    leaves = list[Tensor]()
    while stack:
        if (node := stack.pop()) not in seen:
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
    return leaves
