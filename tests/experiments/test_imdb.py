"""IMDb reviews: the folder and the archive are the same; bytes, labels, what is missing."""

import tarfile
from collections import Counter

import pytest
from small_sets import REVIEWS, write

from diffusion_mp.data import pad
from diffusion_mp_experiments.sequences import IMDb

OTHERS = dict.fromkeys(("train/unsup/0_0.txt", "train/labeledBow.feat", "README", "train/pos/x.md"), "read by nobody")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "aclImdb", REVIEWS | OTHERS)
    return tmp_path / "aclImdb"


def texts(dataset: IMDb) -> list[tuple[bytes, int]]:
    return [(bytes((tokens - 1).tolist()), label) for tokens, label in dataset]


@pytest.mark.parametrize("archive", [None, "w:gz", "w"])
def test_folder_and_archive(folder, tmp_path, archive):
    path = folder
    if archive:
        path = tmp_path / "aclImdb_v1.tar.gz"
        with tarfile.open(path, archive) as tar:
            for file in sorted(folder.rglob("*"), reverse=True):  # not in the order of names
                tar.add(file, f"aclImdb/{file.relative_to(folder)}", recursive=False)
    train, names = IMDb(path), ("train/neg/10_2.txt", "train/neg/9_1.txt", "train/pos/0_9.txt")
    assert texts(train) == [(REVIEWS[name], int("pos" in name)) for name in names]
    assert texts(IMDb(path, "test")) == [(b"", 0), (b"Fine", 1)]
    assert texts(IMDb(path, max_length=4))[1] == (b"Wors", 0)
    assert train[2][0].max() == 0xC3 + 1
    tokens, mask, labels = pad(list(train))
    assert tokens.shape == (3, 81)
    assert mask.sum(dim=1).tolist() == [81, 5, 19]
    assert labels.tolist() == [0, 0, 1]


@pytest.mark.usefixtures("no_typecheck")
def test_refusals(folder, tmp_path):
    with pytest.raises(ValueError, match="split must be one of 'train', 'test'; got 'val'"):
        IMDb(folder, "val")
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        IMDb(folder, max_length=0)
    for path in (tmp_path / "nothing", folder / "train"):
        with pytest.raises(FileNotFoundError, match=r"No train reviews at .* train/pos/\*\.txt"):
            IMDb(path)


@pytest.mark.data
@pytest.mark.exhaustive
def test_the_real_archive(data_root):
    path = data_root / "aclImdb" / "aclImdb_labelled.tar.gz"
    if not path.is_file():
        pytest.skip(f"no aclImdb/aclImdb_labelled.tar.gz at {data_root}")
    dataset = IMDb(path, max_length=1000)
    assert Counter(label for _, label in dataset._reviews) == {0: 12_500, 1: 12_500}
    assert bytes((dataset[0][0] - 1).tolist()).startswith(b"Story of a man who has unnatural feelings for a pig.")
    assert all(len(dataset[i][0]) <= 1000 for i in range(0, 25_000, 500))
