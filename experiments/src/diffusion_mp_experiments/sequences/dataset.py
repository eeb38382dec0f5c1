"""Data sets of sequences whose items are made on access, and IMDb reviews: the text task of the Long Range Arena."""

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import KW_ONLY
from pathlib import Path
from random import Random
from typing import IO, Any, ClassVar, Literal

import torch
from torch.utils.data import Dataset

from diffusion_mp.checks import Count, as_whole, checked
from diffusion_mp_experiments.files.archives import members
from diffusion_mp_experiments.files.reading import as_path, reading
from diffusion_mp_experiments.settings import settings

Item = tuple[Any, ...]  # the tokens [L] of a sequence, then the label, an int


class SequenceDataset(Dataset[Item]):
    """Base class of data sets of items (tokens, label), for `DataLoader(..., collate_fn=diffusion_mp.data.pad)`.

    Items are made on access. `list(dataset)` keeps them, which saves time over many epochs. A subclass defines
    `vocabulary` (tokens are 0 .. vocabulary − 1), `classes` (labels are 0 .. classes − 1), `__len__` and `item`.

    Shapes:
        tokens: [L] of int64.
        label: an int.

    Examples:
        >>> isinstance(ListOps(num=2), SequenceDataset)
        True
    """

    vocabulary: ClassVar[int]
    classes: ClassVar[int]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def item(self, index: int) -> Item:
        """Return item `index`, with 0 <= index < len(self)."""

    def __getitem__(self, index: int) -> Item:
        """Return item `index`, counted from the end if negative."""
        return self.item(check_index(index, -len(self), len(self)) % len(self))


@settings
class DrawnDataset(SequenceDataset):
    """Base class of data sets that are drawn: item i depends only on `seed`, split, i and the parameters of the class.

    A subclass is made by `settings`, and defines `sizes`, the number of items of every split, and `item`.
    """

    sizes: ClassVar[dict[str, int]]

    split: Literal["train", "val", "test"] = "train"
    _: KW_ONLY
    num: Count | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.seed = as_whole(self.seed, "seed")
        self._num = self.num or self.sizes[self.split]

    def __len__(self) -> int:
        return self._num

    def random(self, index: int) -> Random:
        """Return the generator of an item, the same in any worker and order.

        Call only its method `random()`, whose sequence Python promises across versions and machines. The key is hashed.
        """
        task = type(self).__name__.lower()
        return item_random(
            task, self.seed, self.split, check_index(index, 0, self._num)
        )


def item_random(*key: str | int) -> Random:
    # Python hashes a text, so neighbouring numbers give unrelated sequences.
    return Random("/".join(map(str, key)))


def check_index(index: object, low: int, high: int) -> int:
    """Return the index as an int; IndexError unless it lies in low .. high − 1, TypeError if it is not whole."""
    number = as_whole(index, "index", "torch.utils.data.Subset takes several items.")
    if not low <= number < high:
        raise IndexError(f"index must lie in {low} .. {high - 1}; got {number}.")
    return number


_CLASSES = ("neg", "pos")
_LONGEST = 1 << 20  # bytes of a review; the longest published one has 14 106


class IMDb(SequenceDataset):
    """Maas et al.'s (2011) film reviews, byte by byte; the label is 1 if the review is positive.

    The class reads the published folder, or the archive without unpacking it. Bytes include markup. Items are in the
    order of label and file name: shuffle them. The Arena (Tay et al. 2021) reads 4 000 bytes and validates on the test
    set.

    Args:
        path: the folder with `train/pos/*.txt` and so on, or a .tar or .tar.gz of it (`aclImdb_v1.tar.gz`).
        split: "train" or "test", 25 000 reviews each.
        max_length: number of bytes that are kept of a review. The default 4 000 is the Arena's.

    Shapes:
        tokens: [L] of int64 in 1–256, L <= max_length.
        label: 0 or 1.

    Examples:
        >>> (folder / "train" / "pos").mkdir(parents=True)
        >>> _ = (folder / "train" / "pos" / "0_9.txt").write_text("Splendid!")
        >>> [(len(tokens), label) for tokens, label in IMDb(folder, max_length=8)]
        [(8, 1)]
    """

    vocabulary = 257
    classes = 2

    @checked
    def __init__(
        self,
        path: str | Path,
        split: Literal["train", "test"] = "train",
        *,
        max_length: Count = 4000,
    ) -> None:
        self.split = split
        self.max_length = max_length
        path = as_path(path, "path")
        reviews = []
        review = re.compile(rf"(?:.*/)?{split}/({'|'.join(_CLASSES)})/([^/]+\.txt)")
        way_out = (
            "Fetch the archive again, as it was published: a .tar or .tar.gz, whole."
        )
        with reading(path, way_out):
            for name, size, content in _files(path, split):
                if match := review.fullmatch(name):
                    if size > _LONGEST:
                        must = f"a review must have at most {_LONGEST} bytes; this one has {size}"
                        raise ValueError(f"{path}, {name[:200]}: {must}.")
                    text = content.read(min(max_length, _LONGEST))
                    reviews.append((_CLASSES.index(match[1]), match[2], text))
        # An archive has them in any order.
        self._reviews = [(text, label) for label, _, text in sorted(reviews)]
        if not self._reviews:
            raise FileNotFoundError(
                f"No {split} reviews at {path}: expected the folder with {split}/pos/*.txt and {split}/neg/*.txt, or "
                "the archive aclImdb_v1.tar.gz (https://ai.stanford.edu/~amaas/data/sentiment)."
            )

    def __len__(self) -> int:
        return len(self._reviews)

    def item(self, index: int) -> Item:
        text, label = self._reviews[index]
        # Zero is left for padding.
        return torch.tensor(list(text[: self.max_length])) + 1, label


def _files(path: Path, split: str) -> Iterator[tuple[str, int, IO[bytes]]]:
    if path.is_file():
        for member, stream in members(path):
            yield member.name, member.size, stream
    for file in (path / split).glob("*/*.txt"):
        if file.is_file():
            name = file.relative_to(path).as_posix()
            with file.open("rb") as content:
                yield name, file.stat().st_size, content
