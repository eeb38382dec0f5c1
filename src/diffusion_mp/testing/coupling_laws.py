"""The laws that every coupling obeys; the dense matrix of the coupling is the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffusion_mp.checks import Seed, check_function, check_kind, checked
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

Comparison = tuple[str, str, Callable[[], Tensor], Tensor]
"""What is compared, its operation in the table of tolerances, a call of the coupling, the result of the matrix."""


class CouplingCase:
    """A coupling, its dense matrix, and random values for it to act on."""

    def __init__(self, coupling: Coupling, ptr: Tensor | None, seed: int) -> None:
        self.coupling = coupling
        self.ptr = ptr
        self.generator = torch.Generator().manual_seed(seed)

    @cached_property
    def dense(self) -> Tensor:
        return self.coupling.to_dense()

    def random(self, *shape: int) -> Tensor:
        # Drawn in double and rounded, so that all dtypes are tested with one set of
        # numbers.
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.coupling.dtype)

    def values(self, heads: int | None = None) -> Tensor:
        return self.random(self.coupling.num_nodes, heads or self.coupling.heads, 3)

    @cached_property
    def pairs(self) -> Tensor:
        """All pairs (source, target) in random order; the first three pairs come twice."""
        # Some come twice, since the gradients of a repeated entry add up.
        nodes = torch.arange(self.coupling.num_nodes)
        pairs = torch.cartesian_prod(nodes, nodes).T
        order = torch.randperm(pairs.size(1), generator=self.generator)
        pairs = pairs[:, order]
        return torch.cat([pairs, pairs[:, :3]], dim=1)


@checked
def check_coupling(
    coupling: Coupling | Callable[[], Coupling],
    *,
    ptr: Tensor | None = None,
    skip: Mapping[str, str] | None = None,
    seed: Seed = 0,
) -> None:
    """Check a coupling against its own dense matrix: products, gradients, promises and sums with other couplings.

    Use few nodes (N ≤ 30), since the check forms dense matrices, and double precision, in which the tolerances are
    tightest.

    Args:
        coupling: the coupling, or a function that builds it.
        ptr: row boundaries [B + 1] of a batch of B graphs; entries between two graphs must be zero. By default
            ``coupling.ptr``, the boundaries that the coupling itself declares.
        skip: laws to leave out, as {name of the law: why it does not apply}. By default every law is checked.
        seed: seed of the random values; with the default 0 every run checks the same values.

    Raises:
        AssertionError: a law is broken. The message has a sentence for every broken law.

    Examples:
        >>> check_coupling(lambda: UniformCoupling(6, dtype=torch.float64))
    """
    if not isinstance(coupling, Coupling):
        check_function(coupling, "coupling", "that builds a Coupling, or one")
        coupling = coupling()
    check_kind(
        coupling, "coupling", Coupling, "a Coupling, or a function that builds one"
    )
    bounds = coupling.ptr if ptr is None else row_bounds(ptr, coupling.num_nodes)
    case = CouplingCase(coupling, bounds, seed)
    run_laws(type(coupling).__name__, COUPLING_LAWS, case, skip, seed)


def _form(case: CouplingCase) -> None:
    """S says its size, heads, dtype, device, row boundaries and promises, and to_dense is [H, N, N]"""
    coupling = case.coupling
    # First the form: where it is wrong, all other laws would fail for that reason.
    expect_flags(coupling, *PROMISES)
    row_bounds(coupling.ptr, coupling.num_nodes)
    dense = case.dense
    shape = (coupling.heads, coupling.num_nodes, coupling.num_nodes)
    got = (dense.shape, dense.dtype, dense.device)
    expected = (shape, coupling.dtype, coupling.device)
    expect_equal(got, expected, "shape, dtype and device of to_dense()")
    expect(bool(dense.isfinite().all()), "to_dense() is not finite")
    v = case.values()
    expect_equal((coupling @ v).dtype, v.dtype, "the dtype of S @ v")
    # A list without pairs is what an empty graph brings, and an easy one to forget.
    none = coupling.at(case.pairs[:, :0])
    expect_equal(none.shape, (0, coupling.heads), "the shape of S.at(no pairs)")


def dense_product(dense: Tensor, v: Tensor) -> Tensor:
    """Multiply [H, N, N] by [N, H, D]; one head of either meets every head of the other."""
    return (dense @ v.transpose(0, 1)).transpose(0, 1)


def dense_laplacian(dense: Tensor) -> Tensor:
    """Return D − S for every head, where D is the diagonal matrix of the row sums of S."""
    return torch.diag_embed(dense.sum(-1)) - dense


def _methods(
    case: CouplingCase, coupling: Coupling, dense: Tensor, v: Tensor
) -> list[Comparison]:
    """Return a call of every method, and the result of its definition from a matrix [H, N, N]."""
    apart = v[:, None] - v[None, :]
    distances = apart.square().sum(-1).permute(2, 0, 1)
    pairs = case.pairs
    product = dense_product(dense, v)
    turned = dense_product(dense.mT, v)
    laplacian = dense_product(dense_laplacian(dense), v)
    energy = (dense * distances).sum((1, 2))
    # A state [N, C] has one head, which meets every head of S.
    energy_of_one = (dense * distances[:1]).sum((1, 2))
    return [
        (" @ v", "product", lambda: coupling @ v, product),
        (".T @ v", "product", lambda: coupling.T @ v, turned),
        (".both(v, v)[0]", "product", lambda: coupling.both(v, v)[0], product),
        (".both(v, v)[1]", "product", lambda: coupling.both(v, v)[1], turned),
        (".laplacian(v)", "dirichlet", lambda: coupling.laplacian(v), laplacian),
        (".dirichlet(v)", "dirichlet", lambda: coupling.dirichlet(v), energy),
        (
            ".dirichlet(x), x [N, C],",
            "dirichlet",
            lambda: coupling.dirichlet(v[:, 0]),
            energy_of_one,
        ),
        (".degree()", "degree", coupling.degree, dense.sum(-1).T),
        (".at(pairs)", "entries", lambda: coupling.at(pairs), _entries(dense, pairs)),
    ]


def _entries(dense: Tensor, pairs: Tensor) -> Tensor:
    # Columns send and rows receive: exchanged here, every coupling would pass that exchanges them too.
    source, target = pairs
    return dense[:, target, source].T


@torch.no_grad()
def _expect_matrix(
    case: CouplingCase, name: str, coupling: Coupling, dense: Tensor
) -> None:
    """Raise `LawBroken` unless a coupling agrees with a matrix and keeps its promises."""
    # A method may rely on a promise, so a false one is the reason to name.
    expect_promises(name, coupling, dense)
    expect_close(coupling.to_dense(), dense, "entries", f"{name}.to_dense()")
    for method, operation, call, expected in _methods(
        case, coupling, dense, case.values()
    ):
        expect_close(call(), expected, operation, f"{name}{method}")


def _matrix(case: CouplingCase) -> None:
    """products, row sums, entries and energies are those of its matrix, and so is what it promises"""
    _expect_matrix(case, "S", case.coupling, case.dense)


def _heads_broadcast(case: CouplingCase) -> None:
    """one head of values meets every head of S, and one head of S meets every head of values"""
    # Several heads of S take as many heads of values, which the other laws pass.
    heads = 3 if case.coupling.heads == 1 else 1
    v = case.values(heads)
    expected = dense_product(case.dense, v)
    expect_close(case.coupling @ v, expected, "product", f"S @ v for {heads} heads")


def _transpose(case: CouplingCase) -> None:
    """S.T is the transposed matrix: product, degree, entries, promises, and S.T.T is S"""
    coupling = case.coupling
    dense = case.dense.mT
    # Promises too: rows of S.T need not sum to one where those of S do.
    _expect_matrix(case, "S.T", coupling.T, dense)
    expect_close(coupling.T.T.to_dense(), case.dense, "entries", "S.T.T.to_dense()")
    # S.T of a symmetric coupling may be S itself.
    turned = coupling._transpose().to_dense()
    expect_close(turned, dense, "entries", "S._transpose().to_dense()")


def _log_at(case: CouplingCase) -> None:
    """exp(S.log_at(edge_index)) is the entries of a non-negative S, and the gradient at positive ones is that of log"""
    if not case.coupling.nonnegative:
        return
    entries = _entries(case.dense, case.pairs)
    logs = case.coupling.log_at(case.pairs)
    expect_close(logs.exp(), entries, "entries", "exp(S.log_at(pairs))")
    # Where an entry is zero, its logarithm has no derivative.
    positive = (entries > 0).all(1)
    logs = case.coupling.log_at(case.pairs[:, positive])
    _expect_gradients(case, "S.log_at(pairs)", logs, entries[positive].log())


def _majorant(case: CouplingCase) -> None:
    """p = S.majorant(convex) of a symmetric, nonnegative S bounds D − S: 2 diag(p) ⪰ D − S if convex, else diag(p)"""
    if not (case.coupling.symmetric and case.coupling.nonnegative):
        return
    # In double, since eigenvalues near zero decide.
    laplacian = dense_laplacian(case.dense.detach().double())
    for convex, factor in ((True, 2.0), (False, 1.0)):
        bound = case.coupling.majorant(convex).detach().double().T
        bound = factor * torch.diag_embed(bound)
        name = f"the bound of S.majorant({convex}) less the Laplacian"
        _expect_semidefinite(bound - laplacian, name, case.coupling.dtype, bound)


def expect_promises(name: str, coupling: Coupling, dense: Tensor) -> None:
    dense = dense.detach()
    if coupling.symmetric:
        what = f"{name} is declared symmetric, but s_ij against s_ji"
        expect_close(dense, dense.mT, "degree", what)
    if coupling.row_stochastic:  # a node without senders has a zero row
        rows = dense.sum(-1)
        expected = (dense != 0).any(-1).to(rows.dtype)
        what = f"{name} is declared row_stochastic, but a row sum"
        expect_close(rows, expected, "degree", what)
    if coupling.nonnegative:
        negative = int((dense < 0).sum())
        what = f"{name} is declared nonnegative, but has {negative} entries below 0"
        expect(negative == 0, what)
    if coupling.positive_semidefinite:
        what = f"{name}, declared positive_semidefinite,"
        expect(coupling.symmetric, f"{what} is not declared symmetric")
        _expect_semidefinite(dense.double(), what, coupling.dtype)


def _expect_semidefinite(
    matrix: Tensor, name: str, dtype: torch.dtype, scale: Tensor | None = None
) -> None:
    """Raise `LawBroken` for eigenvalues < 0, up to rounding in ``dtype`` of entries as large as in ``scale``."""
    if matrix.numel():
        values = torch.linalg.eigvalsh(matrix)
        rtol, atol = tolerance("degree", dtype)
        low = float(values.min())
        # Rounding grows with what was subtracted, which may be far larger than what is left.
        largest = float((values.abs() if scale is None else scale).max())
        what = f"{name} has the eigenvalue {low:.6g}, expected ≥ 0"
        expect(low >= -atol - rtol * largest, what)


def _metric(case: CouplingCase) -> None:
    """where S knows a metric d̄ [N, H], d̄ is positive and diag(d̄) S symmetric; S is reversible where there is one"""
    coupling = case.coupling
    metric = coupling.metric
    expect_equal(coupling.reversible, metric is not None, "reversible")
    if metric is None:
        return
    shape = (coupling.num_nodes, coupling.heads)
    expect_equal(metric.shape, shape, "the shape of the metric")
    expect(bool((metric > 0).all()), "an entry of the metric is not positive")
    # A metric is one up to a factor: divided by its mean, flows are as large as
    # entries.
    weight = (metric / metric.mean(0)).T.unsqueeze(2)
    flows = (weight * case.dense.detach().double()).to(coupling.dtype)
    what = "diag(metric) S against its transpose"
    expect_close(flows, flows.mT, "degree", what)


def _low_rank_form(case: CouplingCase) -> None:
    """where S promises to be low-rank its form is S, diag(e) + U Kᵀ within every graph, with its gradients"""
    if not case.coupling.low_rank:
        return
    form = case.coupling.low_rank_form(case.coupling.dtype)
    assert form is not None, "S promises to be low-rank, but has no low_rank_form"
    # Its entries come from a coupling that has tests of its own.
    left, right = torch.broadcast_tensors(form.left, form.right)
    dense = LowRankCoupling(left, right, form.ptr).to_dense()
    if form.diagonal is not None:
        dense = dense + torch.diag_embed(form.diagonal.t())
    dense = dense.expand_as(case.dense)
    expect_close(dense, case.dense, "entries", "the low-rank form")
    _expect_gradients(case, "S.low_rank_form", dense, case.dense)


def _algebra(case: CouplingCase) -> None:
    """a * S and S + R have the entries of both, keep their promises, and a convex combination promises what S does"""
    coupling = case.coupling
    dense = case.dense
    total = dense + dense.mT
    # Factors that add up to one, and are exact in every dtype.
    convex = SumCoupling([0.25 * coupling, 0.75 * coupling])
    both_ways = coupling + coupling.T
    _expect_matrix(case, "(S + S.T)", both_ways, total)
    _expect_matrix(case, "(S + S.T).T", both_ways.T, total)
    _expect_matrix(case, "(S + ½ S)", coupling + 0.5 * coupling, 1.5 * dense)
    _expect_matrix(case, "(¼ S + ¾ S)", convex, dense)
    tripled = SumCoupling([3.0 * coupling, -1.0 * coupling])
    _expect_matrix(case, "(3 S − S)", tripled, 2.0 * dense)
    # A number, a 0-dimensional tensor and one number per head.
    for a in (0.25, -1.0, case.random(), case.random(coupling.heads)):
        scale = torch.as_tensor(a).reshape(-1, 1, 1)
        name = f"(a * S) for a = {a}, that"
        _expect_matrix(case, name, a * coupling, scale * dense)
    # A lost promise makes no result wrong, and closes the way to solvers and certificates.
    for promise in PROMISES:
        kept = getattr(convex, promise) or not getattr(coupling, promise)
        expect(kept, f"S is {promise}, and ¼ S + ¾ S does not promise it")


def _block_diagonal(case: CouplingCase) -> None:
    """a graph of a ragged batch never meets its batch-mates: entries are exactly zero, and NaN does not travel"""
    if case.ptr is None or case.ptr.numel() < 3:
        return
    graphs = torch.arange(case.ptr.numel() - 1)
    member = torch.repeat_interleave(graphs, case.ptr.diff())
    apart = member[:, None] != member[None, :]
    leak = case.dense.detach()[:, apart]
    expect(not leak.any(), "entries between different graphs are not zero")
    # NaN, since zero times it is NaN: a mask by multiplication would pass otherwise.
    v = case.values()
    kept = member != member[-1]
    poisoned = torch.where(kept[:, None, None], v, torch.nan)
    got = (case.coupling @ poisoned)[kept]
    what = "S @ v beside NaN rows"
    expect_close(got, (case.coupling @ v)[kept], "rearranged", what)


def _gradients(case: CouplingCase) -> None:
    """gradients of every method are those of the dense matrix"""
    v = case.values().requires_grad_()
    for method, _, call, expected in _methods(case, case.coupling, case.dense, v):
        _expect_gradients(case, f"S{method}", call(), expected, v)


def _pooled_by_blocks(case: CouplingCase) -> None:
    """sums over two blocks of the senders, merged, give each block of receivers its rows of S @ v, and all gradients"""
    coupling = case.coupling
    if not isinstance(coupling, PooledCoupling) or coupling.ptr is not None:
        return
    # Blocks of different sizes, so that an offset that is off by a block shows.
    v = case.values().requires_grad_()
    cut = coupling.num_nodes // 3
    halves = (slice(0, cut), slice(cut, None))
    parts = [(coupling.block(rows), v[rows]) for rows in halves]
    sums = merged([block.pool(values) for block, values in parts])
    got = torch.cat([block.read(sums, values) for block, values in parts])
    expected = dense_product(case.dense, v)
    expect_close(got, expected, "product", "S @ v by blocks")
    _expect_gradients(case, "S @ v by blocks", got, expected, v)


def _expect_gradients(
    case: CouplingCase, name: str, got: Tensor, expected: Tensor, *inputs: Tensor
) -> None:
    """Raise `LawBroken` unless result and reference have equal gradients in every leaf on which either depends."""
    leaves = [*dict.fromkeys((*inputs, *_leaves(got, expected)))]
    if not leaves:
        return
    # A random weight: a plain sum would not tell errors of opposite signs.
    weight = case.random(*expected.shape)
    # Where one of the two does not depend on a leaf, its gradient is zero.
    nothing = 0 * sum(leaf.sum() for leaf in leaves)
    ours, reference = (
        torch.autograd.grad((weight * out).sum() + nothing, leaves, retain_graph=True)
        for out in (got, expected)
    )
    for leaf, gradient, oracle in zip(leaves, ours, reference, strict=True):
        what = f"the gradient of {name} in a leaf of shape {tuple(leaf.shape)}"
        expect_close(gradient, oracle, "gradient", what)


def _leaves(*outputs: Tensor) -> list[Tensor]:
    """Return the leaves of the autograd graph."""
    stack: list[Any] = [output.grad_fn for output in outputs]
    visited = {None}
    leaves = list[Tensor]()
    while stack:
        # Without recursion: a graph of many steps is deeper than Python's stack.
        if (node := stack.pop()) not in visited:
            visited.add(node)
            stack.extend(following for following, _ in node.next_functions)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
    return leaves


def _scipy_operator(case: CouplingCase) -> None:
    """S.as_linear_operator(head) is SciPy's view of the same matrix, both ways"""
    if case.coupling.num_nodes == 0:
        return
    dtype = case.coupling.dtype
    columns = case.values(1).squeeze(1).double()
    for head, matrix in enumerate(case.dense.detach().double()):
        operator = case.coupling.as_linear_operator(head)
        # SciPy's solvers call the adjoint, which no product of ours tests.
        for view, dense in ((operator, matrix), (operator.H, matrix.T)):
            got = torch.as_tensor(view @ columns.numpy()).to(dtype)
            what = f"{view} of head {head}"
            expect_close(got, (dense @ columns).to(dtype), "product", what)


def _purity(case: CouplingCase) -> None:
    """a product leaves its input and the global random state alone, and repeats to the bit"""
    v = case.values()
    before = v.clone()
    with expect_rng_untouched("S @ v"):
        first = case.coupling @ v
        second = case.coupling @ v
        case.coupling.degree()
    expect(torch.equal(v, before), "S @ v changed v in place")
    expect(torch.equal(first, second), "two products with the same v differ")


def _writable(case: CouplingCase) -> None:
    """what S returns can be written to: no entry shares memory with another, with v, or with what S keeps"""
    coupling = case.coupling
    v = case.values(1)
    for values in (case.values(), v):
        for method, _, call, _ in _methods(case, coupling, case.dense, values):
            expect_writable(call, f"S{method}", values)
    calls: dict[str, Callable[[], Any]] = {
        "S.transformed(x, None)": lambda: coupling.transformed(v.squeeze(1), None),
        "S.to_dense()": coupling.to_dense,
    }
    if coupling.metric is not None:
        calls["S.metric"] = lambda: coupling.metric
    if coupling.nonnegative:
        calls["S.log_at(pairs)"] = lambda: coupling.log_at(case.pairs)
        if coupling.symmetric:
            calls["S.majorant(True)"] = lambda: coupling.majorant(True)
            calls["S.majorant(False)"] = lambda: coupling.majorant(False)
    if isinstance(coupling, PooledCoupling) and coupling.ptr is None:
        sums = coupling.pool(v)
        calls["S.pool(v)"] = lambda: coupling.pool(v).totals
        # Its sums are one more tensor that a result must not share.
        expect_writable(
            lambda: coupling.read(sums, v), "S.read(sums, v)", v, sums.totals
        )
    for name, call in calls.items():
        expect_writable(call, name, v)


def _autocast(case: CouplingCase) -> None:
    """under autocast a product stays finite, in at least float32, and close"""
    if case.coupling.dtype not in (torch.float32, torch.float64):
        return
    v = case.values()
    # Autocast would round the sums over all nodes, not only the arguments of a product.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.coupling @ v
    expect_equal(got.dtype, v.dtype, "the dtype of S @ v under autocast")
    expect_close(got, case.coupling @ v, "product", "S @ v under autocast")


COUPLING_LAWS: tuple[Law[CouplingCase], ...] = (
    _form,
    _matrix,
    _heads_broadcast,
    _transpose,
    _log_at,
    _majorant,
    _metric,
    _low_rank_form,
    _algebra,
    _block_diagonal,
    _gradients,
    _pooled_by_blocks,
    _scipy_operator,
    _purity,
    _writable,
    _autocast,
)
