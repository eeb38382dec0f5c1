"""``node_parallel``: one model on all ranks; and the differentiable collectives behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp
from torch.utils.weak import WeakIdKeyDictionary

from diffusion_mp.checks import check_kind
from diffusion_mp.couplings import Sums

Model = TypeVar("Model", bound=nn.Module)


class RankLostError(RuntimeError):
    """Another process of the group has ended, or did not answer in time.

    Examples:
        >>> issubclass(RankLostError, RuntimeError)
        True
    """


#: The hook of every parameter whose gradient is summed; a second hook would sum it
#: twice.
_SUMMED = WeakIdKeyDictionary()

#: Messages of backends whose connection is lost; gloo raises plain RuntimeErrors.
LOST = re.compile(
    r"connection|timed? ?out|closed by peer|broken pipe|socket|gloo/transport",
    re.IGNORECASE,
)


def check_group(group: ProcessGroup | None) -> None:
    """Raise unless there are processes, and ``group`` is a group of them or ``None``."""
    if not distributed.is_initialized():
        raise ValueError(
            "there are no ranks yet. Call torch.distributed.init_process_group first (torchrun starts the processes), "
            "or stay in one process, with a Graph and the model itself."
        )
    check_kind(
        group,
        "group",
        (ProcessGroup, NoneType),
        "a process group of torch.distributed or None",
    )


@contextmanager
def contact(group: ProcessGroup | None) -> Iterator[None]:
    """Raise `RankLostError` when the backend reports a lost connection or a timeout; other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if not (
            isinstance(error, distributed.DistNetworkError) or LOST.search(str(error))
        ):
            raise
        rank = distributed.get_rank(group)
        size = distributed.get_world_size(group)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankLostError(
            f"rank {rank} of {size} got no answer from another one, which has ended or is stuck ({reason}). Look for "
            f"the first error in the output of the other ranks, and start all of them again from the last checkpoint."
        ) from error


class _Collective(torch.autograd.Function):
    """A collective, and the collective ``back`` of its gradient: the losses of all ranks may depend on the result."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        there: Callable[[Tensor], Tensor],
        back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def all_reduce(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the sum of ``x`` over the ranks, on every rank; once differentiable."""

    def summed(x: Tensor) -> Tensor:
        # A copy, because backends write to the tensor that they are given.
        out = x.clone(memory_format=torch.contiguous_format)
        with contact(group):
            distributed.all_reduce(out, group=group)
        return out

    return _Collective.apply(x, summed, summed)


def all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None
) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0, the next to rank 1, …; return ``received[r]`` rows of each rank r."""

    def exchanged(sent: list[int], received: list[int], x: Tensor) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        with contact(group):
            distributed.all_to_all_single(
                out, x.contiguous(), received, sent, group=group
            )
        return out

    return _Collective.apply(
        x, partial(exchanged, sent, received), partial(exchanged, received, sent)
    )


def all_merged(sums: Sums, group: ProcessGroup | None) -> Sums:
    """Return the sums over the senders of all ranks."""
    # Features stored as logarithms have a shift, and sums of two shifts do not add up.
    if sums.shift is None:
        return Sums(all_reduce(sums.totals, group))
    shift = sums.shift.clone()
    with contact(group):
        distributed.all_reduce(shift, ReduceOp.MAX, group=group)
    return Sums(all_reduce(sums.shifted(shift), group), shift)


def node_parallel(model: Model, group: ProcessGroup | None = None) -> Model:
    """Make a model the same on all ranks, and sum the gradients of its parameters over ranks as they arrive.

    Every rank gets the parameters and buffers of the first rank. The model gets hooks on its parameters and is
    returned.

    ```python
    graph = ShardedGraph(edge_index, num_nodes)
    model = node_parallel(DIFFormer(...))
    logits = model(x[graph.rows], graph)
    loss = cross_entropy(logits[mask], y[graph.rows][mask], reduction="sum") / graph.total(mask.sum())
    (loss + auxiliary_loss(model)).backward()
    ```

    The loss of the graph is the sum of the losses of the ranks, so every rank divides by the number of labels on all
    ranks. The gradient of every parameter, and the state dict of every rank, are then the same as in a single process.

    Args:
        model: the model, built alike on every rank.
        group: the processes. By default all of them.

    Raises:
        RankLostError: another process has ended, or does not answer.

    Examples:
        >>> torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=0, world_size=1)  # or more
        >>> graph = ShardedGraph(edge_index, 6)
        >>> node_parallel(DIFFormer(4, 8, 3))(x[graph.rows], graph).shape
        torch.Size([6, 3])
        >>> torch.distributed.destroy_process_group()
    """
    check_kind(model, "model", nn.Module, "a torch.nn.Module")
    check_group(group)
    for tensor in [*model.parameters(), *model.buffers()]:
        with contact(group), torch.no_grad():
            distributed.broadcast(tensor.detach(), group=group, group_src=0)

    # Autograd runs in reverse order of the forward pass, which is the same on every
    # rank, and so is the order of sums.
    for parameter in model.parameters():
        if parameter.requires_grad and parameter not in _SUMMED:
            _SUMMED[parameter] = parameter.register_hook(
                lambda grad: all_reduce(grad.detach(), group)
            )
    return model
