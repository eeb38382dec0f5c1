"""Sparse features: the linear map that reads them, training with dropout, and modules that need dense ones."""

import copy

import pytest
import torch
from test_all_models import LAYOUTS, results

from diffusion_mp.diffusivities import SimpleDiffusivity
from diffusion_mp.graph import ops
from diffusion_mp.layers.features import FeatureLinear
from diffusion_mp.models import GPS, CertifiedDIFFormer, DIFFormer, DiffusionGNN
from diffusion_mp.runtime.noise import dropout
from helpers import built, close

#: What reads the features itself, or moves them; the fuzzer has layers and diffusivities.
DENSE = {
    "gin": lambda: DiffusionGNN(13, 8, 3, conv="gin"),
    "inputs": lambda: CertifiedDIFFormer(
        13, 8, 3, 2, inputs=SimpleDiffusivity(row_stochastic=False)
    ),
}


def features(n: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 13, dtype=torch.float64, generator=generator)
    x = x * (torch.rand(n, 13, generator=generator) < 0.2)
    x[n // 2] = 0
    x[:, 5] = 0
    return x


def edges(n: int = 17) -> torch.Tensor:
    return torch.randint(n, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "x", [features(1), torch.zeros(4, 13, dtype=torch.float64), features()[:0]]
)
def test_few_rows_and_no_entries(x, layout):
    linear = built(lambda: FeatureLinear(13, 3)).double()
    got, expected = (results(linear, {"x": each}) for each in (LAYOUTS[layout](x), x))
    close(got, expected)


def test_the_linear_map_is_differentiated_twice():
    x = features().to_sparse_csr()
    linear = built(lambda: FeatureLinear(13, 3)).double()
    names, leaves = zip(*linear.named_parameters(), strict=True)

    def call(*values):
        named = dict(zip(names, values, strict=True))
        return torch.func.functional_call(linear, named, (x,)).square()

    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_a_copy_takes_sparse_features_too():
    model = built(lambda: DiffusionGNN(13, 8, 3)).double().eval()
    x = features().to_sparse_csr()
    close(copy.deepcopy(model)(x, edges()), model(x, edges()))


@pytest.mark.parametrize("layout", ["csr", "coo", "csc"])
@pytest.mark.parametrize("name", DENSE)
def test_what_reads_the_features_itself_says_that_they_must_be_dense(
    name, layout, no_typecheck
):
    model = built(DENSE[name]).double()
    sparse = LAYOUTS[layout](features())
    with pytest.raises(TypeError, match=r"x must be a dense .*sparse_.*x\.to_dense"):
        model(sparse, edges())


def test_stored_entries_are_dropped_one_by_one_and_zeros_stay():
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(400, 300, generator=generator) < 0.1).double()
    dropped = built(lambda: dropout(x.to_sparse_csr(), 0.25))
    assert dropped.layout is torch.sparse_csr
    dropped = dropped.to_dense()
    assert not dropped[x == 0].any()
    kept = dropped[x == 1] != 0
    close(dropped[x == 1], kept.double() / 0.75)
    share = float(kept.double().mean())
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (lambda x: x[:, :9].to_sparse_csr(), ValueError, r"\[num_nodes, 13\]"),
        (lambda x: x.to_sparse(1), ValueError, r"\[num_nodes, 13\]"),
        (lambda x: x.long().to_sparse_csr(), TypeError, "floating point"),
        (lambda x: x.to_sparse_csr().requires_grad_(), ValueError, r"x\.detach\(\)"),
        (lambda x: x.float().to_sparse_coo(), TypeError, "x must be float64"),
    ],
    ids=["columns", "hybrid", "integers", "gradient", "dtype"],
)
@pytest.mark.parametrize("cls", [DIFFormer, DiffusionGNN, CertifiedDIFFormer, GPS])
def test_features_that_do_not_fit_are_refused(cls, x, error, words):
    with pytest.raises(error, match=words):
        built(lambda: cls(13, 8, 3)).double()(x(features()), edges())


def test_where_features_stand_is_found_once_for_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training step sorts the stored entries by column; the next one need not, until they are moved."""
    dropped = []
    real = ops.compress
    monkeypatch.setattr(ops, "compress", lambda *args: dropped.append(1) or real(*args))
    x = features().to_sparse_csr()
    layer = FeatureLinear(13, 4).double()
    for _ in range(3):
        layer(x).sum().backward()
        dense = x.to_dense().sum(0)
        close(layer.weight.grad, dense.expand(4, -1))
        layer.zero_grad()
    assert len(dropped) == 1
    x.col_indices().copy_(12 - x.col_indices())
    layer(x).sum().backward()
    close(layer.weight.grad, dense.flip(0).expand(4, -1))
    assert len(dropped) == 2
