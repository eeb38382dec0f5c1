"""Every reader of text gives the same for any line ends, with and without a last one, a byte-order mark, blank ends."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch_geometric.data import Data

from diffusion_mp_experiments.files.text_tables import (
    count_lines,
    line_blocks,
    number_blocks,
)
from diffusion_mp_experiments.graphs import load_newsgroups
from hostile import FORMATS
from small_sets import GROUPS, MESSAGES, make_newsgroups, make_tu, tarred, write

MARK = b"\xef\xbb\xbf"
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "no last line break": lambda text: text.rstrip(b"\n"),
    "a last line break": lambda text: text.rstrip(b"\n") + b"\n",
    "a blank last line": lambda text: text.rstrip(b"\n") + b"\n\n",
    "blank last lines": lambda text: text.rstrip(b"\n") + b"\n \n\t\n\n",
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "CRLF without the last": lambda text: text.rstrip(b"\n").replace(b"\n", b"\r\n"),
    "CRLF with a blank last line": lambda text: (
        text.rstrip(b"\n").replace(b"\n", b"\r\n") + b"\r\n\r\n"
    ),
    "a mark": lambda text: MARK + text,
    "a mark and all that": lambda text: (
        MARK + text.rstrip(b"\n").replace(b"\n", b"\r\n") + b"\r\n \r\n"
    ),
}


def tu(folder: Path) -> list[Path]:
    return make_tu(
        folder,
        node_attributes="0.5, 1\n1.5, 2\n2, 3\n3, 4\n4, 5\n5, 6\n",
        edge_attributes="1\n2\n3\n4\n5\n6\n",
    )


READERS = {
    name: FORMATS[name]
    for name in (
        "pokec",
        "pokec gzipped",
        "ogbn-arxiv",
        "ogbn-proteins",
        "planetoid",
        "peptides",
        "chickenpox",
        "england_covid",
    )
    if name in FORMATS
}
READERS["tu"] = replace(FORMATS["tu"], make=tu)
TEXTS = (".txt", ".csv", ".json", ".txt.gz", ".csv.gz", "test.index")


def contents(path: Path) -> bytes:
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rb") as file:
        return file.read()


def plain(value: Any) -> Any:
    """What two results of a reader are compared by."""
    if isinstance(value, Data):
        return {name: plain(part) for name, part in value}
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    return [plain(part) for part in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore:.*tight_layout")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_gives_the_same_for_every_form(
    reader: str, form: str, tmp_path: Path
) -> None:
    make = READERS[reader].make
    load = READERS[reader].load
    (tmp_path / "right").mkdir()
    paths = make(tmp_path / "right")
    right = plain(load(tmp_path / "right"))
    files = [path for path in paths if path.name.endswith(TEXTS)]
    assert files
    for number, changed in enumerate([[path] for path in files] + [files]):
        root = tmp_path / str(number)
        root.mkdir()
        make(root)
        for path in changed:
            name = str(path.relative_to(tmp_path / "right"))
            write(root, {name: FORMS[form](contents(root / name))})
        assert plain(load(root)) == right, [path.name for path in changed]


@pytest.mark.parametrize("form", FORMS)
def test_messages_of_any_form_have_the_same_words(form: str, tmp_path: Path) -> None:
    make_newsgroups(tmp_path)
    right = load_newsgroups(tmp_path, groups=GROUPS, num_words=5)
    messages = {
        name: FORMS[form](text.replace(b"\r\n", b"\n"))
        for name, text in MESSAGES.items()
    }
    write(tmp_path, {"20news-bydate.tar.gz": tarred(messages)})
    assert plain(load_newsgroups(tmp_path, groups=GROUPS, num_words=5)) == plain(right)


@pytest.mark.parametrize("block", [1, 1 << 17, 1 << 26])
@pytest.mark.parametrize("name", ["table.txt", "table.txt.gz"])
def test_blocks_of_any_size_end_anywhere(
    block: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BYTES", block)
    for form in FORMS.values():
        (path,) = write(tmp_path, {name: form(b"1 2\n30 4\n5 600\n")})
        assert count_lines(path) == 3
        lines = [line for _, part in line_blocks(path) for line in part]
        assert lines == [b"1 2", b"30 4", b"5 600"]
        rows = [
            row for _, part in number_blocks(path, 2, np.int64) for row in part.tolist()
        ]
        assert rows == [[1, 2], [30, 4], [5, 600]]
    for empty in (b"", b"\n", b"\n\n \r\n", MARK, MARK + b"\r\n"):
        (path,) = write(tmp_path, {name: empty})
        assert count_lines(path) == 0
        assert not list(line_blocks(path))


@pytest.mark.parametrize("block", [1, 1 << 17, 1 << 26])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"\n1\n", 1),
        (b"1\n\n2\n", 2),
        (b"1\n2\n \t\n\n3", 3),
        (b"1\r\n\r\n2", 2),
        (MARK + b"\n1", 1),
    ],
)
def test_a_blank_line_before_others_is_named(
    text: bytes, line: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are nodes, in their order: it could be a node without a label, or none."""
    monkeypatch.setattr("diffusion_mp_experiments.files.text_tables._BYTES", block)
    (path,) = write(tmp_path, {"table.txt": text})
    with pytest.raises(ValueError, match=rf"table\.txt, line {line}: .*be blank"):
        count_lines(path)
