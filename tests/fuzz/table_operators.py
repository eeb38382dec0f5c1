"""Strategies of graphs, couplings, diffusivities and updates."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
from dataclasses import replace
from functools import partial
from typing import Any

from diffusion_mp.diffusivities import SparseFlowDiffusivity
from diffusion_mp.diffusivities.all_pair import PenaltyDiffusivity, QueryKeyDiffusivity
from diffusion_mp.diffusivities.fixed import AdjacencyDiffusivity
from diffusion_mp.energies.constraints import CONSTRAINTS
from diffusion_mp.updates.implicit import SolvedUpdate

from .arguments import *
from .program import Draw, Strategy
from .signatures import (
    address,
    arguments,
    calls,
    construct,
    numbers,
    parameters,
    texts,
)
from .table_layers import alpha


def node_count(d: Draw, *, beyond_memory: bool = False) -> Arg:
    wrong = [w for w in count(d, zero=True).wrong if w.valid is False]
    more = bad(
        f"a NumPy integer?: np.int64({d.nodes})",
        "beyond memory?: 10**30" if beyond_memory else "",
    )
    return fixed(d.nodes, *wrong, *more)


def graphs(d: Draw) -> None:
    passed = edges(d, objects=False)
    if d.maybe(0.3):
        ones = f"torch.ones({len(d.edges)})"
        matrix = (
            f"torch.sparse_coo_tensor({edge_list(d)}, {ones}, ({d.nodes}, {d.nodes}))"
        )
        wrong = [w for w in wrong_edges(d) if "size" not in w.what]
        adjacency = Arg(matrix, wrong)
        target = "mp.Graph.from_sparse({args})"
        d.call("graph", target, adjacency=adjacency, batch=passed["batch"])
    else:
        # Whatever needs no values is computed there.
        passed["edge_index"] = passed["edge_index"].unsure("on the meta device")
        passed["ptr"] = never(wrong_ptr(d) if d.sizes is None else [])
        passed["num_nodes"] = node_count(d, beyond_memory=True)
        passed["full_degree"] = tensor(d, d.nodes, 2, optional=True, positive=True)
        d.call("graph", "mp.Graph({args})", **passed)
    like = real(d, d.nodes)
    wrong = bad("a list | a string | a number | a module | None")
    of = options(d, "torch.float64", wrong=bad("a string?: 'float'"), optional=True)
    uses: list[tuple[str, dict[str, Arg]]] = [
        ("degree({args})", {"direction": choice(d, "in", "out"), "dtype": of}),
        (
            "with_self_loops({args}).degree()",
            {"policy": choice(d, "keep", "add", "remove", "remaining")},
        ),
        ("within({args}).edges", {"hops": count(d, 1, 2, 3)}),
        ("weights({args})", {"like": fixed(like, *wrong)}),
        ("to_undirected().degree()", {}),
        ("symmetric_part().degree()", {}),
        ("reverse().degree()", {}),
        ("prepare().degree()", {}),
    ]
    use, passed = d.pick(uses)
    d.call("read", "[graph.ptr, graph.batch, graph.csr, graph.csc, repr(graph)]")
    d.call("out", f"graph.{use}", **passed)


NOT_A_SCALE = NOT_A_NUMBER + bad("NaN | a matrix: torch.ones(2, 2)")


def used(d: Draw, *, pooled: bool = False, finite: bool = True) -> None:
    """A use of the coupling. E^{q·k} may leave the range of half precision where nothing normalises it."""
    arguments = [call.args.get("normalize", Arg(None)) for call in d.calls]
    unbounded = "False" in [arg.right for arg in arguments]
    values = {"v": _values(d)}
    scale = options(d, 0.5, -2, "torch.tensor(0.5)", wrong=NOT_A_SCALE)
    head = options(d, 0, optional=True, wrong=NOT_A_NUMBER + bad("negative | beyond"))
    # Float16 may be too narrow for what another dtype holds.
    of = options(d, "torch.float64", wrong=dtype(d).wrong, optional=True)
    moved = {"dtype": of, "device": replace(device(d), optional=True)}
    uses: dict[str, dict[str, Arg]] = {
        "coupling @ {v}": values,
        "coupling.at({edge_index})": {"edge_index": pairs(d)},
        "coupling.log_at({edge_index})": {"edge_index": pairs(d)},
        "coupling.degree()": {},
        "coupling.to_dense()": {},
        "coupling.detach().to_dense()": {},
        "[coupling.T @ {v}, coupling.T.degree()]": values,
        # Of [N, H, D], too.
        "coupling.dirichlet({x})": {
            "x": state(d, parameters=False).unsure("a higher rank")
        },
        "coupling.to({args}).to_dense()": moved,
        "coupling.as_linear_operator({args}).matvec(np.ones(coupling.num_nodes))": {
            "head": head
        },
        "({scale} * coupling).to_dense()": {"scale": scale},
        "(coupling + {other}).to_dense()": {"other": coupling(d)},
    }
    if pooled:
        uses["coupling.read(coupling.pool({v}), {v})"] = values
    target = d.pick([*uses])
    finite = finite and "log_at" not in target
    if unbounded and d.dtype == "float16":
        finite = False
    d.call("out", target, finite=finite, **uses[target])


def _values(d: Draw) -> Arg:
    of = "dtype=coupling.dtype"
    right = [
        f"torch.randn({d.nodes}, coupling.heads, 2, {of})",
        f"torch.ones({d.nodes}, 1, 3, {of})",
    ]
    arg = Arg(d.pick(right), wrong_tensors(d.nodes, 1, 2, meta=None)).without(
        "a longer last dimension"
    )
    return arg.unsure("a lower rank")  # which a coupling of one head takes as a state


def features(d: Draw, *, positive: bool = False) -> dict[str, Arg]:
    h = d.pick([1, 2])
    f = d.pick([3, 1, 5])
    return {
        name: tensor(d, d.nodes, h, f, positive=positive) for name in ("query", "key")
    }


#: Promises and facts that a made coupling would have to keep, and a fuzzed matrix would not.
UNKEPT = "symmetric row_stochastic positive_semidefinite mutual positive"


def built(
    d: Draw, leave: str = "", *, pooled: bool = False, **special: Make | Arg
) -> None:
    """A coupling of its own arguments, the promise `nonnegative` only ever of a wrong kind, and a use of it."""
    if "nonnegative" in parameters(d.name):
        special["nonnegative"] = never(flag(d).wrong)
    construct(d, "coupling", leave=f"{leave} {UNKEPT}", **special)
    used(d, pooled=pooled)


def by_features(
    *, positive: bool = False, pooled: bool = False, **more: Make
) -> Strategy:
    def strategy(d: Draw) -> None:
        bounds = never(wrong_ptr(d)) if pooled and d.maybe(0.3) else ptr(d)
        special = features(d, positive=positive) | {"ptr": bounds}
        built(d, pooled=pooled and bounds.right is None, **special, **more)

    return strategy


def log_low_rank(d: Draw) -> None:
    heads = d.pick([1, 2])
    f = d.pick([3, 1, 5])
    pair = {name: tensor(d, d.nodes, heads, f) for name in ("log_query", "log_key")}
    # Which is of samples.
    weight = tensor(d, d.nodes, heads, 2, optional=True).unsure(
        "a longer last dimension"
    )
    built(d, **pair, log_weight=weight)


def sparse_flow(d: Draw) -> None:
    h = d.pick([1, 2])
    f = d.pick([3, 1])
    names = ["query", "key"]
    if d.maybe(0.5):
        names += ["friction_query", "friction_key"]
    parts = {name: tensor(d, d.nodes, h, f) for name in names}
    # Which may be one per head.
    lam = number(d, 0.3, 0.0, f"torch.rand({h}{kind(d)})", zero=True)
    leak = number(d, 1.0, "math.inf", optional=True, infinite=True)
    parts["lam"] = lam.without("a tensor of two")
    parts["alpha"] = leak.without("a tensor of two")
    leave = "friction_query friction_key"
    built(d, leave, **parts, ptr=ptr(d))


FALLING = ["lambda z2: 1 / (1 + z2)", "lambda z2: torch.exp(-z2)"]
NOT_FALLING = bad(
    "a string | a number | a tensor | a rising function: lambda z2: 1 + z2 | a negative function: lambda z2: -z2",
    "a function with a pole: lambda z2: 1 / z2 | a function of another shape: lambda z2: z2.sum()",
)


def plain(**special: Make) -> Strategy:
    return lambda d: built(d, **special)


def per_node(d: Draw) -> Arg:
    # Which is of heads.
    return tensor(d, d.nodes, 1, optional=True).without("a longer last dimension")


def scale(d: Draw) -> Arg:
    wrong = NOT_A_SCALE + bad(
        "array: np.eye(2) | complex: torch.tensor(1 + 1j) | an integer?: torch.tensor(2)"
    )
    return options(d, 0.5, -2, "torch.tensor(0.5)", "torch.ones(1)", wrong=wrong)


def terms(d: Draw) -> Arg:
    one = coupling_source(d)
    other = coupling_source(d)
    sizes = ", ".join(
        f"mp.couplings.UniformCoupling({d.nodes + more})" for more in (0, 1)
    )
    wrong = bad(
        f"empty | None | a string | a number | numbers: [1, 2] | a tensor | a term that is none: [{one}, None]",
        f"terms of two sizes: [{sizes}] | a coupling: {one}",
    )
    return options(d, f"[{one}, {other}]", f"({one},)", wrong=wrong)


_constant = numbers(0.0, 1.0, zero=True, negative=True)
COUPLINGS: dict[str, Strategy] = {
    "Graph": graphs,
    "IdentityCoupling": plain(num_nodes=partial(node_count, beyond_memory=True)),
    "UniformCoupling": plain(num_nodes=node_count),
    "LowRankCoupling": by_features(pooled=True),
    "LinearAttentionCoupling": by_features(
        positive=True,
        pooled=True,
        constant=_constant,
        own=_constant,
    ),
    "PairwiseCoupling": by_features(normalize=flag),
    "LogLowRankCoupling": log_low_rank,
    "SparseFlowCoupling": sparse_flow,
    "DenseCoupling": plain(
        ptr=lambda d: never(wrong_ptr(d)),
        matrix=lambda d: tensor(d, d.nodes, d.nodes).without(
            "a lower rank", "a higher rank", "a list"
        ),
    ),
    "DistanceCoupling": lambda d: built(
        d,
        function=options(d, *FALLING, wrong=NOT_FALLING[:3]),
        **features(d),
    ),
    "SparseCoupling": plain(
        weight=lambda d: tensor(d, len(d.edges), optional=True).without(
            "a higher rank"
        ),
    ),
    "NeumannCoupling": plain(
        num_nodes=node_count,
        alpha=lambda d: tensor(d, 1, d.pick([1, 2])).unsure("a longer last dimension"),
    ),  # which is of heads
    "PolynomialCoupling": plain(
        coefficients=lambda d: tensor(d, d.pick([1, 2, 3])).without(
            "a longer last dimension", "a higher rank"
        ),
    ),
    "ReweightedCoupling": plain(row=per_node, column=per_node),
    "ScaledCoupling": plain(scale=scale),
    "SumCoupling": plain(terms=terms),
}


def of_state(*, needed: bool = False, **options: Any) -> Strategy:
    """A diffusivity called as ``diffusivity(x, graph)``; the options are those of `arguments`."""

    def strategy(d: Draw) -> None:
        special = arguments(d, **options)
        channels = special.get("channels", Arg(None))
        told = "channels" in special and not channels.optional
        right = {key: arg.right for key, arg in special.items()}
        projected = right.get("projection") not in (None, "None")
        # Its default is a projection.
        projected |= d.name == "SGFormerDiffusivity" and right["projection"] is None
        if channels.optional and projected:
            special["channels"] = Arg(str(d.channels), channels.wrong)
        d.call("diffusivity", f"{address(d.name)}({{args}}){to_dtype(d)}", **special)
        x = state(d, parameters=told)
        d.call("coupling", "diffusivity({args})", x=x, graph=graph(d, needed=needed))
        # E^{(q·k − 1)/σ²} leaves the range of any dtype where nothing bounds q·k, and others that of half precision.
        steep = d.name == "GaussianDiffusivity" and right["normalize"] == "None"
        steep &= right.get("measure") != "'distance'"
        free = right.get("row_stochastic") == "False"
        used(d, finite=not (free and (steep or d.dtype == "float16")))

    return strategy


QUERY_KEY: dict[str, Make] = {
    "head_channels": lambda d: unused(count(d).without("None")),
    "normalize": texts("row", "frobenius", None),
}
LOOSE = "projection row_stochastic"


def penalties(d: Draw) -> Arg:
    right = [
        "'sigmoid'",
        "'quadratic'",
        "'gaussian'",
        "mp.GaussianPenalty(2.0)",
        "mp.SigmoidPenalty()",
    ]
    return options(d, *right, wrong=NOT_A_PENALTY + bad("a function: lambda z: z"))


def own_penalties(d: Draw) -> Arg:
    wrong = penalties(d).without("another name").wrong + bad("a name: 'gaussian'")
    return options(
        d,
        *(f"mp.FunctionPenalty({f})" for f in FALLING),
        "mp.SigmoidPenalty()",
        wrong=wrong,
    )


def one_of(*right: str) -> Make:
    return lambda d: diffusivity(d, *right)


def unnormalised(d: Draw) -> Arg:
    right = [
        "mp.GaussianDiffusivity(row_stochastic=False)",
        "mp.SigmoidDiffusivity(row_stochastic=False)",
        "mp.AdjacencyDiffusivity('sum', direction='undirected')",
    ]
    wrong = bad("rows divided by their sums: mp.GaussianDiffusivity()")
    return options(d, *right, wrong=NOT_A_DIFFUSIVITY + wrong)


def own_diffusivity(d: Draw) -> None:
    """A sum or a multiple of diffusivities."""
    if d.maybe(0.5):
        scale = options(d, 0.5, 2, "torch.tensor(0.5)", wrong=NOT_A_SCALE)
        d.call("diffusivity", "mp.SimpleDiffusivity() * {scale}", scale=scale)
    else:
        other = Arg("mp.SimpleDiffusivity()", NOT_A_DIFFUSIVITY).without("a tensor")
        d.call("diffusivity", "mp.IdentityDiffusivity() + {other}", other=other)
    x = state(d, parameters=False)
    d.call("coupling", "diffusivity({args})", x=x, graph=graph(d))
    used(d)


NOT_WIDTHS = bad(
    "empty | zero: [0.0] | negative: [-1.0] | a string | a number | not a number: [math.nan]"
)
MIXTURE: dict[str, Any] = {
    "always": "widths",  # of which there are as many as weights
    "widths": lambda d: options(d, "[0.3, 1.0]", "(2.0, 0.5)", wrong=NOT_WIDTHS),
    "weights": lambda d: options(
        d, "[1.0, 0.2]", wrong=NOT_WIDTHS + bad("too few: [1.0]")
    ),
}


DIFFUSIVITIES: dict[str, Strategy] = {
    "Positive": calls("(made.reset_parameters(), made())[1]"),
    "Diffusivity": own_diffusivity,
    **dict.fromkeys(
        ("SimpleDiffusivity", "SigmoidDiffusivity", "SoftmaxDiffusivity"),
        of_state(
            more="heads head_channels projection",
            of=QueryKeyDiffusivity,
            **QUERY_KEY,
        ),
    ),
    "GaussianDiffusivity": of_state(
        more=f"{LOOSE} measure",
        of=PenaltyDiffusivity,
        **QUERY_KEY,
    ),
    "PenaltyDiffusivity": of_state(
        leave="constraint measure",
        penalty=own_penalties,
        **QUERY_KEY,
    ),
    "UniformDiffusivity": of_state(),
    "IdentityDiffusivity": of_state(),
    "AdjacencyDiffusivity": of_state(needed=True),
    "GATDiffusivity": of_state(needed=True, leave="edge_dim"),
    "EdgeDiffusivity": of_state(needed=True, penalty=penalties),
    "EdgeSparseFlowDiffusivity": of_state(
        needed=True,
        more="lam friction",
        of=SparseFlowDiffusivity,
        **QUERY_KEY,
        alpha=alpha,
    ),
    "SparseFlowDiffusivity": of_state(
        more="projection",
        of=QueryKeyDiffusivity,
        **QUERY_KEY,
        alpha=alpha,
    ),
    "KernelizedSoftmaxDiffusivity": of_state(
        more="projection",
        of=QueryKeyDiffusivity,
        **QUERY_KEY,
    ),
    "SGFormerDiffusivity": of_state(
        more="projection",
        of=QueryKeyDiffusivity,
        **QUERY_KEY | {"normalize": texts("row", "frobenius")},
    ),
    "NeumannDiffusivity": of_state(),
    "RelationalBias": of_state(
        needed=True,
        more="self_loops direction",
        of=AdjacencyDiffusivity,
    ),
    "SymmetricDiffusivity": of_state(needed=True, diffusivity=unnormalised),
    "AdjacencyEnhancedDiffusivity": of_state(
        needed=True,
        attention=one_of("mp.SoftmaxDiffusivity()", "mp.SigmoidDiffusivity()"),
    ),
    "GraphAugmentedDiffusivity": of_state(
        needed=True,
        attention=one_of("mp.SimpleDiffusivity()", "mp.SoftmaxDiffusivity()"),
        graph_term=one_of(
            "mp.AdjacencyDiffusivity('sym')", "mp.AdjacencyDiffusivity('row')"
        ),
    ),
}


def step(*, symmetric: bool = False, source: bool = True, **options: Any) -> Strategy:
    def strategy(d: Draw) -> None:
        special = construct(d, "update", of=SolvedUpdate, **options)
        beta = special["beta"].right if "beta" in special else None
        # Whose sources weigh one by default.
        weighs = beta != "0.0" and (
            beta is not None or d.name in ("Equilibrium", "CertifiedStep")
        )
        # Heads apart, or a state [N, C] whose channels are cut into heads.
        wide = d.pick([(d.nodes, 1, d.channels), (d.nodes, d.channels)])
        x = tensor(d, *wide).without("a higher rank")
        passed = {
            "x": x.without("a lower rank", "a longer last dimension"),
            "coupling": coupling(d, symmetric=symmetric),
            "values": never(x.without("None").wrong),
        }
        if source:
            right = real(d, *wide) if weighs else None
            passed["source"] = Arg(right, x.without("None").wrong, not weighs)
        # Ten steps with a coupling that is not stable leave the range of half precision.
        finite = d.name != "MomentumStep" or d.dtype != "float16"
        d.call("out", "update({args})", finite=finite, **passed)

    return strategy


def _weight(d: Draw) -> Arg:
    wrong = [w for w in number(d, zero=True).wrong if w.valid is False]
    return options(d, 1.0, "mp.diffusivities.Positive(0.5)", wrong=wrong)


SOLVED: dict[str, Any] = {
    "symmetric": True,
    "leave": "form",
    "more": "beta leak max_iter",
}
UPDATES: dict[str, Strategy] = {
    "ExplicitEuler": step(),
    "MomentumStep": step(momentum=numbers(0.5, 0.0, zero=True, below="1.0")),
    "ImplicitEuler": step(**SOLVED),
    "CrankNicolson": step(**SOLVED),
    "HeatKernel": step(symmetric=True, source=False, leave="form"),
    "Equilibrium": step(**SOLVED, always="leak", leak=numbers(0.5, 0.2, zero=True)),
    "CertifiedStep": step(symmetric=True, beta=_weight, constraint=texts(*CONSTRAINTS)),
}
