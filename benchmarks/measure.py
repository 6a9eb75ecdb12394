"""Measuring tools: alternating repetitions, processes with their memory, measurements with goals."""

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

MEMORY_INTERVAL = 0.2
"""Seconds between two memory samples of a process."""


@dataclass(frozen=True)
class Measurement:
    """One measured number, with its goal if it has one."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """True if the goal is met; None without a goal."""
        if self.at_most is None and self.at_least is None:
            return None
        low_enough = self.at_most is None or self.value <= self.at_most
        return low_enough and (self.at_least is None or self.value >= self.at_least)

    def format_line(self) -> str:
        """Formats the measurement as a line of a table."""
        goal = ""
        if self.met is not None:
            goal = f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"
        verdict = {None: "", True: "ok", False: "missed"}[self.met]
        return f"  {self.name:<44} {self.value:>8.4g} {self.unit:<3} {goal:<8} {verdict:<7} {self.detail}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """Converts the measurement to plain values."""
        return {**asdict(self), "met": self.met}


def alternate(repeats: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Runs all sides in turn, so that a busy machine slows them equally, and returns the results of each."""
    results: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, result in zip(sides, results, strict=True):
            result.append(side())
    return results


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median over repetitions of the ratio of two sides."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


class Process:
    """A module in a new interpreter, which prints a line of JSON per round (`work.RoundPrinter`)."""

    def __init__(self, module: str, *arguments: str, waits: bool = False) -> None:
        self.command = " ".join([module, *arguments])
        self.rounds: list[dict[str, Any]] = []
        self.peak = self.seconds = 0.0
        self.started = time.perf_counter()
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._sample_memory, daemon=True).start()

    def start_round(self) -> None:
        """Starts the next round. The first round starts without this."""
        assert self.child.stdin
        if self.rounds:
            self.child.stdin.write("\n")
            self.child.stdin.flush()

    def wait_for_round(self) -> None:
        """Waits until the round ends."""
        assert self.child.stdout
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.command} exited early")
        self.rounds.append(json.loads(line))

    def finish(self) -> None:
        """Waits until the process exits, and measures the time from launch to exit."""
        self.child.communicate()
        self.seconds = time.perf_counter() - self.started
        if self.child.returncode:
            raise SystemExit(f"{self.command} failed")

    @property
    def times(self) -> list[float]:
        """Seconds of each round except the first, which includes the start."""
        return [entry["seconds"] for entry in self.rounds[1:]]

    def _sample_memory(self) -> None:
        """Samples the resident memory of the process and its children; `peak` is the maximum in MB."""
        with suppress(psutil.Error):
            root = psutil.Process(self.child.pid)
            while self.child.returncode is None:
                total = 0.0
                for process in [root, *root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        total += process.memory_info().rss / 2**20
                self.peak = max(self.peak, total)
                time.sleep(MEMORY_INTERVAL)


def run_in_turn(rounds: int, *sides: Sequence[Process]) -> None:
    """Runs rounds of all sides in turn, the processes of one side concurrently; then waits for all processes."""
    for _ in range(rounds):
        for side in sides:
            for process in side:
                process.start_round()
            for process in side:
                process.wait_for_round()
    for process in chain(*sides):
        process.finish()
