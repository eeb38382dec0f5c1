"""A gigabyte of SNAP's text streams through less than a gigabyte of memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRITE = """
import sys
from pathlib import Path
import torch

root, users, millions, text = Path(sys.argv[1]), *map(int, sys.argv[2:])
first = 1_000_000_000  # of the ids
ends = torch.randint(first, first + users, (1_000_000, 2), generator=torch.Generator().manual_seed(0))
day = "2012-05-25 11:20:00.0"
with (root / "soc-pokec-profiles.txt").open("w") as file:
    for user in range(users):
        numbers = f"{first + user}\\t1\\t50\\t{user % 2}\\tzilinsky kraj, zilina\\t{day}\\t{day}\\t{user % 60}"
        file.write(numbers + "\\tnull" * 50 + "\\t" + "x" * text + "\\n")
block = "".join(f"{a}\\t{b}\\n" for a, b in ends.tolist())
with (root / "soc-pokec-relationships.txt").open("w") as file:
    for _ in range(millions):
        file.write(block)
"""
READ = """
import resource, sys
from diffusion_mp_experiments.graphs import load_pokec
unit = 1024 if sys.platform != "darwin" else 1  # kilobytes on Linux, bytes on macOS
data = load_pokec(sys.argv[1], progress=False)
assert data.num_edges == int(sys.argv[2]) * 1_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
"""


def run(program: str, *arguments: object) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("users", "millions", "text"), [(1_632_803, 1, 300), (400_000, 46, 0)])
def test_a_gigabyte_of_either_file(tmp_path: Path, users: int, millions: int, text: int) -> None:
    """Of the whole process, imports included: as many users as Pokec has, and 1.5 times as many friendships."""
    run(WRITE, tmp_path, users, millions, text)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) > 1e9
    assert float(run(READ, tmp_path, millions)) < 1e9
