"""20 Newsgroups as features and labels of nodes; `KNNGraph` joins them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch_geometric.data import Data

from diffusion_mp.errors import check_counts
from diffusion_mp_experiments.files.archives import members
from diffusion_mp_experiments.files.reading import as_path, check_present, reading

TEN_GROUPS = (
    "alt.atheism",
    "comp.sys.ibm.pc.hardware",
    "misc.forsale",
    "rec.autos",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "talk.politics.guns",
)
_ARCHIVE = "20news-bydate.tar.gz"
_LONGEST = 1 << 20  # bytes of a message that are read; the longest has 160 000
_WAY_OUT = f"Fetch {_ARCHIVE} from http://qwone.com/~jason/20Newsgroups/ and put it there."


def load_newsgroups(root: str | Path, *, groups: Sequence[str] = TEN_GROUPS, num_words: int = 1000) -> Data:
    r"""Messages of 20 Newsgroups (Lang 1995) as weights of words, without edges; ten groups as NodeFormer takes them.

    Only what stands below the header is read, for a header names the group. Words are weighed by scikit-learn's
    `TfidfVectorizer` without English stop words, and rows have norm 1; a message without any of the words is zero.

    Args:
        root: the folder that holds `20news-bydate.tar.gz`.
        groups: names of the groups; number c is class c.
        num_words: how many words, the most frequent ones.

    Returns:
        x [messages, num_words] and y [messages], training and test messages of the archive, in its order.

    Raises:
        TypeError, ValueError: an option does not fit, the archive is damaged, or has nothing of a group.
        FileNotFoundError: it is missing.

    Examples:
        >>> import io, tarfile
        >>> messages = {"sci.space": b"From: a\n\nA rocket flies.", "rec.autos": b"From: b\n\nAn engine and a wheel."}
        >>> with tarfile.open(folder / "20news-bydate.tar.gz", "w:gz") as archive:
        ...     for number, (group, message) in enumerate(messages.items()):
        ...         member = tarfile.TarInfo(f"20news-bydate-train/{group}/{number}")
        ...         member.size = len(message)
        ...         archive.addfile(member, io.BytesIO(message))
        >>> load_newsgroups(folder, groups=list(messages), num_words=4)
        Data(x=[2, 4], y=[2])
    """
    check_counts(num_words=num_words)
    if isinstance(groups, str) or not groups or not all(isinstance(group, str) for group in groups):
        raise TypeError(f"groups must be names of newsgroups; got {groups!r}.")
    from sklearn.feature_extraction.text import TfidfVectorizer

    path = as_path(root, "root") / _ARCHIVE
    check_present("20 Newsgroups", path.parent, [path], _WAY_OUT)
    texts, labels = [], []
    with reading(path, _WAY_OUT):
        for member, content in members(path):
            group = member.name.split("/")[-2] if member.name.count("/") else ""
            if group in groups:
                message = content.read(_LONGEST).decode("latin-1").replace("\r\n", "\n")
                texts.append(message.partition("\n\n")[2])
                labels.append(groups.index(group))
        if len(set(labels)) < len(groups):
            raise ValueError(f"it has nothing of {groups[min({*range(len(groups))}.difference(labels))]}")
        words = TfidfVectorizer(stop_words="english", max_features=num_words).fit_transform(texts)
    return Data(x=torch.from_numpy(words.toarray()).float(), y=torch.tensor(labels))
