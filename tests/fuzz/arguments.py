"""What may stand for a count, a state, edges, a coupling …: right expressions that fit together, and wrong ones."""

from collections.abc import Callable, Sequence

from .program import Arg, Draw, Wrong

Make = Callable[[Draw], Arg]

#: Expressions that are wrong in many places, by what they are.
COMMON = {
    "None": "None",
    "NaN": "math.nan",
    "a class": "nn.Linear",
    "a dict": "{}",
    "a fraction": "2.5",
    "a function": "lambda x: x",
    "a list": "[1]",
    "a module": "nn.Linear(2, 2)",
    "a number": "3",
    "a string": "'abc'",
    "a tensor": "torch.ones(2)",
    "an array": "np.ones((2, 2))",
    "beyond": "9",
    "complex": "1 + 2j",
    "empty": "[]",
    "infinite": "math.inf",
    "negative": "-1",
    "zero": "0",
}


def bad(*tables: str) -> list[Wrong]:
    """Read tables ``what: expression | what: expression | …``.

    A ``what`` without an expression is one of `COMMON`, and ``what?`` may be accepted. A later entry replaces an
    earlier one of the same name.
    """
    entries = {}
    for entry in [entry for table in tables if table for entry in table.split(" | ")]:
        what, _, source = entry.strip().partition(": ")
        name = what.removesuffix("?")
        entries[name] = Wrong(
            source or COMMON[name], name, None if what.endswith("?") else False
        )
    return list(entries.values())


NOT_A_NUMBER = bad("a string | None | a list | complex | a dict | a module")
NOT_A_TENSOR = bad(
    "a list: [[1.0, 2.0], [3.0, 4.0]] | an array | a string | a number | a dict | a module"
)


def fixed(source: object, *wrong: Wrong) -> Arg:
    return Arg(str(source), wrong)


def options(
    d: Draw, *right: object, wrong: Sequence[Wrong] = (), optional: bool = False
) -> Arg:
    """One of some right expressions; an optional argument is left out half of the time."""
    return Arg(
        None if optional and not d.maybe(0.5) else str(d.pick(right)), wrong, optional
    )


def never(wrong: Sequence[Wrong]) -> Arg:
    """An argument that is left out unless it is wrong."""
    return Arg(None, wrong, True)


def unused(arg: Arg) -> Arg:
    """An argument that is left out unless it is surely wrong."""
    return never([w for w in arg.wrong if w.valid is False])


def count(d: Draw, *right: int, optional: bool = False, zero: bool = False) -> Arg:
    """A number of channels, heads, layers …, at least one (or with ``zero`` at least none)."""
    wrong = NOT_A_NUMBER + bad(
        "negative | a fraction | a bool: True | NaN | a tensor?: torch.tensor(2) | a NumPy integer?: np.int64(2)",
        "a tensor of two: torch.ones(2)" + " | zero" * (not zero),
    )
    return options(d, *(right or (1, 2, 3)), wrong=wrong, optional=optional)


def number(
    d: Draw,
    *right: float | str,
    optional: bool = False,
    zero: bool = False,
    below: str | None = None,
    negative: bool = False,
    infinite: bool = False,
) -> Arg:
    """A finite positive number; ``zero``, ``negative`` and ``infinite`` ones if they are allowed too."""
    wrong = NOT_A_NUMBER + bad(
        "NaN | a tensor of two: torch.ones(2) | a tensor?: torch.tensor(0.5) | a NumPy number?: np.float32(0.5)",
        "a bool?: True",
        "" if infinite else "infinite",
        "" if negative else "negative: -0.5 | minus infinity: -math.inf",
        "" if zero or negative else "zero: 0.0",
        "" if below is None else f"beyond its bound: {below}",
    )
    return options(d, *(right or (0.5, 1.0, 0.1)), wrong=wrong, optional=optional)


def channels(d: Draw) -> Arg:
    return count(d, d.channels)


def probability(d: Draw) -> Arg:
    wrong = NOT_A_NUMBER + bad("one: 1.0 | negative: -0.1 | NaN | two: 2")
    return options(d, 0.0, 0.5, wrong=wrong)


def choice(d: Draw, *right: str | None, optional: bool = False) -> Arg:
    """One of some strings, or ``None`` where it is among them."""
    wrong = bad(
        "another string: 'nonsense' | a number | a list: ['sym'] | a dict | a tensor | an array: np.array(['a', 'b'])",
        "" if None in right else "None",
    )
    return options(d, *map(repr, right), wrong=wrong, optional=optional)


def flag(d: Draw, *, optional: bool = True) -> Arg:
    """True or False. Python takes anything for one of them, so a string may be accepted."""
    wrong = bad("a string?: 'yes' | a tensor of two?: torch.ones(2)")
    return options(d, False, True, wrong=wrong, optional=optional)


def generator(d: Draw) -> Arg:
    wrong = bad("a number | a string | NumPy's: np.random.default_rng(0) | None")
    return Arg("torch.Generator().manual_seed(0)", wrong)


def strides(d: Draw) -> Arg:
    wrong = bad(
        "empty: () | a zero: (0,) | negative: (-1,) | a fraction: (1.5,) | a string | a number | None",
        "a bool: (True,) | letters: ('a',) | a module",
    )
    return options(d, "(1,)", "(2,)", "[3]", wrong=wrong)


def dtype(d: Draw) -> Arg:
    wrong = bad(
        "a string: 'float32' | integers: torch.int64 | a number | complex: torch.complex64"
    )
    return Arg(f"torch.{d.dtype}", wrong)


def device(d: Draw) -> Arg:
    wrong = bad("no device: 'nowhere' | a number: 3.5 | a list: ['cpu']")
    return options(d, "'cpu'", "torch.device('cpu')", wrong=wrong)


NOT_A_SEED = bad(
    "a string | None | a fraction | a list | a tensor | NaN | negative? | beyond 64 bits?: 2**70"
)

NOT_A_PATH = bad(
    "None | a number | a list: ['a'] | a tensor | empty: '' | a zero byte: 'a\\0b' | bytes: b'\\xff'",
    "too long: 'x' * 5000",
)


def absent(d: Draw) -> Arg:
    return Arg("'absent'", NOT_A_PATH, valid=None)


def seed(d: Draw) -> Arg:
    return options(d, 0, 1, wrong=NOT_A_SEED, optional=True)


def kind(d: Draw, dtype: str | None = None) -> str:
    dtype = dtype or d.dtype
    return "" if dtype == "float32" else f", dtype=torch.{dtype}"


def real(d: Draw, *shape: int, dtype: str | None = None, positive: bool = False) -> str:
    """An expression for a moderate floating-point tensor."""
    size = ", ".join(map(str, shape)) or "()"
    of = kind(d, dtype)
    if positive:
        return f"torch.rand({size}{of}) + 0.1"
    forms = [f"torch.randn({size}{of})"] * 4 + [
        f"torch.zeros({size}{of})",
        f"torch.ones({size}{of})",
        f"3 * torch.randn({size}{of})",
        f"torch.randn({size}{of}).requires_grad_()",
    ]
    if len(shape) == 2:
        forms += [f"torch.randn({shape[1]}, {shape[0]}{of}).t()"]
        forms += [
            f"torch.randn({1 if shape[0] else 0}, {shape[1]}{of}).expand({shape[0]}, -1)"
        ]
    return d.pick(forms)


def wrong_tensors(
    *shape: int,
    dtype: str = "float32",
    none: bool = False,
    lists: bool | None = False,
    meta: bool | None = False,
) -> list[Wrong]:
    """What is wrong in place of a real tensor of that shape."""
    size = ", ".join(map(str, shape)) or "()"
    of = f", dtype=torch.{dtype}"
    longer = ", ".join(map(str, [*shape[:-1], shape[-1] + 1])) if shape else "2"
    flat = ", ".join(map(str, shape[1:])) if len(shape) > 1 else "()"
    full = f"torch.full(({size},), " if shape else "torch.tensor("
    wrong = bad(
        f"a longer last dimension: torch.ones({longer}{of}) | a lower rank: torch.ones({flat}{of})",
        f"a higher rank: torch.ones(2, {size if shape else 2}{of}) | integers: torch.ones({size}, dtype=torch.long)",
        f"bools: torch.ones({size}, dtype=torch.bool) | complex: torch.ones({size}, dtype=torch.complex64)",
        f"a sparse tensor: torch.ones({size}{of}).to_sparse()",
        f"another dtype?: torch.ones({size}, dtype=torch.float{32 if dtype == 'float64' else 64})",
        f"NaN?: {full}math.nan{of if shape else ''}) | infinite?: {full}math.inf{of if shape else ''})",
        f"huge?: {full}1e30){f'.to(torch.{dtype})' if shape else ''}",
    )
    wrong.append(
        Wrong(f"torch.ones({size}{of}, device='meta')", "on the meta device", meta)
    )
    wrong += [
        Wrong(w.source, w.what, lists if w.what in ("a list", "an array") else False)
        for w in NOT_A_TENSOR
    ]
    return wrong if none else wrong + bad("None")


def tensor(
    d: Draw,
    *shape: int,
    optional: bool = False,
    positive: bool = False,
    lists: bool | None = False,
) -> Arg:
    wrong = wrong_tensors(*shape, dtype=d.dtype, none=optional, lists=lists, meta=None)
    return options(
        d, real(d, *shape, positive=positive), wrong=wrong, optional=optional
    )


def state(
    d: Draw,
    channels: int | None = None,
    *,
    parameters: bool = True,
    dtype: str | None = None,
) -> Arg:
    """x [N, C]; with ``parameters`` the layer knows C, and its parameters are no meta tensors."""
    n = d.nodes
    c = d.channels if channels is None else channels
    dtype = dtype or d.dtype
    arg = Arg(
        real(d, n, c, dtype=dtype),
        wrong_tensors(n, c, dtype=dtype, meta=False if parameters else None),
    )
    return arg if parameters else arg.unsure("a longer last dimension")


def free(d: Draw, *kept: str) -> Arg:
    """x [N, C] of a function that takes any number of channels, and [N, H, D]."""
    return state(d, parameters=False).unsure(
        "a longer last dimension", "another dtype", "a higher rank", *kept
    )


def not_integers(size: str, *own: str) -> list[Wrong]:
    return bad(
        f"a string | a number | a module | floats: torch.zeros({size}) | bools: torch.zeros({size}, dtype=torch.bool)",
        f"complex: torch.zeros({size}, dtype=torch.complex64)",
        f"a sparse tensor: torch.zeros({size}).long().to_sparse()",
        f"on the meta device: torch.zeros({size}, dtype=torch.long, device='meta')",
        *own,
    )


def edge_list(d: Draw) -> str:
    if not d.edges:
        return "torch.zeros(2, 0, dtype=torch.long)"
    return f"torch.tensor([{[s for s, _ in d.edges]}, {[t for _, t in d.edges]}])"


def graph_source(d: Draw) -> str:
    parts = [str(d.nodes), edge_list(d)]
    if d.maybe(0.3):
        parts.append(f"torch.rand({len(d.edges)})")
    if d.sizes is not None:
        parts.append(
            d.pick(
                [
                    f"batch=torch.tensor({d.batch}, dtype=torch.long)",
                    f"ptr=torch.tensor({d.ptr})",
                ]
            )
        )
    return f"mp.Graph({', '.join(parts)})"


def _wrong_pairs(d: Draw, *own: str) -> list[Wrong]:
    return not_integers(
        "2, 3",
        "transposed: torch.zeros(3, 2, dtype=torch.long) | of rank one: torch.zeros(2, dtype=torch.long)",
        f"beyond N: torch.tensor([[{d.nodes}], [0]]) | far beyond N: torch.tensor([[0], [10**8]])",
        "negative: torch.tensor([[-1], [0]])",
        *own,
    )


def wrong_edges(d: Draw) -> list[Wrong]:
    n = d.nodes
    e = edge_list(d)
    return _wrong_pairs(
        d,
        "a list: [[0], [0]] | an array: np.zeros((2, 3), dtype=np.int64) | a dict",
        f"of rank three: torch.zeros(1, 2, 3, dtype=torch.long) | a dense matrix: torch.eye({n + 1})",
        f"a sparse matrix of another size: torch.eye({n + 1}).to_sparse_csr()",
        f"a sparse matrix, not square: torch.ones({n}, {n + 1}).to_sparse_csr()",
        f"a graph of another size: mp.Graph({n + 1}, torch.zeros(2, 1, dtype=torch.long))",
        f"int16?: {e}.to(torch.int16) | uint8?: {e}.to(torch.uint8)",
        "a Data: Data(edge_index=torch.zeros(2, 3, dtype=torch.long))",
    )


def wrong_weights(d: Draw) -> list[Wrong]:
    e = len(d.edges)
    return bad(
        f"a list?: [1.0] * {e} | an array?: np.ones({e}) | a string: 'ones' | a number: 2.0 | a module",
        f"too long: torch.ones({e + 1}) | of rank two: torch.ones({e}, 2)",
        f"a sparse tensor: torch.ones({e}).to_sparse()",
        f"integers: torch.ones({e}, dtype=torch.long) | bools: torch.ones({e}, dtype=torch.bool)",
        f"complex: torch.ones({e}, dtype=torch.complex64) | another dtype?: torch.ones({e}, dtype=torch.float64)",
        f"on the meta device{'' if e else '?'}: torch.ones({e}, device='meta')",
        f"NaN: torch.full(({e},), math.nan) | infinite: torch.full(({e},), math.inf) | none: []"
        if e
        else "",
        f"negative: -torch.ones({e}) | near the largest number: torch.full(({e},), 3e38)"
        if e
        else "",
    )


def wrong_batch(d: Draw) -> list[Wrong]:
    n = d.nodes
    wrong = not_integers(
        str(n),
        f"a list?: [0] * {n} | an array?: np.zeros({n}, dtype=np.int64) | int32?: torch.zeros({n}, dtype=torch.int32)",
        f"too long: torch.zeros({n + 1}, dtype=torch.long) | of rank two: torch.zeros({n}, 1, dtype=torch.long)",
        "of rank zero: torch.tensor(0)",
        f"one large number: torch.full(({n},), 10**8) | negative: torch.full(({n},), -1)"
        if n
        else "",
        f"not sorted: torch.arange({n}).flip(0)" if n > 1 else "",
    )
    return [w for w in wrong if n or w.what != "on the meta device"]


def wrong_ptr(d: Draw) -> list[Wrong]:
    n = d.nodes
    return not_integers(
        "2",
        f"a list?: [0, {n}] | an array?: np.array([0, {n}]) | int32?: torch.tensor([0, {n}], dtype=torch.int32)",
        f"beyond N: torch.tensor([0, {n + 1}]) | not from zero: torch.tensor([1, {n + 1}])",
        f"not rising: torch.tensor([0, {n + 2}, {n}]) | negative: torch.tensor([0, -1, {n}])",
        f"of rank two: torch.tensor([[0, {n}]]) | empty: torch.tensor([], dtype=torch.long)",
        "of rank zero: torch.tensor(0)",
        f"short of N: torch.tensor([0, {n - 1}])" if n else "",
    )


def ptr(d: Draw) -> Arg:
    return Arg(
        None if d.sizes is None else f"torch.tensor({d.ptr})", wrong_ptr(d), True
    )


def batch(d: Draw) -> Arg:
    """The graph of every node, or nothing."""
    return Arg(
        None if d.sizes is None else f"torch.tensor({d.batch}, dtype=torch.long)",
        wrong_batch(d),
        True,
    )


def edges(d: Draw, *, needed: bool = True, objects: bool = True) -> dict[str, Arg]:
    """``edge_index``, ``edge_weight`` and ``batch`` that fit together, in one of the forms that PyG users hold."""
    e = edge_list(d)
    n = d.nodes
    forms = (
        ["tensor"] * 3
        + ["int32", "EdgeIndex", "sparse", "Graph"]
        + ([] if needed else ["None"])
    )
    form = d.pick(forms) if objects else "tensor"
    ones = f"torch.ones({len(d.edges)})"
    source = {
        "tensor": e,
        "int32": f"{e}.int()",
        "EdgeIndex": f"EdgeIndex({e}, sparse_size=({n}, {n}))",
        "None": None,
        "sparse": f"torch.sparse_coo_tensor({e}.flip(0), {ones}, ({n}, {n})).coalesce().to_sparse_csr()",
        "Graph": graph_source(d),
    }[form]
    listed = form in ("tensor", "int32", "EdgeIndex")
    weight = f"torch.rand({len(d.edges)})" if listed and d.maybe(0.4) else None
    return {
        "edge_index": Arg(source, wrong_edges(d), not needed),
        "edge_weight": Arg(weight, wrong_weights(d) if listed else [], True),
        "batch": batch(d) if form != "Graph" else never([]),
    }


def graph(d: Draw, *, needed: bool = False) -> Arg:
    """A `Graph`, or what it can be made of."""
    right = [graph_source(d), edge_list(d)] if d.sizes is None else [graph_source(d)]
    return Arg(
        None if not needed and d.maybe(0.3) else d.pick(right),
        wrong_edges(d),
        not needed,
    )


def just_graph(d: Draw, *own: str) -> Arg:
    wrong = bad(
        "None | a tensor?: torch.tensor([[0], [0]]) | a Data?: Data(edge_index=torch.tensor([[0], [0]]))",
        *own,
    )
    return Arg(graph_source(d), NOT_A_TENSOR + wrong)


def pairs(d: Draw) -> Arg:
    """Listed pairs [2, L] of nodes of this program."""
    n = d.nodes
    right = [edge_list(d), f"torch.tensor([[0, {n - 1}], [{n - 1}, 0]])"] if n else []
    lists = "None | a list?: [[0], [0]] | an array?: np.zeros((2, 1), dtype=np.int64)"
    wrong = _wrong_pairs(d, lists, "int32?: torch.zeros(2, 0, dtype=torch.int32)")
    return Arg(d.pick([*right, "torch.zeros(2, 0, dtype=torch.long)"]), wrong)


NOT_A_COUPLING = bad(
    "None | a string | a number | a list | a tensor: torch.eye(3) | an array | a module",
    "a diffusivity: mp.SimpleDiffusivity() | a class: mp.couplings.IdentityCoupling",
)
NOT_A_DIFFUSIVITY = bad(
    "None | a string | a number | a list: [mp.SimpleDiffusivity()] | a tensor: torch.eye(3) | a module",
    "a coupling: mp.couplings.IdentityCoupling(3) | a class: mp.SimpleDiffusivity | a function: lambda x, graph: x",
)
NOT_AN_UPDATE = bad(
    "a string | a number: 0.5 | a module | a class: mp.ExplicitEuler | a tensor | a list: [mp.ExplicitEuler(0.5)]"
)
NOT_A_MODULE = bad(
    "None | a string | a number | a tensor | a class | a list: [nn.Linear(2, 2)] | a function"
)
NOT_A_FUNCTION = bad("None | a string | a number | a list | a tensor")
NOT_A_PENALTY = bad(
    "another name: 'nonsense' | None | a number | a list | a class: mp.SigmoidPenalty | a module | a tensor"
)


def coupling_source(d: Draw, *, symmetric: bool = False) -> str:
    """A coupling of the nodes of this program, in its dtype."""
    n = d.nodes
    of = kind(d)
    bounds = "" if d.sizes is None else f", ptr=torch.tensor({d.ptr})"
    some = [
        f"mp.couplings.UniformCoupling({n}{bounds}{of})",
        f"mp.couplings.IdentityCoupling({n}{of})",
        f"mp.couplings.SparseCoupling(mp.Graph({n}, {edge_list(d)}).to_undirected(), symmetric=True, nonnegative=True)",
        f"mp.couplings.NeumannCoupling({n}, torch.full((1, 1), 0.2{of}){bounds}, nonnegative=True)",
    ]
    if not symmetric:
        features = f"torch.randn({n}, 1, 3{of})"
        some += [
            f"mp.couplings.SparseCoupling(mp.Graph({n}, {edge_list(d)}))",
            f"mp.couplings.PairwiseCoupling({features}, {features}{bounds})",
            f"mp.couplings.LowRankCoupling({features}, {features}{bounds})",
            f"0.5 * mp.couplings.IdentityCoupling({n}{of}) + 0.5 * mp.couplings.UniformCoupling({n}{bounds}{of})",
        ]
    return d.pick(some)


def coupling(d: Draw, *, symmetric: bool = False) -> Arg:
    other = f"of other nodes: mp.couplings.UniformCoupling({d.nodes + 1})"
    wrong = NOT_A_COUPLING + bad(other)
    return Arg(coupling_source(d, symmetric=symmetric), wrong)


def any_coupling(d: Draw) -> Arg:
    return coupling(d).unsure("of other nodes")


def any_penalty(d: Draw) -> Arg:
    names = ("Gaussian", "Sigmoid", "Mixture")
    return options(d, *(f"mp.{name}Penalty()" for name in names), wrong=NOT_A_PENALTY)


def any_term(d: Draw) -> Arg:
    right = [
        f"mp.energies.SourceTerm({real(d, d.nodes, d.channels)})",
        "mp.energies.PairTerm(mp.GaussianPenalty())",
        f"mp.energies.MLPTerm(torch.ones(2, {d.channels}), torch.ones(2), 'tanh')",
    ]
    wrong = bad("None | a number | a string | a module | a class: mp.energies.MLPTerm")
    return options(d, *right, wrong=wrong)


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
    return Arg(d.pick(right or DIFFUSIVITIES), NOT_A_DIFFUSIVITY)


def update(d: Draw) -> Arg:
    return options(d, *UPDATES, wrong=NOT_AN_UPDATE, optional=True)


def module(source: str, *more: Wrong) -> Arg:
    return Arg(source, [*NOT_A_MODULE, *more])


def to_dtype(d: Draw) -> str:
    return "" if d.dtype == "float32" else f".to(torch.{d.dtype})"


def cast(d: Draw) -> str:
    """What turns a freshly made module into one of this program's dtype, in training or evaluation."""
    return to_dtype(d) + d.pick(["", "", ".eval()"])
