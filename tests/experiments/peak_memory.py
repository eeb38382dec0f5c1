"""How much memory Python's and numpy's objects take at most."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(limit: float) -> Iterator[None]:
    """Fails unless what is allocated inside stays below so many bytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
