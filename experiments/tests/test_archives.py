"""IMDb's reviews in folders and archives, and tar archives that somebody made on purpose."""

import gzip
import io
import re
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from diffusion_mp_experiments.files import archives
from diffusion_mp_experiments.sequences import IMDb
from small_sets import REVIEWS, at_most, write

OTHERS = dict.fromkeys(
    ("train/unsup/0_0.txt", "train/labeledBow.feat", "README", "train/pos/x.md"),
    "read by nobody",
)


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
            for file in sorted(
                folder.rglob("*"), reverse=True
            ):  # not in the order of names
                tar.add(file, f"aclImdb/{file.relative_to(folder)}", recursive=False)
    train = IMDb(path)
    names = ("train/neg/10_2.txt", "train/neg/9_1.txt", "train/pos/0_9.txt")
    assert texts(train) == [(REVIEWS[name], int("pos" in name)) for name in names]
    assert texts(IMDb(path, "test")) == [(b"", 0), (b"Fine", 1)]
    assert texts(IMDb(path, max_length=4))[1] == (b"Wors", 0)
    assert train[2][0].max() == 0xC3 + 1


@pytest.mark.data
@pytest.mark.exhaustive
def test_the_real_archive(data_root):
    path = data_root / "aclImdb" / "aclImdb_labelled.tar.gz"
    if not path.is_file():
        pytest.skip(f"no aclImdb/aclImdb_labelled.tar.gz at {data_root}")
    dataset = IMDb(path, max_length=1000)
    assert Counter(label for _, label in dataset._reviews) == {0: 12_500, 1: 12_500}
    assert bytes((dataset[0][0] - 1).tolist()).startswith(
        b"Story of a man who has unnatural feelings for a pig."
    )
    assert all(len(dataset[i][0]) <= 1000 for i in range(0, 25_000, 500))


def header(
    name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    member.type = kind
    member.linkname = link
    return member.tobuf(tarfile.GNU_FORMAT)


def content(text: bytes) -> bytes:
    return text + bytes(-len(text) % 512)


def review(name: str, text: bytes = b"Good") -> bytes:
    return header(name, len(text)) + content(text)


END = bytes(1024)
TWO = review("aclImdb/train/pos/1_9.txt") + review("aclImdb/train/neg/2_1.txt", b"Bad")


def saved(path: Path, blob: bytes) -> Path:
    path.write_bytes(blob)
    return path


def read(path: Path) -> list[bytes]:
    return [bytes((tokens - 1).tolist()) for tokens, _ in IMDb(path)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_links_devices_and_folders_are_passed_over(tmp_path, pack):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    odd = [
        header("train/pos/3_9.txt", kind=tarfile.SYMTYPE, link=str(secret)),
        header("train/pos/4_9.txt", kind=tarfile.LNKTYPE, link=str(secret)),
        header(
            "train/pos/5_9.txt", kind=tarfile.SYMTYPE, link="aclImdb/train/pos/1_9.txt"
        ),
        header("train/pos/6_9.txt", kind=tarfile.CHRTYPE),
        header("train/pos/7_9.txt", kind=tarfile.FIFOTYPE),
        header("train/pos/8_9.txt", kind=tarfile.DIRTYPE),
        header("../../train/pos/escape.md", 4) + content(b"Good"),
    ]
    before = sorted(tmp_path.rglob("*"))
    path = saved(tmp_path / "a.tar", pack(b"".join(odd) + TWO + END))
    assert read(path) == [b"Bad", b"Good"]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, path])


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (
            TWO,
            "damaged or cut off",
        ),  # tarfile takes the end of the file for the end of the archive
        (
            TWO[:1024] + b"X" * 512 + TWO[1024:] + END,
            "damaged or cut off",
        ),  # and any header it can not read
        (TWO[:-100], "ReadError"),
        (TWO + END + TWO + END, "goes on after its end"),
        (TWO + END + bytes(2 << 20), "goes on after its end"),
        (b"", "ReadError"),
        (b"no archive" * 100, "ReadError"),
        (
            header("train/pos/1.txt", 1 << 40) + TWO + END,
            "at most 1048576 bytes; this one has 1099511627776",
        ),
        (
            header("x", 1 << 40, tarfile.XHDTYPE) + TWO + END,
            "a header wants 1099511627776 bytes at once",
        ),
        (
            header("x", 1 << 40, tarfile.GNUTYPE_LONGNAME) + TWO + END,
            "a header wants 1099511627776 bytes at once",
        ),
        (header("x", -1024) + TWO + END, ""),  # led old tarfiles round and round
        (TWO + header("x", -(1 << 20)) + END, ""),
        (
            (header("x", 5, tarfile.GNUTYPE_LONGNAME) + content(b"long\0")) * 2000
            + TWO
            + END,
            "RecursionError",
        ),
    ],
)
def test_what_is_no_whole_archive_is_one_sentence(tmp_path, pack, blob, said):
    path = saved(tmp_path / "a.tar.gz", pack(blob))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}.*{said}"):
        read(path)


def test_a_header_decides_nothing_about_memory(tmp_path):
    """One header says that 256 MB of attributes follow; zeros compress to nothing."""
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header("x", 1 << 28, tarfile.XHDTYPE))
        for _ in range(256):
            file.write(bytes(1 << 20))
    with (
        pytest.raises(ValueError, match="a header wants 268435456 bytes at once"),
        at_most(16e6),
    ):
        read(path)


def test_members_are_counted_and_no_header_leads_back(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "_MEMBERS", 3)
    path = saved(tmp_path / "a.tar", review("README") + TWO + END)
    assert len(read(path)) == 2
    saved(path, review("README") + header("x") + TWO + END)
    with pytest.raises(ValueError, match="more than 3 members"):
        read(path)
    stream = archives._Forward(io.BytesIO(b"abc"))
    assert stream.read(2) == b"ab"
    with pytest.raises(tarfile.ReadError, match="a header leads back"):
        stream.seek(0)


def test_reviews_in_a_folder_are_files_of_bounded_size_and_there_are_some(
    tmp_path, folder
):
    folder = tmp_path / "train" / "pos"
    folder.mkdir(parents=True)
    (folder / "1_9.txt").write_bytes(b"Good")
    (folder / "2_9.txt").mkdir()
    assert read(tmp_path) == [b"Good"]
    assert len(IMDb(tmp_path, max_length=10**15)[0][0]) == 4
    with (folder / "3_9.txt").open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(
        ValueError,
        match=r"3_9\.txt: a review must have at most 1048576 bytes; this one has 2097152",
    ):
        read(tmp_path)
    for path in (tmp_path / "nothing", folder / "train"):
        with pytest.raises(
            FileNotFoundError, match=r"No train reviews at .* train/pos/\*\.txt"
        ):
            IMDb(path)


@pytest.mark.parametrize(
    "format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]
)
def test_long_names_are_read(tmp_path, format):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=format) as archive:
        member = tarfile.TarInfo("a" * 60 + "/" + "b" * 60 + "/train/pos/1_9.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"Good"))
    assert read(tmp_path / "a.tar.gz") == [b"Good"]
