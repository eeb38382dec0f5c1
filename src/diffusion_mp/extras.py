"""Packages that not every installation has: whatever needs one says so, and how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shlex import quote


@contextmanager
def needed_by(what: str, install: str) -> Iterator[None]:
    """Around the import of optional packages: without them, one sentence with the way out.

    ```python
    with needed_by("A picture", "diffusion-mp[plot]"):
        import matplotlib.pyplot as plt
    ```

    Args:
        what: needs them; begins the sentence.
        install: what pip is to be asked for, ``diffusion-mp[extra]`` or a package.

    Raises:
        ModuleNotFoundError: "A picture needs matplotlib, which is not installed: pip install 'diffusion-mp[plot]'."
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install {quote(install)}.", name=error.name
        ) from error
