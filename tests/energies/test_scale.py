"""The energy of DIFFormer-s on a million nodes: seconds, and little memory beside the state."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MEASURE = """
import json, resource, time, torch
from diffusion_mp.energies import SimplePenalty
x = torch.nn.functional.normalize(torch.randn(1_000_000, 64, generator=torch.Generator().manual_seed(0)), dim=1)
SimplePenalty().total(x[:100])
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
total = float(SimplePenalty().total(x))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"seconds": seconds, "extra_mib": peak / 1024, "total": total}))
"""


@pytest.mark.slow
def test_a_million_nodes() -> None:
    """N = 1 000 000, d = 64, float32: under 10 s and 2 GB beyond the state."""
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout)
    print(measured)
    assert measured["seconds"] < 10
    assert measured["extra_mib"] < 2000
    # Unit vectors in random directions: E z² = 2, E z⁴ = 4 + 4/d, so the mean of δ is 3 − 1/d.
    assert measured["total"] / 1e12 == pytest.approx(3 - 1 / 64, rel=1e-3)
