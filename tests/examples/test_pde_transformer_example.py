"""The placements example: one table, runs that resume to the same numbers."""

import json

import pytest
import torch
from runs import chosen

from training_runs import same

pytestmark = pytest.mark.unwatched

SMALL = [
    "--items",
    "32",
    "--channels",
    "8",
    "--heads",
    "2",
    "--batch-size",
    "8",
    "--epochs",
    "1",
    "--seeds",
    "1",
]


def a_run(pde_transformer, **changes):
    options = chosen(pde_transformer.Run, pde_transformer.parse(SMALL))
    run = {"task": "listops", "placement": "P7", "seed": 0}
    return pde_transformer.Run(**options | run | changes)


@pytest.mark.filterwarnings("ignore:An input array is constant")  # four test items
def test_the_tables_and_the_picture(pde_transformer, tmp_path, capsys):
    run = [
        "--task",
        "listops",
        "--jobs",
        "1",
        "--placement",
        "none",
        "P1",
        "P4",
        "P7",
        "--out",
    ]
    assert pde_transformer.main([*SMALL, *run, str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "over 1 seeds; 2 layers of 8 channels" in printed
    assert "listops: 32 items, 1 epochs, most common class " in printed
    rows = [line for line in printed.splitlines() if line.startswith("| listops |")]
    names = [row.split("|")[2].strip() for row in rows]
    assert names == ["none", "P1", "P4", "P7", "P1", "P4", "P7", "rank correlation"]
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_rank_correlations(pde_transformer):
    """The plain encoder says P7 does most damage; the accuracies agree, and the commutators say the opposite."""
    inserted = {}
    results = {a_run(pde_transformer, placement="none"): {"inserted": inserted}}
    for place, damage, commutator, accuracy in (
        ("P1", 1, 3, 0.9),
        ("P4", 2, 2, 0.8),
        ("P7", 3, 1, 0.1),
    ):
        inserted[place] = {"truth": damage, "estimate": 10 * damage}
        report = {"attention": {"commutator": [commutator, commutator]}}
        run = a_run(pde_transformer, placement=place)
        results[run] = {"report": report, "test_acc": accuracy}
    rows = pde_transformer.ranking(results).splitlines()
    assert rows[-2] == "| listops | P7 | 3 | 30 | 1.000 | 10.00 |"
    assert rows[-1] == "| listops | rank correlation | -1.00 | -1.00 | 1.00 | |"


def test_a_run_that_stopped_goes_on_to_the_same_numbers(
    pde_transformer, tmp_path, monkeypatch
):
    """Weights bit by bit, with dropout; the first epoch after a stop has the order that it would have had."""
    run = a_run(pde_transformer, epochs=3, dropout=0.3, seed=1)

    def trained(folder):
        return pde_transformer.train(run, tmp_path / folder, tmp_path, progress=False)

    def weights(folder, name):
        path = tmp_path / folder / run.name / "checkpoints" / name
        return pde_transformer.load_checkpoint(path)["state_dict"]

    straight = trained("straight")
    stop_at = [0, 1, 2]

    def stop(module):
        if module.current_epoch in stop_at[:1]:
            del stop_at[0]
            raise RuntimeError("stopped")

    learner = pde_transformer.SequenceClassifier
    monkeypatch.setattr(learner, "on_train_epoch_start", stop)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="stopped"):
            trained("stopped")
    resumed = trained("stopped")
    assert {**resumed, "seconds": 0} == {**straight, "seconds": 0}
    for name in ("best.ckpt", "last.ckpt"):
        assert same(weights("straight", name), weights("stopped", name))
    assert trained("stopped") == resumed  # read, not trained


def test_a_folder_of_other_settings_is_not_continued(pde_transformer, tmp_path):
    run = a_run(pde_transformer)
    folder = tmp_path / run.name
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({**vars(run), "lr": 0.5}))
    with pytest.raises(
        SystemExit, match="made with other settings; use another --out or delete it"
    ):
        pde_transformer.train(run, tmp_path, tmp_path, progress=False)


def test_placements_start_from_the_same_parameters(pde_transformer):
    def parameters(placement):
        run = a_run(pde_transformer, placement=placement)
        return dict(pde_transformer.make_model(run).named_parameters())

    plain = parameters("none")
    for placement in pde_transformer.SITES:
        placed = parameters(placement)
        assert all(torch.equal(placed[name], value) for name, value in plain.items())
        assert len(placed) > len(plain)


def test_every_task_has_a_default_size(pde_transformer):
    for options, expected in (
        ([], (20_000, 5)),
        (["--items", "7"], (7, 5)),
        (["--epochs", "2"], (20_000, 2)),
    ):
        lengths = pde_transformer.lengths(pde_transformer.parse(options), "listops")
        assert (lengths["items"], lengths["epochs"]) == expected


def test_images_are_read_row_by_row(pde_transformer, tmp_path):
    run = a_run(pde_transformer, task="pathfinder", items=8)
    x, labels = next(iter(pde_transformer.loaders(run, tmp_path, tmp_path)["train"]))
    assert x.shape == (8, 32, 32)
    greys = 255 * (x * pde_transformer.DEVIATION + pde_transformer.MEAN)
    images = pde_transformer.items(run, "train", tmp_path, tmp_path)
    fifth_rows = {tuple(tokens[5 * 32 : 6 * 32].tolist()) for tokens, _ in images}
    assert {tuple(row) for row in greys[:, 5].round().int().tolist()} == fifth_rows
    assert set(labels.tolist()) == {0, 1}


@pytest.mark.data
@pytest.mark.exhaustive
def test_reviews(pde_transformer, data_root, tmp_path):
    archive = data_root / "aclImdb" / "aclImdb_labelled.tar.gz"
    if not archive.is_file():
        pytest.skip(f"no reviews at {archive}")
    run = a_run(pde_transformer, task="imdb", items=16)
    batches = pde_transformer.loaders(run, tmp_path, archive)
    assert [len(loader.dataset) for loader in batches.values()] == [16, 2, 2]
    tokens, mask, _ = next(iter(batches["train"]))
    assert tokens.shape[1] <= pde_transformer.TASKS["imdb"].max_length
    assert bool((tokens[mask] > 0).all())
