"""The Cora example as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "cora.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def test_wrong_root_says_what_to_do(tmp_path):
    done = run("--root", str(tmp_path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for part in ("missing ind.cora.x", str(tmp_path / "Cora" / "raw"), "--download", "github.com/kimiyoung/planetoid"):
        assert part in done.stderr


def test_nonsense_numbers(tmp_path):
    done = run("--root", str(tmp_path), "--splits", "0")
    assert done.returncode == 2
    assert "at least 1, got 0" in done.stderr


@pytest.mark.data
@pytest.mark.parametrize("dataset", ["Cora", "CiteSeer"])
def test_two_models_on_two_splits(data_root, dataset):
    root = str(data_root / "Planetoid")
    done = run("--root", root, "--dataset", dataset, "--splits", "2", "--epochs", "2", "--model", "difformer-s", "mlp")
    assert done.returncode == 0, done.stderr
    assert "over 2 different random splits (20 per class)" in done.stdout
    assert done.stdout.count(" ± ") == 3


@pytest.mark.data
def test_public_split_says_that_only_weights_differ(data_root):
    root = str(data_root / "Planetoid")
    done = run("--root", root, "--split", "public", "--splits", "1", "--epochs", "2", "--model", "mlp")
    assert "over 1 initialisations on the public split" in done.stdout
