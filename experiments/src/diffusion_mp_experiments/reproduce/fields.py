"""Compares what a YAML file says with the annotations of a dataclass, before anything is made of it."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from diffusion_mp.checks import describe

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
}


def check_fields(content: Any, kinds: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError``, which begins with `name`, unless `content` has fields of these kinds and no others."""
    if not isinstance(content, dict):
        raise ValueError(f"{name} must hold names and values; got {describe(content)}.")
    unknown = sorted(str(field) for field in content if field not in kinds)
    if unknown:
        raise ValueError(
            f"{name} says {', '.join(unknown)}; known are {', '.join(kinds)}."
        )
    for field, value in content.items():
        _check_field(value, kinds[field], f"{name}: {field}")


def check_complete(content: Mapping[str, Any], kind: Any, name: str) -> None:
    """Raise ``ValueError`` unless `content` has all fields of a dataclass that have no default."""
    needed = [
        each.name
        for each in fields(kind)
        if each.default is MISSING and each.default_factory is MISSING
    ]
    missing = [field for field in needed if field not in content]
    if missing:
        raise ValueError(f"{name} must say {', '.join(missing)}.")


def _check_field(value: Any, kind: Any, name: str) -> None:
    kinds = _alternatives(kind)
    for each in kinds:
        if (is_dataclass(each) or is_typeddict(each)) and isinstance(value, dict):
            check_fields(value, get_type_hints(each), name)
            return
    if not any(_fits(value, each) for each in kinds):
        raise ValueError(
            f"{name} must be {' or '.join(map(_in_words, kinds))}; got {describe(value)}."
        )


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if origin in (list, tuple):
        items = _alternatives(get_args(kind)[0])
        return isinstance(value, list) and all(
            any(_fits(each, item) for item in items) for each in value
        )
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(each, str) for each in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _in_words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin in (list, tuple):
        items = " or ".join(map(_in_words, _alternatives(get_args(kind)[0])))
        return f"a list, each item {items}"
    return _WORDS.get(kind, "names and values")
