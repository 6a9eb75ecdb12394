"""Builds a wheel, installs it into a new environment and runs it outside the checkout: python tools/check_wheel.py.

The new environment has nothing but the wheel. It borrows the dependencies of the environment that runs this file, so
that nothing is downloaded. With --newest, pip installs the newest dependencies that the wheel allows instead.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
LOCATE = "import fewer; print(fewer.__file__)"
COMMANDS = (
    "fewer --version",
    "fewer run --help",
    "fewer run fedavg --data fashion-mini --clients 5 --rounds 1 --out run",  # embedded data, and a report
    "fewer reproduce --list",
    "fewer methods fedmk --cite",
)


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command and returns its output; stops with all of it if the command fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Builds the wheel in `folder`, with the build tools of this environment."""
    shutil.rmtree(ROOT / "build/lib", ignore_errors=True)  # files of earlier builds would get into the wheel
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, cwd=folder)
    return next(folder.glob("fewer-*.whl"))


def find_missing_files(wheel: Path) -> set[str]:
    """Returns the files of the package that the wheel lacks."""
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "fewer", cwd=SOURCE).splitlines()
    return {name for name in tracked if (SOURCE / name).exists()} - {*zipfile.ZipFile(wheel).namelist()}


def install(wheel: Path, environment: Path, newest: bool) -> Path:
    """Installs the wheel into a new environment and returns the directory of its commands."""
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    commands = environment / "bin"
    pip = (sys.executable, "-m", "pip", "--python", commands / "python", "install", "--quiet")
    if newest:
        run(*pip, wheel, cwd=ROOT)
        return commands
    run(*pip, "--no-deps", wheel, cwd=ROOT)
    packages = run(commands / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=environment).strip()
    # A path in a .pth file brings no .pth files of its own, so an editable Fewer stays out.
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return commands


def main() -> None:
    """Builds, installs and runs the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        wheel = build_wheel(folder)
        if missing := find_missing_files(wheel):
            sys.exit(f"The wheel lacks {', '.join(sorted(missing))}: see package-data in pyproject.toml.")
        commands = install(wheel, folder / "environment", newest="--newest" in sys.argv)
        location = run(commands / "python", "-I", "-c", LOCATE, cwd=folder).strip()
        if not location.startswith(str(folder)):
            sys.exit(f"The environment imports {location}, not the wheel.")
        for command in COMMANDS:
            print(f"$ {command}\n{run(commands / 'fewer', *command.split()[1:], cwd=folder)}", end="")
        if not (folder / "run/report/report.html").stat().st_size:
            sys.exit("The run has no report.")


if __name__ == "__main__":
    main()
