"""``assert_energy_descent``: whether a layer, an update or any function of a state and edges lowers an energy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

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
#: The parts of the energy of a state by name.
Parts = dict[str, Tensor]
#: Graphs to test on, or a function that draws one.
Graphs = Sequence[Any] | Callable[[torch.Generator], Any]


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
    width = in_channels or getattr(subject, "in_channels", None)
    # A lazy layer has -1, and a layer of categories a list.
    if not isinstance(width, int) or width < 1:
        width = CHANNELS
    generator = torch.Generator().manual_seed(seed)
    drawn = _drawn(graphs, instances, num_nodes, width, generator)
    for instance, (graph, x) in enumerate(drawn):
        source = None
        if isinstance(subject, StateUpdate) and subject.beta != 0:
            source = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        trial = Trial(subject, energy, graph, source)
        if instance == 0:
            trial.call_first(x)
        ending = f"instance {instance}, seed {seed}"
        for kind, start in _states(graph, x, generator):
            if trial.measures_itself:
                trial.expect_falling(start, f"{kind}, {ending}")
                continue
            state = start
            for k in range(steps):
                state = trial.expect_descent(state, f"step {k} from {kind}, {ending}")
        # The energy of a theorem has been proved, and differs from step to step.
        if energy is None:
            continue
        start = _in_ball(torch.randn(x.shape, generator=generator, dtype=x.dtype))
        for state in trial.climbed(start):
            where = f"a step from a state along the gradient of the rise, {ending}"
            trial.expect_descent(state, where)


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
    if callable(graphs):
        graphs = [graphs(generator) for _ in range(instances)]
    for each in graphs:
        graph = each
        if isinstance(each, Data):
            graph = Graph.from_data(each)
        elif not isinstance(each, Graph):
            edges = torch.as_tensor(each)
            # Edges alone do not tell of isolated nodes behind the last.
            graph = Graph(int(edges.max()) + 1, edges)
        x = getattr(each, "x", None)
        if x is None or x.dim() != 2 or x.size(1) != channels:
            x = random_instance(graph.num_nodes, channels, generator).x
        yield graph, x.double()


def _states(
    graph: Graph, x: Tensor, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Yield states at which steps that are too long, or not down an energy, fail first."""
    nodes = len(x)
    direction = torch.randn(x.size(1), generator=generator, dtype=x.dtype)
    direction = 0.99 * direction / direction.norm()
    node = torch.arange(nodes).unsqueeze(1)
    yield "a random state", x
    sides = torch.where(node < nodes // 2, direction, -direction)
    yield "two far groups", sides
    yield "a single far node", torch.where(node == 0, -direction, direction)
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    # The energy is nearly zero, so that a constant which is scaled or added shows.
    yield "a nearly constant state", direction / 2 + 1e-3 * noise
    # The eigenvectors of a large graph would take longer than all steps.
    if graph.edge_index is not None and nodes <= MOST_NODES:
        adjacency = SparseCoupling(graph.to_undirected()).to_dense()[0].double()
        _, modes = torch.linalg.eigh(adjacency.sum(1).diag() - adjacency)
        # Of the largest eigenvalue, which limits explicit steps.
        roughest = modes[:, -1:]
        rough = roughest / roughest.abs().max()
        yield "the state that differs most between neighbours", rough * direction


@dataclass(frozen=True)
class Step:
    """A step of a layer: the next state, and the parts of the energy of any state as it is compared for this step."""

    after: Tensor
    parts: Callable[[Tensor], Parts]

    def energy(self, x: Tensor) -> Tensor:
        return sum(self.parts(x).values(), torch.zeros((), dtype=torch.float64))


@dataclass(frozen=True)
class Trial:
    """A layer on a graph, with the energy that it has to lower; ``None`` is the energy that a theorem gives."""

    layer: Any
    claim: Energy | Penalty | Callable[..., Any] | None
    graph: Graph
    source: Tensor | None

    @property
    def measures_itself(self) -> bool:
        """Whether the layer is a certified model, which knows its energies, block by block."""
        return self.claim is None and hasattr(self.layer, "energies")

    @property
    def name(self) -> str:
        return getattr(self.layer, "__name__", type(self.layer).__name__)

    def call_first(self, x: Tensor) -> None:
        """Call the layer once; an error gets a note on the number of channels."""
        try:
            with torch.no_grad():
                if self.measures_itself:
                    self.layer.energies(x, self.graph)
                else:
                    self.moved(x)
        except Exception as error:
            error.add_note(
                f"The layer was called with C = {x.size(1)} channels; pass in_channels= if it takes another number."
            )
            raise

    def on_edges(self, function: Callable[..., Any], x: Tensor) -> Any:
        """Call a layer or an energy of the user, with the weights of the edges if it has an argument for them."""
        weight = self.graph.edge_weight
        if weight is not None and parameter_of(function, "edge_weight"):
            return function(x, self.graph.edges, edge_weight=weight)
        return function(x, self.graph.edges)

    def moved(self, x: Tensor) -> tuple[Any, Coupling | None]:
        """Return the next state, and the coupling if an energy is made of it."""
        if isinstance(self.layer, StateUpdate):
            coupling = _graph_coupling(self.graph)
            return self.layer(x, coupling, source=self.source), coupling
        if isinstance(self.layer, GraphLayer) and self.claim is None:
            after, coupling = self.layer(x, self.graph, return_coupling=True)
            return after, coupling
        after = self.on_edges(self.layer, x)
        # Layers of other libraries return attention weights beside the state.
        return after[0] if isinstance(after, tuple) else after, None

    def step(self, x: Tensor) -> Step:
        """Take a step, and say what is measured before and after it."""
        after, coupling = self.moved(x)
        if not isinstance(after, Tensor) or after.shape != x.shape:
            raise AssertionError(
                f"{self.name} must map a state to one of the same shape, {list(x.shape)}, for two energies to be "
                f"compared; got {checks.describe(after)}."
            )
        energy = self.claim
        if isinstance(energy, Penalty):
            energy = Energy([PairTerm(energy)])
        elif energy is None:
            energy = self.theory(coupling, x)
        elif coupling is not None and not isinstance(energy, Energy):
            energy = energy(coupling, x)
        if isinstance(energy, Energy):
            return Step(after, partial(_terms, energy, x))
        return Step(after, partial(self.called, energy))

    def called(self, energy: Callable[..., Any], x: Tensor) -> Parts:
        """Return the parts of the energy of a user's function."""
        value = self.on_edges(energy, x)
        parts = value if isinstance(value, Mapping) else {"energy": value}
        numbers: Parts = {}
        for name, part in parts.items():
            number = torch.as_tensor(part, dtype=x.dtype)
            if isinstance(part, bool) or number.numel() != 1:
                raise TypeError(
                    f"energy must give a number, or numbers by name; got {checks.describe(part)} as {name!r}."
                )
            numbers[name] = number.reshape(())
        return numbers

    def theory(self, coupling: Coupling | None, x: Tensor) -> Energy:
        """Return the energy that a theorem gives: E(Z, k) of an explicit step, else that of the state alone."""
        if coupling is None:
            raise AssertionError(
                f"{self.name} is not of this library, which knows no energy of it; pass one, "
                f"assert_energy_descent(layer, energy), with a function energy(x, edge_index)."
            )
        update = getattr(self.layer, "update", self.layer)
        terms: list[EnergyTerm] = [CouplingTerm(coupling)]
        if isinstance(update, CertifiedStep):
            if self.source is not None:
                terms.append(update.source_weight * SourceTerm(self.source))
            return Energy(terms, update.constraint)
        explicit = isinstance(update, ExplicitEuler)
        diffusivity: Any = getattr(self.layer, "diffusivity", None)
        known = explicit and not update.beta and diffusivity is not None
        if update is not self.layer and not known:
            raise AssertionError(
                f"{self.name} has no diffusivity with an explicit step free of a source, so its energy is not known; "
                f"pass assert_energy_descent(layer, energy)."
            )
        form: Form = getattr(update, "form", "conservative")
        leak = getattr(update, "leak", 0.0)
        nothing = torch.zeros_like(x)
        subject: tuple[Any, Tensor | None] = (coupling, None)
        if getattr(diffusivity, "penalty", None) and not diffusivity.needs_graph:
            expect(
                diffusivity.heads == 1,
                f"{self.name} has several heads, each with its own energy; pass the one to watch.",
            )
            # A leak of the row-normalised step acts in the metric d̄ of that step (Theorem 7).
            metric = None
            if diffusivity.row_stochastic:
                metric = diffusivity.penalty.coupling(x).degree()
            subject = (diffusivity, x)
            terms = [PairTerm(diffusivity.penalty), leak * SourceTerm(nothing, metric)]
        else:
            terms.append(leak * SourceTerm(nothing))
            if (
                form == "residual"
            ):  # tr Zᵀ(I − S)Z = tr Zᵀ(D − S)Z + Σ_i (1 − d_i)‖z_i‖²
                terms.append(SourceTerm(nothing, 1 - coupling.degree()))
            if self.source is not None:
                # The source of an explicit step pulls by its product with the state, without a square.
                terms.append(update.beta * LinearTerm(self.source))
        if not explicit:
            return Energy(terms)
        tau = float(update.step_size)
        certificate = certify(*subject, tau, form=form, leak=leak)
        expect(bool(certificate), f"no energy is known to descend: {certificate}")
        # Every pair counts twice in P of E(Z, k) = ‖Z − Z_k‖² + λ P(Z).
        return Energy([ProximalTerm(), *(2 * certificate.lam * term for term in terms)])

    def climbed(self, x: Tensor) -> Iterator[Tensor]:
        """Yield states along the gradient of the relative rise of a user's energy."""
        for _ in range(6):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                step = self.step(leaf)
                before = step.energy(leaf)
                rise = step.energy(step.after) - before
                rise = rise / before.abs().clamp(min=1e-12)
            if not rise.requires_grad:
                return
            (slope,) = torch.autograd.grad(rise, leaf, materialize_grads=True)
            if not slope.norm() > 0:
                return
            # All nodes move equally far: by the gradient itself only the steepest would.
            away = slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12)
            x = _in_ball(x + 0.3 * away)
            yield x

    def expect_falling(self, x: Tensor, where: str) -> None:
        """Raise unless the energies of a run of a certified model, [..., states], never rise."""
        values = self.layer.energies(x, self.graph)
        rtol, atol = tolerance("energy", torch.float64)
        rise = values.diff(dim=-1) - atol - rtol * values[..., :-1].abs()
        expect(
            bool((rise <= 0).all()),
            f"{self.name}, {where}: its energies rise: {values.tolist()}",
        )

    def expect_descent(self, x: Tensor, where: str) -> Tensor:
        """Return the state after a step; raise, with everything that helps, if the energy rose."""
        with torch.no_grad():
            step = self.step(x)
            before = float(step.energy(x))
            after = float(step.energy(step.after))
            rtol, atol = tolerance("energy", torch.float64)
            if after <= before + atol + rtol * abs(before):
                return step.after
            lines = [
                f"{self.name}, {where}: the energy rose from {before:.12g} to {after:.12g}."
            ]
            later = step.parts(step.after)
            if len(later) > 1:
                for name, part in step.parts(x).items():
                    lines.append(
                        f"  {name}: {float(part):.6g} -> {float(later.get(name, torch.nan)):.6g}"
                    )
            graph = self.graph
            lines.append(
                f"  graph of {graph.num_nodes} nodes and {graph.num_edges} edges, edge_index: {_listed(graph.edges)}"
            )
            lines += [f"  likely cause: {cause}" for cause in self.causes(step, x)]
        raise AssertionError("\n".join(lines))

    def causes(self, step: Step, x: Tensor) -> list[str]:
        """Return the likely reasons for a rise: what in the layer moves the state otherwise than down an energy."""
        causes = []
        before = float(step.energy(x))
        shares = [0.5**power for power in range(1, 10)]
        moved = {share: torch.lerp(x, step.after, share) for share in shares}
        short = [share for share in shares if not step.energy(moved[share]) > before]
        # Where a short step raises the energy too, its direction is wrong and not its length.
        if short:
            share = short[0]
            causes.append(
                f"The step is too long: {share:.2g} of it does not raise the energy here. Divide the step size (tau, "
                f"or the factor of the move) by {1 / share:.3g} or more."
            )
        if isinstance(self.layer, GraphLayer):
            if getattr(self.layer, "value", None) is not None:
                causes.append(
                    "W_V transforms the state that is propagated; transform=False moves the state itself."
                )
        elif isinstance(self.layer, nn.Module):
            named = self.layer.named_parameters()
            matrices = [name for name, each in named if each.dim() > 1]
            if matrices:
                causes.append(
                    f"The state is multiplied by {', '.join(matrices)}. A step down an energy of distances moves the "
                    f"state itself: leave the transform out, or compare an energy of the transformed state."
                )
        constant = torch.ones_like(x) / 2
        if not torch.allclose(self.step(constant).after, constant):
            causes.append(
                "A constant state moves, though no step lowers an energy of differences there: weights of neighbours "
                "do not add up to one, or something is added. Subtract the weighted state itself, D − S in place of S."
            )
        if not causes and self.opposite_descends(x):
            causes.append(
                "The move has the wrong sign: its opposite lowers the energy."
            )
        if not causes:
            causes.append(
                "No part of this move lowers the energy, however short. Rows divided by their sums make weights that "
                "are not symmetric, to which no energy of pairs belongs."
            )
        return causes

    def opposite_descends(self, x: Tensor) -> bool:
        """Return whether a short step against the move lowers the energy, from x and from random states."""
        # At a single state the opposite of any move that raises the energy lowers it.
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(8, *x.shape, generator=generator, dtype=x.dtype)
        for state in (x, *map(_in_ball, drawn)):
            step = self.step(state)
            opposite = state - 1e-3 * (step.after - state)
            if not float(step.energy(opposite)) < float(step.energy(state)):
                return False
        return True


def _terms(energy: Energy, before: Tensor, x: Tensor) -> Parts:
    """Return the values of the terms of an `Energy` at x, after a step from ``before``."""
    # A subclass may compute something else than the sum of its terms.
    if type(energy).__call__ is not Energy.__call__:
        return {"energy": energy(x, before)}
    z, graph = energy.checked(x)
    values: Parts = {}
    terms = zip(energy.terms, energy.terms_after(x, before), strict=True)
    for number, (term, measured) in enumerate(terms):
        inner = term.term if isinstance(term, ScaledTerm) else term
        values[f"{type(inner).__name__} {number}"] = measured.value(z, graph)
    if not energy.constraint.holds(z):
        values[f"outside of {energy.constraint}"] = torch.tensor(torch.inf)
    return values


def _in_ball(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True).clamp(min=1)


def _listed(edge_index: Tensor) -> str:
    """Return the first columns of edge_index in short."""
    rows = str(edge_index[:, :_COLUMNS].tolist()).removesuffix("]")
    if edge_index.size(1) > _COLUMNS:
        rows = rows.replace("]", ", …]")
    return rows + "]"


def _graph_coupling(graph: Graph) -> Coupling:
    """Return a symmetric coupling with row sums below one, so that both Laplacians have eigenvalues in [0, 2)."""
    # Divided by the largest degree, so that no step size of a test has to know the graph.
    degree = graph.degree(dtype=torch.float64)
    weight = graph.weights(degree) / (1.01 * degree.max())
    scaled = Graph(graph.num_nodes, graph.edges, weight)
    return SparseCoupling(scaled, symmetric=True, nonnegative=True)
