"""Strategies of the models."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
from dataclasses import replace
from typing import Any

from diffusion_mp import GPS, NodeFormerConv
from diffusion_mp.diffusivities import NeumannDiffusivity
from diffusion_mp.layers import DIFFormerConv, SGFormerConv, WeightedGraph

from .arguments import *
from .program import Draw, Strategy, Wrong
from .signatures import construct, counts, numbers, texts
from .table_layers import CONVEX, SHARE, SPHERES, called, certified, related

NOT_OPTIONS = bad("a string | a number | a list | a module")


def sparse_too(d: Draw, x: Arg) -> Arg:
    """Features that may also be sparse; a model that moves or reads them as they are refuses those."""
    x = x.unsure("a sparse tensor")
    if d.maybe(0.7):
        return x
    layout = d.pick(["to_sparse_csr", "to_sparse_csc", "to_sparse_coo"])
    return Arg(f"({x.right}).detach().{layout}()", x.wrong, valid=None)


def tasks(d: Draw) -> tuple[Arg, dict[str, Arg]]:
    """A task, and the pairs that a model for links scores and others refuse."""
    task = d.pick(["node", "node", "graph", "link"])
    unasked = never(bad("for no link: torch.zeros(2, 1, dtype=torch.long)"))
    return Arg(repr(task), choice(d, "node").wrong), {
        "edge_label_index": pairs(d) if task == "link" else unasked
    }


def model(*, needed: bool = False, **options: Any) -> Strategy:
    def strategy(d: Draw) -> None:
        task, scored = tasks(d)
        construct(d, "layer", cast(d), task=task, **options)
        called(d, needed=needed, source=False, x=sparse_too(d, state(d)), **scored)

    return strategy


def gnn(d: Draw) -> None:
    conv = d.pick(["gcn", "mlp", "sgc", "gin", "gat", "appnp", "gcnii"])
    leave = "edge_dim" if conv in ("mlp", "gcn", "gin", "gat") else "edge_dim norm jk"
    model(
        needed=True,
        leave=leave,
        always="conv",
        conv=texts(conv),
        heads=heads,
        alpha=SHARE,
    )(d)


heads = counts(1, 2)  # which divide 4 and 6


def categories(d: Draw, channels: int, rows: int) -> tuple[Arg, Arg]:
    """``in_channels`` and features: floating-point numbers, or categories with a table for each column."""
    wrong_sizes = count(d).without("a list").wrong + bad(
        "empty | an empty table: [0] | letters: ['a']"
    )
    if not d.maybe(0.3):
        numbers = Arg(
            real(d, rows, channels), wrong_tensors(rows, channels, dtype=d.dtype)
        )
        return Arg(str(channels), wrong_sizes).unsure("negative"), sparse_too(
            d, numbers
        )
    features = Arg(f"torch.randint(3, ({rows}, 2))", wrong_tensors(rows, 2))
    wrong = features.without(
        "integers", "on the meta device", "a lower rank"
    ).wrong + bad(
        f"on the meta device: torch.zeros({rows}, 2, dtype=torch.long, device='meta')",
        f"beyond the table: torch.full(({rows}, 2), 9) | negative: torch.full(({rows}, 2), -1)"
        if rows
        else "",
    )
    return Arg("[5, 3]", wrong_sizes).without("negative"), replace(
        features, wrong=wrong
    )


def encodings(d: Draw) -> Arg:
    n = d.nodes
    wrong = bad(
        f"None | a string | a number | empty: () | too long: torch.randn({n + 1}, 3) | numbers: (1, 2) | a list: [1.0]",
        f"integers: torch.ones({n}, 3, dtype=torch.long) | of rank one: torch.ones({n})",
        f"complex: torch.ones({n}, 3, dtype=torch.complex64)",
    )
    vectors = f"torch.randn({n}, 3{kind(d)})"
    return options(
        d,
        vectors,
        f"({vectors}, {vectors}, torch.ones({n}, 3, dtype=torch.bool))",
        wrong=wrong,
    )


def stack(*, more: str = "", **special: Make) -> Strategy:
    def strategy(d: Draw) -> None:
        edge_count = len(d.edges)
        channels, x = categories(d, d.channels, d.nodes)
        task, scored = tasks(d)
        sizes = {"in_channels": channels, "task": task}
        call = {"x": x, **edges(d, needed=True, objects=False), **scored}
        if d.maybe(0.4):
            wide, call["edge_attr"] = categories(d, 2, edge_count)
            sizes["edge_dim"] = wide.without("None")
        else:
            call["edge_attr"] = never(
                bad(f"without edge_dim: torch.ones({edge_count}, 2)")
            )
        if d.maybe(0.3):
            sizes["pe_channels"] = Arg("2", count(d, zero=True).without("None").wrong)
            call["pe"] = encodings(d)
        construct(
            d,
            "layer",
            cast(d),
            always="heads",
            more=more,
            leave="edge_dim pe_channels",
            of=GPS,
            **sizes,
            **special,
        )
        d.call("out", "layer({args})", **call, return_coupling=flag(d))

    return strategy


def attention_options(d: Draw) -> Arg:
    wrong = NOT_OPTIONS + bad(
        "a negative leak: {'alpha': -1.0} | a leak of letters: {'alpha': 'a'}"
    )
    return options(d, "{'alpha': 0.5}", "{'friction': 'constant'}", "None", wrong=wrong)


BLOCKS: dict[str, Any] = {"heads": counts(2, 1), "attention": attention_options}
OF_GPS = BLOCKS | {"more": "heads attention norm dropout attention_dropout"}


def from_dfi(d: Draw) -> None:
    if d.maybe(0.85):
        stack(**OF_GPS)(d)
        return
    wrong = NOT_A_MODULE + bad("another model: mp.GPS(4, 6, 3, 1, heads=2)")
    passed = {
        "lam": number(d, 1.0, 0.1, optional=True, zero=True),
        "attention": attention_options(d),
    }
    d.call(
        "layer",
        "mp.SFiFormer.from_dfi({args})",
        dfi=Arg("mp.DFiFormer(4, 6, 3, 1, heads=2)", wrong),
        **passed,
    )
    d.call("out", "layer(torch.ones(3, 4), torch.tensor([[0], [1]]))")


def label_propagation(d: Draw) -> None:
    n = d.nodes
    forever = d.maybe(0.2)
    reads = d.maybe(0.3)
    steps = count(d, 3, 10, optional=True).without("None")
    undirected = "mp.AdjacencyDiffusivity('sym', direction='undirected')"
    attention = "mp.SymmetricDiffusivity(mp.SigmoidDiffusivity(row_stochastic=False), diagonal=False)"
    observed = undirected if forever else "mp.AdjacencyDiffusivity('row')"
    spread = bad("a string: 'sym' | a number | a module")
    construct(
        d,
        "layer",
        num_layers=replace(steps, right="None") if forever else steps,
        alpha=number(d, 0.9, *([] if forever else [1.0]), optional=True, below="1.5"),
        diffusivity=options(
            d,
            attention if reads else observed,
            wrong=spread,
            optional=not (reads or forever),
        ),
    )
    wrong = not_integers(
        str(n),
        f"None | a list?: [0] * {n} | an array?: np.zeros({n}, dtype=np.int64) | of rank three: torch.zeros({n}, 2, 2)",
        f"complex: torch.zeros({n}, 2, dtype=torch.complex64) | of rank zero: torch.tensor(0)",
        f"integers of rank two: torch.zeros({n}, 2, dtype=torch.long)",
        f"a column of floats: torch.zeros({n}, 1)",
        f"too long?: torch.zeros({n + 1}, dtype=torch.long)",
        f"a billion classes: torch.full(({n},), 10**9)" if n else "",
    )
    y = [f"torch.randint(3, ({n},))", f"torch.rand({n}, 3)", f"torch.full(({n},), -1)"]
    y += [f"torch.randint(3, ({n}, 1))"]
    passed = edges(d, needed=True)
    mask = bad(
        f"floats: torch.ones({n}) | too long: torch.ones({n + 1}, dtype=torch.bool) | a string | a number",
        f"a list?: [True] * {n} | an array?: np.ones({n}, dtype=bool)",
        f"indices?: torch.arange({n}) | indices beyond: torch.arange({n + 1}) | an index twice: torch.zeros(2).long()",
        f"on the meta device: torch.ones({n}, dtype=torch.bool, device='meta')",
        f"of rank two: torch.ones({n}, 2, dtype=torch.bool)",
    )
    passed["mask"] = options(
        d, f"torch.ones({n}, dtype=torch.bool)", wrong=mask, optional=True
    )
    unread = never([Wrong(real(d, n, 3), "features nobody reads")])
    features = state(d).unsure("a longer last dimension") if reads else unread
    d.call(
        "out",
        "layer({args})",
        y=options(d, *y, wrong=wrong),
        **passed,
        features=features,
    )


def laplacian_encoder(d: Draw) -> None:
    n = d.nodes
    k = d.pick([3, 1, 0])
    construct(d, "layer", cast(d))
    tokens_mask = f"torch.ones({n}, {k}, dtype=torch.bool)" if d.maybe(0.5) else None
    mask = Arg(tokens_mask, wrong_tensors(n, k, none=True), True).without(
        "bools", "NaN", "infinite", "huge", "another dtype"
    )
    passed = {
        "eigenvectors": tensor(d, n, k).unsure("a longer last dimension"),
        "mask": mask,
    }
    d.call("out", "layer({args})", eigenvalues=tensor(d, n, k, optional=True), **passed)


def masks(d: Draw, size: int, length: int) -> Arg:
    n = f"{size}, {length}"
    wrong = bad(
        f"floats: torch.ones({n}) | integers: torch.ones({n}, dtype=torch.long) | a string | a number | a module",
        f"too long: torch.ones({size}, {length + 1}, dtype=torch.bool)",
        f"of rank one: torch.ones({length + 1}, dtype=torch.bool)",
        f"an array?: np.ones(({n}), dtype=bool) | a list?: torch.ones({n}, dtype=torch.bool).tolist()",
        f"on the meta device: torch.ones({n}, dtype=torch.bool, device='meta')",
        f"a sparse tensor: torch.ones({n}, dtype=torch.bool).to_sparse()",
    )
    right = [
        f"torch.ones({n}, dtype=torch.bool)",
        f"torch.rand({n}) < 0.7",
        f"torch.zeros({n}, dtype=torch.bool)",
    ]
    return options(d, *right, wrong=wrong, optional=True)


def pde_diffusion(d: Draw) -> None:
    step = options(
        d,
        "mp.ExplicitEuler(0.5)",
        wrong=bad("a string: 'euler' | a number: 0.5"),
        optional=True,
    )
    stencil = "strides boundary alpha budget"
    construct(
        d,
        "layer",
        cast(d),
        more=stencil,
        of=NeumannDiffusivity,
        update=step,
    )
    if d.maybe(0.4):
        rows = state(d).unsure(
            "a higher rank"
        )  # of three dimensions it is a stack of sequences
        d.call(
            "out",
            "layer({args})",
            x=rows,
            batch=edges(d)["batch"],
            return_coupling=flag(d),
        )
        return
    size = d.pick([2, 1, 0, 3])
    length = d.pick([5, 1, 0, 9])
    x = tensor(d, size, length, d.channels).without("a lower rank")
    d.call(
        "out",
        "layer({args})",
        x=x,
        mask=masks(d, size, length),
        return_coupling=flag(d),
    )


def pde_transformer(d: Draw) -> None:
    tokens = d.maybe(0.5)
    size = d.pick([2, 1, 0, 3])
    length = d.pick([5, 1, 0, 9])
    task = d.pick(["classify", "classify", "retrieve"])
    placement = d.pick([None, "P1", "P2", "P3", "P4", "P5", "P6", "P7"])
    # Another vocabulary may do.
    sizes = bad(f"a string | None | a list{'?' if tokens else ''} | empty | zero")
    smoothing = ["None"] if placement is None else ["None", "{'alpha': 0.2}"]
    construct(
        d,
        "layer",
        cast(d),
        in_channels=Arg("[7]" if tokens else "3", sizes),
        always="heads",
        hidden_channels=counts(4, 8),
        heads=BLOCKS["heads"],
        max_length=counts(12),
        causal=never(flag(d).wrong),
        placement=Arg(repr(placement), choice(d, None).wrong),
        task=Arg(repr(task), choice(d, "classify").wrong),
        diffusion=options(d, *smoothing, wrong=NOT_OPTIONS, optional=True),
    )

    def sequences() -> Arg:
        if not tokens:
            return tensor(d, size, length, 3)
        words = Arg(
            f"torch.randint(7, ({size}, {length}))", wrong_tensors(size, length)
        )
        words = words.without(
            "integers", "a longer last dimension", "a lower rank", "a higher rank"
        )
        # Padding may hold anything, so it depends on the mask whether a word is looked up.
        if size * length:
            beyond = f"beyond the vocabulary?: torch.full(({size}, {length}), 7)"
        else:
            beyond = ""
        return replace(
            words,
            wrong=words.wrong
            + bad(beyond, f"too long: torch.zeros({size}, 13, dtype=torch.long)"),
        )

    call = {"x": sequences(), "mask": masks(d, size, length)}
    if task == "retrieve":
        call |= {"other": sequences(), "other_mask": masks(d, size, length)}
    d.call("out", "layer({args})", **call)


def certified_difformer(d: Draw) -> None:
    construct(
        d,
        "layer",
        cast(d),
        leave="inputs task",
        **certified(d, by_head=False),
    )
    if d.maybe(0.5):
        called(d, needed=False, source=False, x=sparse_too(d, state(d)))
    else:
        asked = d.pick(["energy", "energies"])
        d.call(
            "out",
            f"layer.{asked}({{args}})",
            x=sparse_too(d, state(d)),
            **edges(d, needed=False),
        )


def certified_transformer(d: Draw) -> None:
    channels, x = categories(d, d.channels, d.nodes)
    (task, scored), (dim, features) = tasks(d), related(d)
    attention = d.pick([None, "all", "neighbours"])
    mlp = d.pick([0, 5])
    convex = not mlp and attention is None
    constraint = choice(d, *CONVEX, *([] if convex else SPHERES))
    num_layers = count(d, 2, 1, optional=True).without("None")
    construct(
        d,
        "layer",
        cast(d),
        in_channels=channels,
        heads=heads,
        num_layers=replace(num_layers, right="None")
        if convex and d.maybe(0.5)
        else num_layers,
        edge_dim=dim,
        constraint=constraint,
        task=task,
        mlp_channels=Arg(str(mlp), count(d, zero=True).wrong),
        attention=Arg(repr(attention), choice(d, None).wrong),
        graph=texts("sum", "sym"),
        more="symmetric gate hops matrix",
        of=WeightedGraph,
    )
    call = {"x": x, **edges(d, needed=False, objects=False), "edge_attr": features}
    if d.maybe(0.6):
        d.call("out", "layer({args})", **call, **scored, return_coupling=flag(d))
    else:
        d.call(
            "out",
            f"layer.{d.pick(['energies', 'certificate'])}({{args}})",
            **call,
            finite=False,
        )


MODELS: dict[str, Strategy] = {
    "CertifiedDIFFormer": certified_difformer,
    "CertifiedTransformer": certified_transformer,
    "DIFFormer": model(
        leave="update",
        more="heads kernel projection normalize graph self_loops leak",
        of=DIFFormerConv,
        heads=heads,
        normalize=texts("row", None),
    ),
    "NodeFormer": model(more="heads tau num_samples", of=NodeFormerConv, heads=heads),
    "SGFormer": model(
        more="heads beta normalize projection",
        of=SGFormerConv,
        heads=heads,
        beta=numbers(0.5, 1.0),
        gnn=texts("gcn", "gat", "sgc", "mlp", "residual"),
        aggregate=texts("add"),
    ),  # "cat" needs edges
    "DiffusionGNN": gnn,
    "GatedGCN": stack(),
    "GPS": stack(**BLOCKS),
    "DFiFormer": stack(**OF_GPS),
    "SFiFormer": from_dfi,
    "LabelPropagation": label_propagation,
    "LaplacianEncoder": laplacian_encoder,
    "PDEDiffusion1d": pde_diffusion,
    "PDETransformer": pde_transformer,
}
