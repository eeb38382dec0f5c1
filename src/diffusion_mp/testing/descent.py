"""``assert_energy_descent``: whether a layer, an update or any function of a state and edges lowers an energy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from diffusion_mp import checks
from diffusion_mp.couplings import Coupling, SparseCoupling
from diffusion_mp.energies import (
    CouplingTerm,
    Energy,
    EnergyTerm,
    LinearTerm,
    PairTerm,
    Penalty,
    ProximalTerm,
    ScaledTerm,
    SourceTerm,
    certify,
)
from diffusion_mp.graph import Graph
from diffusion_mp.layers.graph_layer import GraphLayer
from diffusion_mp.testing.laws import expect, tolerance
from diffusion_mp.testing.module_laws import parameter_of, random_instance
from diffusion_mp.updates import CertifiedStep, ExplicitEuler, Form, StateUpdate

#: Nodes of a graph up to which its roughest state is computed, by a dense decomposition.
MOST_NODES = 512
#: Channels of the states, if neither the caller nor the layer says how many.
CHANNELS = 4
#: Columns of edge_index in a message.
_COLUMNS = 3
#: A state and edges to the next state: a module, or any function.
Layer = Callable[..., Any]
#: The energy of a state: a number, or its parts by name.
Parts = dict[str, float | Tensor]
#: Graphs to test on, or a function that draws one.
Graphs = Sequence[Any] | Callable[[torch.Generator], Any]


@dataclass(frozen=True)
class Step:
    """A step of a layer: the next state, and the energy of any state as it is compared for this step."""

    after: Tensor
    energy: Callable[[Tensor], Tensor]
    #: The parts of the energy, for the message.
    parts: Callable[[Tensor], Parts]
    #: Whether the energy is that of the user, and not one that a theorem gives.
    claimed: bool


@checks.checked
def assert_energy_descent(
    layer: Layer,
    energy: Energy | Penalty | Callable[..., Any] | None = None,
    *,
    graphs: Graphs | None = None,
    instances: checks.Count = 10,
    steps: checks.Count = 5,
    num_nodes: checks.Count = 12,
    in_channels: checks.Count | None = None,
    seed: checks.Seed = 0,
) -> None:
    """Assert that no step of a layer raises an energy, from random and from adversarial states, in double precision.

    The states lie in the unit ball: random ones, two far groups, a single far node, nearly constant ones, those that
    differ most between neighbours, and those to which the gradient of the rise leads. The first state in which the
    energy rises is reported with its graph, both energies, their parts, and the likely cause.

    Args:
        layer: a module (of this library, PyG or your own) or any function, called as ``layer(x, edge_index)`` and with
            ``edge_weight=`` if it has that argument; it maps C channels to C. A copy of a module runs, in double
            precision and evaluation mode. A `StateUpdate` runs on symmetric couplings whose Laplacian has eigenvalues
            in [0, 2], with a source if its ``beta`` is not zero.
        energy: a function ``energy(x, edge_index)`` to a number, or to a dictionary of parts that are added; an
            `Energy`, whose ``x_prev`` is the state before the step; or a `Penalty` of all pairs. For an update also a
            function of coupling and state to an `Energy`. By default the energy that a theorem gives: that of
            Theorem 1 or 7 at the least certified λ, of a certified step or block, or of a certified model.
        graphs: PyG ``Data`` (whose ``x`` is then the first state), a `Graph` or edge indices [2, E]; or a function of
            a ``torch.Generator`` that draws one of these. By default random undirected graphs.
        instances: number of graphs.
        steps: number of steps from every state.
        num_nodes: N of random graphs.
        in_channels: C, the number of channels of the states. By default the attribute ``in_channels`` of the layer, or
            4.
        seed: of the graphs and states.

    Examples:
        >>> assert_energy_descent(ExplicitEuler(tau=0.5), instances=2, steps=2)
    """
    checks.check_function(layer, "layer", "called as layer(x, edge_index), or a module")
    if isinstance(layer, type):
        raise TypeError(
            f"layer must be an instance, {layer.__name__}(...); got a class"
        )
    if energy is not None and not isinstance(energy, Penalty):
        checks.check_function(energy, "energy", "called as energy(x, edge_index)")
    if not callable(graphs):
        what = "a list of graphs, a function that draws one, or None"
        checks.check_kind(graphs, "graphs", (list, tuple, NoneType), what)
    subject = layer
    if isinstance(layer, nn.Module):
        # Dropout and rounding would raise any energy now and then.
        subject = copy.deepcopy(layer).double().eval()
    width = in_channels
    if width is None:
        width = getattr(subject, "in_channels", None)
    # A lazy layer has -1, and a layer of categories a list.
    if not isinstance(width, int) or width < 1:
        width = CHANNELS
    generator = torch.Generator().manual_seed(seed)
    for instance, (graph, x) in enumerate(
        _drawn(graphs, instances, num_nodes, width, generator)
    ):
        if instance == 0:
            _call_first(subject, energy, graph, x)
        # A certified model measures itself, block by block.
        if energy is None and hasattr(subject, "energies"):
            for kind, start in _states(graph, x, width, generator):
                values = subject.energies(start, graph)
                _expect_falling(
                    subject, values, f"{kind}, instance {instance}, seed {seed}"
                )
            continue
        source = _source(subject, graph, width, generator)
        take = partial(_step, subject, energy, graph, source)
        for kind, start in _states(graph, x, width, generator):
            state = start
            for k in range(steps):
                where = f"step {k} from {kind}, instance {instance}, seed {seed}"
                state = _expect_descent(subject, take, state, graph, where)
        drawn = torch.randn(len(x), width, generator=generator, dtype=x.dtype)
        for start in _climbed(take, _in_ball(drawn)):
            where = f"a step from a state along the gradient of the rise, instance {instance}, seed {seed}"
            _expect_descent(subject, take, start, graph, where)


def _drawn(
    graphs: Graphs | None,
    instances: int,
    num_nodes: int,
    channels: int,
    generator: torch.Generator,
) -> Iterator[tuple[Graph, Tensor]]:
    """Yield undirected graphs of which every node has a neighbour, or those of the user, with a state each."""
    if graphs is None:
        for _ in range(instances):
            drawn = random_instance(num_nodes, channels, generator)
            graph = Graph(num_nodes, drawn.edge_index, drawn.edge_weight)
            yield graph.to_undirected(), drawn.x
        return
    listed = (
        [graphs(generator) for _ in range(instances)] if callable(graphs) else graphs
    )
    for each in listed:
        graph = each
        x = getattr(each, "x", None)
        if isinstance(each, Data):
            graph = Graph.from_data(each)
        elif not isinstance(each, Graph):
            edges = torch.as_tensor(each)
            # Edges alone do not tell of isolated nodes behind the last.
            graph = Graph(int(edges.max()) + 1, edges)
        if x is None or x.dim() != 2 or x.size(1) != channels:
            x = random_instance(graph.num_nodes, channels, generator).x
        yield graph, x.double()


def _states(
    graph: Graph, x: Tensor, channels: int, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield states at which steps that are too long, or not down an energy, fail first."""
    nodes = graph.num_nodes
    direction = torch.randn(channels, generator=generator, dtype=torch.float64)
    direction = 0.99 * direction / direction.norm()
    yield "a random state", x
    side = torch.ones(nodes, 1, dtype=torch.float64)
    side[nodes // 2 :] = -1
    yield "two far groups", side * direction
    alone = torch.ones(nodes, 1, dtype=torch.float64)
    alone[:1] = -1
    yield "a single far node", alone * direction
    noise = torch.randn(nodes, channels, generator=generator, dtype=torch.float64)
    # The energy is nearly zero, so that a constant which is scaled or added shows.
    yield "a nearly constant state", direction / 2 + 1e-3 * noise
    # The eigenvectors of a large graph would take longer than all steps.
    if graph.edge_index is not None and nodes <= MOST_NODES:
        adjacency = SparseCoupling(graph.to_undirected()).to_dense()[0].double()
        _, modes = torch.linalg.eigh(adjacency.sum(1).diag() - adjacency)
        # Of the largest eigenvalue, which limits explicit steps.
        rough = modes[:, -1:] / modes[:, -1].abs().max()
        yield "the state that differs most between neighbours", rough * direction


def _in_ball(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp(min=1)


def _climbed(
    take: Callable[[Tensor], Step], x: Tensor, steps: int = 6
) -> Iterator[Tensor]:
    """Yield states along the gradient of the relative rise of a user's energy."""
    for _ in range(steps):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            step = take(leaf)
            # The energy of a theorem has been proved, and differs from step to step.
            if not step.claimed:
                return
            before = step.energy(leaf)
            rise = (step.energy(step.after) - before) / before.abs().clamp(min=1e-12)
        if not rise.requires_grad:
            return
        (slope,) = torch.autograd.grad(rise, leaf, materialize_grads=True)
        if not slope.norm() > 0:
            return
        # All nodes move equally far: by the gradient itself only the steepest would.
        x = _in_ball(x + 0.3 * slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12))
        yield x


def _source(
    subject: Layer, graph: Graph, channels: int, generator: torch.Generator
) -> Tensor | None:
    if isinstance(subject, StateUpdate) and subject.beta != 0:
        return torch.randn(
            graph.num_nodes, channels, generator=generator, dtype=torch.float64
        )
    return None


def _on_edges(function: Callable[..., Any], x: Tensor, graph: Graph) -> Any:
    """Call a layer or an energy of the user, with the weights of the edges if it has an argument for them."""
    if graph.edge_weight is not None and parameter_of(function, "edge_weight"):
        return function(x, graph.edges, edge_weight=graph.edge_weight)
    return function(x, graph.edges)


def _moved(
    subject: Layer, energy: Any, graph: Graph, source: Tensor | None, x: Tensor
) -> tuple[Any, Coupling | None]:
    """Return the next state, and the coupling if an energy is made of it."""
    if isinstance(subject, StateUpdate):
        coupling = _graph_coupling(graph)
        return subject(x, coupling, source=source), coupling
    if isinstance(subject, GraphLayer) and energy is None:
        after, coupling = subject(x, graph, return_coupling=True)
        return after, coupling
    after = _on_edges(subject, x, graph)
    # Layers of other libraries return attention weights beside the state.
    return after[0] if isinstance(after, tuple) else after, None


def _call_first(subject: Layer, energy: Any, graph: Graph, x: Tensor) -> None:
    """Call the layer once; an error gets a note on the number of channels."""
    # An update takes any number of them.
    if isinstance(subject, StateUpdate):
        return
    try:
        with torch.no_grad():
            if energy is None and hasattr(subject, "energies"):
                subject.energies(x, graph)
            else:
                _moved(subject, energy, graph, None, x)
    except Exception as error:
        error.add_note(
            f"The layer was called with C = {x.size(1)} channels; pass in_channels= if it takes another number."
        )
        raise


def _step(
    subject: Layer,
    energy: Energy | Penalty | Callable[..., Any] | None,
    graph: Graph,
    source: Tensor | None,
    x: Tensor,
) -> Step:
    """Take a step, and say what is measured before and after it."""
    after, coupling = _moved(subject, energy, graph, source, x)
    name = _name(subject)
    if not isinstance(after, Tensor) or after.shape != x.shape:
        raise AssertionError(
            f"{name} must map a state to one of the same shape, {list(x.shape)}, for two energies to be compared; got "
            f"{checks.describe(after)}."
        )
    if energy is None:
        if coupling is None:
            raise AssertionError(
                f"{name} is not of this library, which knows no energy of it; pass one, "
                f"assert_energy_descent(layer, energy), with a function energy(x, edge_index)."
            )
        known = _theory(cast("nn.Module", subject), coupling, x, source)
        return _measured(after, known, x, claimed=False)
    if isinstance(energy, Penalty):
        energy = Energy([PairTerm(energy)])
    elif coupling is not None and not isinstance(energy, Energy):
        energy = cast("Energy", energy(coupling, x))
    if isinstance(energy, Energy):
        return _measured(after, energy, x, claimed=True)
    parts = partial(_called, energy, graph)

    def total(z: Tensor) -> Tensor:
        return torch.stack([torch.as_tensor(part) for part in parts(z).values()]).sum()

    return Step(after, total, parts, claimed=True)


def _measured(after: Tensor, energy: Energy, before: Tensor, *, claimed: bool) -> Step:
    """Return a step that is measured by an `Energy`, whose terms are the parts."""

    def parts(x: Tensor) -> Parts:
        values: Parts = {}
        # A subclass may compute something else than the sum of its terms.
        if type(energy).__call__ is not Energy.__call__:
            return values
        z, graph = energy.checked(x)
        after = energy.terms_after(x, before)
        for number, (term, measured) in enumerate(
            zip(energy.terms, after, strict=True)
        ):
            inner = term.term if isinstance(term, ScaledTerm) else term
            values[f"{type(inner).__name__} {number}"] = measured.value(z, graph)
        if not energy.constraint.holds(z):
            values[f"outside of {energy.constraint}"] = torch.inf
        return values

    return Step(after, lambda x: energy(x, before), parts, claimed)


def _called(energy: Callable[..., Any], graph: Graph, x: Tensor) -> Parts:
    """Return the parts of the energy of a user's function."""
    value = _on_edges(energy, x, graph)
    parts = dict(value) if isinstance(value, Mapping) else {"energy": value}
    for name, part in parts.items():
        if isinstance(part, bool) or torch.as_tensor(part).numel() != 1:
            raise TypeError(
                f"energy must give a number, or numbers by name; got {checks.describe(part)} as {name!r}."
            )
    return {
        name: torch.as_tensor(part, dtype=x.dtype).reshape(())
        for name, part in parts.items()
    }


def _expect_falling(subject: Layer, values: Tensor, where: str) -> None:
    """Raise unless the energies of a run, [..., states], never rise."""
    rtol, atol = tolerance("energy", torch.float64)
    rise = values.diff(dim=-1) - atol - rtol * values[..., :-1].abs()
    expect(
        bool((rise <= 0).all()),
        f"{_name(subject)}, {where}: its energies rise: {values.tolist()}",
    )


def _expect_descent(
    subject: Layer, take: Callable[[Tensor], Step], x: Tensor, graph: Graph, where: str
) -> Tensor:
    """Return the state after a step; raise, with everything that helps, if the energy rose."""
    with torch.no_grad():
        step = take(x)
        before = float(step.energy(x))
        after = float(step.energy(step.after))
        rtol, atol = tolerance("energy", torch.float64)
        if after <= before + atol + rtol * abs(before):
            return step.after
        lines = [
            f"{_name(subject)}, {where}: the energy rose from {before:.12g} to {after:.12g}."
        ]
        later = step.parts(step.after)
        if len(later) > 1:
            for name, part in step.parts(x).items():
                lines.append(
                    f"  {name}: {float(part):.6g} -> {float(later.get(name, torch.nan)):.6g}"
                )
        lines.append(
            f"  graph of {graph.num_nodes} nodes and {graph.num_edges} edges, edge_index: {_listed(graph.edges)}"
        )
        causes = _causes(subject, step, x, before, take)
        lines += [f"  likely cause: {cause}" for cause in causes]
    raise AssertionError("\n".join(lines))


def _causes(
    subject: Layer, step: Step, x: Tensor, before: float, take: Callable[[Tensor], Step]
) -> list[str]:
    """Return the likely reasons for a rise: what in the layer moves the state otherwise than down an energy."""
    causes = []
    share = 0.5
    # Where a short step raises the energy too, its direction is wrong and not its length.
    while share > 1e-3 and float(step.energy(x + share * (step.after - x))) > before:
        share /= 2
    if share > 1e-3:
        causes.append(
            f"The step is too long: {share:.2g} of it does not raise the energy here. Divide the step size (tau, or "
            f"the factor of the move) by {1 / share:.3g} or more."
        )
    if isinstance(subject, GraphLayer):
        if getattr(subject, "value", None) is not None:
            causes.append(
                "W_V transforms the state that is propagated; transform=False moves the state itself."
            )
    elif isinstance(subject, nn.Module):
        matrices = [name for name, each in subject.named_parameters() if each.dim() > 1]
        if matrices:
            causes.append(
                f"The state is multiplied by {', '.join(matrices)}. A step down an energy of distances moves the state "
                f"itself: leave the transform out, or compare an energy of the transformed state."
            )
    constant = torch.ones_like(x) / 2
    if not torch.allclose(take(constant).after, constant):
        causes.append(
            "A constant state moves, though no step lowers an energy of differences there: weights of neighbours do "
            "not add up to one, or something is added. Subtract the weighted state itself, D − S in place of S."
        )
    if not causes and _opposite_descends(x, take):
        causes.append("The move has the wrong sign: its opposite lowers the energy.")
    if not causes:
        causes.append(
            "No part of this move lowers the energy, however short. Rows divided by their sums make weights that are "
            "not symmetric, to which no energy of pairs belongs."
        )
    return causes


def _opposite_descends(x: Tensor, take: Callable[[Tensor], Step]) -> bool:
    """Return whether a short step against the move lowers the energy, from x and from random states."""
    # At a single state the opposite of any move that raises the energy lowers it.
    generator = torch.Generator().manual_seed(0)
    states = [x]
    for _ in range(8):
        drawn = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        states.append(_in_ball(drawn))
    for state in states:
        step = take(state)
        opposite = state - 1e-3 * (step.after - state)
        if not float(step.energy(opposite)) < float(step.energy(state)):
            return False
    return True


def _listed(edge_index: Tensor) -> str:
    """Return the first columns of edge_index in short."""
    rows = []
    for row in edge_index:
        shown = [str(node) for node in row[:_COLUMNS].tolist()]
        if len(row) > _COLUMNS:
            shown.append("…")
        rows.append(f"[{', '.join(shown)}]")
    return f"[{', '.join(rows)}]"


def _name(subject: Layer) -> str:
    return getattr(subject, "__name__", type(subject).__name__)


def _graph_coupling(graph: Graph) -> Coupling:
    """Return a symmetric coupling with row sums below one, so that both Laplacians have eigenvalues in [0, 2)."""
    # Divided by the largest degree, so that no step size of a test has to know the graph.
    largest = graph.degree(dtype=torch.float64).max()
    weight = graph.weights(graph.degree(dtype=torch.float64)) / (1.01 * largest)
    scaled = Graph(graph.num_nodes, graph.edges, weight)
    return SparseCoupling(scaled, symmetric=True, nonnegative=True)


def _theory(
    module: nn.Module, coupling: Coupling, x: Tensor, source: Tensor | None
) -> Energy:
    """Return the energy that a theorem gives for a step: E(Z, k) of an explicit one, else that of the state alone."""
    update: Any = getattr(module, "update", module)
    if isinstance(update, CertifiedStep):
        pulls: list[EnergyTerm] = [CouplingTerm(coupling)]
        if source is not None:
            pulls.append(update.source_weight * SourceTerm(source))
        return Energy(pulls, update.constraint)
    explicit = isinstance(update, ExplicitEuler)
    diffusivity: Any = getattr(module, "diffusivity", None)
    name = type(module).__name__
    if update is not module and (not explicit or update.beta or diffusivity is None):
        raise AssertionError(
            f"{name} has no diffusivity with an explicit step free of a source, so its energy is not known; pass "
            f"assert_energy_descent(layer, energy)."
        )
    form: Form = getattr(update, "form", "conservative")
    leak = getattr(update, "leak", 0.0)
    nothing = torch.zeros_like(x)
    subject: tuple[Any, Tensor | None] = (coupling, None)
    terms: list[EnergyTerm]
    if getattr(diffusivity, "penalty", None) and not diffusivity.needs_graph:
        expect(
            diffusivity.heads == 1,
            f"{name} has several heads, each with its own energy; pass the one to watch.",
        )
        # A leak of the row-normalised step acts in the metric d̄ of that step (Theorem 7).
        metric = None
        if diffusivity.row_stochastic:
            metric = diffusivity.penalty.coupling(x).degree()
        subject = (diffusivity, x)
        terms = [PairTerm(diffusivity.penalty), leak * SourceTerm(nothing, metric)]
    else:
        terms = [CouplingTerm(coupling), leak * SourceTerm(nothing)]
        if form == "residual":  # tr Zᵀ(I − S)Z = tr Zᵀ(D − S)Z + Σ_i (1 − d_i)‖z_i‖²
            terms.append(SourceTerm(nothing, 1 - coupling.degree()))
        if source is not None:
            # The source of an explicit step pulls by its product with the state, without a square.
            terms.append(update.beta * LinearTerm(source))
    if not explicit:
        return Energy(terms)
    certificate = certify(*subject, float(update.step_size), form=form, leak=leak)
    expect(bool(certificate), f"no energy is known to descend: {certificate}")
    # Every pair counts twice in P of E(Z, k) = ‖Z − Z_k‖² + λ P(Z).
    return Energy([ProximalTerm(), *(2 * certificate.lam * term for term in terms)])
