"""Strategies of the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .arguments import (
    NOT_A_MODULE,
    Arg,
    cast,
    choice,
    count,
    edges,
    fixed,
    flag,
    generator,
    number,
    options,
    pairs,
    probability,
    real,
    state,
    tensor,
    wrong_tensors,
)
from .program import Draw, Strategy, Wrong
from .table_layers import called, certified, loops, positive, projection, rate, share
from .table_operators import boundary, strides

NOT_OPTIONS = [
    Wrong("'none'", "a string"),
    Wrong("3", "a number"),
    Wrong("[1]", "a list"),
    Wrong("nn.Linear(2, 2)", "a module"),
]


def sparse_too(d: Draw, x: Arg) -> Arg:
    """Features that may also be sparse; a model that moves or reads them as they are refuses those."""
    x = x.unsure("a sparse tensor")
    if d.maybe(0.7):
        return x
    layout = d.pick(["to_sparse_csr", "to_sparse_csc", "to_sparse_coo"])
    return Arg(f"({x.right}).detach().{layout}()", x.wrong, valid=None)


def model(name: str, *, needed: bool = False, **make: Callable[[Draw], Arg]) -> Strategy:
    """A model for nodes, graphs or links."""

    def strategy(d: Draw) -> None:
        own = {key: value(d) for key, value in make.items()}
        sizes = {
            "in_channels": count(d, d.channels).unsure("negative"),  # -1 is found out at the first call
            "hidden_channels": count(d, 4, 6),
            "out_channels": count(d, 3, 1),
        }
        task = d.pick(["node", "node", "graph", "link"])
        sizes["task"] = Arg(repr(task), choice(d, "node").wrong)
        d.call("layer", f"mp.{name}({{args}}){cast(d)}", **sizes, **own)
        called(d, needed=needed, source=False, x=sparse_too(d, state(d)), **scored(d, task))

    return strategy


def gnn(d: Draw) -> None:
    """A stack of fixed layers; a norm and jumps go with those that are alike."""
    conv = d.pick(["gcn", "mlp", "sgc", "gin", "gat", "appnp", "gcnii"])
    own = {"norm": norm, "jk": lambda d: choice(d, "last", "cat", "max", "lstm", None)}
    model(
        "DiffusionGNN",
        needed=True,
        num_layers=layers,
        conv=lambda d: choice(d, conv, optional=False),
        heads=heads,
        dropout=probability,
        alpha=lambda d: number(d, 0.1, 0.0, optional=True, zero=True, below="1.0"),
        theta=positive,
        act=lambda d: choice(d, "relu", "elu", "gelu"),
        **(own if conv in ("mlp", "gcn", "gin", "gat") else {}),
    )(d)


def scored(d: Draw, task: str) -> dict[str, Arg]:
    """The pairs that a model for links scores, and others refuse."""
    if task == "link":
        return {"edge_label_index": pairs(d)}
    return {"edge_label_index": Arg(None, [Wrong("torch.zeros(2, 1, dtype=torch.long)", "for no link")], True)}


def layers(d: Draw) -> Arg:
    """How many layers."""
    return count(d, 1, 2, optional=True)


def heads(d: Draw) -> Arg:
    """Heads that divide 4 and 6."""
    return count(d, 1, 2, optional=True)


def norm(d: Draw) -> Arg:
    """A normalisation."""
    return choice(d, "batch", "layer", None)


def maybe_dropout(d: Draw) -> Arg:
    """A rate, or None for that of the others."""
    return probability(d).without("None").or_left_out()


def categories(d: Draw, channels: int, rows: int) -> tuple[Arg, Arg]:
    """``in_channels`` and features: floating-point numbers, or categories with a table for each column."""
    wrong_sizes = [*count(d).wrong, Wrong("[]", "empty"), Wrong("[0]", "an empty table"), Wrong("['a']", "letters")]
    wrong_sizes = [w for w in wrong_sizes if w.source != "[1]"]
    if not d.maybe(0.3):
        numbers = Arg(real(d, rows, channels), wrong_tensors(rows, channels, dtype=d.dtype))
        return Arg(str(channels), wrong_sizes).unsure("negative"), sparse_too(d, numbers)
    wrong = [w for w in wrong_tensors(rows, 2) if w.what not in ("integers", "on the meta device", "a lower rank")]
    wrong += [Wrong(f"torch.full(({rows}, 2), 9)", "beyond the table")] if rows else []
    wrong += [Wrong(f"torch.full(({rows}, 2), -1)", "negative")] if rows else []
    wrong += [Wrong(f"torch.zeros({rows}, 2, dtype=torch.long, device='meta')", "on the meta device")]
    return Arg("[5, 3]", wrong_sizes), Arg(f"torch.randint(3, ({rows}, 2))", wrong)


def stack(name: str, **make: Callable[[Draw], Arg]) -> Strategy:
    """A stack of blocks with states of edges."""

    def strategy(d: Draw) -> None:
        own = {key: value(d) for key, value in make.items()}
        n, e = d.nodes, len(d.edges)
        given = edges(d, needed=True, objects=False)
        channels, x = categories(d, d.channels, n)
        sizes = {
            "in_channels": channels,
            "hidden_channels": count(d, 4, 6),
            "out_channels": count(d, 3, 1),
            "num_layers": layers(d),
        }
        call = {"x": x, **given}
        task = d.pick(["node", "node", "graph", "link"])
        sizes["task"] = Arg(repr(task), choice(d, "node").wrong)
        call |= scored(d, task)
        if d.maybe(0.4):
            wide, attr = categories(d, 2, e)
            sizes["edge_dim"], call["edge_attr"] = wide, attr
        else:
            call["edge_attr"] = Arg(None, [Wrong(f"torch.ones({e}, 2)", "without edge_dim")], True)
        if d.maybe(0.3):
            sizes["pe_channels"] = Arg("2", [w for w in count(d, zero=True).wrong if w.source != "None"])
            vectors = f"torch.randn({n}, 3" + ("" if d.dtype == "float32" else f", dtype=torch.{d.dtype}") + ")"
            wrong = [Wrong("None", "None"), Wrong("'pe'", "a string"), Wrong("3", "a number"), Wrong("()", "empty")]
            wrong += [
                Wrong(f"torch.randn({n + 1}, 3)", "too long"),
                Wrong("(1, 2)", "numbers"),
                Wrong("[1.0]", "a list"),
            ]
            wrong += [
                Wrong(f"torch.ones({n}, 3, dtype=torch.long)", "integers"),
                Wrong(f"torch.ones({n})", "of rank one"),
            ]
            wrong += [Wrong(f"torch.ones({n}, 3, dtype=torch.complex64)", "complex")]
            mask = f"torch.ones({n}, 3, dtype=torch.bool)"
            call["pe"] = options(d, vectors, f"({vectors}, {vectors}, {mask})", wrong=wrong)
        d.call("layer", f"mp.{name}({{args}}){cast(d)}", **sizes, **own)
        d.call("out", "layer({args})", **call, return_coupling=flag(d))

    return strategy


GPS_OPTIONS: dict[str, Callable[[Draw], Arg]] = {
    "heads": lambda d: count(d, 2, 1),
    "adjacency": flag,
    "attention": lambda d: options(
        d,
        "{'alpha': 0.5}",
        "{'friction': 'constant'}",
        "None",
        wrong=[*NOT_OPTIONS, Wrong("{'alpha': -1.0}", "a negative leak"), Wrong("{'alpha': 'a'}", "a leak of letters")],
        optional=True,
    ),
    "norm": norm,
    "dropout": probability,
    "attention_dropout": probability,
}


def from_dfi(d: Draw) -> None:
    """The model, or one that starts from another."""
    if d.maybe(0.85):
        stack("SFiFormer", lam=lambda d: number(d, 1.0, 0.1, optional=True, zero=True), **GPS_OPTIONS)(d)
        return
    right = "mp.DFiFormer(4, 6, 3, 1, heads=2)"
    d.call(
        "layer",
        "mp.SFiFormer.from_dfi({args})",
        dfi=Arg(right, [*NOT_A_MODULE, Wrong("mp.GPS(4, 6, 3, 1, heads=2)", "another model")]),
        lam=number(d, 1.0, 0.1, optional=True, zero=True),
        attention=GPS_OPTIONS["attention"](d),
    )
    d.call("out", "layer(torch.ones(3, 4), torch.tensor([[0], [1]]))")


def label_propagation(d: Draw) -> None:
    """Labels that spread, over a graph or what features say, for some steps or without end."""
    n, forever, reads = d.nodes, d.maybe(0.2), d.maybe(0.3)
    steps = count(d, 3, 10, optional=True, none=True)
    undirected = "mp.AdjacencyDiffusivity('sym', direction='undirected')"
    attention = "mp.SymmetricDiffusivity(mp.SigmoidDiffusivity(row_stochastic=False), diagonal=False)"
    observed = undirected if forever else "mp.AdjacencyDiffusivity('row')"
    d.call(
        "layer",
        "mp.LabelPropagation({args})",
        num_layers=replace(steps, right="None") if forever else steps,
        alpha=number(d, 0.9, *([] if forever else [1.0]), optional=True, below="1.5"),
        diffusivity=options(
            d,
            attention if reads else observed,
            wrong=[Wrong("'sym'", "a string"), Wrong("3", "a number"), Wrong("nn.Linear(2, 2)", "a module")],
            optional=not (reads or forever),
        ),
    )
    wrong = [
        Wrong("'labels'", "a string"),
        Wrong("None", "None"),
        Wrong("3", "a number"),
        Wrong(f"[0] * {n}", "a list", None),
        Wrong(f"np.zeros({n}, dtype=np.int64)", "an array", None),
        Wrong(f"torch.zeros({n})", "floats of rank one"),
        Wrong(f"torch.zeros({n}, 2, 2)", "of rank three"),
        Wrong(f"torch.zeros({n}, 2, dtype=torch.complex64)", "complex"),
        Wrong(f"torch.zeros({n}, 2, dtype=torch.long)", "integers of rank two"),
        Wrong(f"torch.zeros({n}, dtype=torch.bool)", "bools"),
        Wrong(f"torch.zeros({n + 1}, dtype=torch.long)", "too long", None),
        Wrong(f"torch.zeros({n}, dtype=torch.long, device='meta')", "on the meta device"),
        Wrong(f"torch.full(({n},), 10**9)", "a billion classes") if n else Wrong("torch.tensor(0)", "of rank zero"),
        Wrong("torch.tensor(0)", "of rank zero"),
    ]
    y = [f"torch.randint(3, ({n},))", f"torch.rand({n}, 3)", f"torch.full(({n},), -1)", f"torch.zeros({n}, 1)"]
    given = edges(d, needed=True)
    batch = given.pop("batch")
    mask = options(
        d,
        f"torch.ones({n}, dtype=torch.bool)",
        wrong=[
            Wrong(f"torch.ones({n})", "floats"),
            Wrong(f"torch.ones({n + 1}, dtype=torch.bool)", "too long"),
            Wrong("'mask'", "a string"),
            Wrong("3", "a number"),
            Wrong(f"[True] * {n}", "a list", None),
            Wrong(f"np.ones({n}, dtype=bool)", "an array", None),
            Wrong(f"torch.arange({n})", "indices"),
            Wrong(f"torch.ones({n}, dtype=torch.bool, device='meta')", "on the meta device"),
            Wrong(f"torch.ones({n}, 1, dtype=torch.bool)", "of rank two"),
        ],
        optional=True,
    )
    unread = Arg(None, [Wrong(real(d, n, 3), "features nobody reads")], True)
    features = state(d).unsure("a longer last dimension") if reads else unread
    d.call("out", "layer({args})", y=options(d, *y, wrong=wrong), **given, mask=mask, batch=batch, features=features)


def laplacian_encoder(d: Draw) -> None:
    """Positional encodings."""
    n, k = d.nodes, d.pick([3, 1, 0])
    d.call(
        "layer",
        f"mp.LaplacianEncoder({{args}}){cast(d)}",
        out_channels=count(d, 4, 1),
        hidden_channels=count(d, 3, optional=True, none=True),
    )
    mask = [
        w for w in wrong_tensors(n, k, none=True) if w.what not in ("bools", "NaN", "infinite", "huge", "another dtype")
    ]
    d.call(
        "out",
        "layer({args})",
        eigenvectors=tensor(d, n, k).unsure("a longer last dimension"),
        eigenvalues=tensor(d, n, k, optional=True),
        mask=options(d, f"torch.ones({n}, {k}, dtype=torch.bool)", wrong=mask, optional=True),
    )


def masks(d: Draw, size: int, length: int) -> Arg:
    """Which positions are tokens."""
    n = f"{size}, {length}"
    wrong = [
        Wrong(f"torch.ones({n})", "floats"),
        Wrong(f"torch.ones({n}, dtype=torch.long)", "integers"),
        Wrong(f"torch.ones({size}, {length + 1}, dtype=torch.bool)", "too long"),
        Wrong(f"torch.ones({length + 1}, dtype=torch.bool)", "of rank one"),
        Wrong("'mask'", "a string"),
        Wrong("3", "a number"),
        Wrong(f"np.ones(({n}), dtype=bool)", "an array", None),
        Wrong(f"torch.ones({n}, dtype=torch.bool).tolist()", "a list", None),
        Wrong(f"torch.ones({n}, dtype=torch.bool, device='meta')", "on the meta device"),
        Wrong(f"torch.ones({n}, dtype=torch.bool).to_sparse()", "a sparse tensor"),
        Wrong("nn.Linear(2, 2)", "a module"),
    ]
    right = [f"torch.ones({n}, dtype=torch.bool)", f"torch.rand({n}) < 0.7", f"torch.zeros({n}, dtype=torch.bool)"]
    return options(d, *right, wrong=wrong, optional=True)


def pde_diffusion(d: Draw) -> None:
    """Diffusion along sequences."""
    turned = d.maybe(0.2)
    d.call(
        "layer",
        f"mp.PDEDiffusion1d({{args}}){cast(d)}",
        channels=count(d, d.channels),
        heads=count(d, d.heads, optional=True),
        strides=strides(d),
        boundary=boundary(d),
        alpha=number(d, 0.1, 0.2, optional=True),
        budget=number(d, 0.5, 0.25, "None", optional=True, none=True),
        per=choice(d, "layer", "head", "channel"),
        update=options(
            d, "mp.ExplicitEuler(0.5)", wrong=[Wrong("'euler'", "a string"), Wrong("0.5", "a number")], optional=True
        ),
        norm=flag(d),
        batch_first=fixed(not turned, Wrong("'yes'", "a string"), Wrong("None", "none")),
    )
    if d.maybe(0.4):
        rows = state(d).unsure("a higher rank")  # of three dimensions it is a stack of sequences
        d.call("out", "layer({args})", x=rows, batch=edges(d)["batch"], return_coupling=flag(d))
        return
    size, length = d.pick([2, 1, 0, 3]), d.pick([5, 1, 0, 9])
    x = tensor(d, *((length, size) if turned else (size, length)), d.channels).without("a lower rank")
    name = "key_padding_mask" if d.maybe(0.3) else "mask"
    d.call("out", "layer({args})", x=x, **{name: masks(d, size, length)}, return_coupling=flag(d))


def pde_transformer(d: Draw) -> None:
    """A Transformer with diffusion."""
    tokens = d.maybe(0.5)
    size, length = d.pick([2, 1, 0, 3]), d.pick([5, 1, 0, 9])
    task = d.pick(["classify", "classify", "retrieve"])
    placement = d.pick([None, "P1", "P2", "P3", "P4", "P5", "P6", "P7"])
    sizes = count(d).unsure("a list") if tokens else count(d)  # a vocabulary of another size, which may do
    d.call(
        "layer",
        f"mp.PDETransformer({{args}}){cast(d)}",
        in_channels=Arg("[7]" if tokens else "3", [*sizes.wrong[:3], Wrong("[]", "empty"), Wrong("0", "zero")]),
        hidden_channels=count(d, 4, 8),
        out_channels=count(d, 2, 3),
        num_layers=count(d, 1, 2),
        heads=count(d, 2, 1),
        max_length=count(d, 12),
        placement=Arg(repr(placement), choice(d, None).wrong),
        diffusion=options(
            d, *(["None"] if placement is None else ["None", "{'alpha': 0.2}"]), wrong=NOT_OPTIONS, optional=True
        ),
        mlp_channels=count(d, 5, optional=True, none=True),
        pooling=choice(d, "mean", "first", "last"),
        task=Arg(repr(task), choice(d, "classify").wrong),
        causal=Arg(None, flag(d).wrong, True),
        dropout=probability(d),
    )

    def sequences() -> Arg:
        if not tokens:
            x = tensor(d, size, length, 3)
            return Arg(x.right, x.wrong)
        wrong = [
            w
            for w in wrong_tensors(size, length)
            if w.what not in ("integers", "a longer last dimension", "a lower rank", "a higher rank")
        ]
        # Padding may hold anything, so it depends on the mask whether a word is looked up.
        wrong += [Wrong(f"torch.full(({size}, {length}), 7)", "beyond the vocabulary", None)] if size * length else []
        wrong += [Wrong(f"torch.zeros({size}, 13, dtype=torch.long)", "too long")]
        return Arg(f"torch.randint(7, ({size}, {length}))", wrong)

    given = {"x": sequences(), "mask": masks(d, size, length)}
    if task == "retrieve":
        given |= {"other": sequences(), "other_mask": masks(d, size, length)}
    d.call("out", "layer({args})", **given)


def certified_difformer(d: Draw) -> None:
    """The certified model."""
    d.call(
        "layer",
        f"mp.CertifiedDIFFormer({{args}}){cast(d)}",
        in_channels=count(d, d.channels).unsure("negative"),
        hidden_channels=count(d, 4, 6),
        out_channels=count(d, 3, 1),
        num_layers=count(d, 1, 2, optional=True, none=True),
        encoder_layers=count(d, 1, 2, optional=True),
        encoder_channels=count(d, 5, optional=True, none=True),
        centre=flag(d),
        dropout=probability(d),
        **certified(d, channels=False),
    )
    if d.maybe(0.5):
        called(d, needed=False, source=False, x=sparse_too(d, state(d)))
    else:
        d.call(
            "out",
            f"layer.{d.pick(['energy', 'energies'])}({{args}})",
            x=sparse_too(d, state(d)),
            **edges(d, needed=False),
        )


MODELS: dict[str, Strategy] = {
    "CertifiedDIFFormer": certified_difformer,
    "DIFFormer": model(
        "DIFFormer",
        num_layers=layers,
        heads=heads,
        kernel=lambda d: choice(d, "simple", "sigmoid", "softmax", "gaussian"),
        projection=projection,
        normalize=lambda d: choice(d, "row", None),
        tau=lambda d: number(d, 0.5, 0.25, optional=True, none=True),
        graph=lambda d: choice(d, "sum", "mean", None),
        self_loops=loops,
        transform=flag,
        source=flag,
        leak=rate,
        activation=lambda d: choice(d, "relu", None),
        layer_norm=flag,
        dropout=probability,
        dropout_on=lambda d: choice(d, "values", "state"),
    ),
    "NodeFormer": model(
        "NodeFormer",
        num_layers=layers,
        heads=heads,
        edge_regularization=rate,
        residual=flag,
        layer_norm=flag,
        activation=lambda d: choice(d, "elu", None),
        jump=lambda d: choice(d, "cat", "max", None),
        step=lambda d: number(d, 0.5, 1.0, optional=True, none=True),
        dropout=probability,
        tau=positive,
        num_features=lambda d: count(d, 8, optional=True),
        num_samples=lambda d: count(d, 2, optional=True, zero=True),
        generator=generator,
    ),
    "SGFormer": model(
        "SGFormer",
        heads=heads,
        num_gnn_layers=lambda d: count(d, 1, 2, optional=True),
        alpha=lambda d: number(d, 0.5, 0.8, optional=True, zero=True, below="1.5"),
        beta=lambda d: number(d, 0.5, 1.0, optional=True),
        gnn=lambda d: choice(d, "gcn", "gat", "sgc", "mlp", "residual"),
        normalize=lambda d: choice(d, "row", "frobenius"),
        projection=projection,
        shared_encoder=flag,
        layer_norm=flag,
        dropout=probability,
        gnn_dropout=maybe_dropout,
        trans_num_layers=lambda d: count(d, 1, 2, optional=True),
        activation=lambda d: choice(d, "relu", None),
        dropout_on=lambda d: choice(d, "values", "state"),
        aggregate=lambda d: choice(d, "add"),  # "cat" needs edges
        trans_dropout=maybe_dropout,
        gnn_num_layers=lambda d: count(d, 1, 2, optional=True, none=True),
        graph_weight=share,
    ),
    "DiffusionGNN": gnn,
    "GatedGCN": stack("GatedGCN", norm=norm, dropout=probability),
    "GPS": stack("GPS", lam=lambda d: number(d, 0.0, 0.1, optional=True, zero=True), local=flag, **GPS_OPTIONS),
    "DFiFormer": stack("DFiFormer", **GPS_OPTIONS),
    "SFiFormer": from_dfi,
    "LabelPropagation": label_propagation,
    "LaplacianEncoder": laplacian_encoder,
    "PDEDiffusion1d": pde_diffusion,
    "PDETransformer": pde_transformer,
}
