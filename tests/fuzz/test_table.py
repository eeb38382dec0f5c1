"""The table of strategies is complete, and what it draws is the same every time."""

from inspect import isabstract, isclass
from types import ModuleType

import diffusion_mp
from diffusion_mp import (
    couplings,
    data,
    diagnostics,
    distributed,
    energies,
    estimators,
    export,
    layers,
    models,
    testing,
)
from diffusion_mp_experiments import graphs, sequences, train

from .program import plain_program
from .signatures import LIBRARY
from .table import EXEMPT, STRATEGIES, WEIGHTS, drawn

PACKAGES = {"": diffusion_mp}
for package in (
    data,
    diagnostics,
    distributed,
    estimators,
    export,
    testing,
    graphs,
    sequences,
    train,
):
    PACKAGES[f"{package.__name__.rpartition('.')[2]}."] = package


def public(prefix: str, package: ModuleType) -> set[str]:
    """The public names of a package, as the table writes them."""
    plain = {*diffusion_mp.__all__, *STRATEGIES} if prefix else set()
    return {name if name in plain else f"{prefix}{name}" for name in package.__all__}


def test_every_public_name_has_a_strategy() -> None:
    names = {name for name in couplings.__all__ if name.endswith("Coupling")} | {
        *concrete_terms(),
        *layers.__all__,
        *models.__all__,
    }
    missing = (
        names.union(*(public(*item) for item in PACKAGES.items()))
        - set(STRATEGIES)
        - set(EXEMPT)
    )
    assert not missing, (
        f"write a strategy for each of these, or a reason in EXEMPT: {sorted(missing)}"
    )


def concrete_terms() -> set[str]:
    named = {name: getattr(energies, name) for name in energies.__all__}
    return {
        name
        for name, each in named.items()
        if isclass(each) and issubclass(each, energies.EnergyTerm)
        if not isabstract(each)
    }


def test_no_strategy_without_a_public_name() -> None:
    names = set().union(*(public(*item) for item in PACKAGES.items()))
    names |= {name for package in LIBRARY for name in package.__all__}
    assert (set(STRATEGIES) | set(EXEMPT)) - names == set()
    assert set(STRATEGIES) & set(EXEMPT) == set()
    assert set(WEIGHTS) - set(STRATEGIES) == set()


def test_a_program_depends_on_seed_and_index_alone() -> None:
    first = [drawn(3, index) for index in range(400)]
    assert first == [drawn(3, index) for index in range(400)]
    assert first != [drawn(4, index) for index in range(400)]
    assert {program.name for program in first} == set(STRATEGIES)


def test_a_plain_program_has_nothing_wrong() -> None:
    for name, strategy in STRATEGIES.items():
        program = plain_program(name, strategy)
        assert not program.wrong
        assert all(
            step["valid"] is not False for step in program.as_request()["steps"]
        ), name


def test_about_half_of_the_programs_have_something_wrong() -> None:
    programs = [drawn(0, index) for index in range(2_000)]
    wrong = sum(
        any(step["valid"] is False for step in program.as_request()["steps"])
        for program in programs
    )
    assert 0.3 < wrong / len(programs) < 0.6
