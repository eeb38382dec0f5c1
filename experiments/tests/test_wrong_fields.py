"""Every field of table.yaml and of a row, with values of wrong kinds: a sentence that names the file."""

import re
from dataclasses import fields

import pytest
import yaml

from diffusion_mp_experiments.reproduce.table import Row, Table, load_table
from diffusion_mp_experiments.train.cli import main
from reproduce_tables import ROWS, TABLE, write_table

TABLE_FIELDS = {field.name for field in fields(Table)}
ROW_FIELDS = {field.name for field in fields(Row)} - {"curve"}
WRONG = [True, -1, 1.5, [[1]], {1: 2}, {"class_path": 3}]
# Its own sentences, before the shape checks of the test run.
pytestmark = pytest.mark.usefixtures("no_typecheck")
# Mappings in which any name may stand.
OPEN = {"module", "search", "optimizer", "fixed"}


@pytest.mark.parametrize("field", sorted({*TABLE_FIELDS, *ROW_FIELDS}))
def test_a_wrong_value(field, tmp_path):
    for value in WRONG[: -1 if field in OPEN else None]:
        folder = write_table(tmp_path)
        changed = {}
        if field in TABLE_FIELDS:
            changed["table.yaml"] = {**TABLE, field: value}
        if field in ROW_FIELDS - {"data"}:
            changed["gcn.yaml"] = {**ROWS["gcn"], field: value}
        for name, content in changed.items():
            (folder / name).write_text(yaml.safe_dump(content))
            with pytest.raises(
                ValueError, match=rf"{name}:? .*{field}|names and values|not iterable"
            ):
                load_table(folder)


def test_fields_that_a_table_must_have(tmp_path):
    for missing in ("title", "data", "rows"):
        folder = write_table(tmp_path)
        (folder / "table.yaml").write_text(
            yaml.safe_dump({k: v for k, v in TABLE.items() if k != missing})
        )
        with pytest.raises(ValueError, match=rf"table\.yaml.*{missing}"):
            load_table(folder)
    (folder / "table.yaml").write_text("")
    with pytest.raises(ValueError, match="hold names"):
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
    ({"search": {"lr": {"uniform": ["a", 1]}}}, "the axis lr must be"),
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
