"""The defaults of every public name, and what every coupling promises, as `interface.json` has them.

Both are behaviour on which users rely and of which most other tests see nothing. After a change that is meant,
``python tests/test_interface.py`` writes the file anew.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cases import COUPLINGS, DIFFUSIVITIES, EDGES, PTR
from diffusion_mp.couplings import Coupling
from diffusion_mp.energies import (
    GaussianPenalty,
    MixturePenalty,
    QuadraticPenalty,
    SigmoidPenalty,
    SimplePenalty,
    SoftmaxPenalty,
)
from diffusion_mp.graph import Graph
from helpers import randn
from pages.names import public_names

FILE = Path(__file__).with_name("interface.json")
PENALTIES = [
    QuadraticPenalty(),
    SimplePenalty(),
    SigmoidPenalty(),
    SoftmaxPenalty(6),
    GaussianPenalty(),
    MixturePenalty(),
]
QUESTIONS = [
    "symmetric",
    "row_stochastic",
    "nonnegative",
    "positive_semidefinite",
    "low_rank",
    "quadratic",
    "examines",
    "no_empty_row",
]


def functions() -> Iterator[tuple[str, Any]]:
    """Return all public functions, classes and methods that this project defines, by their names."""
    for name in public_names():
        package = name.package.__name__
        yield f"{package}.{name.name}", name.value
        if not isinstance(name.value, type):
            continue
        for method, value in vars(name.value).items():
            if inspect.isfunction(value) and not method.startswith("_"):
                yield f"{package}.{name.name}.{method}", value


def shown(default: Any) -> str:
    """Return a default as text that has no address in it."""
    if isinstance(default, type) or inspect.isroutine(default):
        return default.__qualname__
    return repr(default)


def defaults() -> dict[str, str]:
    found = {}
    for name, value in functions():
        if not callable(value):
            continue
        try:
            parameters = inspect.signature(value).parameters.values()
        except ValueError:  # a class of C, such as an exception
            continue
        given = [
            f"{parameter.name}={shown(parameter.default)}"
            for parameter in parameters
            if parameter.default is not parameter.empty
            and not parameter.name.startswith("_")
        ]
        if given:
            found[name] = ", ".join(given)
    return found


def promises() -> dict[str, str]:
    couplings: dict[str, Coupling] = {name: make() for name, make in COUPLINGS.items()}
    loops = torch.arange(11).expand(2, 11)
    graph = Graph(11, torch.cat([EDGES, loops], dim=1), ptr=PTR)
    for name, make in DIFFUSIVITIES.items():
        diffusivity = make().double()
        channels = getattr(diffusivity, "channels", None) or 6
        couplings[f"of {name}"] = diffusivity(randn(11, channels), graph)
    state = randn(11, 1, 6) / 5
    for penalty in PENALTIES:
        name = type(penalty).__name__
        couplings[f"of {name}"] = penalty.attention(state)
        normalized = penalty.attention(state, normalize=True)
        couplings[f"of {name}, normalized"] = normalized
    found = {}
    for name, coupling in couplings.items():
        kept = [question for question in QUESTIONS if getattr(coupling, question)]
        if coupling.metric is not None:
            kept.append("metric")
        found[name] = " ".join(kept)
    return found


def test_defaults_are_those_of_the_stored_interface():
    assert defaults() == json.loads(FILE.read_text("utf-8"))["defaults"]


def test_promises_are_those_of_the_stored_interface():
    assert promises() == json.loads(FILE.read_text("utf-8"))["promises"]


if __name__ == "__main__":
    stored = {"defaults": defaults(), "promises": promises()}
    FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", "utf-8")
