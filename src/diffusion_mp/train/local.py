"""Configurations come from this machine: they name classes to import, so that reading one is running a program."""

from __future__ import annotations

from collections.abc import Sequence


def check_local(args: Sequence[str]) -> None:
    """Raise ``FileNotFoundError`` where `--config` on a command line is an address instead of a file."""
    for option, value in zip(args, [*args[1:], ""], strict=True):
        name, _, joined = option.partition("=")
        source = joined or value
        if name in ("--config", "-c") and "://" in source:
            raise FileNotFoundError(
                f"--config must be a file of this machine; got the address {source}. A configuration names classes to "
                "import and run: download it, read it, and give its path."
            )
