"""Strategies of the layers and of the models that are called like them."""

# ruff: noqa: F403, F405 (the vocabulary of the tables)
from dataclasses import replace
from typing import Any

from diffusion_mp import (
    DiffusionConv,
    KernelizedSoftmaxDiffusivity,
    SparseFlowDiffusivity,
)
from diffusion_mp.energies.constraints import CONSTRAINTS

from .arguments import *
from .program import Draw, Strategy
from .signatures import calls, construct, counts, numbers, texts


def called(
    d: Draw, *, needed: bool, source: bool = True, x: Arg | None = None, **more: Arg
) -> None:
    rest = {"return_coupling": flag(d), **more}
    if source:
        wrong = tensor(d, d.nodes, d.channels, optional=True).wrong
        rest["source"] = never(wrong if d.nodes else [])
    d.call(
        "out",
        "layer({args})",
        x=state(d) if x is None else x,
        **edges(d, needed=needed),
        **rest,
    )


def layer(*, needed: bool = False, source: bool = True, **options: Any) -> Strategy:
    """A layer called as ``layer(x, edge_index, …)``; the options are those of `arguments`."""

    def strategy(d: Draw) -> None:
        construct(d, "layer", cast(d), **options)
        called(d, needed=needed, source=source)

    return strategy


alpha = numbers(0.1, 1.0, "math.inf", infinite=True)
SHARE = numbers(0.1, 0.0, zero=True, below="1.0")


def certified(d: Draw, *, by_head: bool) -> dict[str, Arg]:
    """Options of a certified layer: the simple penalty wants states near each other."""
    constraint = d.pick([*CONSTRAINTS])
    near = constraint not in (None, "nonnegative")
    return {
        "penalty": choice(
            d,
            *(["simple"] if near else []),
            "gaussian",
            "softmax",
            "quadratic",
            None,
            optional=near,
        ),
        "constraint": choice(d, constraint, optional=constraint == "ball").without(
            "None"
        ),
        "heads": count(d, *([d.heads] if by_head else [1, 2]), optional=True),
        "projection": choice(d, "tied", None),
        "lam": number(d, 0.5, 1e-3, optional=True),
        "graph": flag(d),
    }


def certified_conv(d: Draw) -> None:
    construct(
        d,
        "layer",
        cast(d),
        beta=numbers(1.0, 0.1),
        **certified(d, by_head=True),
    )
    called(d, needed=False)


CONVEX = ("nonnegative", "ball", "nonnegative_ball", None)
SPHERES = ("sphere",)
PARTS = (
    "RowAttention({c})",
    "TiedMLP({c}, 3)",
    "RowAttention({c}, neighbours=True)",
    "WeightedGraph({c}, gate=True)",
)


def related(d: Draw) -> tuple[Arg, Arg]:
    """``edge_dim``, and the ``edge_attr`` that a graph of so many relations needs."""
    dim = count(d, 2).without("None")
    rows = len(d.edges)
    if d.maybe(0.4):
        return dim, tensor(d, rows, 2).unsure("another dtype")
    return unused(dim), never(bad(f"without edge_dim: torch.ones({rows}, 2)"))


def block(d: Draw, *, part: bool = False, **special: Any) -> None:
    """A block of some terms, or with a ``part`` of one term with random options."""
    c = d.channels
    featured = d.name in ("CertifiedBlock", "WeightedGraph")
    dim, features = related(d) if featured else (Arg(None), never([]))
    if part:
        special |= {"edge_dim": dim} if featured else {}
        construct(d, "part", **special)
        d.call("layer", f"mp.layers.CertifiedBlock({c}, [part]){cast(d)}")
    else:
        graph = f"mp.layers.WeightedGraph({c}, edge_dim={dim.right})"
        others = [] if d.maybe(0.4) else [f"mp.layers.{d.pick(PARTS).format(c=c)}"]
        wrong = bad(
            "None | a number | a string in it: ['graph'] | other channels: "
            f"[mp.layers.TiedMLP({c + 1}, 3)]"
        )
        constraint = choice(d, *CONVEX, *(SPHERES if others else []))
        num_layers = count(d, 1, 3, optional=True).without("None")
        construct(
            d,
            "layer",
            cast(d),
            terms=Arg(f"[{', '.join([graph, *others])}]", wrong),
            num_layers=num_layers if others else replace(num_layers, right="None"),
            constraint=constraint,
            beta=numbers(1.0, 0.1),
            leave="heads",  # of terms without matrices, as in CertifiedConv
        )
    passed = edges(d, needed=False, objects=False)
    d.call(
        "out",
        "layer({args})",
        x=state(d),
        **passed,
        edge_attr=features if dim.right else never([]),
        return_coupling=flag(d),
    )


def part(**special: Any) -> Strategy:
    return lambda d: block(
        d, part=True, weight=number(d, 1.0, 0.1, optional=True), **special
    )


def diffusion_conv(d: Draw) -> None:
    special = {"out_channels": channels, "heads": counts(1, 2)}
    construct(d, "layer", cast(d), leave="concat transform value_bias", **special)
    called(d, needed=True)


def gcnii(d: Draw) -> None:
    both = d.maybe(0.5)
    theta = Arg(
        "0.5" if both else None, number(d).without("None").wrong if both else []
    )
    layer = Arg("2" if both else None, count(d).without("None").wrong if both else [])
    construct(d, "layer", cast(d), alpha=SHARE, theta=theta, layer=layer)
    called(d, needed=True)


def gat(d: Draw) -> None:
    featured = d.maybe(0.4)
    wide = Arg(
        str(d.channels) if featured else None,
        count(d).without("None").wrong if featured else [],
    )
    construct(
        d,
        "layer",
        cast(d),
        leave="keep transform",
        more="bias",
        of=DiffusionConv,
        edge_dim=wide,
    )
    if featured:
        passed = with_edge_attr(d, optional=False)
        # Without features it reads the states alone.
        passed["edge_attr"] = passed["edge_attr"].unsure("None")
        d.call("out", "layer({args})", **passed)
    else:
        called(d, needed=True)


def with_edge_attr(d: Draw, *, optional: bool = True) -> dict[str, Arg]:
    passed = edges(d, needed=True, objects=False)
    return {
        "x": state(d),
        **passed,
        "edge_attr": tensor(d, len(d.edges), d.channels, optional=optional),
    }


def with_edges(**options: Any) -> Strategy:
    def strategy(d: Draw) -> None:
        construct(d, "layer", cast(d), **options)
        d.call("out", "layer({args})", **with_edge_attr(d), return_coupling=flag(d))

    return strategy


def local(d: Draw) -> Arg:
    c = d.channels
    right = d.pick([f"mp.GatedGCNConv({c})", f"mp.GCNConv({c}, {c})"])
    return Arg(right, bad("a string: 'gcn' | a number | a class: mp.GCNConv"), True)


def attention(d: Draw) -> Arg:
    c = d.channels
    wrong = bad(
        f"a string: 'sfi' | a number | other channels: mp.SFiConv({c}, {c + 1}, residual=False)"
    )
    return Arg(f"mp.SFiConv({c}, {c}, residual=False)", wrong, True)


def appnp(d: Draw) -> None:
    forever = d.maybe(0.2)
    steps = count(d, 10, 1, optional=True).without("None")
    spread = diffusivity(
        d, "mp.SymmetricDiffusivity(mp.SigmoidDiffusivity(row_stochastic=False))"
    ).without("None")
    construct(
        d,
        "layer",
        cast(d),
        K=replace(steps, right="None") if forever else steps,
        alpha=numbers(0.1, *([] if forever else [0.0]), zero=not forever, below="1.0"),
        diffusivity=replace(
            spread,
            optional=True,
            right=spread.right if forever or d.maybe(0.5) else None,
        ),
    )
    called(d, needed=True)


LAYERS: dict[str, Strategy] = {
    "MLPConv": layer(),
    "GCNConv": layer(needed=True),
    "SGConv": layer(needed=True),
    "GATConv": gat,
    "CertifiedConv": certified_conv,
    "CertifiedBlock": block,
    "WeightedGraph": part(),
    "RowAttention": part(),
    "Pairs": part(leave="constraint penalty"),
    "Neighbours": part(leave="constraint diffusivity penalty"),
    "TiedMLP": part(),
    "DIFFormerConv": layer(
        leave="update transform keep bias concat",
        more="dropout",
        of=DiffusionConv,
        out_channels=channels,
        normalize=texts("row", None),
    ),
    "NodeFormerConv": layer(
        leave="projection",
        more="num_features edge_regularization generator stabilizer",
        of=KernelizedSoftmaxDiffusivity,
    ),
    "SFiConv": layer(
        leave="hops",
        more="lam alpha lam_scale friction",
        of=SparseFlowDiffusivity,
        out_channels=channels,
        alpha=alpha,
    ),
    "SGFormerConv": layer(
        leave="transform", out_channels=channels, beta=numbers(0.5, 1.0)
    ),
    "DiffusionConv": diffusion_conv,
    "GINConv": layer(
        needed=True,
        always="mlp",
        mlp=lambda d: module(f"nn.Linear({d.channels}, 3)"),
    ),
    "MultiHeadConv": layer(needed=True, source=False, out_channels=channels),
    "APPNPConv": appnp,
    "GCNIIConv": gcnii,
    "GatedGCNConv": with_edges(),
    "GPSBlock": with_edges(local=local, attention=attention),
    "from_pyg": calls(
        module=lambda d: Arg(
            d.pick(["mp.GCNConv(2, 3)", "nn.Sequential(mp.GATConv(2, 3))"]),
            NOT_A_MODULE,
        ),
        state=Arg(
            "{'lin.weight': torch.ones(3, 2), 'bias': torch.ones(3)}",
            bad(
                "None | a number | a tensor | a number in it: {'lin.weight': 3} | a list: [('bias', torch.ones(3))]"
            ),
        ),
    ),
}
