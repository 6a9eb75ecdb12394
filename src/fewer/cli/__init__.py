"""The command line."""

from fewer.cli.app import main

__all__ = ["main"]
