"""PDETransformer: the seven placements, padding, causality, tasks, and what every model promises."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.layers import PDEDiffusion1d
from diffusion_mp.models import PDETransformer
from diffusion_mp.models.pde_transformer import SITES
from diffusion_mp.testing.laws import seeded
from helpers import agree, close, randn, refuses

PLACEMENTS = [*SITES, None]
LENGTH = 7
CHANNELS = 6
HEADS = 3
DOUBLE = torch.float64


def build(placement: str | None = None, **options) -> PDETransformer:
    options = {"num_layers": 2, "heads": HEADS, "max_length": 20} | options
    channels = options.pop("in_channels", [11])
    if placement is not None:
        options.setdefault("diffusion", {"strides": (1, 2), "alpha": 0.3})
    with seeded(0):
        model = PDETransformer(channels, CHANNELS, 4, placement=placement, **options)
    model = model.double().eval()
    for layer in diffusions(model):
        layer.reset_parameters()  # α in double precision
    return model


def diffusions(model: nn.Module) -> list[PDEDiffusion1d]:
    return [module for module in model.modules() if isinstance(module, PDEDiffusion1d)]


def sequences(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(11, (3, length), generator=torch.Generator().manual_seed(seed))


def laplacian(length: int, stride: int) -> Tensor:
    """Δ_h of the half-sample extension: position i of a sequence that is reflected at both ends."""
    matrix = -2 * torch.eye(length, dtype=DOUBLE)
    for i in range(length):
        for j in (i - stride, i + stride):
            j = j % (2 * length)
            matrix[i, min(j, 2 * length - 1 - j)] += 1
    return matrix


def smoothing(length: int) -> Tensor:
    """S of the options in `build`: α = 0.3 is shared equally by the strides 1 and 2."""
    return torch.eye(length, dtype=DOUBLE) + 0.15 * (
        laplacian(length, 1) + laplacian(length, 2)
    )


def along(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("ij,bjc->bic", matrix, x)


class Square(nn.Module):
    """Stands for the MLP: position by position, and not linear, for then diffusion would commute with it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def simple_block(model: PDETransformer) -> nn.Module:
    """A block without biases, its LayerNorms tanh, its MLP the square, its attention the mean of the past."""
    block = model.blocks[0]
    block.attention_norm = block.mlp_norm = nn.Tanh()
    block.mlp = Square()
    block.attention.causal = True
    with torch.no_grad():
        block.attention.project.bias.zero_()
        block.attention.project.weight[: 2 * CHANNELS].zero_()
        block.attention.mix.bias.zero_()
    return block


def test_the_placements_are_those_of_table_1() -> None:
    """On a block whose parts can be written down, each output is the composition that the table prints, no other."""
    x = randn(3, LENGTH, CHANNELS)
    outputs = {placement: simple_block(build(placement))(x) for placement in PLACEMENTS}
    block = simple_block(build())
    past = torch.ones(LENGTH, LENGTH, dtype=DOUBLE).tril()
    routing = past / past.sum(1, keepdim=True)
    value = block.attention.project.weight[2 * CHANNELS :].T
    mix = block.attention.mix.weight.T
    s = smoothing(LENGTH)
    s_heads = torch.kron(smoothing(HEADS), torch.eye(CHANNELS // HEADS, dtype=DOUBLE))

    def then(y: Tensor) -> Tensor:
        return y + y.tanh().square()

    plain = x + along(routing, x.tanh() @ value) @ mix
    before_norm = x + along(routing, along(s, x).tanh() @ value) @ mix
    expected = {
        None: then(plain),
        "P1": then(plain),  # the embedding is not in the block
        "P2": along(s, then(plain)),
        "P3": along(s, then(plain)),
        "P4": before_norm + along(s, before_norm).tanh().square(),
        "P5": then(x + along(routing @ s, x.tanh() @ value) @ mix),
        "P6": then(x + along(routing, x.tanh() @ value) @ s_heads @ mix),
        "P7": then(along(s, plain)),
    }
    for placement, output in outputs.items():
        torch.testing.assert_close(
            output, expected[placement], rtol=1e-12, atol=1e-12, msg=str(placement)
        )
    same = {
        ("P2", "P3"),
        ("P1", None),
    }  # as printed: the MLP is last in a pre-norm block
    for pair in combinations(PLACEMENTS, 2):
        assert torch.allclose(*(expected[placement] for placement in pair)) == (
            pair in same
        ), pair


def test_p1_smooths_the_embedding_and_its_position() -> None:
    x = sequences()
    plain = build().embed(sequences())
    close(build("P1").embed(x), along(smoothing(LENGTH), plain), "entries")
    for placement in PLACEMENTS[1:]:
        assert torch.equal(build(placement).embed(x), plain)


def test_the_placements_differ_as_models() -> None:
    """From one draw of all weights, only P2 and P3 are the same function; no α is shared, none is left out."""
    x = sequences()
    start = build().state_dict()
    outputs = {}
    for placement in PLACEMENTS:
        model = build(placement)
        model.load_state_dict(start, strict=False)
        thetas = {layer.diffusivity.theta for layer in diffusions(model)}
        assert len(thetas) == {None: 0, "P1": 1, "P4": 4}.get(placement, 2)
        outputs[placement] = model(x)
        outputs[placement].square().sum().backward()
        assert all(leaf.grad.abs().max() > 1e-12 for leaf in model.parameters())
    close(outputs.pop("P3"), outputs["P2"], "entries")
    for first, second in combinations(outputs.values(), 2):
        assert not torch.allclose(first, second, rtol=1e-3, atol=1e-4)


# where the tokens of three sequences of 7, 4 and 1 tokens stand among 9 positions
RIGHT = torch.arange(9) < torch.tensor([[7], [4], [1]])
ANYWHERE = torch.tensor(
    [
        [0, 1, 1, 0, 1, 1, 1, 1, 1],
        [1, 0, 1, 1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
).bool()


@pytest.mark.parametrize(
    "mask", [RIGHT, RIGHT.flip(1), ANYWHERE], ids=["right", "left", "anywhere"]
)
@pytest.mark.parametrize(
    ("pooling", "causal"), [("mean", False), ("first", False), ("last", True)]
)
@pytest.mark.parametrize("placement", PLACEMENTS)
@torch.no_grad()
def test_a_padded_sequence_is_the_sequence(
    placement: str | None, pooling: str, causal: bool, mask: Tensor
) -> None:
    model = build(placement, pooling=pooling, causal=causal)
    x = sequences(9)
    rows = zip(x, mask, strict=True)
    alone = torch.cat([model(row[tokens].unsqueeze(0)) for row, tokens in rows])
    # No category of the vocabulary.
    close(model(x.masked_fill(~mask, -5), mask), alone, "entries")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_neither_nan_in_the_padding_nor_a_sequence_without_a_token_disturbs_others(
    placement: str | None,
) -> None:
    model = build(placement, in_channels=2)
    x = randn(3, 9, 2)
    expected = model(x, ANYWHERE)
    poisoned = model(x.masked_fill(~ANYWHERE.unsqueeze(2), torch.nan), ANYWHERE)
    assert torch.equal(poisoned, expected)
    agree(poisoned, expected, model.parameters(), (0, 0), (1e-12, 1e-12))
    mask = ANYWHERE.clone()
    mask[1] = False
    out = model(x, mask)
    assert out.isfinite().all()
    close(out[::2], expected[::2], "entries")


def states(model: PDETransformer, x: Tensor, mask: Tensor | None) -> Tensor:
    state = model.embed(x, mask)
    for block in model.blocks:
        state = block(state, mask)
    return state


@pytest.mark.parametrize("mask", [None, ANYWHERE], ids=["whole", "masked"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_causal_model_never_looks_ahead(
    placement: str | None, mask: Tensor | None
) -> None:
    model = build(placement, causal=True, in_channels=2)
    x = randn(3, 9, 2)
    before = states(model, x, mask)
    for position in range(9):
        changed = x.clone()
        changed[:, position:] += 1
        after = states(model, changed, mask)
        past = (torch.ones(3, 9).bool() if mask is None else mask) & (
            torch.arange(9) < position
        )
        assert torch.equal(after[past], before[past])
        assert mask is not None or not torch.allclose(
            after[:, position], before[:, position]
        )


def test_a_causal_model_refuses_a_boundary_that_looks_ahead() -> None:
    # Heads have no before and after.
    for placement, boundary in (
        ("P7", "causal"),
        ("P6", "symmetric"),
    ):
        layers = diffusions(build(placement, causal=True))
        assert {layer.diffusivity.boundary for layer in layers} == {boundary}
    with pytest.raises(ValueError, match="boundary must be 'causal' in a causal model"):
        build("P1", causal=True, diffusion={"boundary": "symmetric"})


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_pooling(pooling: str) -> None:
    model = build(pooling=pooling)
    x = sequences(9)
    rows = []
    for row, tokens in zip(
        model.norm(states(model, x, ANYWHERE)), ANYWHERE, strict=True
    ):
        row = row[tokens]
        rows.append({"mean": row.mean(0), "first": row[0], "last": row[-1]}[pooling])
    expected = torch.stack(rows)
    close(model.encode(x, ANYWHERE), expected, "entries")
    close(model(x, ANYWHERE), model.head(expected), "entries")


def test_retrieval_is_two_towers_with_the_same_weights() -> None:
    model = build("P1", task="retrieve")
    x = sequences()
    other = sequences(9, seed=1)
    mask = RIGHT
    u = model.encode(x)
    v = model.encode(other, mask)
    expected = model.head(torch.cat([u, v, u * v, u - v], 1))
    close(model(x, None, other, mask), expected, "entries")


def test_tokens_of_several_columns() -> None:
    model = build(in_channels=[11, 5])
    columns = torch.stack([sequences(), sequences() % 5], 2)
    tables = model.encoder.tables
    expected = (
        tables[0](columns[..., 0])
        + tables[1](columns[..., 1])
        + model.positions[:LENGTH]
    )
    close(model.embed(columns), expected, "entries")


def test_dropout_and_repr() -> None:
    model = build("P2", dropout=0.5)
    x = sequences()
    random = torch.get_rng_state()
    assert torch.equal(model(x), model(x))
    assert torch.equal(random, torch.get_rng_state())
    with seeded(1):
        assert not torch.allclose(model.train()(x), model.eval()(x))
    assert "placement='P2'" in repr(model)
    assert "heads=3" in repr(model)


test_it_says_what_it_needs = refuses(
    (lambda: build(None, diffusion={}), "diffusion belongs to a placement"),
    (lambda: build(heads=4), "heads must divide channels"),
    (
        lambda: build()(sequences()[0]),
        r"x must be \[batch, length, 1\], as in_channels says",
    ),
    (lambda: build()(randn(3, 7)), "x must hold categories"),
    (lambda: build()(sequences() + 20), r"column 0 of x must lie in \[0, 10\]"),
    (
        lambda: build(task="retrieve")(sequences()),
        "other, the second sequences of pairs, must be passed",
    ),
    (lambda: build()(sequences(), sequences()), "^mask must be"),
    (lambda: build()(sequences(), [True]), TypeError, "^mask must be a bool tensor"),
    (
        lambda: build(task="retrieve")(sequences(), None, sequences(), sequences()),
        "^other_mask must be",
    ),
    (
        lambda: build()(sequences(), None, sequences()),
        "other, the second sequences of pairs, must be passed",
    ),
)


@pytest.mark.parametrize("channels", [6, 9])
def test_positions_start_as_sinusoids(channels: int) -> None:
    positions = PDETransformer(
        [11], channels, 4, heads=3, max_length=50
    ).positions.detach()
    rates = torch.logspace(0, -4, (channels + 1) // 2)
    angles = torch.arange(50.0).unsqueeze(1) * rates
    torch.testing.assert_close(
        positions, torch.cat([angles.sin(), angles.cos()], 1)[:, :channels]
    )
