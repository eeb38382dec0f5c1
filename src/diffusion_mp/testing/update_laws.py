"""The laws every update obeys: shapes, heads, what it refuses, what stays as it is, and what `MODULE_LAWS` ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_mp.couplings import Coupling, ScaledCoupling
from diffusion_mp.diffusivities import AdjacencyDiffusivity
from diffusion_mp.errors import check_counts
from diffusion_mp.graph import Graph
from diffusion_mp.testing.instances import Instance, join
from diffusion_mp.testing.laws import Law, Level, expect, expect_close, run_laws
from diffusion_mp.testing.module_laws import MODULE_LAWS, ModuleCase, builder
from diffusion_mp.updates import StateUpdate


@dataclass(frozen=True)
class UpdateCase(ModuleCase[StateUpdate]):
    """An update; its response is the state after a step with D^-½AD^-½ of an undirected, weighted graph."""

    def response(self, module: StateUpdate, instance: Instance) -> Tensor:
        moved: Tensor = module(instance.x, self.coupling(instance), source=self.source(module, instance.x))
        return moved

    def coupling(self, instance: Instance) -> Coupling:
        """Symmetric, nonnegative, with eigenvalues in [−1, 1], which explicit steps of size one stand."""
        made: Coupling = AdjacencyDiffusivity("sym", direction="undirected")(instance.x, instance.graph())
        return made

    def source(self, module: StateUpdate, x: Tensor) -> Tensor | None:
        """A function of each row, for updates that weigh a source."""
        return x.cos() if module.takes_source and module.beta != 0.0 else None

    def step(self, module: StateUpdate) -> Callable[[Tensor, Tensor | None], Tensor]:
        def moved(x: Tensor, edge_index: Tensor | None) -> Tensor:
            coupling = AdjacencyDiffusivity("sym", direction="undirected")(x, Graph(x.shape[0], edge_index))
            state: Tensor = module(x, coupling, source=self.source(module, x))
            return state

        return moved


def check_update(
    update: StateUpdate | Callable[[], StateUpdate],
    *,
    channels: int = 4,
    level: Level = "strict",
    skip: Mapping[str, str] | None = None,
    compile: bool = False,
    seed: int = 0,
) -> None:
    """Check an update on small random states in the unit ball and symmetric couplings of random graphs.

    Args:
        update: an instance (which is copied, never changed), or a class or function that builds one.
        channels: C of the states.
        level: ``"strict"``, everything the library's own classes obey; or ``"core"``, without second derivatives, half
            precision, autocast and the like, for a first version.
        skip: law name → the reason why it does not apply.
        compile: also capture one full graph with `torch.compile` (seconds).
        seed: of states, graphs and parameters.

    Raises:
        AssertionError: with one sentence per broken law: class, law, got, expected.

    Examples:
        >>> check_update(lambda: ExplicitEuler(tau=0.5), level="core")  # silent, for it obeys
    """
    check_counts(channels=channels)
    build, fresh, sample = builder(update, "update", StateUpdate, seed)
    case = UpdateCase(build, fresh, channels, True, compile, seed)
    run_laws(type(sample).__name__, UPDATE_LAWS, case, skip or {}, level=level)


def _shapes(case: UpdateCase) -> None:
    """the next state has the shape and the dtype of the state, [N, C] as [N, H, D]"""
    module, instance = case.module(), case.instance()
    two = ScaledCoupling(torch.ones(2, dtype=torch.float64), case.coupling(instance), nonnegative=True)
    x, source = instance.x, case.source(module, instance.x)
    x, source = x.repeat(1, 2), None if source is None else source.repeat(1, 2)
    flat = module(x, two, source=source)
    expect(flat.shape == x.shape, f"the next state has shape {tuple(flat.shape)}, expected {tuple(x.shape)}")
    expect(flat.dtype == x.dtype, f"the next state is {flat.dtype}, expected {x.dtype}")
    by_head = module(x.unflatten(1, (2, -1)), two, source=None if source is None else source.unflatten(1, (2, -1)))
    expect_close(by_head.flatten(1), flat, "rearranged", "the next state by head")


def _heads(case: UpdateCase) -> None:
    """a coupling of one head moves every head of the state alike, a state of one head goes through every coupling"""
    module, instance = case.module(), case.instance()
    one, x = case.coupling(instance), instance.x.unsqueeze(1)
    source = case.source(module, x)
    alone = module(x, one, source=source)
    both = module(x.expand(-1, 2, -1), one, source=None if source is None else source.expand(-1, 2, -1))
    expect_close(both, alone.expand(-1, 2, -1), "rearranged", "the next state of two equal heads")
    scales = torch.tensor([1.0, 0.5], dtype=torch.float64)
    got = module(x, ScaledCoupling(scales, one, nonnegative=True), source=source)
    parts = [module(x, ScaledCoupling(scale, one, nonnegative=True), source=source) for scale in scales]
    expect_close(got, torch.cat(parts, 1), "rearranged", "the next state of a state of one head")


def _refusals(case: UpdateCase) -> None:
    """a state of other nodes, a missing source and one that nobody weighs are refused before any arithmetic"""
    module, instance = case.module(), case.instance()
    coupling, x = case.coupling(instance), instance.x
    source = case.source(module, x)
    _expect_refused(lambda: module(torch.cat([x, x]), coupling, source=source), "a state of other nodes")
    if source is not None:
        try:  # some take the state itself
            module(x, coupling)
        except ValueError as error:
            expect("source" in str(error), f"without a source it says {error}")
    if not module.takes_source:
        _expect_refused(lambda: module(x, coupling, source=x), "a source, though takes_source is False,")


def _expect_refused(call: Callable[[], Tensor], what: str) -> None:
    try:
        call()
    except (TypeError, ValueError):
        return
    expect(False, f"{what} gave a result, expected a ValueError: begin step with self.validate(...)")


def _constants(case: UpdateCase) -> None:
    """form='conservative' without source and leak leaves constants alone"""
    module, instance = case.module(), join(case.batch())
    if getattr(module, "form", None) != "conservative" or module.beta != 0.0 or getattr(module, "leak", 0.0) != 0.0:
        return
    constant = torch.full_like(instance.x, 0.7)
    expect_close(case.response(module, instance.at(constant)), constant, "rearranged", "the next state of a constant")


def _previous(case: UpdateCase) -> None:
    """with takes_previous it starts without a state before, and looks at one that comes"""
    module, instance = case.module(), case.instance()
    if not module.takes_previous:
        return
    coupling, x = case.coupling(instance), instance.x
    options = {"source": case.source(module, x)}
    first, moving = module(x, coupling, previous=None, **options), module(x, coupling, previous=x - 1, **options)
    expect(bool(first.isfinite().all()), "the first step, previous=None, is not finite")
    expect(not torch.equal(first, moving), "the next state is the same whatever the state before, previous, was")


UPDATE_LAWS: tuple[Law[UpdateCase], ...] = (
    _shapes,
    _heads,
    _refusals,
    _constants,
    _previous,
    *MODULE_LAWS,
)
