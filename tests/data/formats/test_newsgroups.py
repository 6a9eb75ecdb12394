"""The 20 Newsgroups archive."""

from __future__ import annotations

from pathlib import Path

from tests.data.formats.files import check_refused, count, needs_real_data, read, read_real, shapes, write, write_tar

# --- newsgroups -------------------------------------------------------------------------------------------------


POST = (
    b"Subject: caf\xe9\nFrom: Ann Other <Ann@Example.org>\n\nann@x.org writes:\n> quoted\n"
    b"| quoted too\nIn article <1> bob wrote:\nMy own w\xf6rds.\n\nMore -- of them.\n-- \nAnn\nSignature\n"
)


def test_newsgroups_are_read_by_group_and_author(tmp_path: Path) -> None:
    files = {
        "20news-bydate-train/sci.med/1": POST,
        "20news-bydate-train/alt.atheism/2": b"From: bob@here.edu (Bob)\r\n\r\nOnly this.\r\n",
        "20news-bydate-test/sci.med/3": b"From: nobody\n\n> all is quoted\n",
        "20news-bydate-test/sci.med/4": b"no blank line",
    }
    write_tar(tmp_path / "20news-bydate.tar.gz", files)
    for name, content in files.items():
        write(tmp_path / "tree" / name, content)
    for path in (tmp_path, tmp_path / "20news-bydate.tar.gz", tmp_path / "tree"):
        raw = read("newsgroups", path)
        assert raw.x == ["Only this.", "My own wörds.\n\nMore -- of them."] and raw.y.tolist() == [0, 1]
        assert raw.class_names == ("alt.atheism", "sci.med") and raw.test is not None and raw.test[1].tolist() == [1, 1]
        assert raw.client_ids is not None and raw.client_ids.tolist() == ["bob@here.edu", "ann@example.org"]
        assert raw.test_client_ids is not None and raw.test_client_ids.tolist() == ["nobody", "unknown"]
    check_refused(
        "newsgroups", write_tar(tmp_path / "a.tar.gz", {"somewhere/sci.med/1": POST}), "expected: 20news-bydate-train"
    )


# --- real datasets ----------------------------------------------------------------------------------------------


@needs_real_data
def test_real_newsgroups_have_their_published_sizes() -> None:
    raw = read_real("newsgroups", "20newsgroups")
    assert shapes(raw) == ((11_314,), (7_532,)) and len(raw.class_names) == count(raw.y) == 20
    assert isinstance(raw.x, list) and sum(not text for text in raw.x) < 0.05 * len(raw.x)
