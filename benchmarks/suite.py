"""The benchmarks: each gives figures."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import work
from benchmarks.episode import CLIENTS, SAMPLES, peak
from benchmarks.episode import bare as passes
from benchmarks.measure import Figure, Process, alternate, in_turn, ratio
from fewer.learning.flops import count_flops
from fewer.methods.fedmk import FedMK
from fewer.runs.engine import start_run
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.wire import decode, encode

ROUNDS = 25
POOL = {"runtime": "pool", "workers": 2}


def overhead(directory: str | None) -> list[Figure]:
    """A round: inline against the bare loop."""
    ours = _fewer(ROUNDS + 1, {}, directory, waits=True)
    bare = _bare(ROUNDS + 1, directory, waits=True)
    in_turn(ROUNDS, [ours], [bare])
    apart = max(abs(a["accuracy"] - b["accuracy"]) for a, b in zip(ours.rounds, bare.rounds, strict=True))
    return [
        _compared("inline / bare loop, a round", ours.times, bare.times, most=1.1),
        Figure(
            "accuracy apart, at most", apart, "", most=0.002, detail=f"({ours.rounds[-1]['accuracy']:.4f} at the end)"
        ),
    ]


def pool(directory: str | None) -> list[Figure]:
    """A round: inline against a pool of two."""
    one, two, *twins = (_fewer(ROUNDS + 1, how, directory, waits=True) for how in ({}, POOL, {}, {}))
    in_turn(ROUNDS, [one], [two], twins)
    found = _compared("inline / pool of 2, a round", one.times, two.times, least=1.8)
    room = 2 * ratio(one.times, [max(both) for both in zip(*(twin.times for twin in twins), strict=True)])
    return [found, Figure("two inline runs at once / one, rounds done", room, "x", detail="(what the cores have free)")]


def whole(directory: str | None) -> list[Figure]:
    """15 rounds from launch to exit: a pool of two with a run directory against the bare loop."""
    memory = []

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            process = _fewer(15, {**POOL, "out": f"{folder}/run"}, directory)
            process.end()
        memory.append(process.peak)
        return process.seconds

    def bare() -> float:
        process = _bare(15, directory)
        process.end()
        return process.seconds

    mine, theirs = alternate(3, ours, bare)
    return [
        _compared("pool of 2 / bare loop, launch to exit", mine, theirs, most=0.8),
        Figure("pool of 2, memory of all processes", median(memory), "MB", most=900),
    ]


def help(directory: str | None) -> list[Figure]:
    """`fewer --help` from launch to exit."""

    def timed(*command: str) -> float:
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun

    program = Path(sys.executable).with_name("fewer")
    ours, empty = alternate(7, partial(timed, str(program), "--help"), partial(timed, sys.executable, "-c", "pass"))
    return [Figure("fewer --help", median(ours), "s", most=0.5, detail=f"({ratio(ours, empty):.0f} x an empty Python)")]


def population(directory: str | None) -> list[Figure]:
    """A round and memory: 10 active of 100 clients against 10 of 100,000."""
    figures = []
    for method in ("fedavg", "local"):
        with tempfile.TemporaryDirectory() as folder:
            few, many = (
                Process(
                    "benchmarks.federated",
                    "population",
                    str(ROUNDS + 1),
                    json.dumps({"out": f"{folder}/{count}"}),
                    str(count),
                    method,
                    waits=True,
                )
                for count in (100, 100_000)
            )
            in_turn(ROUNDS, [few], [many])
        figures += [
            _compared(f"{method}: 100,000 / 100 clients, a round", many.times, few.times, most=1.1),
            Figure(f"{method}: 100,000 − 100 clients, memory", many.peak - few.peak, "MB", most=50),
        ]
    return figures


def wire(directory: str | None) -> list[Figure]:
    """A model of 105 KB, encoded and decoded."""
    model = dict(work.net().state_dict())
    blob = encode("train", {"model": model, "size": 1})
    size = sum(tensor.nbytes for tensor in model.values())
    plain = torch.empty(size, dtype=torch.uint8)

    def timed(action: Callable[[], object]) -> float:
        begun = time.perf_counter()
        for _ in range(100):
            action()
        return (time.perf_counter() - begun) / 100 * 1e6

    writing, reading, copying = alternate(
        25,
        partial(timed, lambda: encode("train", {"model": model, "size": 1})),
        partial(timed, lambda: decode(blob, {"model": model, "size": int})),
        partial(timed, plain.clone),
    )
    return [
        Figure("encode", median(writing), "µs", detail=f"({ratio(writing, copying):.0f} x a plain copy)"),
        Figure("decode and check", median(reading), "µs", detail=f"({ratio(reading, copying):.0f} x a plain copy)"),
        Figure("framing", 100 * (len(blob) / size - 1), "%", most=1, detail=f"({len(blob)} bytes for {size})"),
    ]


def condense(directory: str | None) -> list[Figure]:
    """FedMK's bi-level step: 5 inner steps on 64 of 200 images of D̂, then 256 real samples."""
    method = FedMK(inner_steps=5, inner_batch_size=64, augment=False, sample_weights="none")
    data = work.arrays(directory)
    x = torch.from_numpy(data.x[:256]).float().div_(255).sub_(work.MEAN).div_(work.DEVIATION).view(-1, 1, 28, 28)
    y = torch.from_numpy(data.y[:256]).long()
    images = (2 * torch.rand(200, 1, 28, 28) - 1).requires_grad_()
    labels = torch.arange(200) % 10
    net = work.net()
    first: dict[str, Tensor] = dict(net.named_parameters())
    weights, stream = list(net.parameters()), torch.Generator().manual_seed(0)

    def ours() -> None:
        reached = method.inner_loop(net, first, images, labels, stream)
        torch.autograd.grad(method.outer_loss(net, reached, x, y, torch.ones(10)), images)

    def inner() -> tuple[Tensor, ...]:
        part = images[:64]
        return torch.autograd.grad(F.cross_entropy(net(part), labels[:64]), weights, create_graph=True)

    def outer() -> None:
        torch.autograd.grad(F.cross_entropy(net(x), y), weights)

    def back() -> float:
        gradients = inner()
        return _seconds(lambda: torch.autograd.grad(gradients, [images, *weights], grad_outputs=weights))

    def bare() -> float:
        return sum(_seconds(inner) + back() for _ in range(method.inner_steps)) + _seconds(outer)

    for warm in (ours, inner, outer, back):
        warm()
    mine, theirs = alternate(25, partial(_seconds, ours), bare)
    return [
        Figure("bi-level step", 1e3 * median(mine), "ms"),
        _compared("bi-level step / sum of its passes", mine, theirs, most=1.5),
    ]


def metagrad(directory: str | None) -> list[Figure]:
    """A second-order step of MAML against a plain training step on the same samples, and against cloned modules."""
    figures = []
    for net in ("conv4", "lstm"):
        command = [sys.executable, "-m", "benchmarks.metagrad", net, "1", "15"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        figures += [
            _compared(f"{net}: second-order / plain step", found["ours"], found["plain"], most=3),
            _compared(f"{net}: first-order / plain step", found["first order"], found["plain"]),
            _compared(f"{net}: second-order / cloned modules", found["ours"], found["cloned"], most=1.0),
        ]
    return figures


def episode(directory: str | None) -> list[Figure]:
    """An episode of FRL (10 clients, 300 samples each, Conv-4, R = 3, 32×32) against the bare passes that it needs."""
    inline, two, bare = (Process("benchmarks.episode", side, "3", waits=True) for side in ("inline", "pool", "bare"))
    in_turn(3, [inline], [bare], [two])
    with count_flops() as tally:
        passes(torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % 2, clients=1)
    work_of_all = 1e-9 * CLIENTS * tally.flops
    reached = work_of_all / median(bare.times)
    share = f"({reached:.0f} GFLOP/s, a matrix product of 1024² {peak():.0f})"
    return [
        Figure("an episode inline", median(inline.times), "s"),
        _compared("inline / bare passes", inline.times, bare.times, most=1.3),
        _compared("pool of 2 / bare passes", two.times, bare.times, most=0.75),
        Figure("bare passes", work_of_all, "GF", detail=share),
    ]


def machines(directory: str | None) -> list[Figure]:
    """A round of FedAvg with three clients between machines (Flower, on loopback) against inline: what is added."""
    from fewer.runs.machines import local_cluster  # only here: it needs Flower

    settings = {"method": "fedavg", "data": "digits", "clients": 3, "rounds": 12, "evaluate_every": 12}

    def rounds(seconds: Sequence[float]) -> list[float]:
        """Not the first, and not the last with its report."""
        return [after - before for before, after in pairwise(seconds)][:-1]

    with tempfile.TemporaryDirectory() as folder:
        inline = start_run(build_experiment(parse_settings(settings)), Path(folder) / "inline")
        begun = time.perf_counter()
        with local_cluster(Path(folder) / "cluster", 3) as server:
            there = server.start(
                build_experiment(parse_settings({**settings, "runtime": "flower"})), Path(folder) / "flower"
            )
        before = time.perf_counter() - begun - there.seconds
        packed = json.loads((Path(folder) / "flower/events.jsonl").read_text().splitlines()[-1])
        lines = (Path(folder) / "flower/ledger.csv").read_text().splitlines()[1:]
    mine, theirs = (rounds([line["seconds"] for line in run.history]) for run in (there, inline))
    sent = sum(int(line.rpartition(",")[2]) for line in lines)
    extra = (packed["packed_up"] + packed["packed_down"] - sent) / len(lines)
    detail = f"({median(mine):.3g} s / {median(theirs):.3g} s; {min(mine):.2g} to {max(mine):.2g} s)"
    return [
        Figure("a round over Flower − a round inline", median(mine) - median(theirs), "s", most=6, detail=detail),
        Figure("from launch to the first round", before, "s", detail="(SuperLink, three SuperNodes, three clients)"),
        Figure(
            "Flower's own bytes in a message",
            extra,
            "B",
            detail=f"({len(lines)} messages, {sent / len(lines):.0f} B each)",
        ),
    ]


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _bare(rounds: int, directory: str | None, waits: bool = False) -> Process:
    return Process("benchmarks.work", str(rounds), *([directory] if directory else []), waits=waits)


def _fewer(rounds: int, settings: dict[str, Any], directory: str | None, waits: bool = False) -> Process:
    where = [directory] if directory else []
    return Process("benchmarks.federated", "work", str(rounds), json.dumps(settings), *where, waits=waits)


def _compared(what: str, above: list[float], below: list[float], **goal: float) -> Figure:
    detail = f"({median(above):.3g} s / {median(below):.3g} s)"
    return Figure(what, ratio(above, below), "x", detail=detail, **goal)


def dash(directory: str | None) -> list[Figure]:
    """The dashboard on 1,000 runs with 1,000,000 events in all, half of them in one run: answers over HTTP."""
    from benchmarks.dashboard import follow, long_run, made, served

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        made(root, runs=1000, events=500, long=500_000)
        with served(root) as ask:
            cold, _ = ask("runs")
            warm, listing = alternate(15, lambda: ask("runs?from=500")[0], lambda: ask("runs?sort=accuracy&find=7")[0])
            at = f"runs/{long_run(ask)}"
            first = [ask(f"{at}/events?limit=50")[0] for _ in range(15)]
            slices: list[float] = []
            whole = False
            while not whole:
                took, told = ask(f"{at}/tally")
                slices.append(took)
                whole = told["complete"]
            told_after = [follow(root, ask) for _ in range(5)]
    return [
        Figure("first list of all, nothing known", cold, "s", most=3),
        Figure("a page of the list", 1000 * median(warm), "ms", most=100),
        Figure("a sifted and sorted page", 1000 * median(listing), "ms", most=100),
        Figure("newest of 500,000 events", 1000 * median(first), "ms", most=100),
        Figure(
            "faults and ledger of it, one answer",
            1000 * max(slices),
            "ms",
            most=1000,
            detail=f"({len(slices)} answers)",
        ),
        Figure("a round written until a follower is told", median(told_after), "s", most=2),
    ]


SUITE: dict[str, Callable[[str | None], list[Figure]]] = {
    one.__name__: one
    for one in (overhead, pool, whole, help, population, wire, condense, metagrad, episode, machines, dash)
}
