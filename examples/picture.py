"""The pictures of the first pages: energies of two trained networks, what one of them sees, and the karate club.

    python examples/picture.py            # writes energy.svg and karate.svg into docs/images
    python examples/picture.py --quick    # seconds: little is learned; writes into runs/pictures

energy.svg: a certified network and DIFFormer-s with LayerNorm, as published, have eight layers each and learn
scikit-learn's digits from five labels per class. Both rows show the same quantity for both networks, after every layer:
above the energy F of the certified network, whose source is the first state of the network in question and whose
states are projected onto the ball, as a certified step does; below Σ_ij ‖z_i − z_j‖² over all pairs. On the right are
the last states of the certified network, one point per image, in the plane of t-SNE.

karate.svg: four known members of Zachary's karate club, and the groups that a certified network finds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import Template

import networkx as nx
import torch
from inside import load_digits, look_inside, train
from runs import count, needs, options
from torch import Tensor
from torch_geometric.datasets import KarateClub

from diffusion_mp import CertifiedDIFFormer, DIFFormer, Graph, QuadraticPenalty
from diffusion_mp.data import random_split_per_class

with needs("diffusion-mp[sklearn]"):
    from sklearn.manifold import TSNE

GROUPS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#e15759",
    "#76b7b2",
    "#59a14f",
    "#d9b51c",
    "#b07aa1",
    "#ff9da7",
    "#9c755f",
    "#8e9aa5",
)
# One file for light and dark: by the reader's system, or by the fragment of the address, #only-light or #only-dark.
DARK = (
    "svg{--ink:#e6e8eb;--faint:#5b626b;--falls:#56b4e9;--rises:#f0a04b;--paper:#1e2129}"
)
PAGE = Template("""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 $height"
 font-family="sans-serif" font-size="14">
<title>$title</title>
<style>
svg{--ink:#24292f;--faint:#b4bac2;--falls:#0072b2;--rises:#d55e00;--paper:#fff}
@media (prefers-color-scheme:dark){$dark}
$by_address
text{fill:var(--ink)} .head{font-size:16px;font-weight:bold} .end{text-anchor:end} .mid{text-anchor:middle}
.axis{fill:none;stroke:var(--faint)} .line{fill:none;stroke-width:2.5} .dots{stroke-width:4.4;stroke-linecap:round}
.digit{font-size:17px;font-weight:bold;text-anchor:middle;paint-order:stroke;stroke:var(--paper);stroke-width:4px}
</style>
<g id="only-light"/><g id="only-dark"/>
$parts
</svg>
""")


def panel(
    left: float, top: float, head: str, below: str, energies: Sequence[float]
) -> str:
    """The energy after every layer, relative to where it began, in the colour of falling or of rising."""
    falling = all(after <= before for before, after in pairwise(energies))
    colour = "falls" if falling else "rises"
    values = [energy / energies[0] for energy in energies]
    low = min(values)
    high = max(values)
    step = 210 / (len(values) - 1)
    points = [
        (left + 40 + k * step, 230 - 165 * (value - low) / (high - low))
        for k, value in enumerate(values)
    ]
    parts = [
        f'<g transform="translate(0 {top})">',
        f'<text class="head" x="{left}" y="22">{head}</text>',
        f'<path class="axis" d="M{left + 34} 55V240H{left + 255}"/>',
        f'<polyline class="line" stroke="var(--{colour})" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>',
        *(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--{colour})"/>'
            for x, y in points
        ),
        *(
            f'<text class="end" x="{left + 28}" y="{235 - 165 * (value - low) / (high - low):.0f}">{value:.2f}</text>'
            for value in (values[0], values[-1])
        ),
        *(
            f'<text class="mid" x="{points[k][0]:.0f}" y="258">{k}</text>'
            for k in range(0, len(values), 2)
        ),
        f'<text class="mid" x="{left + 145}" y="283">{below}</text>',
        "</g>",
    ]
    return "\n".join(parts)


def cloud(left: float, head: str, below: str, points: Tensor, y: Tensor) -> str:
    """Return points coloured by class; the number of a class stands in the middle of its points."""
    low = points.min(0).values
    high = points.max(0).values
    points = torch.tensor([left + 8, 40.0]) + (points - low) / (
        high - low
    ) * torch.tensor([244.0, 214.0])
    parts = [f'<text class="head" x="{left}" y="22">{head}</text>']
    for digit, colour in enumerate(COLOURS):
        own = points[y == digit]
        dots = "".join(f"M{a:.0f} {b:.0f}h0" for a, b in own.tolist())
        parts.append(f'<path class="dots" stroke="{colour}" d="{dots}"/>')
    for digit in range(len(COLOURS)):
        a, b = points[y == digit].median(0).values.tolist()
        parts.append(f'<text class="digit" x="{a:.0f}" y="{b + 6:.0f}">{digit}</text>')
    return "\n".join(
        [*parts, f'<text class="mid" x="{left + 130}" y="283">{below}</text>']
    )


def groups(
    left: float,
    head: str,
    places: Tensor,
    edges: Tensor,
    shown: Tensor,
    y: Tensor,
    found: Tensor,
) -> str:
    """Return the drawing of a graph: `shown` nodes have the colour of what was found, with a ring if it is wrong."""
    points = torch.tensor([left + 12, 45.0]) + (places + 1) / 2 * torch.tensor(
        [385.0, 205.0]
    )
    lines = "".join(
        f"M{a:.0f} {b:.0f}L{c:.0f} {d:.0f}"
        for a, b, c, d in points[edges.t()].flatten(1).tolist()
    )
    parts = [
        f'<text class="head" x="{left}" y="22">{head}</text>',
        f'<path class="axis" d="{lines}"/>',
    ]
    for (a, b), show, true, guess in zip(
        points.tolist(), shown.tolist(), y.tolist(), found.tolist(), strict=True
    ):
        fill = GROUPS[guess] if show else "var(--paper)"
        if not show:
            stroke = "var(--faint)"
        elif guess == true:
            stroke = fill
        else:
            stroke = "var(--ink)"
        parts.append(
            f'<circle cx="{a:.0f}" cy="{b:.0f}" r="8" fill="{fill}" stroke="{stroke}" stroke-width="3"/>'
        )
    return "\n".join(parts)


def page(title: str, height: int, *parts: str) -> str:
    """Return a picture for light and dark."""
    schemes = {
        "dark": DARK,
        "light": PAGE.template.split("<style>\n")[1].split("\n")[0],
    }
    by_address = "\n".join(
        rule.replace("svg{", f"svg:has(#only-{name}:target){{")
        for name, rule in schemes.items()
    )
    return PAGE.substitute(
        title=title,
        height=height,
        dark=DARK,
        by_address=by_address,
        parts="\n".join(parts),
    )


def digits(epochs: int) -> str:
    """Train both networks on the digits, and draw them."""
    data = load_digits(5)
    split = random_split_per_class(
        data.y, 5, 300, None, torch.Generator().manual_seed(0)
    )
    data = split.apply_to(data)
    networks = {
        "Certified network": CertifiedDIFFormer(
            64, 64, 10, 8, mu=50.0, encoder_layers=2, centre=True, dropout=0.2
        ),
        "DIFFormer-s": DIFFormer(64, 64, 10, 8, layer_norm=True, dropout=0.2),
    }
    seen = {}
    for name, network in networks.items():
        torch.manual_seed(0)
        network.reset_parameters()
        train(network, data, epochs)
        seen[name] = look_inside(network, data, 1)
    certified = seen["Certified network"]
    block = networks["Certified network"].conv
    graph = Graph(data.num_nodes, data.edge_index)
    parts = []
    for column, (name, inside) in enumerate(seen.items()):
        energy = block.energy(inside.states[0], graph)
        start, *later = (block.by_head(state) for state in inside.states)
        states = [energy.constraint.project(state) for state in (start, *later)]
        with torch.no_grad():
            values = [float(energy(state)) for state in states]
            pairs = [float(QuadraticPenalty().total(state)) for state in inside.states]
        print(name, f"{inside.accuracy:.1%}", values, pairs)
        left = 5 + 295 * column
        parts.append(panel(left, 0, name, "energy F by layer", values))
        parts.append(panel(left, 295, "", "Σ ‖z − z′‖² over pairs, by layer", pairs))
    plane = torch.tensor(
        TSNE(init="pca", random_state=0).fit_transform(certified.states[-1].numpy())
    )
    caption = f"1,797 images, 50 labels: {certified.accuracy:.0%} right"
    return page(
        "Two quantities by layer of a certified network and of DIFFormer-s, and the digits as the first one sees them",
        595,
        *parts,
        cloud(595, "Certified network: digits", caption, plane, data.y),
    )


def karate(epochs: int) -> str:
    """Train a certified network on four members of the club, the model of docs/getting-started.md, and draw it."""
    torch.manual_seed(0)
    data = KarateClub()[0]
    model = CertifiedDIFFormer(data.num_features, 16, 4, num_layers=4, encoder_layers=1)
    train(model, data, epochs)
    found = model(data.x, data.edge_index).argmax(1)
    right = (found == data.y)[~data.train_mask]
    others = int((~data.train_mask).sum())
    drawn = nx.spring_layout(
        nx.Graph(data.edge_index.t().tolist()), seed=3, iterations=300
    )
    places = torch.tensor([drawn[node].tolist() for node in range(data.num_nodes)])
    places = 2 * (places - places.amin(0)) / (places.amax(0) - places.amin(0)) - 1
    every = data.train_mask | True
    head = f"Found: {int(right.sum())} of {others} right, a ring where not"
    return page(
        "Zachary's karate club: four known members, and the groups that a certified network finds",
        265,
        groups(
            5,
            "Known: one member of each group",
            places,
            data.edge_index,
            data.train_mask,
            data.y,
            data.y,
        ),
        groups(445, head, places, data.edge_index, every, data.y, found),
    )


def main(argv: list[str] | None = None) -> int:
    """Train and draw; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=count, default=100)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/images"), help="folder of the pictures"
    )
    args = options(parser, argv, epochs=2, out=Path("runs/pictures"))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in {"karate": karate, "energy": digits}.items():
        (args.out / f"{name}.svg").write_text(draw(args.epochs))
        print(args.out / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
