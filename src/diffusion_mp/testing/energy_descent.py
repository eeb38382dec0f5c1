"""``assert_energy_descent``: check on random instances that a step does not raise its energy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies import Certificate, Energy, Penalty, QuadraticPenalty, certify
from diffusion_mp.errors import check_counts, check_function, check_kind, check_seed
from diffusion_mp.graph import Graph
from diffusion_mp.testing.laws import tolerance
from diffusion_mp.testing.module_laws import random_instance
from diffusion_mp.updates import Backtracking, ExplicitEuler, Form, StateUpdate

EnergyOfStep = Energy | Callable[[Coupling, Tensor], Energy]


def assert_energy_descent(
    layer_or_update: nn.Module,
    energy: EnergyOfStep | None = None,
    *,
    instances: int = 10,
    steps: int = 5,
    num_nodes: int = 12,
    channels: int = 4,
    seed: int = 0,
) -> None:
    """Assert E(Z_{k+1}, k) ≤ E(Z_k, k) at every step from random states in the unit ball, in double.

    An update runs on random symmetric graph couplings whose Laplacian has eigenvalues in [0, 2], with a random source
    if its ``beta`` is not zero; one with a penalty, such as `Backtracking`, on that penalty's coupling. A layer runs as
    ``layer(x, edge_index)`` on random undirected graphs and must map C channels to C.

    Args:
        layer_or_update: the layer or update; a copy runs in double and in evaluation mode.
        energy: an `Energy`, or a function of the coupling and the state before the step that returns one. By default
            the quadratic energy of the coupling (Theorem 1), or that of the layer's penalty (Theorem 7), at the least
            certified λ; for updates other than `ExplicitEuler` the energy of the state alone.
        instances, steps, num_nodes: number of instances, of steps on each, and of nodes.
        channels: C, unless a layer has ``in_channels``.
        seed: of the instances.

    Raises:
        AssertionError: the energy rose, or no theorem covers the step and no energy was given.

    Examples:
        >>> assert_energy_descent(ExplicitEuler(tau=0.5), instances=2, steps=2)
    """
    check_kind(layer_or_update, "layer_or_update", nn.Module, "a layer or a StateUpdate")
    if energy is not None:
        check_function(energy, "energy", "called as energy(coupling, x), or an Energy")
    check_counts(instances=instances, steps=steps, num_nodes=num_nodes, channels=channels)
    check_seed(seed)
    module = copy.deepcopy(layer_or_update).double().eval()
    width = int(getattr(module, "in_channels", channels))
    generator = torch.Generator().manual_seed(seed)
    run = _run_update if isinstance(module, StateUpdate) else _run_layer
    with torch.no_grad():
        for instance in range(instances):
            x = random_instance(num_nodes, width, generator, edges=False).x
            step = run(module, energy, x, generator)
            for k in range(steps):
                x = _descend(step, x, f"{type(module).__name__}, instance {instance}, step {k}")


Step = Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]


def _descend(step: Step, x: Tensor, where: str) -> Tensor:
    """Take one step and compare the energies before and after it."""
    moved, energy = step(x)
    if moved.shape != x.shape:
        raise AssertionError(f"{where}: the state has shape {tuple(moved.shape)}, expected {tuple(x.shape)} as before")
    before, after = float(energy(x)), float(energy(moved))
    rtol, atol = tolerance("energy", torch.float64)
    if not after <= before + atol + rtol * abs(before):
        raise AssertionError(
            f"{where}: the energy rose from {before:.12g} to {after:.12g}; expected a step that does not raise it"
        )
    return moved


def _run_update(update: nn.Module, energy: EnergyOfStep | None, start: Tensor, generator: torch.Generator) -> Step:
    assert isinstance(update, StateUpdate)
    penalty = update.penalty if isinstance(update, Backtracking) else None
    own = penalty if isinstance(penalty, Penalty) and not isinstance(penalty, QuadraticPenalty) else None
    fixed = None if own is not None else _graph_coupling(start, generator)
    with_source = getattr(update, "beta", 0.0) != 0
    source = torch.randn(start.shape, generator=generator, dtype=start.dtype) if with_source else None

    def step(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        coupling = own.coupling(x, normalize=True) if fixed is None else fixed  # type: ignore[union-attr]
        if energy is not None:
            chosen = _chosen(energy, coupling, x)
        else:
            chosen = Energy(own) if own is not None else _quadratic(update, coupling, source)
        # Theorems on other updates than the explicit step are about the energy of the state alone.
        x_prev = x if energy is not None or isinstance(update, ExplicitEuler) else None
        return update(x, coupling, source=source), lambda state: chosen(state, x_prev)

    return step


def _run_layer(layer: nn.Module, energy: EnergyOfStep | None, start: Tensor, generator: torch.Generator) -> Step:
    graph = random_instance(start.shape[0], 1, generator).graph().to_undirected()

    def step(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        moved, coupling = layer(x, graph, return_coupling=True)
        chosen = _theory(layer, coupling, x) if energy is None else _chosen(energy, coupling, x)
        return moved, lambda state: chosen(state, x)

    return step


def _theory(layer: nn.Module, coupling: Coupling, x: Tensor) -> Energy:
    """Return the energy that a theorem gives for a layer's explicit step."""
    update, diffusivity = getattr(layer, "update", None), getattr(layer, "diffusivity", None)
    if not isinstance(update, ExplicitEuler) or update.beta or diffusivity is None:
        raise AssertionError(
            f"{type(layer).__name__} has no diffusivity with an explicit step free of a source, so its energy is not "
            f"known; pass assert_energy_descent(layer, energy)."
        )
    if diffusivity.penalty is not None and not diffusivity.needs_graph:
        if diffusivity.heads > 1:
            raise AssertionError(
                f"{type(layer).__name__} has several heads, each with an energy of its own; pass the one to watch."
            )
        certificate = _covered(certify(diffusivity, x, float(update.step_size), form=update.form, leak=update.leak))
        # A leak of the row-normalised step acts in the metric d̄ of that step (Theorem 7).
        metric = diffusivity.penalty.coupling(x).degree() if diffusivity.row_stochastic else None
        return Energy(diffusivity.penalty, certificate.lam, leak=update.leak, metric=metric)
    return _quadratic(update, coupling)


def _quadratic(update: StateUpdate, coupling: Coupling, source: Tensor | None = None) -> Energy:
    """Return the quadratic energy of a coupling, at the certified λ for an explicit step."""
    form: Form = getattr(update, "form", "conservative")
    beta, leak, lam = getattr(update, "beta", 0.0), getattr(update, "leak", 0.0), 1.0
    if isinstance(update, ExplicitEuler):
        lam = _covered(certify(coupling, None, float(update.step_size), form=form, leak=leak)).lam
    return Energy("quadratic", lam, coupling=coupling, source=source, beta=beta, leak=leak, laplacian=form)


def _covered(certificate: Certificate) -> Certificate:
    if not certificate:
        raise AssertionError(f"no energy is known to descend: {certificate}")
    return certificate


def _chosen(energy: EnergyOfStep, coupling: Coupling, x: Tensor) -> Energy:
    return energy if isinstance(energy, Energy) else energy(coupling, x)


def _graph_coupling(x: Tensor, generator: torch.Generator) -> Coupling:
    """Return a symmetric coupling with row sums below one, so that both Laplacians have eigenvalues in [0, 2)."""
    num_nodes = x.shape[0]
    graph = random_instance(num_nodes, 1, generator).graph().to_undirected()
    graph = Graph(num_nodes, graph.edges, graph.weights(x) / (1.01 * graph.degree(dtype=x.dtype).max()))
    return SparseCoupling(graph, symmetric=True, nonnegative=True)
