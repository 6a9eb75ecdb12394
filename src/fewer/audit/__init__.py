"""A privacy look at a run: what an attacker could make of what the server sees. It needs the real data."""

from fewer.audit.attacks import AttackImages, Audit, Block, audit

__all__ = ["AttackImages", "Audit", "Block", "audit"]
