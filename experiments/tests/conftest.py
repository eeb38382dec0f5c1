"""The command as it is typed."""

import shlex
from collections.abc import Callable

import pytest

from diffusion_mp_experiments.train.cli import main


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``typed(line, *words)`` runs `diffusion-mp` with the words of a line and others; returns what it printed.

    It fails unless the command ends with ``code``, and wherever a traceback is shown.
    """

    def run(line: str, *words: object, code: int = 0) -> str:
        capsys.readouterr()
        try:
            ended: object = main([*shlex.split(line), *map(str, words)])
        except SystemExit as stopped:
            # argparse and jsonargparse end the process themselves.
            ended = stopped.code
        said = "".join(capsys.readouterr())
        assert ended == code, said
        assert "Traceback" not in said
        return said

    return run
