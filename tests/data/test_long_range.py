"""LRGB through PyG's reader: sentences for what is missing, and made-up raw files read in the benchmark's layout."""

import pickle

import pytest
import torch
from hostile import Payload
from torch_geometric.datasets import LRGBDataset

from diffusion_mp.data import load_lrgb

NAMES = ["Peptides-func", "Peptides-struct", "PCQM-Contact", "PascalVOC-SP", "COCO-SP"]
EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


def write_peptides(root, name, targets):
    raw = root / name.lower() / "raw"
    raw.mkdir(parents=True)
    for count, split in enumerate(("train", "val", "test"), start=2):
        graph = (torch.ones(3, 9, dtype=torch.long), torch.ones(4, 3, dtype=torch.long), EDGES, torch.ones(1, targets))
        torch.save([graph] * count, raw / f"{split}.pt")


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_say_what_where_and_how(tmp_path, name):
    with pytest.raises(FileNotFoundError) as caught:
        load_lrgb(tmp_path / "nowhere", name, "test")
    ending = "pickle" if name.endswith("-SP") else "pt"
    raw = tmp_path / "nowhere" / name.lower() / "raw"
    for part in (f"train.{ending}, val.{ending}, test.{ending}", str(raw), f'"{name}", download=True', "https://"):
        assert part in str(caught.value)
    assert not (tmp_path / "nowhere").exists()


def test_only_the_missing_file_is_named(tmp_path):
    write_peptides(tmp_path, "Peptides-func", 10)
    (tmp_path / "peptides-func" / "raw" / "val.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing val\.pt\. "):
        load_lrgb(tmp_path, "Peptides-func")


@pytest.mark.parametrize(("name", "targets"), [("Peptides-func", 10), ("Peptides-struct", 11)])
def test_peptides(tmp_path, name, targets):
    write_peptides(tmp_path, name, targets)
    assert [len(load_lrgb(tmp_path, name, split)) for split in ("train", "val", "test")] == [2, 3, 4]
    data = load_lrgb(tmp_path, name, transform=lambda data: data.update({"seen": True}))[0]
    assert (data.x.shape, data.edge_attr.shape, data.y.shape, data.seen) == ((3, 9), (4, 3), (1, targets), True)


def test_superpixels(tmp_path):
    raw = tmp_path / "pascalvoc-sp" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "val", "test"):
        graph = (torch.rand(3, 14), torch.rand(4, 2), EDGES, [0, 20, 3])
        (raw / f"{split}.pickle").write_bytes(pickle.dumps([graph] * 2))
    data = load_lrgb(tmp_path, "PascalVOC-SP", "val")[1]
    assert (data.x.shape, data.edge_attr.shape, data.y.tolist()) == ((3, 14), (4, 2), [0, 20, 3])


def test_a_failed_download_is_explained(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("no route to host")

    monkeypatch.setattr(LRGBDataset, "download", fail)
    with pytest.raises(
        ConnectionError, match=r"could not download PascalVOC-SP .* no route to host.*test\.pickle under"
    ):
        load_lrgb(tmp_path, "PascalVOC-SP", download=True)


def test_files_that_cannot_be_read_are_no_failed_download(tmp_path):
    write_peptides(tmp_path, "Peptides-func", 10)
    (tmp_path / "peptides-func" / "raw" / "val.pt").write_bytes(b"no tensors")
    with pytest.raises(
        ValueError,
        match=r"val\.pt: it is no zip file, as torch\.save writes.*\. Fetch it anew, from the archive https://",
    ):
        load_lrgb(tmp_path, "Peptides-func", "val", download=True)


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize(
    ("name", "split", "message"),
    [("Peptides", "train", "name must be one of"), ("COCO-SP", "dev", "split must be one of")],
)
def test_refusals(tmp_path, name, split, message):
    with pytest.raises(ValueError, match=message):
        load_lrgb(tmp_path, name, split)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_run(tmp_path, name):
    """Neither from the raw files nor from what PyG keeps of its own in `processed`, which it would unpickle."""
    raw = tmp_path / name.lower() / "raw"
    (raw.parent / "processed").mkdir(parents=True)
    raw.mkdir()
    harm = [(Payload(tmp_path / "marker", "open"),) * 4]
    for split in ("train", "val", "test"):
        if name.endswith("-SP"):
            (raw / f"{split}.pickle").write_bytes(pickle.dumps(harm))
        else:
            torch.save(harm, raw / f"{split}.pt")
    for note in ("pre_transform.pt", "pre_filter.pt", "train.pt", "val.pt", "test.pt"):
        torch.save(Payload(tmp_path / "marker", "open"), raw.parent / "processed" / note)
    sentence = r"asks for (more than tensors|io\.open, which is no array)\. Fetch it anew, from the archive"
    with pytest.raises(ValueError, match=rf"train\.(pt|pickle): it .*{sentence}"):
        load_lrgb(tmp_path, name)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_index": EDGES + 1}, "edge_index must lie in 0..2, got up to 3"),
        ({"edge_index": EDGES[:, :3]}, r"edge_index \[2, E\]; got"),
        ({"x": torch.ones(3)}, r"must have x \[N, C\]"),
        ({"y": torch.ones(2, 10)}, "y must have one row for the graph or one for each node"),
        ({"y": [1.0]}, "a graph must be a tuple of tensors"),
    ],
)
def test_parts_that_do_not_agree_are_refused(tmp_path, change, message):
    write_peptides(tmp_path, "Peptides-func", 10)
    parts = {"x": torch.ones(3, 9), "edge_attr": torch.ones(4, 3), "edge_index": EDGES, "y": torch.ones(1, 10)}
    good, bad = tuple(parts.values()), tuple((parts | change).values())
    torch.save([good, bad], tmp_path / "peptides-func" / "raw" / "val.pt")
    with pytest.raises(ValueError, match=rf"val\.pt: .*{message}"):
        load_lrgb(tmp_path, "Peptides-func", "val")
    torch.save([good, (torch.ones(3, 8), *good[1:])], tmp_path / "peptides-func" / "raw" / "val.pt")
    with pytest.raises(ValueError, match=r"val\.pt: its graphs differ in type and width"):
        load_lrgb(tmp_path, "Peptides-func", "val")


def test_a_download_is_read_as_data_too(tmp_path, monkeypatch):
    def download(self):
        for file in self.raw_paths:
            torch.save([(Payload(tmp_path / "marker", "open"),) * 4], file)

    monkeypatch.setattr(LRGBDataset, "download", download)
    with pytest.raises(ValueError, match=r"train\.pt: it .*asks for more than tensors"):
        load_lrgb(tmp_path, "Peptides-func", download=True)
    assert not (tmp_path / "marker").exists()
