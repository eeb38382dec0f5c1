"""Torch's FlexAttention: rows divided by their sums are a softmax of log f, whatever f > 0 (D11 of docs/errata.md)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from diffusion_mp.kernels.pairwise.scores import Attended, log_score


def declines(named: bool, q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> str | None:
    """Why FlexAttention cannot take these arguments, as the end of a sentence; ``None``: it can."""
    if q.dtype == torch.float64:
        return "FlexAttention has no float64"
    if not q.numel():
        return "FlexAttention wants at least one node"
    if not q.is_cuda:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            return "FlexAttention has no backward pass on the CPU (see torch.no_grad)"
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            return "FlexAttention compiles its code, and there is no C++ compiler (see the variable CXX)"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, ptr: Tensor | None, score: str) -> Attended:
    """Σ_j p_ij v_j, [N, H, D]; differentiated by torch. Graphs of a batch are masked, not skipped."""
    graph = None if ptr is None else torch.repeat_interleave(ptr.diff()).to(q.device)

    def log_weight(s: Tensor, batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        log_f = log_score(s, score)
        return log_f if graph is None else torch.where(graph[row] == graph[col], log_f, -torch.inf)

    queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = _compiled()(queries, keys, values, score_mod=log_weight, scale=1.0)
    return Attended(out.squeeze(0).transpose(0, 1), out.new_empty(0))


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)
