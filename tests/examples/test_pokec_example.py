"""The Pokec example: its table, its refusals, and runs that go on from their checkpoints."""

import subprocess
import sys

import pytest
import torch

from training_runs import same

pytestmark = pytest.mark.unwatched

SMALL = [
    "--synthetic",
    "--nodes",
    "2000",
    "--edges",
    "30000",
    "--batch-size",
    "100",
    "--hidden",
    "8",
    "--layers",
    "2",
]


def test_the_table(pokec, tmp_path, capsys):
    models = ["constant", "linear", "gcn", "label-propagation", "difformer-s"]
    models += ["certified", "certified_transformer"]
    run = ["--lr=0.01", "--epochs=1", f"--out={tmp_path}", "--model", *models]
    assert pokec.main([*SMALL, *run]) == 0
    printed = capsys.readouterr().out
    assert "synthetic: 2000 nodes, 30000 edges, split 10/10/80, seed 0." in printed
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    rows = [line.split("|")[1:-1] for line in lines[2:]]
    assert [row[0].strip() for row in rows] == models
    assert all(0 <= float(cell) <= 100 for row in rows for cell in row[1:4])
    # The constant predictor has the majority of the training nodes.
    assert float(rows[0][1]) > 50
    assert float(rows[1][1]) > 55  # the linear model reads the planted signal
    for stage in pokec.STAGES:
        assert printed.count(f"{stage} ") >= 3


def run_of(folder, epochs, model="difformer-s"):
    return [*SMALL, f"--epochs={epochs}", f"--out={folder}", f"--model={model}"]


def saved(folder, model="difformer-s"):
    return torch.load(folder / f"synthetic-{model}-seed0.pt", weights_only=True)


def trained(pokec, folder, *options, epochs=2, model="difformer-s"):
    assert pokec.main([*run_of(folder, epochs, model), *options]) == 0
    return saved(folder, model)


def test_every_batch_is_a_place_to_stop(pokec, tmp_path, monkeypatch):
    """Within an epoch, at its end, and before the checkpoint that follows a step."""
    options = ["--dropout", "0.5", "--checkpoint-every", "4"]
    straight = trained(pokec, tmp_path / "straight", *options)
    step = pokec.Training.step
    steps = []
    # At batches 1, 6, 4 of the first epoch, 0 and 5 of the second.
    stops = [2, 9, 10, 27, 33]

    def stopping(training, batch, graph):
        steps.append(batch.n_id)
        if len(steps) in stops:
            raise KeyboardInterrupt
        return step(training, batch, graph)

    monkeypatch.setattr(pokec.Training, "step", stopping)
    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            trained(pokec, tmp_path / "stopped", *options)
    assert same(trained(pokec, tmp_path / "stopped", *options), straight)
    assert len(steps) > 40  # some were done twice


def test_more_epochs_go_on(pokec, tmp_path):
    trained(pokec, tmp_path / "two", epochs=1)
    assert same(
        trained(pokec, tmp_path / "two", epochs=2),
        trained(pokec, tmp_path / "one", epochs=2),
    )


def test_a_checkpoint_of_other_settings_is_not_continued(pokec, tmp_path):
    trained(pokec, tmp_path, epochs=1)
    with pytest.raises(
        SystemExit,
        match=r"other settings \(split, lr\); use another --out or delete it",
    ):
        trained(pokec, tmp_path, "--lr", "0.5", "--split", "50/25/25")


def launched(pokec, folder, epochs, model):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = [pokec.__file__, "--node-parallel", *run_of(folder, epochs, model)]
    result = subprocess.run(
        [sys.executable, *launch, *run], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"| {model} |") == 1
    return saved(folder, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["difformer-s", "certified_transformer"])
def test_nodes_over_two_processes(pokec, tmp_path, model):
    """Two processes do what one does whose only part is the graph, and go on from their checkpoint."""
    whole = ["--batch-size", "2000"]
    launched(pokec, tmp_path / "two", 1, model)
    two = launched(pokec, tmp_path / "two", 3, model)
    one = trained(pokec, tmp_path / "one", *whole, epochs=3, model=model)
    assert two["next"] == one["next"] == [3, 0]
    assert two["best"] == pytest.approx(one["best"], abs=0.2)
    for name, weight in one["model"].items():
        torch.testing.assert_close(two["model"][name], weight, atol=1e-4, rtol=1e-4)


def test_node_parallel_needs_torchrun(pokec, tmp_path, capsys):
    assert pokec.main([*SMALL, "--node-parallel", "--out", str(tmp_path)]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.data
def test_real_users(pokec, data_root, tmp_path, capsys):
    for name in ("profiles.sample500.txt", "relationships.sample500.txt.gz"):
        source = data_root / "pokec" / f"soc-pokec-{name}"
        copied = tmp_path / source.name.replace(".sample500", "")
        copied.write_bytes(source.read_bytes())
    run = [
        "--batch-size",
        "100",
        "--hidden",
        "8",
        "--epochs",
        "2",
        "--model",
        "constant",
        "difformer-s",
    ]
    paths = [f"--root={tmp_path}", f"--out={tmp_path / 'out'}"]
    assert pokec.main([*run, *paths]) == 0
    assert f"{tmp_path}: 500 nodes, 2913 edges" in capsys.readouterr().out


@pytest.mark.data
def test_the_folder_of_a_sample_as_it_is(pokec, data_root, tmp_path, capsys):
    root = data_root / "pokec"
    run = [f"--root={root}", f"--out={tmp_path}", "--model", "constant"]
    assert pokec.main(run) == 0
    assert f"{root}: 20000 nodes, 298926 edges" in capsys.readouterr().out


def test_a_folder_of_other_files_is_refused_in_a_sentence(pokec, tmp_path, capsys):
    (tmp_path / "pokec.csv").write_text("name,age\nAnna,30\n")
    assert pokec.main([f"--root={tmp_path}", f"--out={tmp_path / 'out'}"]) == 2
    printed = capsys.readouterr().err
    assert "missing soc-pokec-profiles.txt.gz" in printed
    assert "begins user_id,gender,region_large" in printed
