"""What is kept with tensors: found once, and never for longer than it is true."""

from __future__ import annotations

import gc

import torch

from diffusion_mp.kernels import kept
from diffusion_mp.kernels.kept import kept_with


def counted(*tensors: torch.Tensor, key: str = "sum") -> tuple[int, int]:
    """What is kept, and how often it was found by now."""
    calls = []

    def find() -> int:
        calls.append(1)
        return int(sum(tensor.sum() for tensor in tensors))

    return kept_with(tensors, key, find), len(calls)


def test_it_is_found_once_for_a_key() -> None:
    a = torch.arange(4)
    assert counted(a) == (6, 1)
    assert counted(a) == (6, 0)
    assert counted(a, key="another") == (6, 1)
    assert counted(a.clone()) == (6, 1)


def test_it_is_found_again_once_a_tensor_is_written_to_or_another() -> None:
    a, b = torch.arange(4), torch.arange(3)
    assert counted(a, b) == (9, 1)
    b += 1
    assert counted(a, b) == (12, 1)
    assert counted(a, b) == (12, 0)
    assert counted(a, b.clone()) == (12, 1)


def test_nothing_is_kept_beyond_the_tensor() -> None:
    before = len(kept._KEPT)
    a = torch.arange(4)
    counted(a)
    assert len(kept._KEPT) == before + 1
    del a
    gc.collect()
    assert len(kept._KEPT) == before


def test_what_is_found_in_inference_mode_serves_a_gradient() -> None:
    a = torch.arange(4)
    with torch.inference_mode():
        found = kept_with((a,), "twice", lambda: a * 2)
        fresh = torch.arange(4)
        assert counted(fresh)[1] == counted(fresh)[1] == 1  # whether it is written to nobody can tell
    assert not found.is_inference()
