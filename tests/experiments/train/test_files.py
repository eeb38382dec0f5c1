"""Checkpoints on disk: complete or absent, data and never programs, and a folder that can be written to."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from diffusion_mp_experiments.train import check_writable, load_checkpoint, replace_file, save_checkpoint

DAMAGED = ["a payload", "a pickle", "a truncated archive", "an empty archive", "text", "empty"]
ELSEWHERE = ["http://example.org/x.ckpt", "https://example.org/x.ckpt", "s3://bucket/x.ckpt", "hf://owner/x.ckpt"]
ABSENT = ["a folder", "missing", "best", "last", "hpc", "registry:model", "simplecache::file"]


class Payload:
    """Unpickling it would make a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def hostile(kind, folder):
    """The path of a file, or what is given as one, of this kind; `executed` in its folder shows that it ran."""
    path, payload = folder / "checkpoint.ckpt", Payload(folder / "executed")
    torch.save({"state_dict": {"weight": torch.randn(64, 64)}, "payload": payload}, path)
    contents = {"a pickle": pickle.dumps(payload), "a truncated archive": path.read_bytes()[:-200], "empty": b""}
    contents |= {"an empty archive": b"PK\5\6" + bytes(18), "text": b"epoch 3, accuracy 0.8\n"}
    path.write_bytes(contents.get(kind, path.read_bytes()))
    places = {**dict.fromkeys(DAMAGED, path), "a folder": folder, "missing": folder / "none.ckpt"}
    return places.get(kind, kind)


@pytest.mark.parametrize("kind", [*DAMAGED, *ELSEWHERE, *ABSENT])
def test_nothing_but_checkpoints_is_read_and_nothing_runs(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = hostile(kind, tmp_path)
    kinds = {**dict.fromkeys(DAMAGED, "or is damaged"), **dict.fromkeys(ELSEWHERE, "of this machine only")}
    with pytest.raises((ValueError, FileNotFoundError), match=kinds.get(kind, "A checkpoint was expected")) as refused:
        load_checkpoint(path)
    assert str(path) in str(refused.value)
    assert not (tmp_path / "executed").exists()


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "state.pt"
    save_checkpoint({"epoch": 1}, path)
    write = Path.write_bytes

    def half(self, data):
        write(self, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match=r"state\.pt cannot be written: No space left on device\. What stood there is as"):
        save_checkpoint({"epoch": 2}, path)
    assert load_checkpoint(path) == {"epoch": 1}
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_writable_or_a_sentence(tmp_path, monkeypatch):
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=f"Nothing can be written to {folder}: .*Give another folder as --out"):
            check_writable(folder)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device\. Give another"):
        check_writable(tmp_path)
