"""Bars show within `show_progress` alone, and say how far a computation is."""

import re
import time

import pytest
import torch
from tqdm import tqdm

from diffusion_mp import DIFFormer, full_graph_inference, knn_graph, show_progress
from diffusion_mp.data import knn
from diffusion_mp.diagnostics import kernel_error
from diffusion_mp.diffusivities import KernelizedSoftmaxDiffusivity
from diffusion_mp.updates import fixed_point
from diffusion_mp.updates.linear_solve import conjugate_gradients
from helpers import refuses

X = torch.arange(40.0).view(20, 2)
EDGES = torch.tensor([[0, 1], [1, 2]])
SHOWN = {
    "neighbours": lambda: knn_graph(X, 3),
    "inference": lambda: full_graph_inference(DIFFormer(2, 4, 3), X, EDGES, block_size=5),
    "fixed point": lambda: fixed_point(torch.cos, torch.zeros(1)),
    "linear system": lambda: conjugate_gradients(lambda v: 2 * v, X[None]),
    "kernel_error": lambda: kernel_error(KernelizedSoftmaxDiffusivity(2), X, num_features=(4,), draws=1),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("what", SHOWN)
def test_a_bar_shows_where_it_was_asked_for(what, capsys):
    SHOWN[what]()
    with show_progress():
        SHOWN[what]()  # in less than five seconds
    assert capsys.readouterr().err == ""
    with show_progress(after=0):
        SHOWN[what]()
    assert what in capsys.readouterr().err
    SHOWN[what]()
    assert capsys.readouterr().err == ""


def test_it_says_what_share_of_the_digits_has_been_gained(capsys):
    def slow(z):
        time.sleep(0.11)  # tqdm prints ten times a second
        return 0.1 * z + 1

    with show_progress(after=0):
        fixed_point(slow, torch.full((2,), 1e3, dtype=torch.float64), tol=1e-8, memory=0)
    shares = [int(found) for found in re.findall(r"(\d+)%", capsys.readouterr().err)]
    assert shares == sorted(shares)
    assert len(set(shares)) >= 8  # a step gains a digit, of about nine
    assert max(shares) >= 80


def test_rows_are_counted_and_the_parts_are_one_search(monkeypatch, generator):
    counted = []
    monkeypatch.setattr(tqdm, "update", lambda bar, n: counted.append(n))
    x = torch.randn(50, 70, generator=generator)
    whole = knn_graph(x, 4)
    monkeypatch.setattr(knn, "_PART", 7)
    assert torch.equal(knn_graph(x, 4), whole)
    assert counted == [50] + 7 * [7] + [1]


test_what_is_refused = refuses(
    (lambda: show_progress(after=-1.0).__enter__(), ValueError, "after must be finite and >= 0; got -1.0"),
)
