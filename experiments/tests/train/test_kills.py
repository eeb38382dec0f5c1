"""Everything that can be resumed, killed at random moments until it is done: as if it had not been."""

import importlib
import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import diffusion_mp_experiments.train.lightning_cli  # noqa: F401 - once, before the processes fork
import own_process
from diffusion_mp_experiments.train import load_checkpoint
from training_runs import CONFIG, same

# The checker of shapes draws from Python's random state, which is among what is compared.
pytestmark = pytest.mark.usefixtures("no_typecheck")

CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))


@dataclass(frozen=True)
class Command:
    """The module of a `main`, its arguments, files that show its progress, and a function that reads its results."""

    module: str
    arguments: str
    progress: str
    left: Callable[[Path], object]


def left_by_fit(folder):
    """The latest of the folders, by name: a kill before the first checkpoint begins a new one."""
    checkpoints = max(
        folder.glob("runs/*/version_*/checkpoints"),
        key=lambda path: int(path.parent.name[8:]),
    )
    actual = {path.name: load_checkpoint(path) for path in checkpoints.glob("*.ckpt")}
    parts = (
        "state_dict",
        "optimizer_states",
        "random_state",
        "loops",
        "epoch",
        "global_step",
    )
    return {
        name: {part: checkpoint[part] for part in parts}
        for name, checkpoint in actual.items()
    }


def left_by_placements(folder):
    actual = {
        path.relative_to(folder): load_checkpoint(path)["state_dict"]
        for path in folder.rglob("*.ckpt")
    }
    results = {
        path.relative_to(folder): json.loads(path.read_text())
        for path in folder.rglob("result.json")
    }
    return actual, {name: {**result, "seconds": 0} for name, result in results.items()}


def left_by_script(folder):
    states = {
        path.name: load_checkpoint(path) for path in (folder / "out").glob("*.pt")
    }
    for state in states.values():
        state["spent"] = state.get("result", {})[
            "seconds" if "result" in state else "spent"
        ] = None
    return states


COMMANDS = {
    "fit": Command(
        "diffusion_mp_experiments.train.cli",
        f"fit --config {CONFIG} --model.model.hidden_channels=8 --model.model.dropout=0.5 --trainer.max_epochs=150",
        "runs/*/*/checkpoints/last.ckpt",
        left_by_fit,
    ),
    "pde_transformer": Command(
        "pde_transformer",
        "--out=out --task=listops --placement none P7 --items=64 --channels=8 --heads=2 --batch-size=16 --epochs=40 "
        "--seeds=1 --dropout=0.3 --jobs=1",
        "out/*/checkpoints/last.ckpt",
        left_by_placements,
    ),
    "sfi_former": Command(
        "sfi_former",
        "--out=out --dataset=CLUSTER --model=SFi --graphs=5 --layers=2 --parameters=9000 --batch-size=2 --seeds=1 "
        "--epochs=40 --dropout=0.2 --attention-dropout=0.5 --jobs=1",
        "out/*.pt",
        left_by_script,
    ),
    "pokec": Command(
        "pokec",
        "--out=out --synthetic --nodes=2000 --edges=30000 --batch-size=100 --hidden=8 --layers=2 --model=difformer-s "
        "--dropout=0.5 --epochs=60 --checkpoint-every=3",
        "out/*.pt",
        left_by_script,
    ),
}


def started(command, arguments, folder):
    return own_process.started(
        importlib.import_module(command.module).main, arguments, folder
    )


def ended(command, arguments, folder):
    process = started(command, arguments, folder)
    process.join(600)
    assert process.exitcode == 0, (folder / "said.txt").read_text()


def kill(process, number, checkpoints, pause, files):

    def newest():
        return {path: path.stat().st_mtime_ns for path in files()}

    observed = newest()
    deadline = time.monotonic() + 300
    while checkpoints > 0 and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
        if (now := newest()) != observed:
            observed = now
            checkpoints = checkpoints - 1
    time.sleep(pause)
    os.kill(process.pid, number)
    process.join(120)


def next_arguments(name, arguments, folder, said, number):
    """What a user types: what was printed, or, after a kill without a word, the command with its last checkpoint."""
    if number != signal.SIGKILL and "Stopped by" in said:
        program, *printed = shlex.split(said.splitlines()[-1])
        return printed if program == "diffusion-mp" else printed[1:]
    actual = sorted(
        folder.glob("runs/*/*/checkpoints/last.ckpt"),
        key=lambda path: path.stat().st_mtime_ns,
    )
    return (
        [*arguments, "--ckpt_path", str(actual[-1])]
        if name == "fit" and actual
        else arguments
    )


def assert_kills_change_nothing(name, folder, moments, *options):
    command = COMMANDS[name]
    here = folder / "killed"
    arguments = original = [*shlex.split(command.arguments), *options]
    ended(command, original, folder / "straight")
    for number, checkpoints, pause in moments:
        process = started(command, arguments, here)
        kill(process, number, checkpoints, pause, lambda: here.glob(command.progress))
        said = (here / "said.txt").read_text()
        assert process.exitcode != 0, "it was done before"
        if checkpoints:
            assert process.exitcode == CODES[number], said
            assert "Traceback" not in said
        arguments = next_arguments(name, original, here, said, number)
    ended(command, arguments, here)
    assert same(command.left(here), command.left(folder / "straight"))


@pytest.mark.unwatched
def test_a_killed_fit_ends_with_the_same_bits_and_predictions(tmp_path):
    assert_kills_change_nothing(
        "fit", tmp_path, [(signal.SIGKILL, 3, 0.005)], "--trainer.max_epochs=20"
    )
    predicted = []
    for folder in (tmp_path / "straight", tmp_path / "killed"):
        last = max(
            folder.glob("runs/*/*/checkpoints/last.ckpt"),
            key=lambda path: path.stat().st_mtime_ns,
        )
        trained = [
            "--config",
            str(last.parents[1] / "config.yaml"),
            "--ckpt_path",
            str(last),
        ]
        ended(COMMANDS["fit"], ["test", *trained], folder)
        ended(COMMANDS["fit"], ["predict", *trained], folder)
        (written,) = folder.glob("runs/*/*/predictions.csv")
        predicted.append(written.read_text())
    assert predicted[0] == predicted[1]
    assert predicted[0].count("\n") > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_ten_kills_change_nothing(name, tmp_path):
    """SIGKILL, SIGTERM and SIGINT, after one to three new checkpoints and a pause of an epoch or two."""
    draw = random.Random(name)
    moments = [
        (draw.choice(list(CODES)), draw.randint(1, 3), draw.uniform(0, 0.1))
        for _ in range(9)
    ]
    # Perhaps before it has begun.
    moments.insert(draw.randrange(10), (signal.SIGKILL, 0, draw.uniform(0, 1)))
    assert_kills_change_nothing(name, tmp_path, moments)


@pytest.mark.slow
def test_runs_side_by_side_end_with_the_process_that_started_them(tmp_path):
    """With --jobs 2 a kill of the first process leaves none that goes on writing."""
    moments = [
        (signal.SIGKILL, 2, 0.05),
        (signal.SIGTERM, 1, 0.0),
        (signal.SIGINT, 2, 0.02),
    ]
    assert_kills_change_nothing("pde_transformer", tmp_path, moments, "--jobs=2")
