"""Readers of Long Range Arena files, on small files of the true formats."""

from __future__ import annotations

import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from peak_memory import at_most

from diffusion_mp.data import GreyCIFAR10, PathfinderFiles, RetrievalPairs, pad

NEEDS_PILLOW = "PNG files are read with Pillow"


def text(tokens) -> bytes:
    return bytes((tokens - 1).tolist())


# --- retrieval


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "new_aan_pairs.train.tsv"
    lines = [b'1.0\tP05-1001\tP04-1002\tOne "text\tand other', b"0.0\tA\tB\t\xc3\xa9\t", b"1\tC\tD\t1234567\tx"]
    path.write_bytes(b"\n".join(lines))  # the last line does not end
    return path


def test_pairs(pairs):
    dataset = RetrievalPairs(pairs, max_length=5)
    assert len(dataset) == 3
    assert [(text(one), text(other), label) for one, other, label in dataset] == [
        (b'One "', b"and o", 1),
        (b"\xc3\xa9", b"", 0),
        (b"12345", b"x", 1),
    ]
    assert text(RetrievalPairs(pairs)[0][0]) == b'One "text'
    tokens, mask, other, other_mask, labels = pad([dataset[2], dataset[1]])
    assert (tokens.shape, other.shape) == ((2, 5), (2, 1))
    assert (mask.sum(dim=1).tolist(), other_mask.sum(dim=1).tolist()) == ([5, 2], [1, 0])
    assert labels.tolist() == [1, 0]


@pytest.mark.parametrize("line", [b"1.0\tA\tB\tonly one text", b"2\tA\tB\tx\ty", b"one\tA\tB\tx\ty", b""])
def test_bad_pairs_are_named(pairs, line):
    pairs.write_bytes(pairs.read_bytes() + b"\n" + line + b"\n")
    dataset = RetrievalPairs(pairs)
    assert dataset[2][2] == 1
    with pytest.raises(ValueError, match=r"\.tsv, line 4: expected label, two ids and two texts"):
        dataset[3]


def test_missing_pairs(pairs):
    with pytest.raises(FileNotFoundError, match=r"No retrieval pairs at .*new_aan_pairs\.train\.tsv"):
        RetrievalPairs(pairs.parent)
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        RetrievalPairs(pairs, max_length=0)


# --- images


@pytest.fixture
def cifar(tmp_path):
    """Four images in each of the five batches, two in the test batch."""
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (22, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(22) % 10
    records[20, 1:], records[21, 1:] = 255, 0
    records[21, 1:4], records[21, 1025], records[21, 2049] = (255, 0, 10), 255, 255  # red at 0 and 2; all at 0
    for i in range(5):
        records[4 * i : 4 * i + 4].tofile(tmp_path / f"data_batch_{i + 1}.bin")
    records[20:].tofile(tmp_path / "test_batch.bin")
    return tmp_path, records


def test_grey_images(cifar):
    root, records = cifar
    train, val, test = (GreyCIFAR10(root, split) for split in ("train", "val", "test"))
    assert [label for _, label in train] == [i % 10 for i in range(18)]
    assert [label for _, label in val] == [8, 9]
    assert [label for _, label in test] == [0, 1]
    assert (test[0][0] == 255).all()
    tokens, _ = test[1]
    assert (int(tokens[0]), int(tokens[1]), int(tokens[2])) == (255, 0, int(0.2989 * 10 * 255.5 / 255))
    assert (tokens[3:] == 0).all()

    red, green, blue = (records[5, 1 + 1024 * i : 1 + 1024 * (i + 1)].astype(float) for i in range(3))
    grey = (0.2989 * red + 0.5870 * green + 0.1140 * blue) * 255.5 / 255
    tokens, _ = train[5]
    assert (tokens.shape, tokens.dtype) == ((1024,), torch.long)
    assert np.abs(tokens.numpy() + 0.5 - grey).max() <= 0.5 + 1e-9  # rounded down


def test_bad_and_missing_images(cifar):
    root, records = cifar
    (root / "data_batch_5.bin").write_bytes(bytes(3072))
    with pytest.raises(ValueError, match=r"data_batch_5\.bin must be images of 3073 bytes"):
        GreyCIFAR10(root)
    records[21, 0] = 10
    records[20:].tofile(root / "test_batch.bin")
    with pytest.raises(ValueError, match=r"test_batch\.bin must be .* a label 0 \.\. 9"):
        GreyCIFAR10(root, "test")
    for i in (2, 4):
        (root / f"data_batch_{i}.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing data_batch_2\.bin, data_batch_4\.bin\. Unpack"):
        GreyCIFAR10(root, "val")


# --- Pathfinder


@pytest.fixture
def pathfinder(tmp_path):
    """Twelve images of 4 × 4 in two batches, number 2 and 10; the first of batch 10 is an empty file."""
    Image = pytest.importorskip("PIL.Image", reason=NEEDS_PILLOW)
    root = tmp_path / "curv_contour_length_14"
    (root / "metadata").mkdir(parents=True)
    for batch, count in ((10, 5), (2, 6)):
        folder = root / "imgs" / str(batch)
        folder.mkdir(parents=True)
        lines = []
        for i in range(count):
            Image.fromarray(np.full((4, 4), batch * 10 + i, dtype=np.uint8)).save(folder / f"sample_{i}.png")
            lines.append(f"imgs/{batch} sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1")
        (root / "metadata" / f"{batch}.npy").write_text("\n".join(lines) + "\n")
    (root / "imgs" / "10" / "sample_0.png").write_bytes(b"")
    return root


def test_pathfinder_files(pathfinder):
    train, val, test = (PathfinderFiles(pathfinder, split) for split in ("train", "val", "test"))
    found = [(int(tokens[0]), label) for tokens, label in train]
    assert found == [(20, 0), (21, 1), (22, 0), (23, 1), (24, 0), (25, 1), (101, 1), (102, 0)]
    assert [(int(tokens[0]), label) for tokens, label in val] == [(103, 1)]
    assert [(int(tokens[0]), label) for tokens, label in test] == [(104, 0)]
    tokens, mask, labels = pad(list(train))
    assert (tokens.shape, tokens.dtype, bool(mask.all()), len(labels)) == ((8, 16), torch.long, True, 8)


def test_bad_and_missing_pathfinder_files(pathfinder, monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "PIL", None)
        with pytest.raises(ModuleNotFoundError, match="pip install pillow"):
            PathfinderFiles(pathfinder)[0]
    (pathfinder / "metadata" / "2.npy").write_text("imgs/2 sample_0.png 0 x 1.0\n")
    with pytest.raises(ValueError, match=r"2\.npy, line 1: expected folder, file, number and label; got 'imgs/2"):
        PathfinderFiles(pathfinder)
    with pytest.raises(FileNotFoundError, match=r"No Pathfinder at .* metadata/\*\.npy"):
        PathfinderFiles(pathfinder / "metadata")


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("reader", [GreyCIFAR10, PathfinderFiles])
def test_unknown_splits(tmp_path, reader):
    with pytest.raises(ValueError, match="split must be one of 'train', 'val', 'test'; got 'eval'"):
        reader(tmp_path, "eval")


# --- files that somebody damaged, or made on purpose


def test_pairs_that_are_no_lines(tmp_path, monkeypatch):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"pairs\.tsv must have a line for each pair of texts; it is empty"):
        RetrievalPairs(path)
    monkeypatch.setattr("diffusion_mp.data.text_tables.LONGEST", 100)
    path.write_bytes(b"1\tA\tB\tx\ty\n" + b"0" * 200)
    with pytest.raises(ValueError, match=r"pairs\.tsv, line 2: a line must have at most 100 bytes"):
        RetrievalPairs(path)


def test_pairs_have_places(pairs):
    dataset = RetrievalPairs(pairs)
    assert dataset[-1][2] == dataset.item(2)[2] == 1
    for index in (-1, 3):
        with pytest.raises(IndexError, match=rf"index must lie in 0 \.\. 2; got {index}"):
            dataset.item(index)


def test_batches_of_images_have_a_size(cifar):
    root, _ = cifar
    (root / "test_batch.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test_batch\.bin must be images .* it has 0 bytes"):
        GreyCIFAR10(root, "test")
    with (root / "test_batch.bin").open("wb") as file:
        file.truncate(3073 * 10_000_000)  # 30 GB of zeros that take no space
    with pytest.raises(ValueError, match=r"test_batch\.bin .* 10000 at most; it has 30730000000 bytes"):
        GreyCIFAR10(root, "test")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("imgs/2", "../../../secret.png"),
        ("../outside", "secret.png"),
        ("imgs/../../outside", "secret.png"),
        ("{root}/../outside", "secret.png"),
        ("/", "secret.png"),
        ("imgs/out", "secret.png"),
        ("imgs/2", "{root}/../outside/secret.png"),
    ],
)
def test_metadata_can_not_lead_out_of_the_root(pathfinder, folder, name):
    outside = pathfinder.parent / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes((pathfinder / "imgs" / "2" / "sample_0.png").read_bytes())
    (pathfinder / "imgs" / "out").symlink_to(outside)
    line = f"{folder} {name} 0 1\n".format(root=pathfinder)
    (pathfinder / "metadata" / "2.npy").write_text(line)
    with pytest.raises(ValueError, match=r"2\.npy, line 1: images must lie below .* leads out of it"):
        PathfinderFiles(pathfinder)


def test_images_are_files(pathfinder):
    first, second = (pathfinder / "imgs" / "2" / f"sample_{i}.png" for i in (0, 1))
    first.unlink()
    first.symlink_to(second)
    with pytest.raises(ValueError, match=r"2\.npy, line 1: .*sample_0\.png must be a file, neither a link"):
        PathfinderFiles(pathfinder)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=r"2\.npy, line 1: no image at .*sample_0\.png .*Unpack the files anew"):
        PathfinderFiles(pathfinder)
    (pathfinder / "metadata" / "2.npy").write_bytes(b"imgs/2 sample_1.png 0 1\nimgs/2 \xff.png 0 1\n")
    with pytest.raises(ValueError, match=r"2\.npy: UnicodeDecodeError"):
        PathfinderFiles(pathfinder)


def test_metadata_without_images(pathfinder):
    for file in (pathfinder / "metadata").iterdir():
        file.write_text("")
    with pytest.raises(ValueError, match="metadata must name images that are not empty; it names none"):
        PathfinderFiles(pathfinder)


def test_images_that_are_none(pathfinder):
    path = pathfinder / "imgs" / "2" / "sample_0.png"
    good = path.read_bytes()
    wide = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    begin = good.index(b"IDAT") - 4
    greedy = good[:begin] + struct.pack(">I", 2**31 - 1) + good[begin + 4 :]  # Pillow would ask the file for 2 GB
    bomb = good[:12] + wide + struct.pack(">I", zlib.crc32(wide)) + good[33:]
    dataset = PathfinderFiles(pathfinder)
    for blob, said in (
        (good[:-20], "truncated|broken|OSError"),
        (good[:20], ""),
        (b"GIF89a" + good, "UnidentifiedImageError"),
        (bomb, "bomb|at most 1048576 pixels"),
    ):
        path.write_bytes(blob)
        with pytest.raises(ValueError, match=rf"^{path}: .*({said}).*Unpack the files anew"), at_most(64e6):
            dataset[0]
    path.write_bytes(greedy)
    with at_most(64e6):
        assert int(dataset[0][0][0]) == 20
