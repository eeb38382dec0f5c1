"""``node_parallel``: one model on all ranks, with the gradients of the whole graph."""

from __future__ import annotations

from types import NoneType
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from diffusion_mp.distributed.collectives import all_reduce, contact
from diffusion_mp.errors import check_kind

Model = TypeVar("Model", bound=nn.Module)


def node_parallel(model: Model, group: ProcessGroup | None = None) -> Model:
    r"""Give every rank the parameters and buffers of the first, and sum gradients over ranks as they arrive.

    ```python
    graph = ShardedGraph(edge_index, num_nodes)
    model = node_parallel(DIFFormer(...))
    logits = model(x[graph.rows], graph)
    loss = cross_entropy(logits[mask], y[graph.rows][mask], reduction="sum") / graph.total(mask.sum())
    (loss + auxiliary_loss(model)).backward()
    ```

    The loss of the whole graph is the sum of the ranks' losses, which is why they are divided by the number of labels
    everywhere, not by a rank's own; then the gradient of every parameter is the one a single process has. The model is
    changed in nothing but hooks on its parameters: its state dict is that of one process, and any rank's will do.

    Args:
        model: the same on every rank, but for the numbers in it, which become those of the first.
        group: the processes; all by default.

    Returns:
        The model.

    Raises:
        TypeError: no module, or no group.
        RankLostError: another process has ended, or does not answer.

    Examples:
        >>> torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=0, world_size=1)  # or more
        >>> graph = ShardedGraph(edge_index, 6)
        >>> model = node_parallel(DIFFormer(4, 8, 3))
        >>> model(x[graph.rows], graph).shape
        torch.Size([6, 3])
        >>> torch.distributed.destroy_process_group()
    """
    check_kind(model, "model", nn.Module, "a torch.nn.Module")
    check_kind(group, "group", (ProcessGroup, NoneType), "a process group of torch.distributed or None")
    for tensor in [*model.parameters(), *model.buffers()]:
        with contact(group), torch.no_grad():
            distributed.broadcast(tensor.detach(), group=group, group_src=0)

    def summed(grad: Tensor) -> Tensor:
        return all_reduce(grad.detach(), group)

    # The autograd engine runs in reverse order of the forward pass, which is the same program on every rank: so are the
    # orders in which gradients arrive and layers' own sums are taken back.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(summed)
    return model
