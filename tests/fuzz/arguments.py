"""What may stand for a count, a state, edges, a coupling …: right expressions that fit together, and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence

from .program import Arg, Draw, Wrong

SELF_LOOPS = ["keep", "add", "remove", "remaining"]
NOT_A_NUMBER = [
    Wrong("'two'", "a string"),
    Wrong("None", "None"),
    Wrong("[1]", "a list"),
    Wrong("1 + 2j", "complex"),
    Wrong("{}", "a dict"),
    Wrong("nn.Linear(2, 2)", "a module"),
]
NOT_A_TENSOR = [
    Wrong("[[1.0, 2.0], [3.0, 4.0]]", "a list"),
    Wrong("np.ones((2, 2))", "an array"),
    Wrong("'abc'", "a string"),
    Wrong("3.5", "a number"),
    Wrong("{}", "a dict"),
    Wrong("nn.Linear(2, 2)", "a module"),
]


def _one_of(d: Draw, right: Sequence[str], wrong: Sequence[Wrong], optional: bool) -> Arg:
    """One of some right expressions; an optional argument is left out half of the time."""
    source = None if optional and not d.maybe(0.5) else d.pick(right)
    return Arg(source, wrong, optional)


def fixed(source: object, *wrong: Wrong) -> Arg:
    """One right expression."""
    return Arg(str(source), wrong)


def options(d: Draw, *right: object, wrong: Sequence[Wrong] = (), optional: bool = False) -> Arg:
    """One of some right expressions."""
    return _one_of(d, [str(option) for option in right], wrong, optional)


def count(d: Draw, *right: int, optional: bool = False, zero: bool = False, none: bool = False) -> Arg:
    """A number of channels, heads, layers …, at least one (or with ``zero`` at least none)."""
    wrong = [
        *(w for w in NOT_A_NUMBER if not (none and w.source == "None")),
        Wrong("-1", "negative"),
        Wrong("2.5", "a fraction"),
        Wrong("True", "a bool"),
        Wrong("math.nan", "NaN"),
        Wrong("torch.tensor(2)", "a tensor", None),
        Wrong("np.int64(2)", "a NumPy integer", None),
        Wrong("torch.ones(2)", "a tensor of two"),
        *([] if zero else [Wrong("0", "zero")]),
    ]
    return _one_of(d, [str(number) for number in right or (1, 2, 3)], wrong, optional)


def number(
    d: Draw,
    *right: float | str,
    optional: bool = False,
    zero: bool = False,
    below: str | None = None,
    negative: bool = False,
    infinite: bool = False,
    none: bool = False,
) -> Arg:
    """A finite positive number; ``zero``, ``negative`` and ``infinite`` ones, or ``None``, if they are allowed too."""
    wrong = [
        *(w for w in NOT_A_NUMBER if not (none and w.source == "None")),
        Wrong("math.nan", "NaN"),
        Wrong("torch.ones(2)", "a tensor of two"),
        Wrong("torch.tensor(0.5)", "a tensor", None),
        Wrong("np.float32(0.5)", "a NumPy number", None),
        Wrong("True", "a bool", None),
        *([] if infinite else [Wrong("math.inf", "infinite")]),
        *([] if negative else [Wrong("-0.5", "negative"), Wrong("-math.inf", "minus infinity")]),
        *([] if zero or negative else [Wrong("0.0", "zero")]),
        *([] if below is None else [Wrong(below, "beyond its bound")]),
    ]
    return _one_of(d, [str(value) for value in right or (0.5, 1.0, 0.1)], wrong, optional)


def probability(d: Draw) -> Arg:
    """A rate of dropout."""
    wrong = [*NOT_A_NUMBER, Wrong("1.0", "one"), Wrong("-0.1", "negative"), Wrong("math.nan", "NaN"), Wrong("2", "two")]
    return _one_of(d, ["0.0", "0.5"], wrong, True)


def choice(d: Draw, *right: str | None, optional: bool = True) -> Arg:
    """One of some strings, or ``None`` where it is among them."""
    wrong = [
        Wrong("'nonsense'", "another string"),
        Wrong("3", "a number"),
        Wrong("['sym']", "a list"),
        Wrong("{}", "a dict"),
        Wrong("torch.ones(2)", "a tensor"),
        Wrong("np.array(['a', 'b'])", "an array"),
        *([] if None in right else [Wrong("None", "None")]),
    ]
    return _one_of(d, [repr(option) for option in right], wrong, optional)


def flag(d: Draw) -> Arg:
    """True or False. Python takes anything for one of them, so a string may be accepted."""
    wrong = [Wrong("'yes'", "a string", None), Wrong("torch.ones(2)", "a tensor of two", None)]
    return _one_of(d, ["False", "True"], wrong, True)


def generator(d: Draw, *, optional: bool = True) -> Arg:
    """A random generator."""
    wrong = [Wrong("3", "a number"), Wrong("'seed'", "a string"), Wrong("np.random.default_rng(0)", "NumPy's")]
    return _one_of(d, ["torch.Generator().manual_seed(0)"], wrong, optional)


def real(d: Draw, *shape: int, dtype: str | None = None, positive: bool = False) -> str:
    """An expression for a moderate floating-point tensor."""
    dtype = d.dtype if dtype is None else dtype
    size = ", ".join(map(str, shape)) or "()"
    kind = "" if dtype == "float32" else f", dtype=torch.{dtype}"
    if positive:
        return f"torch.rand({size}{kind}) + 0.1"
    forms = [f"torch.randn({size}{kind})"] * 4 + [
        f"torch.zeros({size}{kind})",
        f"torch.ones({size}{kind})",
        f"3 * torch.randn({size}{kind})",
        f"torch.randn({size}{kind}).requires_grad_()",
    ]
    if len(shape) == 2:
        forms += [f"torch.randn({shape[1]}, {shape[0]}{kind}).t()"]
        forms += [f"torch.randn({1 if shape[0] else 0}, {shape[1]}{kind}).expand({shape[0]}, -1)"]
    return d.pick(forms)


def wrong_tensors(
    *shape: int, dtype: str = "float32", none: bool = False, lists: bool | None = False, meta: bool | None = False
) -> list[Wrong]:
    """What is wrong in place of a real tensor of that shape."""
    size = ", ".join(map(str, shape)) or "()"
    kind = f", dtype=torch.{dtype}"
    other = "float64" if dtype != "float64" else "float32"
    longer = ", ".join(map(str, [*shape[:-1], shape[-1] + 1])) if shape else "2"
    flat = ", ".join(map(str, shape[1:])) if len(shape) > 1 else "()"
    wrong = [
        *(Wrong(w.source, w.what, lists if w.what in ("a list", "an array") else False) for w in NOT_A_TENSOR),
        Wrong(f"torch.ones({longer}{kind})", "a longer last dimension"),
        Wrong(f"torch.ones({flat}{kind})", "a lower rank"),
        Wrong(f"torch.ones(2, {size}{kind})" if shape else f"torch.ones(2, 2{kind})", "a higher rank"),
        Wrong(f"torch.ones({size}, dtype=torch.long)", "integers"),
        Wrong(f"torch.ones({size}, dtype=torch.bool)", "bools"),
        Wrong(f"torch.ones({size}, dtype=torch.complex64)", "complex"),
        Wrong(f"torch.ones({size}{kind}).to_sparse()", "a sparse tensor"),
        Wrong(f"torch.ones({size}{kind}, device='meta')", "on the meta device", meta),
        Wrong(f"torch.ones({size}, dtype=torch.{other})", "another dtype", None),
        Wrong(f"torch.full(({size},), math.nan{kind})" if shape else "torch.tensor(math.nan)", "NaN", None),
        Wrong(f"torch.full(({size},), math.inf{kind})" if shape else "torch.tensor(math.inf)", "infinite", None),
        Wrong(f"torch.full(({size},), 1e30).to(torch.{dtype})" if shape else "torch.tensor(1e30)", "huge", None),
    ]
    return wrong if none else [*wrong, Wrong("None", "None")]


def tensor(d: Draw, *shape: int, optional: bool = False, positive: bool = False, lists: bool | None = False) -> Arg:
    """A real tensor of that shape."""
    wrong = wrong_tensors(*shape, dtype=d.dtype, none=optional, lists=lists, meta=None)
    return _one_of(d, [real(d, *shape, positive=positive)], wrong, optional)


def state(d: Draw, channels: int | None = None, *, parameters: bool = True, dtype: str | None = None) -> Arg:
    """x [N, C]; with ``parameters`` the layer knows C, and its parameters are no meta tensors."""
    n, c, dtype = d.nodes, d.channels if channels is None else channels, dtype or d.dtype
    wrong = wrong_tensors(n, c, dtype=dtype, meta=False if parameters else None)
    if not parameters:
        wrong = [Wrong(w.source, w.what, None) if w.what == "a longer last dimension" else w for w in wrong]
    return Arg(real(d, n, c, dtype=dtype), wrong)


# ---------------------------------------------------------------- graphs


def edge_list(d: Draw) -> str:
    """[2, E] of the edges of this program."""
    if not d.edges:
        return "torch.zeros(2, 0, dtype=torch.long)"
    return f"torch.tensor([{[s for s, _ in d.edges]}, {[t for _, t in d.edges]}])"


def graph_source(d: Draw, *, batch: bool = True) -> str:
    """A `Graph` with the edges, weights and batch of this program."""
    parts = [str(d.nodes), edge_list(d)]
    if d.maybe(0.3):
        parts.append(f"torch.rand({len(d.edges)})")
    if batch and d.sizes is not None:
        parts.append(d.pick([f"batch=torch.tensor({d.batch}, dtype=torch.long)", f"ptr=torch.tensor({d.ptr})"]))
    return f"mp.Graph({', '.join(parts)})"


def wrong_edges(d: Draw) -> list[Wrong]:
    """What is wrong in place of edges."""
    n, e = d.nodes, edge_list(d)
    return [
        Wrong("[[0], [0]]", "a list"),
        Wrong("np.zeros((2, 3), dtype=np.int64)", "an array"),
        Wrong("'edges'", "a string"),
        Wrong("3", "a number"),
        Wrong("{}", "a dict"),
        Wrong("nn.Linear(2, 2)", "a module"),
        Wrong("torch.zeros(2, 3)", "floats"),
        Wrong("torch.zeros(2, 3, dtype=torch.bool)", "bools"),
        Wrong("torch.zeros(2, 3, dtype=torch.complex64)", "complex"),
        Wrong("torch.zeros(3, 2, dtype=torch.long)", "transposed"),
        Wrong("torch.zeros(2, dtype=torch.long)", "of rank one"),
        Wrong("torch.zeros(1, 2, 3, dtype=torch.long)", "of rank three"),
        Wrong(f"torch.tensor([[{n}], [0]])", "beyond N"),
        Wrong("torch.tensor([[0], [10**8]])", "far beyond N"),
        Wrong("torch.tensor([[-1], [0]])", "negative"),
        Wrong("torch.zeros(2, 3, dtype=torch.long, device='meta')", "on the meta device"),
        Wrong(f"torch.eye({n + 1})", "a dense matrix"),
        Wrong(f"torch.eye({n + 1}).to_sparse_csr()", "a sparse matrix of another size"),
        Wrong(f"torch.ones({n}, {n + 1}).to_sparse_csr()", "a sparse matrix, not square"),
        Wrong(f"mp.Graph({n + 1}, torch.zeros(2, 1, dtype=torch.long))", "a graph of another size"),
        Wrong(f"{e}.to(torch.int16)", "int16", None),
        Wrong(f"{e}.to(torch.uint8)", "uint8", None),
        Wrong("Data(edge_index=torch.zeros(2, 3, dtype=torch.long))", "a Data"),
    ]


def wrong_weights(d: Draw) -> list[Wrong]:
    """What is wrong in place of edge weights."""
    e = len(d.edges)
    some = [
        Wrong(f"torch.full(({e},), math.nan)", "NaN"),
        Wrong(f"torch.full(({e},), math.inf)", "infinite"),
        Wrong(f"-torch.ones({e})", "negative"),
        Wrong(f"torch.full(({e},), 3e38)", "near the largest number"),
        Wrong("[]", "none"),
    ]
    return [
        *(some if e else []),
        Wrong(f"[1.0] * {e}", "a list", None),
        Wrong(f"np.ones({e})", "an array", None),
        Wrong("'ones'", "a string"),
        Wrong("2.0", "a number"),
        Wrong("nn.Linear(2, 2)", "a module"),
        Wrong(f"torch.ones({e + 1})", "too long"),
        Wrong(f"torch.ones({e}, 2)", "of rank two"),
        Wrong(f"torch.ones({e}, dtype=torch.long)", "integers"),
        Wrong(f"torch.ones({e}, dtype=torch.bool)", "bools"),
        Wrong(f"torch.ones({e}, dtype=torch.complex64)", "complex"),
        Wrong(f"torch.ones({e}, device='meta')", "on the meta device", None if e == 0 else False),
        Wrong(f"torch.ones({e}).to_sparse()", "a sparse tensor"),
        Wrong(f"torch.ones({e}, dtype=torch.float64)", "another dtype", None),
    ]


def wrong_batch(d: Draw) -> list[Wrong]:
    """What is wrong in place of a batch vector."""
    n = d.nodes
    some = [
        Wrong(f"torch.full(({n},), 10**8)", "one large number"),
        Wrong(f"torch.full(({n},), -1)", "negative"),
        Wrong(f"torch.zeros({n}, dtype=torch.long, device='meta')", "on the meta device"),
    ]
    return [
        *(some if n else []),
        *([Wrong(f"torch.arange({n}).flip(0)", "not sorted")] if n > 1 else []),
        Wrong(f"[0] * {n}", "a list", None),
        Wrong(f"np.zeros({n}, dtype=np.int64)", "an array", None),
        Wrong("'batch'", "a string"),
        Wrong("3", "a number"),
        Wrong("nn.Linear(2, 2)", "a module"),
        Wrong(f"torch.zeros({n + 1}, dtype=torch.long)", "too long"),
        Wrong(f"torch.zeros({n}, 1, dtype=torch.long)", "of rank two"),
        Wrong("torch.tensor(0)", "of rank zero"),
        Wrong(f"torch.zeros({n})", "floats"),
        Wrong(f"torch.zeros({n}, dtype=torch.bool)", "bools"),
        Wrong(f"torch.zeros({n}, dtype=torch.complex64)", "complex"),
        Wrong(f"torch.zeros({n}, dtype=torch.long).to_sparse()", "a sparse tensor"),
        Wrong(f"torch.zeros({n}, dtype=torch.int32)", "int32", None),
    ]


def wrong_ptr(d: Draw) -> list[Wrong]:
    """What is wrong in place of bounds."""
    n = d.nodes
    return [
        Wrong(f"[0, {n}]", "a list", None),
        Wrong(f"np.array([0, {n}])", "an array", None),
        Wrong("'ptr'", "a string"),
        Wrong("3", "a number"),
        Wrong("nn.Linear(2, 2)", "a module"),
        Wrong(f"torch.tensor([0, {n + 1}])", "beyond N"),
        Wrong(f"torch.tensor([1, {n + 1}])", "not from zero"),
        Wrong(f"torch.tensor([0, {n + 2}, {n}])", "not rising"),
        Wrong(f"torch.tensor([0, -1, {n}])", "negative"),
        Wrong(f"torch.tensor([[0, {n}]])", "of rank two"),
        Wrong("torch.tensor(0)", "of rank zero"),
        Wrong("torch.tensor([], dtype=torch.long)", "empty"),
        Wrong(f"torch.tensor([0.0, {n}])", "floats"),
        Wrong(f"torch.tensor([0, {n}], dtype=torch.complex64)", "complex"),
        Wrong("torch.tensor([False, True])", "bools"),
        Wrong("torch.zeros(2, dtype=torch.long, device='meta')", "on the meta device"),
        Wrong(f"torch.tensor([0, {n}], dtype=torch.int32)", "int32", None),
        Wrong(f"torch.tensor([0, {n}]).to_sparse()", "a sparse tensor"),
    ]


def ptr(d: Draw) -> Arg:
    """Bounds of a ragged batch, or none."""
    return Arg(None if d.sizes is None else f"torch.tensor({d.ptr})", wrong_ptr(d), True)


def batch(d: Draw) -> Arg:
    """The graph of every node, or nothing."""
    return Arg(None if d.sizes is None else f"torch.tensor({d.batch}, dtype=torch.long)", wrong_batch(d), True)


def edges(d: Draw, *, needed: bool = True, objects: bool = True) -> dict[str, Arg]:
    """``edge_index``, ``edge_weight`` and ``batch`` that fit together, in one of the forms that PyG users hold."""
    e, n = edge_list(d), d.nodes
    forms = ["tensor"] * 3 + ["int32", "EdgeIndex", "sparse", "Graph"] + ([] if needed else ["None"])
    form = d.pick(forms) if objects else "tensor"
    ones = f"torch.ones({len(d.edges)})"
    source = {
        "tensor": e,
        "int32": f"{e}.int()",
        "EdgeIndex": f"EdgeIndex({e}, sparse_size=({n}, {n}))",
        "sparse": f"torch.sparse_coo_tensor({e}.flip(0), {ones}, ({n}, {n})).coalesce().to_sparse_csr()",
        "Graph": graph_source(d),
        "None": None,
    }[form]
    weighted = form in ("tensor", "int32", "EdgeIndex") and d.maybe(0.4)
    weights = wrong_weights(d) if form in ("tensor", "int32", "EdgeIndex") else []
    graphs = batch(d) if form != "Graph" else Arg(None, [], True)
    return {
        "edge_index": Arg(source, wrong_edges(d), not needed),
        "edge_weight": Arg(f"torch.rand({len(d.edges)})" if weighted else None, weights, True),
        "batch": graphs,
    }


def graph(d: Draw, *, optional: bool = True, needed: bool = False) -> Arg:
    """A `Graph`, or what it can be made of."""
    right = [graph_source(d), edge_list(d)] if d.sizes is None else [graph_source(d)]
    source = None if optional and not needed and d.maybe(0.3) else d.pick(right)
    wrong = wrong_edges(d)
    return Arg(source, wrong if optional else [*wrong, Wrong("None", "None")], optional and not needed)


def just_graph(d: Draw) -> Arg:
    """A `Graph` and nothing else."""
    wrong = [
        *NOT_A_TENSOR,
        Wrong("None", "None"),
        Wrong("torch.tensor([[0], [0]])", "a tensor", None),
        Wrong("Data(edge_index=torch.tensor([[0], [0]]))", "a Data", None),
    ]
    return Arg(graph_source(d), wrong)


def pairs(d: Draw, name: str = "pairs") -> Arg:
    """Listed pairs [2, L] of nodes of this program."""
    n = d.nodes
    right = ["torch.zeros(2, 0, dtype=torch.long)"]
    if n:
        right = [edge_list(d), f"torch.tensor([[0, {n - 1}], [{n - 1}, 0]])", *right]
    wrong = [
        Wrong("[[0], [0]]", "a list", None),
        Wrong("np.zeros((2, 1), dtype=np.int64)", "an array", None),
        Wrong("None", "None"),
        Wrong("'pairs'", "a string"),
        Wrong("3", "a number"),
        Wrong("torch.zeros(2, 3)", "floats"),
        Wrong("torch.zeros(2, 3, dtype=torch.bool)", "bools"),
        Wrong("torch.zeros(2, 3, dtype=torch.complex64)", "complex"),
        Wrong("torch.zeros(3, 2, dtype=torch.long)", "transposed"),
        Wrong("torch.zeros(2, dtype=torch.long)", "of rank one"),
        Wrong(f"torch.tensor([[{n}], [0]])", "beyond N"),
        Wrong("torch.tensor([[0], [10**8]])", "far beyond N"),
        Wrong("torch.tensor([[-1], [0]])", "negative"),
        Wrong("torch.zeros(2, 3, dtype=torch.long, device='meta')", "on the meta device"),
        Wrong("torch.zeros(2, 0, dtype=torch.int32)", "int32", None),
        Wrong("torch.zeros(2, 3, dtype=torch.long).to_sparse()", "sparse"),
        Wrong("nn.Linear(2, 2)", "a module"),
    ]
    return Arg(d.pick(right), wrong)


# ---------------------------------------------------------------- objects of the library

NOT_A_COUPLING = [
    Wrong("None", "None"),
    Wrong("'simple'", "a string"),
    Wrong("3.5", "a number"),
    Wrong("[1, 2]", "a list"),
    Wrong("torch.eye(3)", "a tensor"),
    Wrong("np.eye(3)", "an array"),
    Wrong("nn.Linear(2, 2)", "a module"),
    Wrong("mp.SimpleDiffusivity()", "a diffusivity"),
    Wrong("mp.IdentityCoupling", "a class"),
]
NOT_A_DIFFUSIVITY = [
    Wrong("None", "None"),
    Wrong("'simple'", "a string"),
    Wrong("3.5", "a number"),
    Wrong("[mp.SimpleDiffusivity()]", "a list"),
    Wrong("torch.eye(3)", "a tensor"),
    Wrong("nn.Linear(2, 2)", "a module"),
    Wrong("mp.IdentityCoupling(3)", "a coupling"),
    Wrong("mp.SimpleDiffusivity", "a class"),
    Wrong("lambda x, graph: x", "a function"),
]
NOT_AN_UPDATE = [
    Wrong("'euler'", "a string"),
    Wrong("0.5", "a number"),
    Wrong("nn.Linear(2, 2)", "a module"),
    Wrong("mp.ExplicitEuler", "a class"),
    Wrong("torch.ones(2)", "a tensor"),
    Wrong("[mp.ExplicitEuler(0.5)]", "a list"),
]
NOT_A_MODULE = [
    Wrong("None", "None"),
    Wrong("'model'", "a string"),
    Wrong("3", "a number"),
    Wrong("torch.ones(2)", "a tensor"),
    Wrong("nn.Linear", "a class"),
    Wrong("[nn.Linear(2, 2)]", "a list"),
    Wrong("lambda x: x", "a function"),
]


def coupling_source(d: Draw, *, symmetric: bool = False, heads: int = 1) -> str:
    """A coupling of the nodes of this program, in its dtype."""
    n, kind = d.nodes, "" if d.dtype == "float32" else f", dtype=torch.{d.dtype}"
    bounds = "" if d.sizes is None else f", ptr=torch.tensor({d.ptr})"
    some = [
        f"mp.UniformCoupling({n}{bounds}{kind})",
        f"mp.IdentityCoupling({n}{kind})",
        f"mp.SparseCoupling(mp.Graph({n}, {edge_list(d)}).to_undirected(), symmetric=True, nonnegative=True)",
        f"mp.NeumannCoupling({n}, torch.full((1, {heads}), 0.2{kind}){bounds}, nonnegative=True)",
    ]
    if not symmetric:
        features = f"torch.randn({n}, {heads}, 3{kind})"
        some += [
            f"mp.SparseCoupling(mp.Graph({n}, {edge_list(d)}))",
            f"mp.PairwiseCoupling({features}, {features}{bounds})",
            f"mp.LowRankCoupling({features}, {features}{bounds})",
            f"0.5 * mp.IdentityCoupling({n}{kind}) + 0.5 * mp.UniformCoupling({n}{bounds}{kind})",
        ]
    return d.pick(some)


def coupling(d: Draw, *, symmetric: bool = False, optional: bool = False, other_size: bool | None = False) -> Arg:
    """A coupling of the nodes of this program."""
    wrong = [*NOT_A_COUPLING, Wrong(f"mp.UniformCoupling({d.nodes + 1})", "of other nodes", other_size)]
    wrong = [w for w in wrong if not (optional and w.source == "None")]
    return _one_of(d, [coupling_source(d, symmetric=symmetric)], wrong, optional)


DIFFUSIVITIES = [
    "mp.SimpleDiffusivity()",
    "mp.SigmoidDiffusivity()",
    "mp.UniformDiffusivity()",
    "mp.IdentityDiffusivity()",
    "mp.GaussianDiffusivity()",
    "mp.AdjacencyDiffusivity('row')",
    "0.5 * mp.SimpleDiffusivity() + 0.5 * mp.AdjacencyDiffusivity()",
]
UPDATES = [
    "mp.ExplicitEuler(0.5)",
    "mp.ExplicitEuler(0.5, 'residual')",
    "mp.ExplicitEuler(0.5, beta=0.5, leak=0.1)",
]


def diffusivity(d: Draw, *right: str) -> Arg:
    """A diffusivity."""
    return Arg(d.pick(right or DIFFUSIVITIES), NOT_A_DIFFUSIVITY)


def update(d: Draw, *, optional: bool = True) -> Arg:
    """A state update."""
    return _one_of(d, UPDATES, NOT_AN_UPDATE, optional)


def module(source: str, *more: Wrong) -> Arg:
    """A module."""
    return Arg(source, [*NOT_A_MODULE, *more])


def cast(d: Draw) -> str:
    """What turns a freshly made module into one of this program's dtype, in training or evaluation."""
    to = "" if d.dtype == "float32" else f".to(torch.{d.dtype})"
    return to + d.pick(["", "", ".eval()"])
