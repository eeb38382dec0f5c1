"""A gigabyte of SNAP's text streams through less than a gigabyte of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITE = """
import sys
from pathlib import Path
import torch

root, users, friendships, text = Path(sys.argv[1]), *map(int, sys.argv[2:])
generator = torch.Generator().manual_seed(0)
day = "2012-05-25 11:20:00.0"
with (root / "soc-pokec-profiles.txt").open("w") as file:
    for user in range(users):
        numbers = f"{user + 1}\\t1\\t50\\t{user % 2}\\tzilinsky kraj, zilina\\t{day}\\t{day}\\t{user % 60}"
        file.write(numbers + "\\tnull" * 50 + "\\t" + "x" * text + "\\n")
with (root / "soc-pokec-relationships.txt").open("w") as file:
    for start in range(0, friendships, 1 << 20):
        ends = torch.randint(1, users + 1, (min(1 << 20, friendships - start), 2), generator=generator)
        file.write("".join(f"{a}\\t{b}\\n" for a, b in ends.tolist()))
"""
READ = """
import resource, sys
from diffusion_mp.data import load_pokec
unit = 1024 if sys.platform != "darwin" else 1  # kilobytes on Linux, bytes on macOS
data = load_pokec(sys.argv[1], progress=False)
assert data.edge_index.size(1) == int(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


def run(program: str, *arguments: object) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("users", "friendships", "text"), [(700_000, 1_000_000, 1000), (500_000, 78_000_000, 0)])
def test_a_gigabyte_of_either_file(tmp_path: Path, users: int, friendships: int, text: int) -> None:
    """Of the whole process, imports included."""
    run(WRITE, tmp_path, users, friendships, text)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) > 1e9
    assert float(run(READ, tmp_path, friendships)) < 1e9
