"""Every picture shows the numbers that it says, on the axis that it is given."""

import doctest

import matplotlib
import pandas as pd
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import diffusion_mp as dm
from diffusion_mp import plot
from diffusion_mp.diagnostics import plot_attention, posterior_variance
from diffusion_mp.energies import SigmoidPenalty
from helpers import refuses

matplotlib.use("Agg")
import matplotlib.pyplot as plt

X = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
NODE = torch.arange(6)
EDGES = torch.cat(
    [torch.stack([NODE, (NODE + 1) % 6]), torch.stack([(NODE + 1) % 6, NODE])], 1
)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.figure().add_subplot()


@pytest.mark.parametrize("name", plot.__all__)
def test_the_example_of_a_plot(name):
    scope = {
        **vars(dm),
        "SigmoidPenalty": SigmoidPenalty,
        "torch": torch,
        "x": X,
        "edge_index": EDGES,
        **vars(plot),
    }
    found = doctest.DocTestParser().get_doctest(
        getattr(plot, name).__doc__, scope, name, None, 0
    )
    outcome = doctest.DocTestRunner(verbose=False).run(found)
    assert outcome.attempted
    assert not outcome.failed


def test_energies(ax):
    model = dm.CertifiedTransformer(4, 8, 3, num_blocks=2).train()
    assert plot.energies(model, X, EDGES, ax=ax) is ax
    assert model.training
    expected = model.eval().energies(X, EDGES)
    drawn = torch.stack([torch.as_tensor(line.get_ydata()) for line in ax.lines])
    assert_close(drawn, (expected / expected[:, :1].abs()).double())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "block 1",
        "block 2",
    ]
    (line,) = plot.energies(dm.DIFFormer(4, 8, 3, 5), X, EDGES).lines
    assert (len(line.get_ydata()), line.get_ydata()[0]) == (6, 1.0)
    (line,) = plot.energies(torch.tensor([-4.0, -6.0])).lines
    assert line.get_ydata().tolist() == [-1.0, -1.5]


def test_neighbours(ax):
    coupling = dm.SoftmaxDiffusivity(4, heads=2)(X)
    plot.neighbours(coupling, 2, top=3, names="abcdef", ax=ax)
    row = coupling.to_dense().mean(0)[2]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(
        row.topk(3).values.tolist()
    )
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "abcdef"[j] for j in row.topk(3).indices
    ]


@pytest.mark.parametrize("matrix", ["full", "diagonal", "identity"])
def test_spectrum(matrix, ax):
    model = dm.CertifiedTransformer(
        4, 8, 3, num_blocks=2, matrix=matrix, attention="all"
    )
    values, shares = plot.eigenvalues(model, X, EDGES)
    assert values.shape == shares.shape == (16,)
    assert float(shares.sum()) == pytest.approx(1)
    if matrix == "identity":
        assert values.tolist() == [1.0] * 16
    plot.spectrum(model, X, EDGES, ax=ax)
    if matrix == "diagonal":  # the eigenvectors are the channels
        states = []
        model.blocks[1].register_forward_hook(
            lambda block, inputs, out: states.append(out.detach())
        )
        model.eval()(X, EDGES)
        share = states[0].var(0) / states[0].var(0).sum() / 2
        order = model.blocks[1].terms[0].matrices()[0].argsort()
        assert_close(shares[8:], share[order])
    heights = torch.tensor([float(bar.get_height()) for bar in ax.containers[0]])
    assert_close(heights, torch.histogram(values, torch.linspace(-1, 1, 17)).hist / 16)
    # Sixteen bars, and the line around the others.
    assert len(plot.spectrum((values, shares)).patches) == len(ax.patches) == 17


def test_uncertainty(ax):
    coupling = SigmoidPenalty().coupling(X)
    plot.uncertainty(coupling, X, leak=0.5, ax=ax)
    drawn = torch.as_tensor(ax.collections[0].get_array()).float()
    assert_close(drawn, posterior_variance(coupling, 0.5)[:, 0])
    points = torch.as_tensor(ax.collections[0].get_offsets())
    spread = torch.linalg.svdvals((X - X.mean(0)).double())[:2]
    assert_close(torch.linalg.svdvals(points), spread)
    assert ax.figure.axes[-1].get_ylabel() == "posterior variance"


@pytest.mark.filterwarnings("error")
def test_unusual_axes_and_inputs(ax):
    ax.set(xscale="log", yscale="log")
    plot.energies(torch.tensor([3.0, 2.0]).bfloat16(), ax=ax)
    _, shares = plot.eigenvalues(
        dm.CertifiedTransformer(4, 8, 3).bfloat16(), X.bfloat16(), EDGES
    )
    assert float(shares.sum()) == pytest.approx(1)
    one = plot.uncertainty(SigmoidPenalty().coupling(X[:1]), X[:1])
    assert one.collections[0].get_offsets().tolist() == [[0, 0]]
    drawn = plot.neighbours(
        dm.SimpleDiffusivity()(X),
        2,
        names=pd.Series(list("abcdef"), index=range(5, -1, -1)),
    )
    assert drawn.get_title().endswith("c")
    before = plt.get_fignums()
    with pytest.raises(ValueError, match="non-negative"):
        plot_attention(-1.0 * dm.SoftmaxDiffusivity(4)(X))
    assert plt.get_fignums() == before


SIMPLE = dm.SimpleDiffusivity()(X)
test_refusals = refuses(
    (lambda: plot.neighbours(SIMPLE, 6), ValueError, r"node must lie in \[0, 5\]"),
    (lambda: plot.neighbours(SIMPLE, 1.0), TypeError, "node must be an integer"),
    (lambda: plot.neighbours(X, 1), TypeError, "coupling"),
    (
        lambda: plot.energies(X, ax=plt),
        TypeError,
        "ax must be a matplotlib axis or None",
    ),
    (
        lambda: plot.spectrum(nn.Linear(2, 2)),
        ValueError,
        "model must have a CertifiedBlock .* Linear has none",
    ),
    (
        lambda: plot.energies(nn.Linear(4, 2), X),
        ValueError,
        "must contain a diffusion layer",
    ),
    (
        lambda: plot.uncertainty(dm.SoftmaxDiffusivity()(X), X),
        ValueError,
        "posterior_variance",
    ),
)
