"""Every field of table.yaml and of a row, with values of wrong kinds: a sentence that names file and field."""

import re

import pytest
import yaml

from diffusion_mp_experiments.reproduce.table import _ROW_FILE, _TABLE_FILE, load_table
from diffusion_mp_experiments.train.cli import main
from reproduce_tables import ROWS, TABLE, write_table

VALUES = [
    None,
    True,
    -1,
    3,
    1.5,
    "",
    "text",
    [],
    [1],
    ["text"],
    {},
    {"a": 1},
    {1: 2},
    {"class_path": 3},
    [[1]],
]
VALUES += [{"class_path": "x.Y", "init_args": 3}]
# Values that a field takes, though they mean little.
TAKEN = {
    "title": ["", "text"],
    "like": ["gcn"],
    "splits": [3],
    "seeds": [3],
    "tuning": [3],
    "trials": [3],
    "epochs": [3],
    "patience": [3],
    "module": [{}, {"a": 1}, {"class_path": 3}, {"class_path": "x.Y", "init_args": 3}],
    "baselines": [[]],
    "quick": [{}],
    "metric": [{}],
    "sweep": [None],
    "attention": [None],
}
CONFIGS = ["search", "optimizer", "fixed"]
TAKEN |= dict.fromkeys(CONFIGS, TAKEN["module"])


@pytest.mark.parametrize("field", _TABLE_FILE)
def test_a_table_with_a_wrong_value(field, tmp_path):
    for value in VALUES:
        folder = write_table(tmp_path, **{field: value})
        if value in TAKEN.get(field, []) and not isinstance(value, bool):
            load_table(folder)
            continue
        with pytest.raises(ValueError, match=rf"table\.yaml:? .*{field}"):
            load_table(folder)


@pytest.mark.parametrize("field", _ROW_FILE)
def test_a_row_with_a_wrong_value(field, tmp_path):
    for value in VALUES:
        folder = write_table(tmp_path)
        path = folder / "gcn.yaml"
        path.write_text(yaml.safe_dump({**ROWS["gcn"], field: value}))
        taken = (
            TAKEN["module" if field == "data" else field]
            if field in {*TAKEN, "data"}
            else []
        )
        if value in taken and not isinstance(value, bool):
            load_table(folder)
            continue
        with pytest.raises(
            ValueError, match=rf"gcn\.yaml:? .*{field}|either a model or a predictor"
        ):
            load_table(folder)


def test_fields_that_a_table_must_have(tmp_path):
    for missing in ("title", "data", "rows"):
        folder = write_table(tmp_path)
        (folder / "table.yaml").write_text(
            yaml.safe_dump({k: v for k, v in TABLE.items() if k != missing})
        )
        with pytest.raises(ValueError, match=rf"table\.yaml must .*{missing}"):
            load_table(folder)
    for content, said in [
        ("3", "hold names"),
        ("- a", "hold names"),
        ("a: [", "is no YAML"),
        ("", "hold names"),
    ]:
        (folder / "table.yaml").write_text(content)
        with pytest.raises(ValueError, match=said):
            load_table(folder)
    for name in ("name", "curves"):  # not for users to say
        (folder / "table.yaml").write_text(yaml.safe_dump({**TABLE, name: "x"}))
        with pytest.raises(ValueError, match=f"says {name}; known are title"):
            load_table(folder)


LATER = [
    ({"module": {"weight_decay": "x"}}, "weight_decay must be a number"),
    (
        {"module": {"momentum": 0.5}},
        "NodeClassifier cannot be made with {'momentum': 0.5",
    ),
    ({"metric": {"name": "accuracy"}}, "The module does not log val_accuracy, but "),
    ({"data": {"class_path": "x.Y"}}, "x.Y"),
    (
        {"data": {"class_path": "pytorch_lightning.LightningDataModule"}},
        "LightningDataModule",
    ),
    (
        {"data": {"class_path": "torch.nn.Identity"}},
        "does not correspond to a subclass",
    ),
    ({"search": {"lr.x.y": {"choice": [1]}, "lr": {"choice": [0.1]}}}, "row 'gcn' "),
    ({"search": {"lr": {"uniform": ["a", 1]}}}, r"uniform of lr must be"),
    ({"search": {"model.depth": {"choice": [1]}}}, "depth"),
    ({"search": {"": {"choice": [1]}}}, ""),
]


@pytest.mark.unwatched
@pytest.mark.parametrize(("changes", "said"), LATER)
def test_values_that_only_a_run_finds_out(changes, said, tmp_path, capsys):
    write_table(tmp_path, splits=1, trials=1, epochs=1, **changes)
    words = [
        "reproduce",
        "digits",
        "--configs",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--jobs=1",
    ]
    assert main([*words, "--only", "gcn"]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert "Traceback" not in error
