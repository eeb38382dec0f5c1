"""Readers of Long Range Arena files (Tay et al. 2021): retrieval, images, Pathfinder. Nothing is downloaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import UInt8

from diffusion_mp.data.arguments import as_path
from diffusion_mp.data.reading import reading
from diffusion_mp.data.sequences import Item, SequenceDataset, byte_tokens, check_index
from diffusion_mp.data.text_tables import line_blocks, line_ends
from diffusion_mp.errors import check_choice, check_counts

Split = Literal["train", "val", "test"]
_SPLITS = ("train", "val", "test")
_RECORD = 1 + 3 * 1024  # bytes of an image in CIFAR-10's binary version: label, then red, green and blue planes
_BATCHES = {split: tuple(f"data_batch_{i}.bin" for i in range(1, 6)) for split in ("train", "val")}
_BATCHES["test"] = ("test_batch.bin",)
_BATCH = 10_000  # images of a file, as it was published
_PIXELS = 1 << 20  # the most of an image; the Arena's have 32² to 256²
_IMAGE = 1 << 23  # bytes that are read of a file: eight for every pixel
_LINES = 1 << 16
_AS_PUBLISHED = "Unpack the files anew, as they were published."


class RetrievalPairs(SequenceDataset):
    """The retrieval task: two articles of the ACL Anthology Network, byte by byte; label 1 where one cites the other.

    A line is label TAB id TAB id TAB text TAB text, without quotes or header (`new_aan_pairs.train.tsv`, `.eval`,
    `.test`). Lines are looked up in the file when they are asked for, so that it need not fit into memory.

    Shapes: two times tokens [L] long, 1–256, L <= max_length; label 0 or 1.
    Errors: FileNotFoundError; ValueError for a `max_length` below 1, a file without lines, a line of more than 16 MiB,
    and, when it is read, naming the line that has not five columns and a label 0 or 1.

    Args:
        path: the file.
        max_length: bytes that are kept of a text.
    """

    vocabulary = 257
    classes = 2

    def __init__(self, path: str | Path, *, max_length: int = 4000) -> None:
        check_counts(max_length=max_length)
        self.path, self.max_length = as_path(path, "path"), max_length
        if not self.path.is_file():
            raise FileNotFoundError(
                f"No retrieval pairs at {self.path}: name the Arena's new_aan_pairs.train.tsv, .eval.tsv or .test.tsv."
            )
        self._ends = torch.from_numpy(line_ends(self.path))
        if not len(self._ends):
            raise ValueError(f"{self.path} must have a line for each pair of texts; it is empty.")

    def __len__(self) -> int:
        return len(self._ends)

    def item(self, index: int) -> Item:
        """The two texts of line `index`, and whether they belong together."""
        index = check_index(index, 0, len(self))
        begin = int(self._ends[index - 1]) if index else 0
        with self.path.open("rb") as file:
            file.seek(begin)
            columns = file.read(int(self._ends[index]) - begin).rstrip(b"\r\n").split(b"\t", 5)
        if len(columns) != 5 or columns[0] not in (b"0", b"1", b"0.0", b"1.0"):
            raise ValueError(
                f"{self.path}, line {index + 1}: expected label, two ids and two texts, the label 0 or 1; "
                f"got {len(columns)} columns, the first {columns[0][:20]!r}."
            )
        one, other = (byte_tokens(text, self.max_length) for text in columns[3:])
        return one, other, int(float(columns[0]))


class GreyCIFAR10(SequenceDataset):
    """The image task: CIFAR-10 (Krizhevsky 2009) in grey, pixel by pixel, row after row.

    Reads the *binary* version, whose files are numbers and nothing else; those of the Python version are pickles, which
    can run code. Grey is 0.2989 R + 0.5870 G + 0.1140 B, rounded as TensorFlow does, ⌊255.5/255 · …⌋, in whole numbers.
    "val" is the last tenth of the training images in the order of the files; the Arena's is that of its own order.

    Shapes: tokens [1024] long, 0–255; label 0–9.
    Errors: ValueError for an unknown split, or a file that is not 1 to 10 000 whole images with labels 0–9;
    FileNotFoundError naming the missing files.

    Args:
        root: the folder `cifar-10-batches-bin`.
        split: "train" (45 000), "val" (5 000) or "test" (10 000).
    """

    vocabulary = 256
    classes = 10

    def __init__(self, root: str | Path, split: Split = "train") -> None:
        check_choice(split, "split", _SPLITS)
        root = as_path(root, "root")
        missing = [name for name in _BATCHES[split] if not (root / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"CIFAR-10 is not at {root}: missing {', '.join(missing)}. Unpack cifar-10-binary.tar.gz "
                "(https://www.cs.toronto.edu/~kriz/cifar.html) and name its folder cifar-10-batches-bin."
            )
        records = np.concatenate([_images(root / name) for name in _BATCHES[split]])
        if split != "test":
            records = np.split(records, [len(records) - len(records) // 10])[_SPLITS.index(split)]
        self._labels = records[:, 0].tolist()
        self._images = [_grey(record[1:]) for record in records]

    def __len__(self) -> int:
        return len(self._labels)

    def item(self, index: int) -> Item:
        """The grey values of image `index`, row after row, and its class."""
        index = check_index(index, 0, len(self))
        return torch.from_numpy(self._images[index]).long(), self._labels[index]


class PathfinderFiles(SequenceDataset):
    """The Pathfinder task from published files; `Pathfinder` draws a task of this kind without them.

    Reads `metadata/<number>.npy`, which is text in spite of its name: folder, file, number, label and more, between
    spaces. Some published images are empty files; they are left out, as in the Arena. The first 80 % in the order of
    the metadata are "train", the next 10 % "val" and the rest "test"; the Arena has the same shares in an order of
    its own.

    Shapes: tokens [size²] long, 0–255, row after row; label 0 or 1.
    Metadata can name no file outside `root`: a path that leads out of it is refused, and so is a link.

    Errors: ValueError for an unknown split, a line without a label or with a path that leads out of `root`, no images,
    and, when it is read, for what is no PNG of at most 1 048 576 pixels; FileNotFoundError; ModuleNotFoundError without
    Pillow.

    Args:
        root: the folder of one difficulty, such as `pathfinder32/curv_contour_length_14` (the hard one).
        split: "train", "val" or "test".
    """

    vocabulary = 256
    classes = 2

    def __init__(self, root: str | Path, split: Split = "train") -> None:
        check_choice(split, "split", _SPLITS)
        root = as_path(root, "root")
        files = sorted((root / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
        if not files:
            raise FileNotFoundError(
                f"No Pathfinder at {root}: expected metadata/*.npy and imgs/ of one difficulty of the Arena's "
                "lra_release.gz, such as pathfinder32/curv_contour_length_14."
            )
        images = [(path, label) for file in files for path, label in _named_images(root, file)]
        if not images:
            raise ValueError(f"{root / 'metadata'} must name images that are not empty; it names none. {_AS_PUBLISHED}")
        first, second = len(images) * 8 // 10, len(images) * 9 // 10
        self._images = {"train": images[:first], "val": images[first:second], "test": images[second:]}[split]

    def __len__(self) -> int:
        return len(self._images)

    def item(self, index: int) -> Item:
        """The grey values of image `index`, row after row, and its label."""
        try:
            from PIL import Image
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "PNG files are read with Pillow, which is not installed: pip install pillow."
            ) from error
        path, label = self._images[check_index(index, 0, len(self))]
        with path.open("rb") as file:
            content = BytesIO(file.read(_IMAGE))  # Pillow asks a file for as much as a chunk claims to have
        with reading(path, _AS_PUBLISHED), Image.open(content, formats=["PNG"]) as image:
            if image.width * image.height > _PIXELS:
                raise ValueError(f"an image must have at most {_PIXELS} pixels; this has {image.width}·{image.height}")
            return torch.from_numpy(np.asarray(image.convert("L")).flatten()).long(), label


def _named_images(root: Path, metadata: Path) -> Iterator[tuple[Path, int]]:
    """The images that a file of metadata names, but empty ones, and their labels."""
    inside, folders = root.resolve(), dict[str, Path]()
    for start, lines in line_blocks(metadata, _LINES, progress=False):
        for number, line in enumerate(lines, start + 1):
            where = f"{metadata}, line {number}"
            with reading(metadata, _AS_PUBLISHED):
                columns = line.decode().split()
                if len(columns) < 4 or columns[3] not in ("0", "1"):
                    raise ValueError(f"{where}: expected folder, file, number and label; got {line[:60].decode()!r}.")
                below, name = columns[:2]
                folder = folders[below] if below in folders else folders.setdefault(below, (root / below).resolve())
            if not folder.is_relative_to(inside) or Path(name).name != name:
                raise ValueError(
                    f"{where}: images must lie below {root}; {below[:60]!r} {name[:60]!r} leads out of it. "
                    f"{_AS_PUBLISHED}"
                )
            path = folder / name
            try:
                status = os.lstat(path)
            except (OSError, ValueError) as error:
                raise FileNotFoundError(f"{where}: no image at {path} ({error}). {_AS_PUBLISHED}") from error
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{where}: {path} must be a file, neither a link nor a folder. {_AS_PUBLISHED}")
            if status.st_size:
                yield path, int(columns[3])


def _images(path: Path) -> UInt8[np.ndarray, "images bytes"]:
    content = np.fromfile(path, np.uint8, _BATCH * _RECORD + 1)  # so many at most
    if not 0 < len(content) <= _BATCH * _RECORD or len(content) % _RECORD or content[::_RECORD].max() > 9:
        raise ValueError(
            f"{path} must be images of {_RECORD} bytes that begin with a label 0 .. 9, {_BATCH} at most; it has "
            f"{path.stat().st_size} bytes. {_AS_PUBLISHED}"
        )
    return content.reshape(-1, _RECORD)


def _grey(planes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    red, green, blue = planes.reshape(3, -1).astype(np.int64)
    return ((2989 * red + 5870 * green + 1140 * blue) * 511 // (2 * 255 * 10_000)).astype(np.uint8)
