"""Strategies of the layers and of the models that are called like them."""

from __future__ import annotations

from dataclasses import replace

from .arguments import (
    SELF_LOOPS,
    Arg,
    cast,
    choice,
    count,
    diffusivity,
    edges,
    flag,
    generator,
    module,
    number,
    probability,
    real,
    state,
    tensor,
    update,
)
from .program import Draw, Strategy, Wrong


def called(
    d: Draw,
    *,
    needed: bool,
    source: bool = True,
    channels: int | None = None,
    features: Arg | None = None,
    x: Arg | None = None,
    **more: Arg,
) -> None:
    """``layer(x, edge_index, …)``."""
    rest = {"return_coupling": flag(d), **more} | ({} if features is None else {"features": features})
    if source:
        wide = d.nodes, d.channels if channels is None else channels
        wrong = [w for w in tensor(d, *wide).wrong if w.source != "None"]
        rest["source"] = Arg(None, wrong if wide[0] else [], True)
    d.call("out", "layer({args})", x=state(d) if x is None else x, **edges(d, needed=needed), **rest)


def layer(name: str, *, needed: bool = False, source: bool = True, **make: object) -> Strategy:
    """A layer with in_channels and out_channels."""

    def strategy(d: Draw) -> None:
        options = {key: value(d) for key, value in make.items() if callable(value)}
        sizes = {"in_channels": count(d, d.channels).unsure("negative"), "out_channels": count(d, 3, 1, 4)}
        if "out_channels" in options:
            sizes.pop("out_channels")
        d.call("layer", f"mp.{name}({{args}}){cast(d)}", **sizes, **options)
        called(d, needed=needed, source=source)

    return strategy


def same(d: Draw) -> Arg:
    """As many channels out as in."""
    return count(d, d.channels)


def loops(d: Draw) -> Arg:
    """A policy for self-loops."""
    return choice(d, *SELF_LOOPS)


def projection(d: Draw) -> Arg:
    """How queries and keys are made."""
    return choice(d, "separate", "tied", None)


def rows_or_frobenius(d: Draw) -> Arg:
    """A normalisation that may be none."""
    return choice(d, "row", "frobenius", None)


def lam(d: Draw) -> Arg:
    """A friction."""
    return number(d, 1.0, 0.0, 0.1, optional=True, zero=True)


def alpha(d: Draw) -> Arg:
    """A leak of a flow, infinite where it is conserved."""
    return number(d, 0.1, 1.0, "math.inf", optional=True, infinite=True)


def rate(d: Draw) -> Arg:
    """A non-negative rate."""
    return number(d, 0.5, 0.0, optional=True, zero=True)


def heads(d: Draw) -> Arg:
    """A number of heads that divides the channels."""
    return count(d, d.heads, optional=True)


def dropout(d: Draw) -> Arg:
    """A rate of dropout."""
    return probability(d)


def share(d: Draw) -> Arg:
    """A weight between 0 and 1, or None."""
    return number(d, 0.3, 0.0, 1.0, optional=True, zero=True, below="1.5", none=True)


def positive(d: Draw) -> Arg:
    """A positive number."""
    return number(d, 0.5, 0.25, optional=True)


def certified(d: Draw, *, channels: bool) -> dict[str, Arg]:
    """Options of a certified layer: the simple penalty wants states near each other."""
    constraint = d.pick(["ball", "sphere", "nonnegative", None])
    near = constraint in ("ball", "sphere")
    return {
        "penalty": choice(d, *(["simple"] if near else []), "gaussian", "softmax", "quadratic", None, optional=near),
        "constraint": choice(d, constraint, optional=constraint == "ball").without("None"),
        "heads": heads(d) if channels else count(d, 1, 2, optional=True),
        "projection": choice(d, "tied", None),
        "radius": number(d, 1.0, 0.5, optional=True),
        "beta": number(d, 1.0, 0.1, optional=True),
        "lam": number(d, 0.5, 1e-3, optional=True),
        "mu": number(d, 2.0, 20.0, optional=True),
        "graph": flag(d),
    }


def certified_conv(d: Draw) -> None:
    """A certified step."""
    d.call(
        "layer",
        f"mp.CertifiedConv({{args}}){cast(d)}",
        channels=count(d, d.channels),
        **certified(d, channels=True),
    )
    called(d, needed=False)


def diffusion_conv(d: Draw) -> None:
    """The generic layer."""
    reads = choice(d, "state", "values", "features")
    d.call(
        "layer",
        f"mp.DiffusionConv({{args}}){cast(d)}",
        in_channels=count(d, d.channels).unsure("negative"),  # -1 is found out at the first call, where it can be
        out_channels=count(d, d.channels),
        diffusivity=diffusivity(d),
        update=update(d),
        heads=count(d, 1, 2, optional=True),
        bias=flag(d),
        keep=choice(d, "values", "state"),
        reads=reads,
        steps=count(d, 1, 3, optional=True),
        dropout=probability(d),
        validate=flag(d),
    )
    read = reads.right == "'features'"
    called(
        d,
        needed=True,
        features=state(d) if read else Arg(None, [Wrong(real(d, d.nodes, 3), "features nobody reads")], True),
    )


def gin(d: Draw) -> None:
    """A layer around an MLP."""
    d.call(
        "layer",
        f"mp.GINConv({{args}}){cast(d)}",
        in_channels=count(d, d.channels).unsure("negative"),
        mlp=module(f"nn.Linear({d.channels}, 3)"),
        eps=number(d, 0.0, 0.2, optional=True, negative=True),
        train_eps=flag(d),
    )
    called(d, needed=True)


def multi_head(d: Draw) -> None:
    """Heads beside each other."""
    d.call(
        "layer",
        f"mp.MultiHeadConv({{args}}){cast(d)}",
        in_channels=count(d, d.channels),
        out_channels=count(d, d.channels),
        diffusivity=diffusivity(d),
        heads=heads(d),
        head_channels=count(d, 3, 1),
        residual=flag(d),
        bias=flag(d),
    )
    called(d, needed=True, source=False)


def gcnii(d: Draw) -> None:
    """A layer with a source of its own."""
    both = d.maybe(0.5)
    d.call(
        "layer",
        f"mp.GCNIIConv({{args}}){cast(d)}",
        channels=count(d, d.channels),
        alpha=number(d, 0.1, 0.0, optional=True, zero=True, below="1.0"),
        theta=Arg("0.5" if both else None, number(d, none=True).wrong if both else [], False),
        layer=Arg("2" if both else None, count(d, none=True).wrong if both else [], False),
        normalize=flag(d),
        self_loops=choice(d, *SELF_LOOPS, None),
    )
    called(d, needed=True)


def gat(d: Draw) -> None:
    """Attention over edges, that may read features of theirs."""
    featured = d.maybe(0.4)
    d.call(
        "layer",
        f"mp.GATConv({{args}}){cast(d)}",
        in_channels=count(d, d.channels).unsure("negative"),
        out_channels=count(d, 3, 1, 4),
        heads=heads(d),
        concat=flag(d),
        negative_slope=number(d, 0.2, 0.0, optional=True, negative=True),
        self_loops=loops(d),
        edge_dim=Arg(str(d.channels) if featured else None, count(d, none=True).wrong if featured else [], False),
        residual=flag(d),
        dropout=dropout(d),
        value_dropout=dropout(d),
        bias=flag(d),
    )
    if featured:
        given = with_edge_attr(d, optional=False)
        given["edge_attr"] = given["edge_attr"].unsure("None")  # without features it reads the states alone
        d.call("out", "layer({args})", **given, return_attention_weights=flag(d))
    else:
        called(d, needed=True)


def with_edge_attr(d: Draw, *, optional: bool = True) -> dict[str, Arg]:
    """The call of a layer whose edges have states."""
    given = edges(d, needed=True, objects=False)
    return {"x": state(d), **given, "edge_attr": tensor(d, len(d.edges), d.channels, optional=optional)}


def gated_gcn_conv(d: Draw) -> None:
    """Edges that gate."""
    d.call(
        "layer",
        f"mp.GatedGCNConv({{args}}){cast(d)}",
        channels=count(d, d.channels),
        norm=choice(d, "batch", "layer", None),
        residual=flag(d),
        dropout=probability(d),
        eps=number(d, 1e-6, 0.1, optional=True),
    )
    d.call("out", "layer({args})", **with_edge_attr(d), return_coupling=flag(d))


def gps_block(d: Draw) -> None:
    """Message passing beside attention."""
    c = d.channels
    local = d.pick([f"mp.GatedGCNConv({c})", f"mp.GCNConv({c}, {c})"])
    d.call(
        "layer",
        f"mp.GPSBlock({{args}}){cast(d)}",
        channels=count(d, c),
        local=Arg(local, [Wrong("'gcn'", "a string"), Wrong("3", "a number"), Wrong("mp.GCNConv", "a class")], True),
        attention=Arg(
            f"mp.SFiConv({c}, {c}, residual=False)",
            [
                Wrong("'sfi'", "a string"),
                Wrong("3", "a number"),
                Wrong(f"mp.SFiConv({c}, {c + 1}, residual=False)", "other channels"),
            ],
            True,
        ),
        norm=choice(d, "batch", "layer", None),
        dropout=probability(d),
    )
    d.call("out", "layer({args})", **with_edge_attr(d), return_coupling=flag(d))


def appnp(d: Draw) -> None:
    """Personalised PageRank, over a graph or all pairs, for some steps or without end."""
    forever = d.maybe(0.2)
    steps = count(d, 10, 1, optional=True, none=True)
    spread = diffusivity(d, "mp.SymmetricDiffusivity(mp.SigmoidDiffusivity(row_stochastic=False))")
    spread = replace(spread, optional=True).without("None")
    d.call(
        "layer",
        f"mp.APPNPConv({{args}}){cast(d)}",
        channels=count(d, d.channels),
        K=replace(steps, right="None") if forever else steps,
        alpha=number(d, 0.1, *([] if forever else [0.0]), optional=True, zero=not forever, below="1.0"),
        diffusivity=replace(spread, right=spread.right if forever or d.maybe(0.5) else None),
    )
    called(d, needed=True)


def weights_of_pyg(d: Draw) -> None:
    """A state dict with the names of PyG."""
    state = "{'lin.weight': torch.ones(3, 2), 'bias': torch.ones(3)}"
    wrong = [
        Wrong("None", "None"),
        Wrong("3", "a number"),
        Wrong("torch.ones(2)", "a tensor"),
        Wrong("{'lin.weight': 3}", "a number in it"),
        Wrong("[('bias', torch.ones(3))]", "a list"),
    ]
    given = Arg(d.pick(["mp.GCNConv(2, 3)", "nn.Sequential(mp.GATConv(2, 3))"]), module("nn.ReLU()").wrong)
    d.call("out", "mp.from_pyg({args})", module=given, state=Arg(state, wrong))


LAYERS: dict[str, Strategy] = {
    "MLPConv": layer("MLPConv", bias=flag),
    "GCNConv": layer(
        "GCNConv", needed=True, normalize=flag, self_loops=lambda d: choice(d, *SELF_LOOPS, None), bias=flag
    ),
    "SGConv": layer(
        "SGConv",
        needed=True,
        K=lambda d: count(d, 2, 1, optional=True),
        self_loops=lambda d: choice(d, *SELF_LOOPS, None),
        bias=flag,
    ),
    "GATConv": gat,
    "CertifiedConv": certified_conv,
    "DIFFormerConv": layer(
        "DIFFormerConv",
        out_channels=same,
        heads=heads,
        kernel=lambda d: choice(d, "simple", "sigmoid", "softmax", "gaussian"),
        projection=projection,
        normalize=lambda d: choice(d, "row", None),
        tau=positive,
        graph=lambda d: choice(d, "sum", "mean", None),
        self_loops=loops,
        beta=lambda d: number(d, 0.0, 0.5, optional=True, negative=True),
        leak=rate,
        dropout=dropout,
        qkv_bias=flag,
        graph_weight=share,
        direction=lambda d: choice(d, "directed", "undirected", "pyg"),
        degrees=lambda d: choice(d, "weighted", "count"),
    ),
    "NodeFormerConv": layer(
        "NodeFormerConv",
        heads=heads,
        head_channels=lambda d: count(d, 3, optional=True, none=True),
        tau=positive,
        num_features=lambda d: count(d, 8, 5, optional=True),
        num_samples=lambda d: count(d, 2, 0, optional=True, zero=True),
        logits=lambda d: choice(d, "dot", "scaled_dot"),
        normalize=rows_or_frobenius,
        relational_bias=lambda d: choice(d, "sum", "sym", "row", None),
        hops=lambda d: count(d, 1, 2, optional=True),
        edge_regularization=rate,
        generator=generator,
        bias=flag,
        qkv_bias=flag,
        powers=lambda d: choice(d, "walks", "reach"),
        gate=lambda d: choice(d, "sigmoid", None),
        stabilizer=lambda d: number(d, 0.0, 1e-6, optional=True, zero=True),
    ),
    "SFiConv": layer(
        "SFiConv",
        out_channels=same,
        heads=heads,
        head_channels=lambda d: count(d, 3, optional=True, none=True),
        lam=lam,
        alpha=alpha,
        lam_scale=lambda d: choice(d, "own", "batch_max"),
        friction=lambda d: choice(d, "attention", "constant"),
        projection=projection,
        normalize=rows_or_frobenius,
        adjacency=flag,
        gamma=lambda d: number(d, 1.0, 0.5, optional=True),
        self_loops=loops,
        residual=flag,
        bias=flag,
        dropout=dropout,
    ),
    "SGFormerConv": layer(
        "SGFormerConv",
        out_channels=same,
        heads=heads,
        beta=lambda d: number(d, 0.5, 1.0, optional=True),
        projection=projection,
        normalize=lambda d: choice(d, "row", "frobenius"),
        bias=flag,
        qkv_bias=flag,
    ),
    "DiffusionConv": diffusion_conv,
    "GINConv": gin,
    "MultiHeadConv": multi_head,
    "APPNPConv": appnp,
    "GCNIIConv": gcnii,
    "GatedGCNConv": gated_gcn_conv,
    "GPSBlock": gps_block,
    "from_pyg": weights_of_pyg,
}
