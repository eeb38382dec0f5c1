"""Mistakes that code of this field has shown, each kept out by a test. D-numbers are those of docs and ERRATA."""

# ruff: noqa: F403, F405 (everything public)
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from diffusion_mp import *
from diffusion_mp.testing.laws import seeded
from helpers import built, close, randn

ALL_PAIR = [
    SimpleDiffusivity,
    SigmoidDiffusivity,
    SoftmaxDiffusivity,
    GaussianDiffusivity,
]
# a ring with a chord; node 5 is isolated
EDGES = torch.tensor(
    [[0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0, 2], [1, 0, 2, 1, 3, 2, 4, 3, 0, 4, 2, 0]]
)


def state() -> Tensor:
    return randn(6, 4)


def two_clusters(num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centre = torch.zeros(2, 16)
    centre[:, 0] = torch.tensor([1.0, -1.0])
    return centre.repeat_interleave(num_nodes // 2, dim=0) + 0.1 * torch.randn(
        num_nodes, 16, generator=generator
    )


def distance_from_the_mean(diffusivity: Diffusivity, x: Tensor) -> float:
    """How far S x stays from the plain mean of x, relative to the spread of x."""
    moved = (diffusivity(x) @ x.unsqueeze(1)).squeeze(1)
    return float((moved - x.mean(0)).norm() / (x - x.mean(0)).norm())


def test_attention_over_100_000_nodes_is_not_the_plain_mean_and_trains_its_queries():
    x = two_clusters(100_000)
    row = built(lambda: SimpleDiffusivity(16, projection="tied"))
    frobenius = built(
        lambda: SimpleDiffusivity(16, projection="tied", normalize="frobenius")
    )
    with torch.no_grad():
        assert distance_from_the_mean(SimpleDiffusivity(), x) > 0.1
        assert distance_from_the_mean(row, x) > 0.1
        # The released form, D1: uniform for every practical purpose.
        assert distance_from_the_mean(frobenius, x) < 1e-4
    sizes = {}
    for normalize in ("row", "frobenius"):
        diffusivity = built(
            lambda n=normalize: SimpleDiffusivity(
                16, projection="separate", normalize=n
            )
        )
        (diffusivity(x) @ x.unsqueeze(1)).square().sum().backward()
        assert diffusivity.query.weight.grad.isfinite().all()
        sizes[normalize] = float(diffusivity.query.weight.grad.norm() / len(x))
    assert sizes["row"] > 1e-3
    assert sizes["frobenius"] < 1e-3 * sizes["row"]


def test_every_kernel_normalises_its_queries_by_default():
    """D2: the released sigmoid kernel does not; with the default, scale does not matter."""
    x = state()
    for kind in ALL_PAIR:
        close(kind()(7.0 * x).to_dense(), kind()(x).to_dense())
    assert not torch.allclose(
        SigmoidDiffusivity(normalize=None)(7.0 * x).to_dense(),
        SigmoidDiffusivity(normalize=None)(x).to_dense(),
    )


@pytest.mark.parametrize(
    ("kind", "score"),
    [
        (SimpleDiffusivity, lambda s: 1 + s),
        (SigmoidDiffusivity, torch.sigmoid),
        (SoftmaxDiffusivity, lambda s: torch.exp(s / 2)),  # √d of four channels
        (GaussianDiffusivity, lambda s: torch.exp(-(2 - 2 * s) / 2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_scores_on_unit_vectors(kind, score):
    """D8, D9: on unit vectors the inner product and the actual distance are the same score; D25: with √d in ŝ, too."""
    unit = torch.nn.functional.normalize(state(), dim=1)
    expected = score(unit @ unit.T)
    for measure in ("inner", "distance"):
        got = kind(normalize=None, measure=measure, row_stochastic=False)(
            unit
        ).to_dense()[0]
        close(got, expected)
        got = kind(measure=measure)(3 * unit).to_dense()[0]
        close(got, expected / expected.sum(1, keepdim=True))


@pytest.mark.parametrize("kind", ALL_PAIR)
def test_the_distance_form_is_the_derivative_of_its_penalty(
    kind,
):
    """D8: ω_ij = f(‖x_i − x_j‖²) for states of any norm in the unit ball."""
    x = state() / 5
    diffusivity = kind(4, normalize=None, measure="distance", row_stochastic=False)
    z2 = (x[:, None] - x[None]).square().sum(-1)
    close(diffusivity(x).to_dense()[0], diffusivity.penalty.f(z2))


def test_no_softmax_penalty_of_an_unknown_dimension():
    """f depends on d, and without channels the constructor does not know it."""
    diffusivity = SoftmaxDiffusivity(
        normalize=None, measure="distance", row_stochastic=False
    )
    assert diffusivity.penalty is None
    assert "channels" in diffusivity.why_no_penalty


def test_equation_24_and_equations_61_to_63_are_different_updates():
    """D3: ½(Ŝ + Ã) with the conservative step, Ŝ + Ã with the residual one."""
    x = state()
    graph = Graph(6, EDGES)
    attention = SimpleDiffusivity()(x).to_dense()[0]
    adjacency = AdjacencyDiffusivity("sym")(x, graph).to_dense()[0]
    options = {"transform": False, "bias": False, "self_loops": "keep", "tau": 0.4}
    mixed = 0.5 * (attention + adjacency)
    eq24 = x - 0.4 * (mixed.sum(1, keepdim=True) * x - mixed @ x)
    eq63 = (1 - 0.4) * x + 0.4 * (attention + adjacency) @ x
    close(DIFFormerConv(4, 4, graph="mean", **options)(x, graph), eq24)
    close(DIFFormerConv(4, 4, graph="sum", **options)(x, graph), eq63)
    halves = 0.5 * SimpleDiffusivity() + 0.5 * AdjacencyDiffusivity("sym")
    by_hand = DiffusionConv(
        4, 4, halves, ExplicitEuler(0.4), transform=False, bias=False
    )
    close(by_hand(x, graph), eq24)


@pytest.mark.parametrize("kernel", ["simple", "sigmoid", "softmax", "gaussian"])
@pytest.mark.parametrize(
    ("graph", "share"),
    [("sum", None), ("mean", None), (None, None), ("sum", 0.3), ("mean", 0.3)],
)
def test_the_returned_coupling_reproduces_the_output(kernel, graph, share):
    """``graph="sum"`` keeps (1 − τ) x, ``graph="mean"`` conserves with the row sums of what is mixed."""
    x = state()
    mapped: Any = {
        "transform": True,
        "keep": "values",
        "bias": True,
        "kernel": kernel,
        "graph": graph,
    }
    conv = built(
        lambda: DIFFormerConv(
            4, 4, 2, projection="separate", tau=0.3, graph_weight=share, **mapped
        )
    ).double()
    out, coupling = conv(x, EDGES, return_coupling=True)
    values = conv.value(x).unflatten(1, (2, 4))
    dense = coupling.to_dense()
    keep = 0.3 * (dense.sum(2).T.unsqueeze(2) if graph == "mean" else 1.0)
    expected = (1 - keep) * values + 0.3 * torch.einsum("hij,jhd->ihd", dense, values)
    close(out, expected.mean(1) + conv.bias)
    close(coupling @ values, torch.einsum("hij,jhd->ihd", dense, values))
    if graph is None:
        close(coupling.degree(), torch.ones(6, 2, dtype=torch.float64))


@pytest.mark.usefixtures("no_typecheck")
def test_training_and_evaluation_use_the_same_tau():
    """With dropout off both modes agree; with it on, the mean over many masks is the evaluated output."""
    x = state()
    model = built(lambda: DIFFormer(4, 6, 3, dropout=0.0)).double()
    close(model.train()(x, EDGES), model.eval()(x, EDGES), "rearranged")
    conv = DIFFormerConv(4, 4, transform=False, bias=False, dropout=0.5)
    mean = built(
        lambda: torch.stack([conv.train()(x, EDGES) for _ in range(400)])
    ).mean(0)
    # Another τ moves it by more than 0.5.
    assert_close(mean, conv.eval()(x, EDGES), atol=0.15, rtol=0)


def test_dropout_never_touches_what_the_diffusivity_reads_and_follows_the_seed():
    """D20: the coupling of a training step is the coupling of evaluation."""
    x = state()
    conv = built(
        lambda: DIFFormerConv(4, 4, projection="separate", dropout=0.9)
    ).double()
    dropped = conv.train()(x, EDGES, return_coupling=True)[1].to_dense()
    assert torch.equal(
        dropped, conv.eval()(x, EDGES, return_coupling=True)[1].to_dense()
    )
    conv = built(lambda: DIFFormerConv(4, 4, dropout=0.5)).double().train()

    def run() -> list[Tensor]:
        with seeded(3):
            return [conv(x, EDGES), conv(x, EDGES)]

    first = run()
    again = run()
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_tied_pairs_of_far_states_move_in_single_precision():
    """Scores of far states are computed in double precision, which the share of a mean took over once."""
    conv = built(
        lambda: CertifiedConv(
            4, penalty="gaussian", constraint=None, heads=2, projection="tied"
        )
    )
    assert conv(100 * randn(17, 4).float()).dtype == torch.float32
