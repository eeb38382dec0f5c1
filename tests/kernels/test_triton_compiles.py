"""The interpreter takes what a GPU may not: every kernel is compiled to machine code too, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory that one program may take on any GPU since the RTX 30 series; an H100 has more.
LIMIT = 99 * 1024


SLOW = [("float16", 256), ("bfloat16", 8), ("float32", 64), ("float32", 128), ("float32", 256)]


@pytest.mark.parametrize(("dtype", "width"), [
    pytest.param("bfloat16", 64, marks=pytest.mark.exhaustive),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
])  # fmt: skip
def test_every_kernel_compiles(dtype: str, width: int, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_for_gpu.py")), dtype, str(width)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    shared = [(int(line.split()[1]), line) for line in result.stdout.splitlines()]
    assert len(shared) >= 20
    assert max(shared)[0] <= LIMIT, max(shared)
