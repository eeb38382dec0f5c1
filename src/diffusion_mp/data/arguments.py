"""Arguments of the data tools: whole numbers, from wherever they come."""

from __future__ import annotations

from operator import index

from diffusion_mp.errors import describe


def as_whole(value: object, name: str, way_out: str = "") -> int:
    """A whole number as an int, numpy's and PyTorch's too; a bool is none.

    Raises:
        TypeError: it is no whole number; the sentence names the argument and ends with `way_out`.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number; got {describe(value)}.{way_out and f' {way_out}'}")
    return number
