"""The generated graph of Pokec's kind."""

import math

import pytest
import torch

from diffusion_mp_experiments.graphs import synthetic_pokec

SIZE = {"num_nodes": 20_000, "num_edges": 375_000}


@pytest.fixture(scope="module")
def data():
    return synthetic_pokec(**SIZE)


def test_sizes(data):
    assert data.x.shape == (20_000, 65)
    assert data.edge_index.shape == (2, 375_000)
    assert bool((data.edge_index[0].diff() >= 0).all())
    assert 0 <= int(data.edge_index.min()) <= int(data.edge_index.max()) < 20_000
    data.validate()


def test_degrees_are_log_normal(data):
    """Median 18.75 / exp(1.5² / 2), and the logarithm has deviation 1.5; in both directions."""
    for ends in data.edge_index:
        degree = ends.bincount(minlength=20_000).double()
        assert float(degree.median()) == pytest.approx(6.09, abs=1)
        for share, deviations in ((0.9, 1.2816), (0.99, 2.3263)):
            assert float(degree.quantile(share)) == pytest.approx(6.09 * math.exp(1.5 * deviations), rel=0.06)


def test_homophily_and_signal(data):
    known = (data.y[data.edge_index] >= 0).all(0)
    source, target = data.y[data.edge_index[:, known]]
    assert float((source == target).float().mean()) == pytest.approx(0.444, abs=0.01)
    right = (data.x.sum(1) > 0) == (data.y == 1)
    assert float(right[data.y >= 0].float().mean()) == pytest.approx(0.618, abs=0.015)


def test_both_classes_and_a_few_without():
    y = synthetic_pokec(1_000, 5_000, 3, unlabelled=0.1).y
    assert set(y.tolist()) == {-1, 0, 1}
    assert 60 < int((y < 0).sum()) < 140


def test_seed_decides_everything_and_nothing_else_does(data):
    before = torch.get_rng_state()
    again, other = synthetic_pokec(**SIZE), synthetic_pokec(**SIZE, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("x", "edge_index", "y"):
        assert torch.equal(data[name], again[name])
        assert not torch.equal(data[name], other[name])


def test_cache(tmp_path, data):
    for _ in range(2):
        cached = synthetic_pokec(**SIZE, cache=tmp_path / "cache")
        assert torch.equal(cached.edge_index, data.edge_index)
    assert not torch.equal(synthetic_pokec(**SIZE, seed=1, cache=tmp_path / "cache").x, data.x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 1}, "num_nodes must be at least 2"),
        ({"num_edges": 0}, "num_edges must be at least 1"),
        ({"homophily": 1.5}, r"homophily must be a probability; got 1\.5"),
        ({"unlabelled": -0.1}, "unlabelled must be a probability"),
        ({"signal": -1.0}, "signal must be finite and >= 0"),
        ({"spread": 1e6}, r"spread must be at most 100, .* got 1000000\.0"),
        ({"seed": 2**70}, "seed must have 64 bits"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        synthetic_pokec(**{"num_nodes": 10, "num_edges": 10, **options})


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("name", ["seed", "homophily", "unlabelled", "signal", "spread"])
@pytest.mark.parametrize("value", ["0", None, True, [0.5]])
def test_options_that_are_no_numbers(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a"):
        synthetic_pokec(10, 10, 3, **{name: value})


def test_the_default_type_of_numbers_decides_nothing():
    expected = synthetic_pokec(50, 90, 3)
    torch.set_default_dtype(torch.float64)
    try:
        data = synthetic_pokec(50, 90, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(data[name], expected[name]) for name in ("x", "y", "edge_index"))
