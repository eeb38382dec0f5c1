"""IMDb reviews as bytes: the text classification task of the Long Range Arena."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

from diffusion_mp.errors import check_choice, check_counts
from diffusion_mp_experiments.files.archives import members
from diffusion_mp_experiments.files.reading import as_path, reading
from diffusion_mp_experiments.sequences.dataset import Item, SequenceDataset, byte_tokens, check_index

_CLASSES = ("neg", "pos")
_LONGEST = 1 << 20  # bytes of a review; the longest published one has 14 106


class IMDb(SequenceDataset):
    """Maas et al.'s (2011) film reviews, byte by byte; label 1 where the review is positive.

    Reads the published folder, or the archive without unpacking it. Bytes include markup; the Arena (Tay et al. 2021)
    reads 4 000 and uses the test set for validation as well. Items are in the order of label and file name: shuffle
    them.

    Shapes: tokens [L] long, 1–256, L <= max_length; label 0 or 1.

    Args:
        path: the folder with `train/pos/*.txt` and so on, or a .tar or .tar.gz of it (`aclImdb_v1.tar.gz`).
        split: "train" or "test", 25 000 reviews each.
        max_length: bytes that are kept of a review.

    Examples:
        >>> (folder / "train" / "pos").mkdir(parents=True)
        >>> _ = (folder / "train" / "pos" / "0_9.txt").write_text("Splendid!")
        >>> [(len(tokens), label) for tokens, label in IMDb(folder, max_length=8)]
        [(8, 1)]
    """

    vocabulary = 257
    classes = 2

    def __init__(self, path: str | Path, split: Literal["train", "test"] = "train", *, max_length: int = 4000) -> None:
        check_choice(split, "split", ("train", "test"))
        check_counts(max_length=max_length)
        self.split, self.max_length = split, max_length
        path, reviews = as_path(path, "path"), []
        review = re.compile(rf"(?:.*/)?{split}/({'|'.join(_CLASSES)})/([^/]+\.txt)")
        with reading(path, "Fetch the archive again, as it was published: a .tar or .tar.gz, whole."):
            for name, size, content in _files(path, split):
                if found := review.fullmatch(name):
                    if size > _LONGEST:
                        must = f"a review must have at most {_LONGEST} bytes; this one has {size}"
                        raise ValueError(f"{path}, {name[:200]}: {must}.")
                    reviews.append((_CLASSES.index(found[1]), found[2], content.read(min(max_length, _LONGEST))))
        self._reviews = [(text, label) for label, _, text in sorted(reviews)]
        if not self._reviews:
            raise FileNotFoundError(
                f"No {split} reviews at {path}: expected the folder with {split}/pos/*.txt and {split}/neg/*.txt, or "
                "the archive aclImdb_v1.tar.gz (https://ai.stanford.edu/~amaas/data/sentiment)."
            )

    def __len__(self) -> int:
        return len(self._reviews)

    def item(self, index: int) -> Item:
        text, label = self._reviews[check_index(index, 0, len(self))]
        return byte_tokens(text, self.max_length), label


def _files(path: Path, split: str) -> Iterator[tuple[str, int, IO[bytes]]]:
    if path.is_file():
        yield from ((member.name, member.size, content) for member, content in members(path))
    for file in (path / split).glob("*/*.txt"):
        if file.is_file():
            with file.open("rb") as content:
                yield f"{split}/{file.parent.name}/{file.name}", file.stat().st_size, content
