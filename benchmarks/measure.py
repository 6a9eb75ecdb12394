"""Measuring: repetitions in turn, processes with their memory, figures with their goals."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any

import psutil

SAMPLE = 0.2
"""Seconds between two looks at the memory of a process."""


@dataclass(frozen=True)
class Figure:
    """One measured number, with its goal if it has one."""

    what: str
    value: float
    unit: str
    most: float | None = None
    least: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.most is None and self.least is None:
            return None
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    def line(self) -> str:
        """The figure as a line of a table."""
        goal = "" if self.met is None else f"<= {self.most:g}" if self.most is not None else f">= {self.least:g}"
        verdict = {None: "", True: "ok", False: "missed"}[self.met]
        return f"  {self.what:<44} {self.value:>8.4g} {self.unit:<3} {goal:<8} {verdict:<7} {self.detail}".rstrip()

    def row(self) -> dict[str, Any]:
        """The figure as JSON."""
        return {**asdict(self), "met": self.met}


def alternate(repeats: int, *sides: Callable[[], float]) -> list[list[float]]:
    """The results of all sides, taken in turn so that a busy machine hits them alike."""
    results: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, result in zip(sides, results, strict=True):
            result.append(side())
    return results


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over repetitions of one side's ratio to the other."""
    return median(a / b for a, b in zip(above, below, strict=True))


class Process:
    """A module in a new interpreter, which prints a line of JSON for each round (`work.Turns`)."""

    def __init__(self, module: str, *arguments: str, waits: bool = False) -> None:
        self.what = " ".join([module, *arguments])
        self.rounds: list[dict[str, Any]] = []
        self.peak = self.seconds = 0.0
        self.begun = time.perf_counter()
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._watch, daemon=True).start()

    def go(self) -> None:
        """Let it begin its next round; the first it begins unasked."""
        assert self.child.stdin
        if self.rounds:
            self.child.stdin.write("\n")
            self.child.stdin.flush()

    def wait(self) -> None:
        """Wait until the round has ended."""
        assert self.child.stdout
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.what} ended early")
        self.rounds.append(json.loads(line))

    def end(self) -> None:
        """Let it run to its end, and take the time from launch to exit."""
        self.child.communicate()
        self.seconds = time.perf_counter() - self.begun
        if self.child.returncode:
            raise SystemExit(f"{self.what} failed")

    @property
    def times(self) -> list[float]:
        """Seconds of each round but the first, which has the start in it."""
        return [line["seconds"] for line in self.rounds[1:]]

    def _watch(self) -> None:
        """Sample the resident memory of the process and all its children, in MB: `peak` is the most at once."""
        with suppress(psutil.Error):
            root = psutil.Process(self.child.pid)
            while self.child.returncode is None:
                total = 0.0
                for process in [root, *root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        total += process.memory_info().rss / 2**20
                self.peak = max(self.peak, total)
                time.sleep(SAMPLE)


def in_turn(rounds: int, *sides: Sequence[Process]) -> None:
    """Rounds of all sides in turn, the processes of one side at the same time; then all run to their ends."""
    for _ in range(rounds):
        for side in sides:
            for process in side:
                process.go()
            for process in side:
                process.wait()
    for process in chain(*sides):
        process.end()
