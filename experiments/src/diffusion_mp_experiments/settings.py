"""Dataclasses that check their fields as their annotations say."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from diffusion_mp.checks import checked

Kind = TypeVar("Kind")


def checked_fields(kind: type[Kind]) -> type[Kind]:
    """Let a dataclass check its fields."""
    kind.__init__ = checked(kind.__init__)  # type: ignore[method-assign]
    return kind


@dataclass_transform()
def settings(kind: type[Kind]) -> type[Kind]:
    """Make the annotated attributes of a class the arguments of its constructor, which checks them."""
    return checked_fields(dataclass(eq=False, repr=False)(kind))
