"""Strategies of graphs, couplings, diffusivities and updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .arguments import (
    NOT_A_DIFFUSIVITY,
    NOT_A_NUMBER,
    Arg,
    choice,
    count,
    coupling,
    coupling_source,
    diffusivity,
    edge_list,
    edges,
    fixed,
    flag,
    generator,
    graph,
    just_graph,
    number,
    options,
    pairs,
    ptr,
    real,
    state,
    tensor,
    wrong_edges,
    wrong_ptr,
    wrong_tensors,
)
from .program import Draw, Strategy, Wrong
from .table_layers import alpha, lam, loops, positive, projection, rows_or_frobenius

Options = dict[str, Callable[[Draw], Arg]]

FORM: Callable[[Draw], Arg] = lambda d: choice(d, "conservative", "residual")  # noqa: E731

# ---------------------------------------------------------------- graphs


def node_count(d: Draw) -> Arg:
    """N."""
    wrong = [w for w in count(d, zero=True).wrong if w.valid is False]
    wrong += [Wrong(f"np.int64({d.nodes})", "a NumPy integer", None), Wrong("10**30", "beyond memory", None)]
    return fixed(d.nodes, *wrong)


def full_degree(d: Draw) -> Arg:
    """Degrees in a larger graph."""
    return Arg(f"torch.ones({d.nodes}, 2)" if d.maybe(0.2) else None, wrong_tensors(d.nodes, 2, none=True), True)


def graphs(d: Draw) -> None:
    """A graph, made in one of four ways, and what it derives."""
    made = d.pick(["new", "new", "from_edge_index", "from_sparse", "from_data", "coerce"])
    given = edges(d, objects=False)
    given["edge_index"] = given["edge_index"].unsure("on the meta device")  # whatever needs no values is computed there
    rows = {"batch": given["batch"], "ptr": Arg(None, wrong_ptr(d) if d.sizes is None else [], True)}
    if made == "new":
        edge_weight = {"edge_index": given["edge_index"], "edge_weight": given["edge_weight"]}
        d.call("graph", "mp.Graph({args})", num_nodes=node_count(d), **edge_weight, **rows, full_degree=full_degree(d))
    elif made == "from_edge_index":
        d.call("graph", "mp.Graph.from_edge_index({args})", **given, num_nodes=node_count(d).without("None"))
    elif made == "from_sparse":
        matrix = f"torch.sparse_coo_tensor({edge_list(d)}, torch.ones({len(d.edges)}), ({d.nodes}, {d.nodes}))"
        wrong = [w for w in wrong_edges(d) if "size" not in w.what]
        d.call("graph", "mp.Graph.from_sparse({args})", adjacency=Arg(matrix, wrong), batch=given["batch"])
    elif made == "from_data":
        part = f"edge_index={edge_list(d)}, num_nodes={d.nodes}"
        wrong = [Wrong("None", "None"), Wrong("'data'", "a string"), Wrong("Data()", "empty"), Wrong("[1]", "a list")]
        wrong += [Wrong("Data(edge_index='abc', num_nodes=3)", "edges of letters"), Wrong("torch.ones(2)", "a tensor")]
        wrong += [Wrong("Data(edge_index=torch.tensor([[0], [7]]), num_nodes=3)", "edges beyond N")]
        d.call("graph", "mp.Graph.from_data({args})", data=fixed(f"Data({part})", *wrong))
    else:
        x = state(d, parameters=False)
        refused = ("a list", "an array", "a string", "a number", "a dict", "a module", "None")  # only its rows count
        x = Arg(x.right, [Wrong(w.source, w.what, w.what not in refused and None) for w in x.wrong])
        d.call("graph", "mp.Graph.coerce({args})", x=x, **edges(d))
    asked = d.pick(["degree", "with_self_loops", "within", "to_undirected", "reverse", "prepare", "weights", "parts"])
    if asked == "degree":
        dtype = options(d, "torch.float64", wrong=[Wrong("'float'", "a string", None)], optional=True)
        d.call("out", "graph.degree({args})", direction=choice(d, "in", "out"), dtype=dtype)
    elif asked == "with_self_loops":
        d.call("out", "graph.with_self_loops({args}).degree()", policy=loops(d))
    elif asked == "within":
        d.call("out", "graph.within({args}).edges", hops=count(d, 1, 2, 3))
    elif asked == "weights":
        tensors = tensor(d, d.nodes)
        strange = [w for w in tensors.wrong if w.what in ("a list", "a string", "a number", "a module", "None")]
        d.call("out", "graph.weights({args})", like=Arg(tensors.right, strange))
    elif asked == "parts":
        d.call("out", "[graph.ptr, graph.batch, graph.csr, graph.csc, graph.num_graphs, graph.weighted, repr(graph)]")
    else:
        d.call("out", f"graph.{asked}().degree()")


# ---------------------------------------------------------------- couplings


def used(d: Draw, *, pooled: bool = False) -> None:
    """What can be done with a coupling."""
    unbounded = [call.args["normalize"].right == "False" for call in d.calls if "normalize" in call.args]
    finite = not (d.dtype == "float16" and any(unbounded))  # e^{q·k} may leave the range of half precision
    what = ["matmul", "matmul", "at", "degree", "dense", "T", "dirichlet", "scaled", "added", "operator", "log_at"]
    what += ["to", "detach"]
    asked = d.pick(what + ["pool"] * pooled)
    heads = "coupling.heads"
    if asked == "matmul":
        d.call("out", "coupling @ {v}", finite=finite, v=_values(d, heads))
    elif asked == "at":
        d.call("out", "coupling.at({edge_index})", finite=finite, edge_index=pairs(d))
    elif asked == "log_at":
        d.call("out", "coupling.log_at({edge_index})", finite=False, edge_index=pairs(d))
    elif asked == "degree":
        d.call("out", "coupling.degree()", finite=finite)
    elif asked == "dense":
        d.call("out", "coupling.to_dense()", finite=finite)
    elif asked == "T":
        d.call("out", "[coupling.T @ {v}, coupling.T.degree()]", finite=finite, v=_values(d, heads))
    elif asked == "dirichlet":
        x = state(d, parameters=False).unsure("a higher rank")  # which is [N, H, D]
        d.call("out", "coupling.dirichlet({x})", finite=finite, x=x)
    elif asked == "scaled":
        wrong = [*NOT_A_NUMBER, Wrong("math.nan", "NaN"), Wrong("torch.ones(2, 2)", "a matrix")]
        d.call(
            "scaled", "{scale} * coupling", finite=finite, scale=options(d, 0.5, -2, "torch.tensor(0.5)", wrong=wrong)
        )
        d.call("out", "[scaled.degree(), scaled.to_dense()]", finite=finite)
    elif asked == "added":
        d.call("added", "coupling + {other}", finite=finite, other=coupling(d))
        d.call("out", "added.degree()", finite=finite)
    elif asked == "to":
        # float16 may be too narrow for what another dtype holds
        dtype = options(d, "torch.float64", "torch.float32", wrong=_dtype(d).wrong, optional=True)
        d.call("out", "coupling.to({args}).to_dense()", finite=finite, dtype=dtype, device=_device(d))
    elif asked == "detach":
        d.call("out", "coupling.detach().to_dense()", finite=finite)
    elif asked == "operator":
        head = options(d, 0, optional=True, wrong=[*NOT_A_NUMBER, Wrong("-1", "negative"), Wrong("9", "beyond")])
        d.call(
            "out", "coupling.as_linear_operator({args}).matvec(np.ones(coupling.num_nodes))", finite=finite, head=head
        )
    else:
        d.call("out", "coupling.read(coupling.pool({v}), {v})", finite=finite, v=_values(d, heads))


def _values(d: Draw, heads: str) -> Arg:
    dtype = "coupling.dtype"
    right = [f"torch.randn({d.nodes}, {heads}, 2, dtype={dtype})", f"torch.ones({d.nodes}, 1, 3, dtype={dtype})"]
    return Arg(
        d.pick(right), [w for w in wrong_tensors(d.nodes, 1, 2, meta=None) if w.what != "a longer last dimension"]
    ).unsure("a lower rank")  # which a coupling of one head takes as a state


def features(d: Draw, *, positive: bool = False) -> dict[str, Arg]:
    """Queries and keys."""
    h, f = d.pick([1, 2]), d.pick([3, 1, 5])
    return {name: tensor(d, d.nodes, h, f, positive=positive) for name in ("query", "key")}


def promises(d: Draw) -> dict[str, Arg]:
    """What a coupling may promise and does not here."""
    return {"nonnegative": Arg(None, flag(d).wrong, True)}


def by_features(name: str, *, positive: bool = False, more: Options | None = None, pooled: bool = False) -> Strategy:
    """A coupling made of queries and keys."""

    def strategy(d: Draw) -> None:
        own = {key: make(d) for key, make in (more or {}).items()}
        bounds = Arg(None, wrong_ptr(d), True) if pooled and d.maybe(0.3) else ptr(d)
        single = pooled and bounds.right is None
        d.call("coupling", f"mp.{name}({{args}})", **features(d, positive=positive), ptr=bounds, **own)
        used(d, pooled=single)

    return strategy


def log_low_rank(d: Draw) -> None:
    """Positive features by their logarithms."""
    h, f = d.pick([1, 2]), d.pick([3, 1, 5])
    pair = {name: tensor(d, d.nodes, h, f) for name in ("log_query", "log_key")}
    weight = tensor(d, d.nodes, h, 2, optional=True).unsure("a longer last dimension")  # which is of samples
    d.call("coupling", "mp.LogLowRankCoupling({args})", **pair, ptr=ptr(d), log_weight=weight, normalize=flag(d))
    used(d)


def sparse_flow(d: Draw) -> None:
    """The sparse flow of given features."""
    h, f = d.pick([1, 2]), d.pick([3, 1])
    names = ["query", "key"] + (["friction_query", "friction_key"] if d.maybe(0.5) else [])
    parts = {name: tensor(d, d.nodes, h, f) for name in names}
    kind = "" if d.dtype == "float32" else f", dtype=torch.{d.dtype}"
    alone = number(d, 0.3, 0.0, 1.0, zero=True).without("a tensor of two")  # which may be one per head
    strength = Arg(d.pick([str(alone.right), f"torch.rand({h}{kind})"]), alone.wrong)
    leak = number(d, 1.0, "math.inf", optional=True, infinite=True).without("a tensor of two")
    d.call("coupling", "mp.SparseFlowCoupling({args})", **parts, ptr=ptr(d), lam=strength, alpha=leak)
    used(d)


def dense(d: Draw) -> None:
    """A matrix."""
    matrix = tensor(d, d.nodes, d.nodes).without("a lower rank", "a higher rank", "a list")
    d.call("coupling", "mp.DenseCoupling({args})", matrix=matrix, ptr=Arg(None, wrong_ptr(d), True), **promises(d))
    used(d)


FALLING = ["lambda z2: 1 / (1 + z2)", "lambda z2: torch.exp(-z2)"]
NOT_FALLING = [
    Wrong("'f'", "a string"),
    Wrong("3", "a number"),
    Wrong("torch.ones(2)", "a tensor"),
    Wrong("lambda z2: 1 + z2", "a rising function"),
    Wrong("lambda z2: -z2", "a negative function"),
    Wrong("lambda z2: 1 / z2", "a function with a pole"),
    Wrong("lambda z2: z2.sum()", "a function of another shape"),
]


def of_distance(d: Draw) -> None:
    """Any function of a distance."""
    function = options(d, *FALLING, wrong=NOT_FALLING[:3])
    d.call("coupling", "mp.DistanceCoupling({args})", function=function, **features(d), ptr=ptr(d), **promises(d))
    used(d)


def sparse(d: Draw) -> None:
    """Entries over edges."""
    weight = tensor(d, len(d.edges), optional=True).without("a higher rank")
    d.call("coupling", "mp.SparseCoupling({args})", graph=just_graph(d), weight=weight, **promises(d))
    used(d)


def identity(d: Draw) -> None:
    """I."""
    d.call("coupling", "mp.IdentityCoupling({args})", num_nodes=node_count(d), dtype=_dtype(d), device=_device(d))
    used(d)


def uniform(d: Draw) -> None:
    """All one."""
    d.call(
        "coupling",
        "mp.UniformCoupling({args})",
        num_nodes=node_count(d).without("10**30"),
        ptr=ptr(d),
        normalize=flag(d),
        dtype=_dtype(d),
        device=_device(d),
    )
    used(d)


def _dtype(d: Draw) -> Arg:
    wrong = [Wrong("'float32'", "a string"), Wrong("torch.int64", "integers"), Wrong("3", "a number")]
    return options(d, f"torch.{d.dtype}", wrong=[*wrong, Wrong("torch.complex64", "complex")], optional=True)


def _device(d: Draw) -> Arg:
    wrong = [Wrong("'nowhere'", "no device"), Wrong("3.5", "a number"), Wrong("[1]", "a list")]
    return options(d, "'cpu'", "torch.device('cpu')", wrong=wrong, optional=True)


def strides(d: Draw) -> Arg:
    """Strides of a stencil."""
    wrong = [
        Wrong("()", "empty"),
        Wrong("(0,)", "a zero"),
        Wrong("(-1,)", "negative"),
        Wrong("(1.5,)", "a fraction"),
        Wrong("'ab'", "a string"),
        Wrong("2", "a number"),
        Wrong("None", "None"),
        Wrong("(True,)", "a bool"),
        Wrong("('a',)", "letters"),
        Wrong("nn.Linear(2, 2)", "a module"),
    ]
    return options(d, "(1,)", "(2,)", "[3]", wrong=wrong, optional=True)


def boundary(d: Draw) -> Arg:
    """What lies beyond the ends."""
    return choice(d, "symmetric", "replicate", "drop", "periodic", "causal")


def neumann(d: Draw) -> None:
    """Neighbours along a sequence."""
    d.call(
        "coupling",
        "mp.NeumannCoupling({args})",
        num_nodes=node_count(d).without("10**30"),
        alpha=tensor(d, 1, d.pick([1, 2])).unsure("a longer last dimension"),  # which is of heads
        strides=strides(d),
        boundary=boundary(d),
        ptr=ptr(d),
        transposed=flag(d),
        **promises(d),
    )
    used(d)


def polynomial(d: Draw) -> None:
    """Several hops."""
    coefficients = tensor(d, d.pick([1, 2, 3])).without("a longer last dimension", "a higher rank")
    d.call(
        "coupling",
        "mp.PolynomialCoupling({args})",
        coupling=coupling(d, other_size=None),
        coefficients=coefficients,
        **promises(d),
    )
    used(d)


def reweighted(d: Draw) -> None:
    """Rows and columns rescaled."""
    one = "a longer last dimension"  # which is of heads
    rows = {name: tensor(d, d.nodes, 1, optional=True).without(one) for name in ("row", "column")}
    d.call("coupling", "mp.ReweightedCoupling({args})", coupling=coupling(d, other_size=None), **rows, **promises(d))
    used(d)


def projected(d: Draw) -> None:
    """Heads that look at a state through projections."""
    projection = tensor(d, d.pick([1, 2]), 2, d.channels).without("a longer last dimension")
    d.call(
        "coupling",
        "mp.ProjectedCoupling({args})",
        coupling=coupling(d, symmetric=True, other_size=None),
        projection=projection,
    )
    v = tensor(d, d.nodes, 1, d.channels)
    d.call("out", "[coupling @ ({v}), coupling.laplacian({v}), coupling.majorant(False)]", v=v)


def scaled(d: Draw) -> None:
    """A multiple."""
    wrong = [
        *NOT_A_NUMBER,
        Wrong("math.nan", "NaN"),
        Wrong("torch.ones(2, 2)", "a matrix"),
        Wrong("np.eye(2)", "array"),
    ]
    wrong += [Wrong("torch.tensor(1 + 1j)", "complex"), Wrong("torch.tensor(2)", "an integer", None)]
    scale = options(d, 0.5, -2, "torch.tensor(0.5)", "torch.ones(1)", wrong=wrong)
    d.call("coupling", "mp.ScaledCoupling({args})", scale=scale, coupling=coupling(d, other_size=None))
    used(d)


def summed(d: Draw) -> None:
    """A sum."""
    one, other = coupling_source(d), coupling_source(d)
    wrong = [
        Wrong("[]", "empty"),
        Wrong("None", "None"),
        Wrong("'ab'", "a string"),
        Wrong("3", "a number"),
        Wrong("[1, 2]", "numbers"),
        Wrong("torch.eye(3)", "a tensor"),
        Wrong(f"[{one}, None]", "a term that is none"),
        Wrong(f"[mp.UniformCoupling({d.nodes}), mp.UniformCoupling({d.nodes + 1})]", "terms of two sizes"),
        Wrong(one, "a coupling"),
    ]
    d.call("coupling", "mp.SumCoupling({args})", terms=options(d, f"[{one}, {other}]", f"({one},)", wrong=wrong))
    used(d)


def abstract(name: str) -> Strategy:
    """A base class: it cannot be made by itself, and a subclass of it is used."""

    def strategy(d: Draw) -> None:
        size = node_count(d).without("10**30")
        like = Arg(
            "torch.ones(1)", [w for w in wrong_tensors(1) if w.what in ("a string", "None", "a number", "a list")]
        )
        body = (
            "'_product': lambda s, v: 2 * v, '_transpose': lambda s: s, '_pool': None, '_read': None, 'block': None, "
        )
        body += "'degree': lambda s: torch.full((s.num_nodes, s.heads), 2.0)"
        d.call("Own", f"type('Own', (mp.{name},), {{{body}}})")
        d.call("coupling", "Own({args})", num_nodes=size, heads=count(d, 1, 2), like=like, symmetric=flag(d))
        used(d)

    return strategy


COUPLINGS: dict[str, Strategy] = {
    "Graph": graphs,
    "Coupling": abstract("Coupling"),
    "PooledCoupling": abstract("PooledCoupling"),
    "IdentityCoupling": identity,
    "UniformCoupling": uniform,
    "LowRankCoupling": by_features(
        "LowRankCoupling", pooled=True, more={"nonnegative": lambda d: promises(d)["nonnegative"]}
    ),
    "LinearAttentionCoupling": by_features(
        "LinearAttentionCoupling",
        positive=True,
        pooled=True,
        more={
            "constant": lambda d: number(d, 0.0, 1.0, optional=True, zero=True, negative=True),
            "own": lambda d: number(d, 0.0, 1.0, optional=True, zero=True, negative=True),
            "unit": flag,
        },
    ),
    "PairwiseCoupling": by_features(
        "PairwiseCoupling", more={"score": lambda d: choice(d, "exp", "sigmoid"), "normalize": flag, "loops": flag}
    ),
    "LogLowRankCoupling": log_low_rank,
    "SparseFlowCoupling": sparse_flow,
    "DenseCoupling": dense,
    "DistanceCoupling": of_distance,
    "SparseCoupling": sparse,
    "NeumannCoupling": neumann,
    "PolynomialCoupling": polynomial,
    "ReweightedCoupling": reweighted,
    "ProjectedCoupling": projected,
    "ScaledCoupling": scaled,
    "SumCoupling": summed,
}

# ---------------------------------------------------------------- diffusivities


def of_state(
    name: str, *, channels: bool | None = None, needed: bool = False, **make: Callable[[Draw], Arg]
) -> Strategy:
    """A diffusivity with some options; ``channels`` says whether it has to be told them (``None``: it may be)."""

    def strategy(d: Draw) -> None:
        own = {key: value(d) for key, value in make.items()}
        if channels is not None:
            own = {"channels": count(d, d.channels, optional=not channels, none=not channels), **own}
        if not channels and "projection" in own:
            projected = own["projection"].right not in (None, "None")
            asked = name == "SGFormerDiffusivity" and own["projection"].right is None
            if projected or asked:
                own["channels"] = Arg(str(d.channels), own["channels"].wrong)
        to = "" if d.dtype == "float32" else f".to(torch.{d.dtype})"
        d.call("diffusivity", f"mp.{name}({{args}}){to}", **own)
        d.call("coupling", "diffusivity({args})", x=state(d, parameters=bool(channels)), graph=graph(d, needed=needed))
        normalized = not any(own[key].right == "False" for key in ("row_stochastic",) if key in own)
        _used_by(d, finite=normalized or d.dtype != "float16")

    return strategy


def _used_by(d: Draw, *, finite: bool = True) -> None:
    """One product with the coupling that came out, or another use of it.

    A score that nothing normalises, e^{q·k} for one, may leave the range of half precision: then it is not ``finite``.
    """
    asked = d.pick(["matmul", "degree", "at", "dirichlet"])
    if asked == "matmul":
        d.call(
            "out",
            "coupling @ {v}",
            finite=finite,
            v=fixed(f"torch.ones({d.nodes}, coupling.heads, 2, dtype=coupling.dtype)"),
        )
    elif asked == "degree":
        d.call("out", "coupling.degree()", finite=finite)
    elif asked == "at":
        d.call("out", "coupling.at({edge_index})", finite=finite, edge_index=fixed(edge_list(d)))
    else:
        d.call("out", "coupling.dirichlet({x})", finite=finite, x=fixed(real(d, d.nodes, 3)))


def dividing(d: Draw) -> Arg:
    """Heads that divide the channels."""
    return count(d, d.heads, optional=True)


def head_channels(d: Draw) -> Arg:
    """Channels of a head."""
    return Arg(None, [w for w in count(d, none=True).wrong if w.valid is False], True)


ALL_PAIR: Options = {
    "heads": dividing,
    "projection": lambda d: choice(d, None, "separate", "tied"),
    "head_channels": head_channels,
    "normalize": rows_or_frobenius,
    "measure": lambda d: choice(d, "inner", "distance"),
    "row_stochastic": flag,
}
FLOW: Options = {
    "heads": dividing,
    "projection": projection,
    "normalize": rows_or_frobenius,
    "lam": lam,
    "alpha": alpha,
    "friction": lambda d: choice(d, "attention", "constant"),
}
DIRECTION: Callable[[Draw], Arg] = lambda d: choice(d, "directed", "undirected", "pyg")  # noqa: E731
NORMALIZATION: Callable[[Draw], Arg] = lambda d: choice(d, "sym", "row", "sum")  # noqa: E731


def softmax_penalty(d: Draw) -> Arg:
    """A penalty or its name."""
    wrong = [
        Wrong("'nonsense'", "another name"),
        Wrong("None", "None"),
        Wrong("3", "a number"),
        Wrong("[1]", "a list"),
    ]
    wrong += [
        Wrong("mp.SigmoidPenalty", "a class"),
        Wrong("nn.Linear(2, 2)", "a module"),
        Wrong("lambda z: z", "a function"),
    ]
    right = ["'sigmoid'", "'quadratic'", "'gaussian'", "mp.GaussianPenalty(2.0)", "mp.SigmoidPenalty()"]
    return options(d, *right, wrong=wrong)


def own_penalties(d: Draw) -> Arg:
    """A penalty, not its name."""
    wrong = [w for w in softmax_penalty(d).wrong if w.what != "another name"] + [Wrong("'gaussian'", "a name")]
    return options(d, *(f"mp.FunctionPenalty({f})" for f in FALLING), "mp.SigmoidPenalty()", wrong=wrong)


def composed(name: str) -> Strategy:
    """A diffusivity made of others."""

    def strategy(d: Draw) -> None:
        if name == "AdjacencyEnhancedDiffusivity":
            own = {
                "attention": diffusivity(d, "mp.SoftmaxDiffusivity()", "mp.SigmoidDiffusivity()"),
                "gamma": positive(d),
                "self_loops": loops(d),
            }
        elif name == "SymmetricDiffusivity":
            whole = "mp.GaussianDiffusivity(row_stochastic=False)", "mp.SigmoidDiffusivity(row_stochastic=False)"
            divided = Wrong("mp.GaussianDiffusivity()", "rows divided by their sums")
            inner = diffusivity(d, *whole, "mp.AdjacencyDiffusivity('sum', direction='undirected')")
            own = {"diffusivity": replace(inner, wrong=[*inner.wrong, divided]), "diagonal": flag(d)}
        else:
            own = {
                "attention": diffusivity(d, "mp.SimpleDiffusivity()", "mp.SoftmaxDiffusivity()"),
                "graph_term": diffusivity(d, "mp.AdjacencyDiffusivity('sym')", "mp.AdjacencyDiffusivity('row')"),
                "mix": choice(d, "sum", "mean"),
            }
            if name == "GraphAugmentedDiffusivity":
                own["graph_weight"] = number(d, 0.3, 0.0, 1.0, optional=True, zero=True, below="1.5", none=True)
        d.call("diffusivity", f"mp.{name}({{args}})", **own)
        d.call("coupling", "diffusivity({args})", x=state(d, parameters=False), graph=graph(d, needed=True))
        _used_by(d)

    return strategy


def own_diffusivity(d: Draw) -> None:
    """A subclass of the base, and its algebra."""
    d.call(
        "Own",
        "type('Own', (mp.Diffusivity,), dict(couple=lambda s, x, graph: mp.IdentityCoupling(len(x), dtype=x.dtype)))",
    )
    asked = d.pick(["alone", "scaled", "added"])
    if asked == "alone":
        d.call("diffusivity", "Own()")
    elif asked == "scaled":
        wrong = [*NOT_A_NUMBER, Wrong("math.nan", "NaN"), Wrong("torch.ones(2, 2)", "a matrix")]
        d.call("diffusivity", "Own() * {scale}", scale=options(d, 0.5, 2, "torch.tensor(0.5)", wrong=wrong))
    else:
        wrong = [w for w in NOT_A_DIFFUSIVITY if w.what != "a tensor"]
        d.call("diffusivity", "Own() + {other}", other=Arg("mp.SimpleDiffusivity()", wrong))
    d.call("coupling", "diffusivity({args})", x=state(d, parameters=False), graph=graph(d))
    _used_by(d)


NOT_WIDTHS = [
    Wrong("[]", "none"),
    Wrong("[0.0]", "zero"),
    Wrong("[-1.0]", "negative"),
    Wrong("'ab'", "a string"),
    Wrong("1.0", "a number"),
    Wrong("[math.nan]", "not a number"),
]
MIXTURE: Options = {
    "widths": lambda d: options(d, "[0.3, 1.0]", "(2.0, 0.5)", wrong=NOT_WIDTHS),
    "weights": lambda d: options(d, "[1.0, 0.2]", wrong=[*NOT_WIDTHS, Wrong("[1.0]", "too few")], optional=True),
}
DISTANCE_ONLY = {name: make for name, make in ALL_PAIR.items() if name != "measure"}


def positive_number(d: Draw) -> None:
    """A learnable number."""
    d.call("positive", "mp.Positive({args})", initial=number(d, 1.0, 0.01, optional=True))
    d.call("out", "(positive.reset_parameters(), positive())[1]")


DIFFUSIVITIES: dict[str, Strategy] = {
    "Positive": positive_number,
    "Diffusivity": own_diffusivity,
    "SimpleDiffusivity": of_state("SimpleDiffusivity", channels=False, **ALL_PAIR),
    "SigmoidDiffusivity": of_state("SigmoidDiffusivity", channels=False, **ALL_PAIR),
    "SoftmaxDiffusivity": of_state("SoftmaxDiffusivity", channels=False, **ALL_PAIR),
    "GaussianDiffusivity": of_state("GaussianDiffusivity", channels=False, bandwidth=positive, **ALL_PAIR),
    "MixtureDiffusivity": of_state("MixtureDiffusivity", channels=False, **MIXTURE, **DISTANCE_ONLY),
    "PenaltyDiffusivity": of_state("PenaltyDiffusivity", penalty=own_penalties, channels=False, **DISTANCE_ONLY),
    "UniformDiffusivity": of_state("UniformDiffusivity"),
    "IdentityDiffusivity": of_state("IdentityDiffusivity"),
    "AdjacencyDiffusivity": of_state(
        "AdjacencyDiffusivity",
        needed=True,
        normalization=NORMALIZATION,
        self_loops=loops,
        direction=DIRECTION,
        degrees=lambda d: choice(d, "weighted", "count"),
    ),
    "GATDiffusivity": of_state(
        "GATDiffusivity",
        channels=True,
        needed=True,
        heads=dividing,
        negative_slope=lambda d: number(d, 0.2, 0.0, optional=True, negative=True),
        self_loops=loops,
    ),
    "EdgeDiffusivity": of_state(
        "EdgeDiffusivity", needed=True, penalty=softmax_penalty, row_stochastic=flag, self_loops=loops
    ),
    "EdgeSparseFlowDiffusivity": of_state(
        "EdgeSparseFlowDiffusivity",
        channels=True,
        needed=True,
        **FLOW,
        hops=lambda d: count(d, 1, 2, optional=True),
        self_loops=loops,
    ),
    "SparseFlowDiffusivity": of_state(
        "SparseFlowDiffusivity", channels=True, **FLOW, lam_scale=lambda d: choice(d, "own", "batch_max")
    ),
    "KernelizedSoftmaxDiffusivity": of_state(
        "KernelizedSoftmaxDiffusivity",
        channels=True,
        heads=dividing,
        projection=projection,
        head_channels=head_channels,
        normalize=rows_or_frobenius,
        num_features=lambda d: count(d, 8, 5, optional=True),
        tau=positive,
        logits=lambda d: choice(d, "dot", "scaled_dot"),
        num_samples=lambda d: count(d, 2, 0, optional=True, zero=True),
        edge_regularization=lambda d: number(d, 0.0, 0.5, optional=True, zero=True),
        generator=generator,
        stabilizer=lambda d: number(d, 0.0, 1e-6, optional=True, zero=True),
    ),
    "SGFormerDiffusivity": of_state(
        "SGFormerDiffusivity",
        channels=False,
        heads=dividing,
        projection=projection,
        head_channels=head_channels,
        normalize=lambda d: choice(d, "row", "frobenius"),
    ),
    "NeumannDiffusivity": of_state(
        "NeumannDiffusivity",
        heads=lambda d: count(d, 1, 2, optional=True),
        strides=strides,
        boundary=boundary,
        alpha=lambda d: number(d, 0.1, 0.2, optional=True),
        budget=lambda d: number(d, 0.5, 0.25, "None", optional=True, none=True),
    ),
    "RelationalBias": of_state(
        "RelationalBias",
        needed=True,
        heads=lambda d: count(d, 1, 2, optional=True),
        hops=lambda d: count(d, 1, 2, optional=True),
        normalization=lambda d: choice(d, "sum", "sym", "row"),
        self_loops=loops,
        direction=DIRECTION,
        powers=lambda d: choice(d, "walks", "reach"),
        gate=lambda d: choice(d, "sigmoid", None),
    ),
    "SymmetricDiffusivity": composed("SymmetricDiffusivity"),
    "AdjacencyEnhancedDiffusivity": composed("AdjacencyEnhancedDiffusivity"),
    "GraphAugmentedDiffusivity": composed("GraphAugmentedDiffusivity"),
}

# ---------------------------------------------------------------- updates


def step(name: str, *, symmetric: bool = False, source: bool = True, **make: Callable[[Draw], Arg]) -> Strategy:
    """A state update of a state and a coupling."""

    def strategy(d: Draw) -> None:
        own = {key: value(d) for key, value in make.items()}
        d.call("update", f"mp.{name}({{args}})", **own)
        weighs = own["beta"].right not in (None, "0.0") if "beta" in own else False
        if name in ("Equilibrium", "CertifiedStep"):  # whose sources weigh one by default
            weighs = own["beta"].right != "0.0"
        # Heads apart, or a state [N, C] whose channels are cut into heads.
        wide = d.pick([(d.nodes, 1, d.channels), (d.nodes, d.channels)])
        x = Arg(real(d, *wide), wrong_tensors(*wide, dtype=d.dtype, meta=None))
        given = {"x": x.without("a lower rank", "a higher rank", "a longer last dimension")}
        given["coupling"] = coupling(d, symmetric=symmetric)
        wrong = [w for w in wrong_tensors(*wide, dtype=d.dtype, none=True, meta=None) if w.what != "a higher rank"]
        given["values"] = Arg(None, wrong, True)
        if source:
            given["source"] = Arg(real(d, *wide) if weighs else None, wrong, not weighs)
        d.call("out", "update({args})", **given)

    return strategy


TIME: Callable[[Draw], Arg] = lambda d: number(d, 0.5, 1.0, 0.1)  # noqa: E731
BETA: Callable[[Draw], Arg] = lambda d: number(d, 0.0, 0.5, optional=True, zero=True, negative=True)  # noqa: E731
LEAK: Callable[[Draw], Arg] = lambda d: number(d, 0.0, 0.2, optional=True, zero=True)  # noqa: E731
TOL: Callable[[Draw], Arg] = lambda d: number(d, 1e-3, "None", optional=True, none=True)  # noqa: E731
STEPS: Callable[[Draw], Arg] = lambda d: count(d, 1000, optional=True)  # noqa: E731


def own_update(d: Draw) -> None:
    """A subclass of the base."""
    d.call(
        "Own", "type('Own', (mp.StateUpdate,), dict(step=lambda s, x, c, v=None, h=None: c @ s.validate(x, c, v, h)))"
    )
    d.call("update", "Own()")
    wide = d.nodes, 1, d.channels
    wrong = [
        w
        for w in wrong_tensors(*wide, dtype=d.dtype, meta=None)
        if w.what not in ("a lower rank", "a longer last dimension")
    ]
    d.call("out", "update({args})", x=Arg(real(d, *wide), wrong), coupling=coupling(d))


UPDATES: dict[str, Strategy] = {
    "StateUpdate": own_update,
    "ExplicitEuler": step("ExplicitEuler", tau=TIME, form=FORM, beta=BETA, leak=LEAK),
    "MomentumStep": step(
        "MomentumStep",
        tau=TIME,
        momentum=lambda d: number(d, 0.5, 0.0, zero=True, below="1.0"),
        steps=lambda d: count(d, 2, 3, optional=True),
        form=FORM,
        beta=BETA,
        leak=LEAK,
    ),
    "ImplicitEuler": step("ImplicitEuler", symmetric=True, tau=TIME, beta=BETA, leak=LEAK, tol=TOL, max_iter=STEPS),
    "CrankNicolson": step("CrankNicolson", symmetric=True, tau=TIME, beta=BETA, leak=LEAK, tol=TOL, max_iter=STEPS),
    "HeatKernel": step("HeatKernel", symmetric=True, source=False, t=TIME, tol=TOL),
    "Equilibrium": step(
        "Equilibrium",
        symmetric=True,
        beta=lambda d: number(d, 1.0, 0.5, optional=True, negative=True, zero=True),
        leak=lambda d: number(d, 0.5, 0.2, zero=True),
        tol=TOL,
        max_iter=STEPS,
    ),
    "CertifiedStep": step(
        "CertifiedStep",
        symmetric=True,
        beta=lambda d: options(
            d, 1.0, "mp.Positive(0.5)", wrong=[w for w in number(d, zero=True).wrong if w.valid is False], optional=True
        ),
        constraint=lambda d: choice(d, None, "nonnegative", "ball", "sphere"),
        radius=lambda d: number(d, 1.0, 2.0, optional=True),
    ),
    "Backtracking": step(
        "Backtracking",
        symmetric=True,
        source=False,
        penalty=lambda d: options(
            d,
            "mp.QuadraticPenalty()",
            wrong=[
                Wrong("None", "None"),
                Wrong("3", "a number"),
                Wrong("[1]", "a list"),
                Wrong("'nonsense'", "a name"),
            ],
        ),
        tau=lambda d: number(d, 1.0, 0.5, optional=True),
        shrink=lambda d: number(d, 0.5, optional=True, below="1.0"),
        max_steps=lambda d: count(d, 30, optional=True),
        form=lambda d: choice(d, "conservative"),
        exact=lambda d: options(
            d, False, wrong=[Wrong("True", "not for this penalty"), Wrong("'yes'", "a string")], optional=True
        ),
    ),
}
