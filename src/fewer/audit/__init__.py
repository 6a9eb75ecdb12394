"""Privacy audit of a run: what an attacker learns from the server's view. It needs the clients' real data.

The package is callable: `fewer.audit("runs/…")` is `fewer.audit.audit("runs/…")`.
"""

import sys
from types import ModuleType
from typing import Any

from fewer.audit.attacks import AttackImages, Audit, Block, audit

__all__ = ["AttackImages", "Audit", "Block", "audit"]


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Audit:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
