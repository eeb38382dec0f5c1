"""What modules share: parameters drawn anew, positive numbers, norms, auxiliary losses, evaluation mode."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch_geometric.nn import BatchNorm
from torch_geometric.nn.inits import reset

from diffusion_mp.checks import PositiveNumber, check_kind
from diffusion_mp.saving import Saved


class Resettable(Saved):
    """Base of modules with `reset_parameters`. A module with parameters of its own draws them in `_draw`."""

    _initial: Mapping[str, Tensor] = {}

    def reset_parameters(self) -> None:
        """Reset every parameter, in the order of the constructor."""
        # In this order a seed gives the numbers that the constructor drew.
        for child in self.children():
            reset(child)
        with torch.no_grad():
            for name, value in self._initial.items():
                getattr(self, name).copy_(value)
        self._draw()

    def _draw(self) -> None:
        """Draw the parameters that the module itself holds."""

    def _keep(self, name: str, value: object) -> None:
        """Set an attribute; a parameter is reset to the value it has now, and any other tensor is a buffer."""
        # A buffer moves with the module and is saved, and no optimiser changes it.
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
            return
        if isinstance(value, nn.Parameter):
            self._initial = {**self._initial, name: value.detach().clone()}
        setattr(self, name, value)


class Positive(Saved):
    """A positive learnable number softplus(r) = log(1 + eʳ) as a 0-dimensional tensor, such as a weight of an energy.

    Args:
        initial: Initial value, > 0.

    Examples:
        >>> diffusivity = Positive(1.0) * SimpleDiffusivity()  # softplus of a parameter, so it stays positive
    """

    def __init__(self, initial: PositiveNumber = 1.0) -> None:
        super().__init__()
        self.initial = float(initial)
        self.raw = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # The inverse of softplus, log(eˣ − 1), in a form that does not overflow.
        nn.init.constant_(self.raw, self.initial + math.log(-math.expm1(-self.initial)))

    def forward(self) -> Float[Tensor, ""]:
        return softplus(self.raw)

    def extra_repr(self) -> str:
        return f"initial={self.initial:g}"


Norm = Literal["batch", "layer"] | None


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """Return a norm. BatchNorm uses running statistics in evaluation, and in training for fewer than two rows."""
    if norm == "batch":
        return BatchNorm(channels, allow_single_element=True)
    if norm == "layer":
        return nn.LayerNorm(channels)
    return nn.Identity()


class AuxiliaryLoss:
    """The auxiliary loss of a module's last forward pass: ``self.auxiliary = AuxiliaryLoss()``.

    The module sets ``value`` in every forward pass, to ``None`` in evaluation. Each thread has a value of its own.
    Copies and pickles are empty, since tensors of an autograd graph cannot be copied or saved.

    Examples:
        >>> gate = torch.nn.Identity()
        >>> gate.auxiliary = AuxiliaryLoss()
        >>> gate.auxiliary.value = torch.ones(())  # by its forward pass; auxiliary_loss(gate) collects it
    """

    def __init__(self) -> None:
        # An attribute, not a base class: Dynamo writes values back to a plain threading.local only.
        self._of_thread = threading.local()
        self._ever_set = False

    @property
    def value(self) -> Tensor | None:
        """The loss as a 0-dimensional tensor, or ``None``.

        Raises:
            RuntimeError: Only other threads have a value, which would be ignored.
        """
        if hasattr(self._of_thread, "value"):
            return cast("Tensor | None", self._of_thread.value)
        if self._ever_set:
            raise RuntimeError(
                "an auxiliary loss belongs to the thread whose forward pass recorded it; got other threads only. Call "
                "auxiliary_loss(model) where the model is called; under DataParallel, inside the replicated module."
            )
        return None

    @value.setter
    def value(self, value: Tensor | None) -> None:
        self._of_thread.value = value
        self._of_thread.with_gradient = torch.is_grad_enabled()
        if value is not None:
            self._ever_set = True

    def lacks_gradient(self, module: nn.Module) -> bool:
        """Return whether a training pass of ``module`` recorded the value while gradients were disabled.

        A reentrant checkpoint does so: it runs the module without gradients first, and once more in the backward pass.
        """
        if self.value is None or self._of_thread.with_gradient or not module.training:
            return False
        return any(parameter.requires_grad for parameter in module.parameters())

    def __reduce__(self) -> tuple[type[AuxiliaryLoss], tuple[()]]:
        return AuxiliaryLoss, ()


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Return the sum of the auxiliary losses of all modules in this thread's last forward pass; zero without any.

    Weights (λ/L) are included. A module that ran several times counts with its last run.

    Args:
        model: The module, or any module with parts that record auxiliary losses.

    Raises:
        RuntimeError: A module ran in other threads only; or it ran in training and without gradients, as a reentrant
            checkpoint runs it, while gradients are enabled here.

    Examples:
        >>> model = NodeFormer(4, 16, 3)
        >>> loss = model(x, edge_index).logsumexp(1).mean() + auxiliary_loss(model)
    """
    check_kind(model, "model", nn.Module, "a module")
    losses: list[Tensor] = []
    for module in model.modules():
        holder = getattr(module, "auxiliary", None)
        if not isinstance(holder, AuxiliaryLoss) or holder.value is None:
            continue
        if torch.is_grad_enabled() and holder.lacks_gradient(module):
            raise RuntimeError(
                f"the auxiliary loss of model has no gradient: {type(module).__name__} ran without gradients in "
                f"training, as under a reentrant checkpoint. Pass use_reentrant=False to torch.utils.checkpoint, or "
                f"call auxiliary_loss under torch.no_grad() for the value alone."
            )
        losses.append(holder.value)
    if not losses:
        return next(model.parameters(), torch.zeros(())).new_zeros(())
    # Adding to zero also copies a single loss, which its module keeps.
    return reduce(torch.add, losses, torch.zeros_like(losses[0]))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode, and restore the mode of every module afterwards, also after an error."""
    # `model.train()` would set one mode in all parts, some of which may be frozen in evaluation.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
