"""A privacy look at a run: what an attacker could make of what the coordinator sees. It needs the real data."""

from fewer.audit.look import Audit, Block, Sheet, audit

__all__ = ["Audit", "Block", "Sheet", "audit"]
