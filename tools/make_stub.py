"""Writes src/fewer/__init__.pyi, the static types of the public API: `python tools/make_stub.py`."""

from __future__ import annotations

from pathlib import Path

import fewer

STUB = Path(fewer.__file__).with_suffix(".pyi")


def stub() -> str:
    """Returns the content of the stub file."""
    imports = [f"from fewer import {package} as {package}" for package in fewer._PACKAGES if package != "audit"]
    imports.append("from fewer.audit import audit as audit")
    imports += [f"from {module} import {name} as {name}" for name, module in fewer._modules_by_name().items()]
    lines = [
        "# Written by tools/make_stub.py from the registry of methods.",
        *sorted(imports),
        "",
        "__version__: str",
        "_PACKAGES: tuple[str, ...]",
        "",
        "def _modules_by_name() -> dict[str, str]: ...",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    STUB.write_text(stub())
