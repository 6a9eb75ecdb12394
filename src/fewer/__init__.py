"""Fewer: federated learning in fewer rounds, with fewer samples and fewer bytes.

    import fewer
    from fewer import FedAvg

    result = fewer.run(FedAvg(lr=0.1), data="fashion-mini", model="cnn")
    result.accuracy, result.model

Everything is imported on first use, so that `import fewer` does not load torch. `__init__.pyi` has the static types.
"""

import gc
from importlib import import_module
from typing import Any

from fewer.registry import METHODS

__version__ = "0.1.0"

_PACKAGES = ("audit", "data", "methods", "models")
_API = {
    "errors": ["DataError", "FewerError", "QuorumLost", "RunError", "SettingError"],
    "experiments": ["Comparison", "Tuning", "compare", "tune"],
    "methods": ["Client", "Method", "ModelState", "PersonalMethod", "Scores", "Server", "State"],
    "models": ["Task"],
    "runs.callbacks": ["Callback", "EarlyStopping", "Run"],
    "runs.engine": ["resume", "run"],
    "runs.inference": ["deploy"],
    "runs.result": ["Result", "open_run"],
    "runs.settings": ["Settings"],
    "runtime": ["Clients", "Unable", "on_client", "on_ring", "on_server"],
}
"""Public names by module."""


def _modules_by_name() -> dict[str, str]:
    """The module of each public name; methods come from the registry."""
    modules = {name: f"fewer.{module}" for module, names in _API.items() for name in names}
    return modules | {builtin.attribute: builtin.module for builtin in METHODS.builtins.values()}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    module_name = f"fewer.{name}" if name in _PACKAGES else _modules_by_name().get(name)
    if module_name is None:
        raise AttributeError(f"module 'fewer' has no attribute '{name}'")
    gc_enabled = gc.isenabled()
    gc.disable()  # importing torch creates a million objects and no garbage; collecting takes 0.2 s
    try:
        module = import_module(module_name)
    finally:
        if gc_enabled:
            gc.enable()
    return module if name in _PACKAGES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(["__version__", *_PACKAGES, *_modules_by_name()])
