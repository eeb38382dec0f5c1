"""What ranks say to each other, with derivatives; and a sentence where one of them does not answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp

from diffusion_mp.couplings import Sums


class RankLostError(RuntimeError):
    """Another process of the group has ended, or did not answer in time.

    Examples:
        >>> issubclass(RankLostError, RuntimeError)
        True
    """


#: What backends say where the other side is gone; gloo raises plain RuntimeErrors.
LOST = re.compile(r"connection|timed? ?out|closed by peer|broken pipe|socket|gloo/transport", re.IGNORECASE)


@contextmanager
def contact(group: ProcessGroup | None) -> Iterator[None]:
    """Turn what the backend says about a lost connection or a timeout into a sentence; other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistNetworkError) or LOST.search(str(error))):
            raise
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankLostError(
            f"rank {rank} of {size} got no answer from another one, which has ended or is stuck ({reason}). Look for "
            f"the first error in the output of the other ranks, and start all of them again from the last checkpoint."
        ) from error


class _AllReduce(torch.autograd.Function):
    """Σ over ranks. Every rank's loss may depend on it, so its gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        with contact(group):
            distributed.all_reduce(out, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    """Rows to every rank, and rows from every rank; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        with contact(group):
            distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of ``x`` over the ranks, on every rank; once differentiable."""
    out: Tensor = _AllReduce.apply(x, group)
    return out


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None) -> Tensor:
    """The first ``sent[0]`` rows to rank 0, the next to rank 1, …; returns ``received[r]`` rows from each rank r."""
    out: Tensor = _AllToAll.apply(x, sent, received, group)
    return out


def all_merged(sums: Sums, group: ProcessGroup | None) -> Sums:
    """The sums over the senders of all ranks."""
    if sums.shift is None:
        return Sums(all_reduce(sums.totals, group))
    shift = sums.shift.clone()
    with contact(group):
        distributed.all_reduce(shift, ReduceOp.MAX, group=group)
    return Sums(all_reduce(sums.shifted(shift), group), shift)
