"""Self-attention and the pre-norm block: torch's own modules agree."""

import pytest
import torch
from torch import Tensor, nn

from diffusion_mp.layers.sequences import SelfAttention, TransformerBlock
from helpers import built, close, refuses
from helpers import randn as state

MASK = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()


def attention(**options: object) -> SelfAttention:
    return built(lambda: SelfAttention(6, 3, **options)).double().eval()


def block(**options: object) -> TransformerBlock:
    return (
        built(lambda: TransformerBlock(6, 3, mlp_channels=8, **options)).double().eval()
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_it_is_the_attention_of_torch(mask: Tensor | None, causal: bool) -> None:
    ours = attention(causal=causal)
    theirs = nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    inside = {"in_proj_weight": ours.project.weight, "in_proj_bias": ours.project.bias}
    theirs.load_state_dict(
        inside | {"out_proj.weight": ours.mix.weight, "out_proj.bias": ours.mix.bias}
    )
    x = state(3, 5, 6)
    past = torch.ones(5, 5).triu(1).bool() if causal else None
    padding = None if mask is None else ~mask
    expected, weights = theirs(
        x, x, x, attn_mask=past, key_padding_mask=padding, average_attn_weights=False
    )
    rows = torch.ones(3, 5).bool() if mask is None else mask
    close(ours(x, mask)[rows], expected[rows])
    weights = [each.transpose(1, 2)[rows] for each in (ours.weights(x, mask), weights)]
    torch.testing.assert_close(*weights, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "mask", [None, MASK, torch.zeros(3, 5).bool()], ids=["whole", "masked", "no-token"]
)
def test_a_frozen_route_is_linear_in_what_it_routes(
    mask: Tensor | None, causal: bool
) -> None:
    """It depends on the state that decides, and reproduces the output of that."""
    module = attention(causal=causal)
    x, y, z = (state(3, 5, 6, seed=seed) for seed in range(3))
    out = module(x, mask)
    assert out.isfinite().all()
    route = module.frozen(x, mask)
    close(route(x), out)
    close(route(y + 2 * z), route(y) + 2 * route(z) - 2 * route(0 * x))
    ones = torch.ones(3, 3, 5, dtype=torch.float64)
    close(module.weights(x, mask).sum(-1), ones)
    if mask is None or mask.any():
        assert not torch.allclose(module.frozen(y, mask)(x), out)


def test_it_is_the_block_of_torch() -> None:
    ours = block()
    theirs = nn.TransformerEncoderLayer(
        6, 3, 8, 0.0, "gelu", batch_first=True, norm_first=True
    ).double()
    names = {
        "attention.project.": "self_attn.in_proj_",
        "attention.mix": "self_attn.out_proj",
        "attention_norm": "norm1",
        "mlp_norm": "norm2",
        "mlp.0": "linear1",
        "mlp.3": "linear2",
    }
    weights = {}
    for name, parameter in ours.named_parameters():
        # Also the norms, which begin as the identity.
        parameter.data.copy_(state(*parameter.shape, seed=len(name)))
        old = next(key for key in names if name.startswith(key))
        weights[name.replace(old, names[old])] = parameter
    theirs.load_state_dict(weights)
    x = state(3, 5, 6, seed=1)
    # In training mode it takes no shortcut.
    expected = theirs.train()(x, src_key_padding_mask=~MASK)
    close(ours(x, MASK)[MASK], expected[MASK])


X = state(3, 5, 6)
test_it_says_what_it_needs = refuses(
    (lambda: SelfAttention(6, 4), ValueError, "heads"),
    (lambda: attention()(X[..., :4]), ValueError, "x must be"),
    (lambda: attention()(X.long()), TypeError, "x must be"),
    (lambda: attention()(X, MASK.long()), TypeError, "mask"),
    (lambda: attention()(X, MASK[:2]), ValueError, "mask"),
)
