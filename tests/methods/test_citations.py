"""Every method with a paper has its BibTeX entries, and they agree with the file of the method."""

import inspect
import re
import sys

import pytest

from fewer.methods import find
from fewer.methods.citations import cite, read_papers
from fewer.registry import METHODS
from tests.helpers import call

WITHOUT_PAPER = {"centralized", "dp-fedmk", "fedmk-avg", "local"}


def field(entry: str, name: str) -> str:
    (value,) = re.findall(rf"^  {name} = \{{(.+)\}},$", entry, re.M)
    return str(value)


def paper_text(name: str) -> str:
    """What the files of a method and of its base classes say about papers, on one line."""
    modules = dict.fromkeys(owner.__module__ for owner in find(name).__mro__ if owner.__module__.startswith("fewer."))
    return " ".join(" ".join(inspect.getdoc(sys.modules[module]) or "" for module in modules).split())


def test_every_method_with_a_paper_has_an_entry() -> None:
    cited = {name for _, names in read_papers() for name in names}
    assert cited == {*METHODS.builtins} - WITHOUT_PAPER
    keys = re.findall(r"@\w+\{(\w+),", "\n".join(entry for entry, _ in read_papers()))
    assert len(keys) == len({*keys}) == len(read_papers())


@pytest.mark.parametrize("name", sorted({*METHODS.builtins} - WITHOUT_PAPER))
def test_an_entry_agrees_with_the_file_of_the_method(name: str) -> None:
    text, entries = paper_text(name), cite(name)
    shortened = []
    for entry in entries:
        names = [author.split(",")[0] for author in field(entry, "author").split(" and ")]
        assert field(entry, "year") in text
        shortened.append(f"{names[0]} et al." in text)
        assert shortened[-1] or [name for name in names if name not in text] == []
    titles = [field(entry, "title").partition("?")[0] for entry in entries]
    assert all(shortened) or any(title in text for title in titles)


def test_the_command_prints_bibtex() -> None:
    printed = call("methods", "fedmk", "--cite").stdout
    assert printed.startswith("@inproceedings{liu2023meta,\n  title = {Meta Knowledge Condensation for Federated")
    assert "methods =" not in printed and printed.endswith("  year = {2023},\n}\n")
    assert call("methods", "fl-maml", "--cite").stdout.count("@") == 2
    assert call("methods", "local", "--cite").stdout == "% local has no paper in this list\n"


def test_without_a_method_the_command_says_what_is_missing() -> None:
    assert "METHOD is missing" in call("methods", "--cite", code=2).stderr
