"""What a theorem says of one layer, whatever stands before and behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffusion_mp.energies import Certificate, certify
from diffusion_mp.energies.certification import broken_parameter
from diffusion_mp.graph import Graph
from diffusion_mp.updates import ExplicitEuler

if TYPE_CHECKING:
    from diffusion_mp.layers.diffusion_conv import DiffusionConv

THEOREMS = "Theorems 1 and 7"


def why_uncertified(layer: DiffusionConv) -> str | None:
    """What keeps every theorem from a layer at any state, as a sentence; ``None`` where the state decides."""
    from diffusion_mp.layers.diffusion_conv import DiffusionConv

    name, diffusivity = type(layer).__name__, layer.diffusivity
    if not isinstance(layer.update, ExplicitEuler):
        update = type(layer.update).__name__
        return f"{name} moves the state by {update}, and they are about ExplicitEuler (CertifiedConv has Theorem T1)."
    if layer.value is not None:
        return f"{name} transforms what it propagates; transform=False moves the state itself."
    if layer.bias is not None:
        return f"{name} adds a bias to the new state; bias=False leaves it out."
    if type(layer).output is not DiffusionConv.output:
        return f"{name} adds terms of its own to the new state."
    if diffusivity.heads > 1 and not layer.concat:
        return f"{name} takes the mean of {diffusivity.heads} heads, each of which has an energy of its own."
    if diffusivity.penalty is None and not diffusivity.symmetric and diffusivity.depends_on != "nothing":
        return f"{type(diffusivity).__name__}: {diffusivity.why_no_penalty}"
    return None


@torch.no_grad()
def layer_certificate(
    layer: DiffusionConv, x: Tensor | None, graph: Graph | None, features: Tensor | None = None
) -> Certificate:
    """Theorem 7 for a step with the coupling of a penalty, Theorem 1 for one with any other that is symmetric."""
    update, diffusivity = layer.update, layer.diffusivity
    tau = float(update.step_size) if isinstance(update, ExplicitEuler) else float("nan")
    why = layer.why_uncertified or broken_parameter(layer)
    if why is None and (x is None or graph is None):
        why = "that depends on the state and the graph: pass them, certify(model, data)."
    if why is not None or x is None or graph is None or not isinstance(update, ExplicitEuler):
        return Certificate.refused(THEOREMS, tau, why or "")
    known = diffusivity.penalty is not None and not diffusivity.needs_graph and layer.reads != "features"
    if known and layer.steps == 1:
        return certify(diffusivity, x, tau, form=update.form, leak=update.leak, ptr=graph.segments)
    coupling = diffusivity(x if features is None else features, graph)
    return certify(coupling, None, tau, form=update.form, leak=update.leak)
