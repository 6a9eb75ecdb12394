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


def parse_command(line: str) -> dict[str, object]:
    """Parses a `fewer` command line without running it; raises click's error if it is wrong."""
    args = shlex.split(line)
    assert Path(args[0]).name == "fewer"
    command = typer.main.get_command(app)
    for depth, arg in enumerate(args[1:], 2):
        if not hasattr(command, "commands"):
            break
        command, rest = command.commands[arg], args[depth:]
    with command.make_context(args[1], rest) as context:
        return context.params


def test_an_unknown_flag_is_an_error() -> None:
    with pytest.raises(click.UsageError, match="--keey"):
        parse_command("fewer join a:1 --keey x")


def test_the_compose_file_starts_valid_commands() -> None:
    compose = pytest.importorskip("yaml").safe_load((EXAMPLES / "compose.yaml").read_text())
    services = compose["services"]
    assert sorted(services) == [*(f"client-{n}" for n in range(3)), "server"]
    server_options = parse_command(services["server"]["command"])
    assert server_options["clients"] is None  # as many as there are keys
    volumes = set()
    for name, service in services.items():
        build = service["build"]
        assert (EXAMPLES / build["context"]).resolve() == ROOT
        for copied in re.findall(r"^COPY (.*) \S+$", build["dockerfile_inline"], re.MULTILINE):
            assert all((ROOT / file).exists() for file in copied.split())
        container_paths = {volume.split(":")[1] for volume in service["volumes"]}
        volumes |= {source for volume in service["volumes"] if "/" not in (source := volume.split(":")[0])}
        options = parse_command(service["command"])
        if name == "server":
            assert {options["keys"], str(Path(str(options["out"])).parent)} <= container_paths
        else:
            assert options["address"] == f"server:{server_options['port']}"
            data = Path(str(options["data"]).partition(":")[2])
            assert {options["key"], options["store"], str(data.parent)} <= container_paths
            assert f"./keys/{name}:{options['key']}:ro" in service["volumes"]
    assert volumes == set(compose["volumes"])


def test_the_systemd_unit_starts_a_valid_command(tmp_path: Path) -> None:
    text = UNIT.read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    options = parse_command(line)
    (state,) = re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
    assert options["store"] == f"/var/lib/{state}"  # the only place where it may write
    assert "RestartPreventExitStatus=2\n" in text  # no restarts after a mistake in the command
    if verify := shutil.which("systemd-analyze"):
        copy = tmp_path / UNIT.name
        copy.write_text(text.replace(shlex.split(line)[0], sys.executable))
        checked = subprocess.run([verify, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
        assert UNIT.name not in checked.stderr, checked.stderr


def test_the_commands_on_the_page_are_valid() -> None:
    text = (ROOT / "docs/how-to/machines.md").read_text()
    lines = re.findall(r"^    (fewer (?:keys|server|join|local-cluster) [^#\n]*)", text, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        if " seal " in line or " trust " in line:  # they need an existing folder
            continue
        parse_command(line)
