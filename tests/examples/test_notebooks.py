"""The notebooks run from the first cell to the last, and show what they say."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

pytestmark = pytest.mark.unwatched

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples/notebooks"


@pytest.fixture(autouse=True)
def without_a_screen(monkeypatch):
    plt.switch_backend("agg")
    with torch.random.fork_rng():
        yield
    plt.close("all")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_notebook_begins_and_goes_on_with_cells(path):
    text = path.read_text()
    assert text.startswith("# %% [markdown]\n# # ")
    assert text.count("\n# %%\n") >= 3


def test_digits_are_learned():
    assert runpy.run_path(str(NOTEBOOKS / "digits.py"))["share"] > 0.7


def test_attention_stays_within_clusters_as_far_as_it_looks_at_the_state():
    within = runpy.run_path(str(NOTEBOOKS / "attention.py"))["within"]
    assert within["uniform"] == pytest.approx(0.5)
    assert 0.6 < within["simple"] < within["Gaussian"]


def test_the_energy_falls_where_it_is_certified():
    shown = runpy.run_path(str(NOTEBOOKS / "energy.py"))
    assert all(after <= before for before, after in shown["energies"])
    assert not shown["refused"]
    assert (shown["layers"].diff() <= 1e-5 * shown["layers"][0].abs()).all()
