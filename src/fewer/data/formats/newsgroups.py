"""20 Newsgroups by date: posts without the headers, quotes and signatures that reveal their group."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from fewer.data.formats.readers import find_inside, iter_members, reader
from fewer.data.raw_dataset import RawDataset
from fewer.errors import DataError
from fewer.registry import FORMATS

_QUOTE = re.compile(r"^\s*[>|].*\n?|^.*\b(?:writes|wrote):\s*$\n?|^In article\b.*\n?", re.MULTILINE)
_FOOTER = re.compile(r"^--\s*$", re.MULTILINE)
_SENDER = re.compile(r"^From:(.*)$", re.MULTILINE | re.IGNORECASE)
_ADDRESS = re.compile(r"[^\s<>()\",:;]+@[^\s<>()\",:;]+")


@FORMATS.register("newsgroups")
@reader("20 Newsgroups (20news-bydate.tar.gz or its contents)")
def read_newsgroups(path: Path) -> RawDataset:
    """Posts without headers, quotes and signatures; a class is a group, a client is a sender's address."""
    path = find_inside(path, "20news-bydate.tar.gz")
    posts: dict[str, list[tuple[str, str, str]]] = {"train": [], "test": []}
    for name, content in sorted(iter_members(path, lambda name: name.count("/") >= 2)):
        folder, group, _ = name.split("/")[-3:]
        part = folder.rpartition("-")[2]
        if part not in posts:
            raise DataError(f"{path} has '{name}' (expected: 20news-bydate-train/group/post and 20news-bydate-test)")
        head, _, body = content.decode("latin-1").replace("\r\n", "\n").partition("\n\n")
        posts[part].append((_FOOTER.split(_QUOTE.sub("", body), maxsplit=1)[0].strip(), group, _parse_sender(head)))
    class_names = sorted({group for part in posts.values() for _, group, _ in part})
    (x, y, senders), (test_x, test_y, test_senders) = (
        (
            [text for text, _, _ in part],
            np.array([class_names.index(group) for _, group, _ in part], np.int64),
            np.array([sender for _, _, sender in part]),
        )
        for part in posts.values()
    )
    return RawDataset(x, y, (test_x, test_y), senders, test_senders, tuple(class_names))


def _parse_sender(head: str) -> str:
    match = _SENDER.search(head)
    line = match[1].strip() if match else ""
    address = _ADDRESS.search(line)
    return (address[0] if address else line or "unknown").lower()
