"""The conformance suites name the law that a broken class breaks, and pass a user's sound one in three lines."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn

from diffusion_mp.couplings import (
    Coupling,
    LinearAttentionCoupling,
    LowRankCoupling,
    PairwiseCoupling,
    Sums,
    UniformCoupling,
)
from diffusion_mp.diffusivities import (
    AdjacencyDiffusivity,
    Diffusivity,
    ScaledDiffusivity,
)
from diffusion_mp.energies import SourceTerm
from diffusion_mp.graph import Graph
from diffusion_mp.layers import DiffusionConv, RowAttention
from diffusion_mp.testing import (
    check_coupling,
    check_diffusivity,
    check_energy_term,
    check_layer,
    check_update,
    order_of_convergence,
    path_problem,
    tolerance,
)
from diffusion_mp.testing.coupling_laws import COUPLING_LAWS
from diffusion_mp.testing.diffusivity_laws import DIFFUSIVITY_LAWS
from diffusion_mp.testing.laws import Law, LawBroken, by_name, expect_writable
from diffusion_mp.testing.layer_laws import (
    GRAPH_LAYER_LAWS,
    LAYER_LAWS,
    UPDATE_LAWS,
)
from diffusion_mp.testing.module_laws import LIBRARY_LAWS, MODULE_LAWS
from diffusion_mp.updates import ExplicitEuler, LaplacianUpdate, StateUpdate
from helpers import refuses


def matrix() -> Tensor:
    return torch.rand(
        6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


class Dense(Coupling):
    """A matrix as a coupling."""

    parts = ("matrix",)

    def __init__(self, matrix: Tensor, **promises: bool) -> None:
        super().__init__(len(matrix), 1, matrix)
        self.matrix = matrix
        for name, promise in promises.items():
            setattr(self, name, promise)

    def _product(self, v: Tensor) -> Tensor:
        return torch.einsum("ij,jhd->ihd", self.matrix, v)

    def _transpose(self) -> Coupling:
        return type(self)(self.matrix.T)

    def degree(self) -> Tensor:
        return self.matrix.sum(1, keepdim=True)


def test_a_sound_coupling_passes() -> None:
    check_coupling(Dense(matrix().requires_grad_()))


Body = dict[str, Any]
product = Dense._product
SYMMETRIC: Body = {
    "__init__": lambda self, matrix: Dense.__init__(
        self, matrix + matrix.T, symmetric=True, nonnegative=True
    ),
    "_transpose": lambda self: self,
}


def rounded_by_autocast(x: Tensor) -> Tensor:
    return x.bfloat16().to(x) if torch.is_autocast_enabled("cpu") else x


# The law that is broken, and by what.
COUPLINGS: list[tuple[str, Body]] = [
    ("transpose", {"_transpose": lambda self: self}),
    ("matrix", {"degree": lambda self: self.matrix.sum(0).unsqueeze(1)}),
    # What repeats, but changes v; and what does not repeat.
    ("purity", {"_product": lambda self, v: product(self, v.detach().abs_())}),
    (
        "purity",
        {"_product": lambda self, v: product(self, v + 1e-3 * torch.rand_like(v))},
    ),
    ("purity", {"degree": lambda self: Dense.degree(self) + 0 * torch.rand(1)}),
    ("gradients", {"degree": lambda self: Dense.degree(self).detach()}),
    (
        "writable",
        {"_product": lambda self, v: product(self, v).mean(0, True).expand_as(v)},
    ),
    ("writable", {"degree": lambda self: Dense.degree(self)[:1].expand(6, 1)}),
    ("writable", {"to_dense": lambda self: self.matrix.unsqueeze(0)}),
    ("writable", {"_product": lambda self, v: v[:, :, :]}),
    ("form", {"nonnegative": 1}),
    ("heads broadcast", {"_product": lambda self, v: product(self, v[:, :1] + 0 * v)}),
    ("log at", {"nonnegative": True, "log_at": lambda self, pairs: self.at(pairs)}),
    ("majorant", {**SYMMETRIC, "majorant": lambda self, _: 0.1 * self.degree()}),
    ("metric", {"_metric": property(Dense.degree)}),
    (
        "low rank form",
        {
            "low_rank": True,
            "low_rank_form": lambda self, dtype: UniformCoupling(
                6, dtype=dtype
            ).low_rank_form(dtype),
        },
    ),
    (
        "scipy operator",
        {
            "as_linear_operator": lambda self, head: aslinearoperator(
                2 * self.matrix.detach().numpy()
            )
        },
    ),
    ("autocast", {"_product": lambda self, v: product(self, rounded_by_autocast(v))}),
    # A factor that is a number is right, and one that is a tensor is not.
    (
        "algebra",
        {
            "__rmul__": lambda self, a: Coupling.__rmul__(
                self, 2 * a if isinstance(a, Tensor) else a
            )
        },
    ),
]


@pytest.mark.parametrize(("law", "body"), COUPLINGS)
def test_broken_couplings_are_named(law: str, body: Body) -> None:
    with pytest.raises(
        AssertionError, match=rf"Broken breaks the law '{law}' \(\w.*\): .*"
    ) as caught:
        check_coupling(type("Broken", (Dense,), body)(matrix().requires_grad_()))
    # The place where the first law broke is in the traceback.
    assert str(caught.value.__cause__).split(",")[0] in str(caught.value)


def names(laws: Sequence[Law[Any]]) -> set[str]:
    return set(by_name(laws))


def test_laws_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="laws must have different names"):
        by_name([*COUPLING_LAWS, COUPLING_LAWS[0]])


def test_every_law_of_couplings_has_been_broken() -> None:
    # These two need couplings of other kinds, which have tests of their own.
    others = {"block diagonal", "pooled by blocks"}
    assert {law for law, _ in COUPLINGS} == names(COUPLING_LAWS) - others


def test_two_entries_that_share_memory_are_found() -> None:
    with pytest.raises(LawBroken, match="entries of it share memory"):
        expect_writable(lambda: torch.ones(1).expand(2), "it")
    expect_writable(lambda: torch.ones(1).expand(1, 1), "it")


@pytest.mark.parametrize("promise", ["symmetric", "row_stochastic", "nonnegative"])
def test_false_promises_are_found(promise: str) -> None:
    with pytest.raises(
        AssertionError,
        match=f"Dense breaks the law 'matrix'.*declared {promise}",
    ):
        check_coupling(Dense(-matrix(), **{promise: True}))


def test_couplings_that_leak_between_graphs_are_found() -> None:
    with pytest.raises(
        AssertionError,
        match=r"block diagonal.*entries between different graphs are not zero",
    ):
        check_coupling(Dense(matrix()), ptr=torch.tensor([0, 2, 6]))


class PoolsMeans(LowRankCoupling):
    """Right as long as all rows are at hand: means do not merge."""

    def _pool(self, v: Tensor) -> Sums:
        return Sums(super()._pool(v).totals / self.num_nodes)

    def _read(self, sums: Sums, v: Tensor) -> Tensor:
        return self.num_nodes * super()._read(sums, v)


def test_sums_that_do_not_merge_are_found() -> None:
    query = matrix().unsqueeze(1)
    check_coupling(LowRankCoupling(query, query, positive_semidefinite=True))
    with pytest.raises(
        AssertionError,
        match=r"PoolsMeans breaks the law 'pooled by blocks'.*S @ v by blocks at",
    ):
        check_coupling(PoolsMeans(query, query))


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_checks_take_gradients_wherever_they_are_called(switch: Any) -> None:
    coupling = Dense(matrix().requires_grad_())
    with switch():
        check_coupling(coupling)
        check_update(Halfway)
        check_energy_term(SourceTerm(torch.ones(6, 4)), torch.ones(6, 1, 4), Graph(6))


class Uncut(SourceTerm):
    """Keeps the source of all rows when some are asked for."""

    def block(self, rows: slice) -> SourceTerm:
        return SourceTerm(self.source[: rows.stop - rows.start])


class Centred(SourceTerm):
    """Reads the mean of all rows, and declares the contrary."""

    def value(self, z: Any, graph: Graph) -> Any:
        return super().value(z - z.mean(0), graph)

    def half_gradient(self, z: Any, graph: Graph) -> Any:
        half = super().half_gradient(z - z.mean(0), graph)
        return half - half.mean(0)


class SignedInBlocks(SourceTerm):
    """Has another gradient for some rows, and the value of all."""

    def block(self, rows: slice) -> SourceTerm:
        block = super().block(rows)
        block.half_gradient = lambda z, graph: (
            -SourceTerm.half_gradient(block, z, graph)
        )
        return block


@pytest.mark.parametrize("kind", [Uncut, Centred, SignedInBlocks])
def test_a_term_that_is_no_sum_over_rows_is_found(kind: type[SourceTerm]) -> None:
    x = torch.randn(7, 4, dtype=torch.float64)
    check_energy_term(SourceTerm(x), 2 * x.unsqueeze(1), Graph(7))
    with pytest.raises(AssertionError, match=r'declares depends_on = "rows", but'):
        check_energy_term(kind(x), 2 * x.unsqueeze(1), Graph(7))


def test_a_term_of_a_module_is_checked_without_gradients() -> None:
    graph = Graph(6, torch.arange(12).view(2, 6) % 6)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    module = RowAttention(4, 1).double()
    term = module.weight() * module(x.exp(), graph)
    check_energy_term(term, x.unsqueeze(1), graph)
    assert all(leaf.grad is None for leaf in (x, *module.parameters()))


PATH = path_problem(5)
test_refusals = refuses(
    (
        lambda: check_coupling(Dense(matrix()), skip={"prodct": "misspelt"}),
        "skip names the laws",
    ),
    (
        lambda: check_coupling(Dense(matrix()), skip=["purity"]),
        TypeError,
        "skip must be a mapping",
    ),
    (
        lambda: check_coupling(Dense(matrix()), ptr=torch.tensor([0, 7])),
        "ptr must rise",
    ),
    (
        lambda: check_diffusivity(nn.Linear(3, 3)),
        TypeError,
        "a Diffusivity, got Linear",
    ),
    (lambda: check_diffusivity(Cosine, channels=0), "channels must be at least 1"),
    # A buffer of int64 would not hold it.
    (lambda: check_diffusivity(Cosine, seed=1 << 63), "seed must"),
    (lambda: check_update(nn.Linear(3, 3)), TypeError, "a StateUpdate, got Linear"),
    (lambda: check_layer(nn.ReLU()), "in_channels"),
    (lambda: check_layer(BatchNormed), TypeError, "a function without arguments"),
    (
        lambda: check_layer(normed, in_channels=2.5),
        TypeError,
        "in_channels must be an integer",
    ),
    (lambda: check_layer(normed, extra={}), TypeError, "extra must be a function"),
    (lambda: tolerance("prodct", torch.float64), KeyError, "prodct"),
    (lambda: tolerance("product", torch.int64), KeyError, "torch.int64"),
    (lambda: path_problem(1), "num_nodes must be at least 2"),
    (lambda: path_problem(3, "mixed"), "form"),
    (lambda: order_of_convergence(ExplicitEuler, PATH, count=0), "count"),
    (lambda: order_of_convergence(None, PATH), TypeError, "step must be a function"),
    error=ValueError,
)


class Cosine(Diffusivity):
    """1 + cosine similarity after a learned scaling."""

    row_stochastic = True

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.scale = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def features(self, x: Tensor) -> Tensor:
        unit = nn.functional.normalize(x * self.scale, dim=1)
        return torch.cat([unit, torch.ones_like(unit[:, :1])], dim=1).unsqueeze(1)

    def couple(self, x: Tensor, graph: Graph) -> Coupling:
        q = self.features(x)
        return LinearAttentionCoupling(
            q, q, graph.segments, nonnegative=True, mutual=True
        )


class ForgetsToReset(Cosine):
    def reset_parameters(self) -> None:
        if not hasattr(self, "done"):
            super().reset_parameters()
        self.done = True


def test_a_sound_diffusivity_passes() -> None:
    check_diffusivity(Cosine)
    check_diffusivity(Cosine(5))


def without_batch(self: Cosine, x: Tensor, graph: Graph) -> Coupling:
    return LinearAttentionCoupling(
        self.features(x), self.features(x), nonnegative=True, mutual=True
    )


def by_count(self: Cosine, x: Tensor, graph: Graph) -> Coupling:
    """Row-normalised only up to the number of nodes."""
    q = self.features(x)
    return (1.0 / len(x)) * LowRankCoupling(
        q, q, graph.segments, nonnegative=True, positive_semidefinite=True
    )


def by_position(self: Cosine, x: Tensor) -> Tensor:
    return Cosine.features(self, x + torch.arange(len(x), dtype=x.dtype).unsqueeze(1))


MixesBatchMates = type("MixesBatchMates", (Cosine,), {"couple": without_batch})
CountsNodes = type("CountsNodes", (Cosine,), {"couple": by_count})
ReadsPositions = type("ReadsPositions", (Cosine,), {"features": by_position})
in_training = {
    "features": lambda self, x: Cosine.features(self, 2 * x + 1 if self.training else x)
}
DropsInTraining = type("DropsInTraining", (Cosine,), in_training)


def sharpened_by_count(self: Cosine, x: Tensor, graph: Graph) -> Coupling:
    q = self.features(x)
    return PairwiseCoupling(len(x) * q, q, graph.segments)


def forward_with_edges(self: Cosine, x: Tensor, graph: Graph | None = None) -> Coupling:
    if graph is None:
        raise ValueError("something is missing")
    return Cosine.forward(self, x, graph)


def wrong_degree(self: Cosine, x: Tensor, graph: Graph) -> Coupling:
    body = {"degree": lambda self: 2 * Dense.degree(self)}
    q = self.features(x).squeeze(1)
    return type("Broken", (Dense,), body)(q @ q.T)


def wrong_alone(self: Cosine, x: Tensor, graph: Graph) -> Coupling:
    return (wrong_degree if len(x) == 1 else Cosine.couple)(self, 2 * x, graph)


SharpenedByCount = type("SharpenedByCount", (Cosine,), {"couple": sharpened_by_count})
MissesSomething = type("MissesSomething", (Cosine,), {"forward": forward_with_edges})
MakesBrokenCouplings = type(
    "MakesBrokenCouplings", (Cosine,), {"couple": wrong_degree, "row_stochastic": False}
)
BreaksAlone = type(
    "BreaksAlone", (Cosine,), {"couple": wrong_alone, "row_stochastic": False}
)
DeclaresANumber = type("DeclaresANumber", (Cosine,), {"positional": 0})
ClaimsNothing = type("ClaimsNothing", (Cosine,), {"depends_on": "nothing"})
DIFFUSIVITIES = [
    (ClaimsNothing, "dependence"),
    (MixesBatchMates, "batching"),
    (MixesBatchMates, "poisoned batch mate"),
    (ReadsPositions, "permutation"),
    (ForgetsToReset, "reset parameters"),
    (DropsInTraining, "same in training"),
    (CountsNodes, "promises"),
    (DeclaresANumber, "declarations"),
    (MakesBrokenCouplings, "coupling laws"),
    (BreaksAlone, "coupling laws of isolated nodes"),
    (MissesSomething, "needs graph"),
    (SharpenedByCount, "duplicated nodes"),
]


@pytest.mark.parametrize(("kind", "law"), DIFFUSIVITIES)
def test_broken_diffusivities_are_named(kind: type[Cosine], law: str) -> None:
    with pytest.raises(
        AssertionError, match=rf"{kind.__name__} breaks the law '{law}'"
    ):
        check_diffusivity(kind)


def test_every_law_of_diffusivities_has_been_broken() -> None:
    # Those of modules are broken by layers below, and the algebra by the next test.
    own = names(DIFFUSIVITY_LAWS) - names([*MODULE_LAWS, *LIBRARY_LAWS])
    assert own - {law for _, law in DIFFUSIVITIES} == {"algebra"}


class Undemanding(ScaledDiffusivity):
    def declare(self) -> None:
        super().declare()
        self.needs_graph = False


def test_multiples_need_what_the_diffusivity_needs() -> None:
    times = {"__rmul__": lambda self, a: Undemanding(a, self)}
    with pytest.raises(AssertionError, match=r"'algebra'.*needs_graph of ½ D"):
        check_diffusivity(type("Times", (AdjacencyDiffusivity,), times))


class Layer(DiffusionConv):
    """A sound layer; a broken one below is made of it by other methods."""

    def __init__(self) -> None:
        super().__init__(4, 3, AdjacencyDiffusivity("sum"))


def wrapped(change: Callable[..., Any]) -> Body:
    """Return a forward pass that changes the result, given what the layer was called with."""

    def forward(  # type: ignore[no-untyped-def]
        self: Layer, x, edge_index=None, edge_weight=None, batch=None, **options
    ) -> Any:
        inputs = x, edge_index, edge_weight, batch
        return change(Layer.forward(self, *inputs, **options), *inputs, **options)

    return {"forward": forward}


def on_output(change: Callable[[Tensor], Tensor]) -> Body:
    return {"output": lambda self, out, x: change(out)}


def shifted(self: Layer) -> None:
    Layer.__init__(self)
    self.shift = torch.rand((), dtype=torch.float64)


def writes_to_the_state(out: Tensor, x: Tensor, *_: Any) -> Tensor:
    x.detach().mul_(1.5)
    return out


def last_result(self: Layer, x: Tensor, *inputs: Any, **named: Any) -> Any:
    """Keep the last result for an equal state, and return what is kept."""
    last = getattr(self, "last", None)
    if last is None or not torch.equal(last[0], x):
        self.last = last = x, Layer.forward(self, x, *inputs, **named)
    return last[1]


def per_neighbour(out: Tensor, x: Tensor, edges: Any, *_: Any) -> Tensor:
    return out / edges[1].bincount(minlength=len(x)).unsqueeze(1)


def per_node_of_the_smallest_graph(
    out: Tensor, x: Tensor, edges: Any, weight: Any, batch: Tensor | None
) -> Tensor:
    return out if batch is None else out / batch.bincount().min()


def with_a_false_promise(out: Any, *_: Any, return_coupling: bool = False) -> Any:
    if return_coupling:
        out[1].symmetric = True
    return out


def branching(out: Tensor) -> Tensor:
    return out + 1 if out.sum() > 0 else out


class WrongTwice(torch.autograd.Function):
    """x², whose gradient is right, but does not depend on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0].detach() * grad


LAYERS: list[tuple[str, Body]] = [
    ("output", on_output(lambda out: out.float())),
    ("output", on_output(lambda out: out / 0)),
    (
        "unit weights",
        wrapped(lambda out, x, edges, weight, _: out * (1 + (weight is None))),
    ),
    ("saved", {"__init__": shifted, "output": lambda self, out, x: out + self.shift}),
    ("purity", wrapped(writes_to_the_state)),
    ("purity", on_output(lambda out: out + torch.rand(1))),
    ("writable", {"forward": last_result}),
    (
        "permutation",
        on_output(lambda out: out + torch.arange(3.0 * len(out)).view(-1, 3)),
    ),
    (
        "order of edges",
        wrapped(lambda out, x, edges, *_: out + edges[0, 0]),
    ),
    ("batching", on_output(lambda out: out - out.mean(0))),
    ("poisoned batch mate", on_output(lambda out: out + 0 * out.sum(0))),
    ("single node", on_output(lambda out: out / (out - out.mean(0)).norm())),
    ("isolated nodes", wrapped(per_neighbour)),
    ("empty graph", wrapped(per_node_of_the_smallest_graph)),
    ("no nodes", on_output(lambda out: out + 0 * out.amax(0))),
    ("first derivatives", on_output(lambda out: out * out.detach())),
    ("second derivatives", on_output(WrongTwice.apply)),
    ("compile", on_output(branching)),
    ("half precision", on_output(lambda out: out + sum(out.abs()))),
    (
        "autocast",
        on_output(lambda out: out * (1 + torch.is_autocast_enabled("cpu"))),
    ),
    ("reset parameters", {"reset_parameters": lambda self: None}),
    ("readable", {"__repr__": lambda self: "a layer"}),
    (
        "graph in place of edges",
        wrapped(lambda out, x, edges, *_, **__: out + isinstance(edges, Graph)),
    ),
    (
        "graph in place of edges",
        wrapped(
            lambda out, x, edges, *_, **__: (
                out + (isinstance(edges, Tensor) and edges.layout is torch.sparse_csr)
            )
        ),
    ),
    ("returned coupling", wrapped(with_a_false_promise)),
    (
        "returned coupling",
        wrapped(
            lambda out, *_, return_coupling=False: (
                (out[0] + 1, out[1]) if return_coupling else out
            )
        ),
    ),
]


def test_a_sound_layer_passes() -> None:
    check_layer(Layer)


@pytest.mark.parametrize(("law", "body"), LAYERS)
def test_broken_layers_are_named(law: str, body: Body) -> None:
    others = names([*LAYER_LAWS, *GRAPH_LAYER_LAWS]) - {law}
    with pytest.raises(AssertionError, match=rf"Broken breaks the law '{law}'"):
        check_layer(
            type("Broken", (Layer,), body),
            skip=dict.fromkeys(others, "not this one"),
            compile=True,
        )


def test_a_result_that_a_layer_keeps_is_named() -> None:
    remembers = type("Remembers", (Layer,), {"forward": last_result})
    with pytest.raises(
        AssertionError,
        match=r"Remembers breaks the law 'writable'.*what the next call returns",
    ):
        check_layer(remembers)


def test_every_law_of_layers_has_been_broken() -> None:
    assert {law for law, _ in LAYERS} == names([*LAYER_LAWS, *GRAPH_LAYER_LAWS])


class BatchNormed(DiffusionConv):
    def output(self, out: Tensor, x: Tensor) -> Tensor:
        return out - out.mean(0)


def normed() -> BatchNormed:
    return BatchNormed(4, 3, Cosine())


class Halfway(StateUpdate):
    """x′ = ½ (x + S v), the sound one that the broken ones below are made of."""

    def step(self, x, coupling, values, source=None):  # type: ignore[no-untyped-def]
        return torch.lerp(self.kept(x), coupling.matmul(values), 0.5)

    def kept(self, x: Tensor) -> Tensor:
        return x


class AcceptsAnything(Halfway):
    takes_source = False

    def forward(self, x, coupling, *_, **__):  # type: ignore[no-untyped-def]
        heads = x.unflatten(1, (coupling.heads, -1))
        return self.step(heads, coupling, heads).flatten(1)


class ForgetsItsGain(Halfway):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def kept(self, x: Tensor) -> Tensor:
        return self.gain * x


class Leaks(LaplacianUpdate):
    def step(self, x, coupling, values, source=None):  # type: ignore[no-untyped-def]
        return 0.9 * values


class IgnoresTheStateBefore(Halfway):
    takes_previous = True

    def step(self, x, coupling, values, source=None, *, previous=None):  # type: ignore[no-untyped-def,override]
        return super().step(x, coupling, values, source)


def test_a_sound_update_passes() -> None:
    check_update(Halfway)
    check_update(Halfway(), channels=3)


UPDATES = [
    (
        type("LooksAtAllGraphs", (Halfway,), {"kept": lambda self, x: x - x.mean(0)}),
        "batching",
    ),
    (AcceptsAnything, "refusals"),
    (ForgetsItsGain, "reset parameters"),
    (type("Writes", (Halfway,), {"kept": lambda self, x: x.mul_(1.001)}), "purity"),
    (Leaks, "constants"),
    (type("CountsHeads", (Halfway,), {"kept": lambda self, x: x * x.size(1)}), "heads"),
    (IgnoresTheStateBefore, "previous"),
    (
        type("ReturnsTheState", (Halfway,), {"step": lambda self, x, *_, **__: x}),
        "writable",
    ),
    (
        type("RoundsTheState", (Halfway,), {"kept": lambda self, x: x.float()}),
        "shapes",
    ),
]


@pytest.mark.parametrize(("kind", "law"), UPDATES)
def test_broken_updates_are_named(kind: type[StateUpdate], law: str) -> None:
    with pytest.raises(
        AssertionError, match=rf"{kind.__name__} breaks the law '{law}'"
    ):
        check_update(kind)


def test_every_law_of_updates_has_been_broken() -> None:
    own = names(UPDATE_LAWS) - names([*MODULE_LAWS, *LIBRARY_LAWS])
    assert own <= {law for _, law in UPDATES}


def test_a_broken_law_says_how_to_leave_it_out() -> None:
    with pytest.raises(
        AssertionError,
        match=r"left out with a reason: skip=\{'reset parameters': 'why'\}",
    ) as caught:
        check_diffusivity(ForgetsToReset)
    assert "\n" in str(caught.value)
    check_diffusivity(ForgetsToReset, skip={"reset parameters": "it is drawn once"})
    # The laws of the couplings, which nobody can skip one by one.
    with pytest.raises(AssertionError) as nested:
        check_diffusivity(CountsNodes)
    assert str(nested.value).count("is left out with a reason") == 1
