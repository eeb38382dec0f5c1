"""Bars show within `show_progress` alone, and say how far a computation is."""

import re
import time

import pytest
import torch
from tqdm import tqdm

from diffusion_mp import knn_graph, show_progress
from diffusion_mp.data import knn
from diffusion_mp.runtime import progress
from diffusion_mp.updates import fixed_point
from diffusion_mp.updates.linear_solve import conjugate_gradients


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("neighbours", lambda: knn_graph(torch.eye(9), 3)),
        (
            "linear system",
            lambda: conjugate_gradients(torch.clone, torch.ones(2, 1, 3), least=1.0),
        ),
    ],
)
def test_a_bar_shows_where_it_was_asked_for(what, call, capsys, monkeypatch):
    with show_progress():
        call()  # in less than five seconds
    monkeypatch.setattr(progress, "AFTER", 0)
    call()
    assert capsys.readouterr().err == ""
    with show_progress(), show_progress(False):
        call()
    assert what in capsys.readouterr().err


def test_it_says_what_share_of_the_digits_has_been_gained(capsys, monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 0)
    slow = lambda z: time.sleep(0.11) or 0.1 * z + 1  # noqa: E731  # tqdm prints ten times a second
    with show_progress():
        fixed_point(
            slow, torch.full((2,), 1e3, dtype=torch.float64), tol=1e-8, memory=0
        )
    shares = [
        int(found)
        for found in re.findall(r"fixed point: +(\d+)%", capsys.readouterr().err)
    ]
    assert shares == sorted(shares)
    assert len(set(shares)) >= 8  # a step gains a digit, of about nine


def test_rows_are_counted_and_the_parts_are_one_search(monkeypatch, generator):
    counted = []
    x = torch.randn(50, 70, generator=generator)
    whole = knn_graph(x, 4)
    monkeypatch.setattr(tqdm, "update", lambda bar, n: counted.append(n))
    monkeypatch.setattr(knn, "_PART", 7)
    assert torch.equal(knn_graph(x, 4), whole)
    assert counted == 7 * [7] + [1]
