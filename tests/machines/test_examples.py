"""The files in docs/examples/machines, as far as they can be checked without root."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

from fewer.cli.app import app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples/machines"
UNIT = EXAMPLES / "fewer-join.service"


def parsed(line: str) -> dict[str, object]:
    """The parsed parameters of a `fewer` command line, without running it; click's error if it is wrong."""
    words = shlex.split(line)
    assert Path(words[0]).name == "fewer"
    command = typer.main.get_command(app)
    for depth, word in enumerate(words[1:], 2):
        if not hasattr(command, "commands"):
            break
        command, rest = command.commands[word], words[depth:]
    with command.make_context(words[1], rest) as context:
        return context.params


def test_a_wrong_word_is_found() -> None:
    with pytest.raises(click.UsageError, match="--keey"):
        parsed("fewer join a:1 --keey x")


def test_the_compose_file_starts_what_there_is() -> None:
    compose = pytest.importorskip("yaml").safe_load((EXAMPLES / "compose.yaml").read_text())
    services = compose["services"]
    assert sorted(services) == [*(f"client-{n}" for n in range(3)), "server"]
    listens = parsed(services["server"]["command"])
    assert listens["clients"] == 3
    named = set()
    for name, service in services.items():
        build = service["build"]
        assert (EXAMPLES / build["context"]).resolve() == ROOT
        for copied in re.findall(r"^COPY (.*) \S+$", build["dockerfile_inline"], re.MULTILINE):
            assert all((ROOT / file).exists() for file in copied.split())
        inside = {volume.split(":")[1] for volume in service["volumes"]}
        named |= {source for volume in service["volumes"] if "/" not in (source := volume.split(":")[0])}
        given = parsed(service["command"])
        if name == "server":
            assert {given["keys"], str(Path(str(given["out"])).parent)} <= inside
        else:
            assert given["address"] == f"server:{listens['port']}"
            data = Path(str(given["data"]).partition(":")[2])
            assert {given["key"], given["store"], str(data.parent)} <= inside
            assert f"./keys/{name}:{given['key']}:ro" in service["volumes"]
    assert named == set(compose["volumes"])


def test_the_unit_starts_what_there_is(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    given = parsed(line)
    (state,) = re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
    assert given["store"] == f"/var/lib/{state}"  # the only place where it may write
    assert "RestartPreventExitStatus=2\n" in text  # no restart every 5 seconds after a mistake in the line
    if verify := shutil.which("systemd-analyze"):
        copy = tmp_path / UNIT.name
        copy.write_text(text.replace(shlex.split(line)[0], sys.executable))
        said = subprocess.run([verify, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
        assert UNIT.name not in said.stderr, said.stderr


def test_the_commands_of_the_page_are_commands() -> None:
    text = (ROOT / "docs/machines.md").read_text()
    lines = re.findall(r"^    (fewer (?:keys|server|join|local-cluster) [^#\n]*)", text, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        if " seal " in line or " trust " in line:  # they need an existing folder
            continue
        parsed(line)
