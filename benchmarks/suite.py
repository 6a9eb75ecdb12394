"""The benchmarks. Each returns measurements."""

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

import fewer
from benchmarks import work
from benchmarks.episode import CLIENTS, SAMPLES, measure_peak, run_bare_passes
from benchmarks.measure import Measurement, Process, alternate, median_ratio, run_in_turn
from fewer.methods import Method
from fewer.methods.fedavg import FedAvg
from fewer.methods.fedmk import FedMK
from fewer.methods.fedmk_avg import FedMKAvg
from fewer.runs.callbacks import Run
from fewer.runs.engine import run_experiment
from fewer.runs.experiment import build_experiment, parse_settings
from fewer.runs.result import Result
from fewer.runtime.flops import count_flops
from fewer.wire import decode, encode

ROUNDS = 25
POOL = {"runtime": "pool", "workers": 2}
FEWER_STEPS: dict[str, Any] = {"start": "class", "matching_steps": 50, "match_rounds": 1, "outer_steps": 5}
"""Options of FedMK that cost a fraction of its time."""
FEW_ROUNDS_GOALS = {"FedMK": 9.0, "FedMK, fewer steps": 2.25, "FedMK-Avg": 2.25}
"""The time of ten rounds of FedMK was 9 times that of FedAvg once; the goal is a quarter of it."""


def overhead(directory: str | None) -> list[Measurement]:
    """The time of a round: inline against the bare loop."""
    ours = _start_fewer(ROUNDS + 1, {}, directory, waits=True)
    bare = _start_bare_loop(ROUNDS + 1, directory, waits=True)
    run_in_turn(ROUNDS, [ours], [bare])
    difference = max(abs(a["accuracy"] - b["accuracy"]) for a, b in zip(ours.rounds, bare.rounds, strict=True))
    return [
        _measure_ratio("inline / bare loop, a round", ours.times, bare.times, at_most=1.0),
        Measurement(
            "largest accuracy difference",
            difference,
            "",
            at_most=0.002,
            detail=f"({ours.rounds[-1]['accuracy']:.4f} at the end)",
        ),
    ]


def pool(directory: str | None) -> list[Measurement]:
    """The time of a round: inline against a pool of two."""
    inline, pooled, *twins = (
        _start_fewer(ROUNDS + 1, settings, directory, waits=True) for settings in ({}, POOL, {}, {})
    )
    run_in_turn(ROUNDS, [inline], [pooled], twins)
    speedup = _measure_ratio("inline / pool of 2, a round", inline.times, pooled.times, at_least=1.8)
    available = 2 * median_ratio(
        inline.times, [max(both) for both in zip(*(twin.times for twin in twins), strict=True)]
    )
    detail = "(what the cores have free)"
    return [speedup, Measurement("two inline runs at once / one, rounds done", available, "x", detail=detail)]


def end_to_end(directory: str | None) -> list[Measurement]:
    """15 rounds from launch to exit: a pool of two with a run directory against the bare loop."""
    memory = []

    def run_fewer() -> float:
        with tempfile.TemporaryDirectory() as folder:
            process = _start_fewer(15, {**POOL, "out": f"{folder}/run"}, directory)
            process.finish()
        memory.append(process.peak)
        return process.seconds

    def run_bare() -> float:
        process = _start_bare_loop(15, directory)
        process.finish()
        return process.seconds

    ours, bare = alternate(3, run_fewer, run_bare)
    return [
        _measure_ratio("pool of 2 / bare loop, launch to exit", ours, bare, at_most=0.8),
        Measurement("pool of 2, memory of all processes", median(memory), "MB", at_most=900),
    ]


def help(directory: str | None) -> list[Measurement]:
    """`fewer --help` from launch to exit."""

    def measure_command(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    program = Path(sys.executable).with_name("fewer")
    ours, empty = alternate(
        7, partial(measure_command, str(program), "--help"), partial(measure_command, sys.executable, "-c", "pass")
    )
    return [
        Measurement(
            "fewer --help",
            median(ours),
            "s",
            at_most=0.3,
            detail=f"({median_ratio(ours, empty):.0f} x an empty Python)",
        )
    ]


def population(directory: str | None) -> list[Measurement]:
    """The time of a round and memory: a cohort of 10 of 100 clients against 10 of 100,000."""
    measurements = []
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
            run_in_turn(ROUNDS, [few], [many])
        measurements += [
            _measure_ratio(f"{method}: 100,000 / 100 clients, a round", many.times, few.times, at_most=1.1),
            Measurement(f"{method}: 100,000 − 100 clients, memory", many.peak - few.peak, "MB", at_most=50),
        ]
    return measurements


def features(directory: str | None) -> list[Measurement]:
    """A run of 100 clients on cached features of a frozen encoder, and its memory against 1,000 clients."""
    with tempfile.TemporaryDirectory() as folder:

        def run_process(clients: int) -> Process:
            process = Process("benchmarks.features", str(clients), folder)
            process.finish()
            return process

        run_process(100)  # computes the features
        few, many = run_process(100), run_process(1000)
    return [
        Measurement("100 clients, 10 rounds, launch to exit", few.seconds, "s", at_most=60),
        Measurement("1,000 − 100 clients, memory", many.peak - few.peak, "MB", at_most=50),
    ]


def wire(directory: str | None) -> list[Measurement]:
    """Encoding and decoding a model of 105 KB."""
    model = dict(work.build_net().state_dict())
    blob = encode("train", {"model": model, "size": 1})
    size = sum(tensor.nbytes for tensor in model.values())
    buffer = torch.empty(size, dtype=torch.uint8)

    def measure_microseconds(action: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(100):
            action()
        return (time.perf_counter() - start) / 100 * 1e6

    encoding, decoding, copying = alternate(
        25,
        partial(measure_microseconds, lambda: encode("train", {"model": model, "size": 1})),
        partial(measure_microseconds, lambda: decode(blob, {"model": model, "size": int})),
        partial(measure_microseconds, buffer.clone),
    )
    return [
        Measurement("encode", median(encoding), "µs", detail=f"({median_ratio(encoding, copying):.0f} x a plain copy)"),
        Measurement(
            "decode and check", median(decoding), "µs", detail=f"({median_ratio(decoding, copying):.0f} x a plain copy)"
        ),
        Measurement("framing", 100 * (len(blob) / size - 1), "%", at_most=1, detail=f"({len(blob)} bytes for {size})"),
    ]


def condense(directory: str | None) -> list[Measurement]:
    """FedMK's bi-level step: 5 inner steps on 64 of 200 images of D̂, then the loss on 256 real samples."""
    method = FedMK(inner_steps=5, inner_batch_size=64, augment=False, sample_weights="none")
    data = work.load_arrays(directory)
    x = torch.from_numpy(data.x[:256]).float().div_(255).sub_(work.MEAN).div_(work.STD).view(-1, 1, 28, 28)
    y = torch.from_numpy(data.y[:256]).long()
    images = (2 * torch.rand(200, 1, 28, 28) - 1).requires_grad_()
    labels = torch.arange(200) % 10
    net = work.build_net()
    first: dict[str, Tensor] = dict(net.named_parameters())
    weights, stream = list(net.parameters()), torch.Generator().manual_seed(0)

    def take_step() -> None:
        adapted = method.inner_loop(net, first, images, labels, stream)
        torch.autograd.grad(method.outer_loss(net, adapted, x, y, torch.ones(10)), images)

    def inner_pass() -> tuple[Tensor, ...]:
        batch = images[:64]
        return torch.autograd.grad(F.cross_entropy(net(batch), labels[:64]), weights, create_graph=True)

    def outer_pass() -> None:
        torch.autograd.grad(F.cross_entropy(net(x), y), weights)

    def second_order_pass() -> float:
        gradients = inner_pass()
        return _measure_seconds(lambda: torch.autograd.grad(gradients, [images, *weights], grad_outputs=weights))

    def sum_of_passes() -> float:
        inner = sum(_measure_seconds(inner_pass) + second_order_pass() for _ in range(method.inner_steps))
        return inner + _measure_seconds(outer_pass)

    for warm_up in (take_step, inner_pass, outer_pass, second_order_pass):
        warm_up()
    steps, passes = alternate(25, partial(_measure_seconds, take_step), sum_of_passes)
    return [
        Measurement("bi-level step", 1e3 * median(steps), "ms"),
        _measure_ratio("bi-level step / sum of its passes", steps, passes, at_most=1.5),
    ]


def few_rounds(directory: str | None) -> list[Measurement]:
    """A round of FedMK, FedMK with fewer steps and FedMK-Avg (the mean of ten), against FedAvg with 400 local steps."""
    arrays = work.load_arrays(directory)
    data = fewer.data.from_arrays(
        arrays.x, arrays.y, test=(arrays.test_x, arrays.test_y), client_ids=arrays.client_ids, name="images"
    )
    methods: dict[str, Method[Any]] = {
        "FedAvg": FedAvg(local_steps=400, rounds=10, cohort=work.COHORT),
        "FedMK": FedMK(rounds=2, cohort=work.COHORT),
        "FedMK, fewer steps": FedMK(rounds=2, cohort=work.COHORT, **FEWER_STEPS),
        "FedMK-Avg": FedMKAvg(rounds=10, cohort=work.COHORT),  # its first round costs more than the others
    }

    def seconds_per_round(method: Method[Any]) -> float:
        return _measure_seconds(lambda: fewer.run(method, data, seed=0)) / method.rounds

    baseline, *others = alternate(1, *(partial(seconds_per_round, method) for method in methods.values()))
    return [
        _measure_ratio(f"{name} / FedAvg, 400 steps", seconds, baseline, at_most=FEW_ROUNDS_GOALS[name])
        for name, seconds in zip(list(methods)[1:], others, strict=True)
    ]


def metagrad(directory: str | None) -> list[Measurement]:
    """A second-order MAML step against a plain training step on the same samples, and against cloned modules."""
    measurements = []
    for net, steps in (("conv4", 1), ("conv4", 5), ("lstm", 1)):
        command = [sys.executable, "-m", "benchmarks.metagrad", net, str(steps), "15"]
        seconds = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        name = f"{net}, {steps} inner"
        measurements += [
            _measure_ratio(f"{name}: second-order / plain step", seconds["fewer"], seconds["plain"], at_most=3 * steps),
            _measure_ratio(f"{name}: first-order / plain step", seconds["first order"], seconds["plain"]),
            _measure_ratio(f"{name}: second-order / cloned modules", seconds["fewer"], seconds["cloned"], at_most=1.0),
        ]
    return measurements


def episode(directory: str | None) -> list[Measurement]:
    """An episode of FRL (10 clients, 300 samples each, Conv-4, R = 3, 32×32) against its bare passes."""
    inline, pooled, bare = (Process("benchmarks.episode", side, "3", waits=True) for side in ("inline", "pool", "bare"))
    run_in_turn(3, [inline], [bare], [pooled])
    with count_flops() as tally:
        run_bare_passes(torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES) % 2, clients=1)
    gflop = 1e-9 * CLIENTS * tally.flops
    speed = gflop / median(bare.times)
    detail = f"({speed:.0f} GFLOP/s, a matrix product of 1024² {measure_peak():.0f})"
    return [
        Measurement("an episode inline", median(inline.times), "s"),
        _measure_ratio("inline / bare passes", inline.times, bare.times, at_most=1.3),
        _measure_ratio("pool of 2 / bare passes", pooled.times, bare.times, at_most=0.75),
        Measurement("bare passes", gflop, "GF", detail=detail),
    ]


def machines(directory: str | None) -> list[Measurement]:
    """What Flower (on loopback) adds to an inline round of FedAvg with three clients, and what a secure sum adds."""
    from fewer.runs.machines import local_cluster  # needs Flower

    settings = {"method": "fedavg", "data": "digits", "clients": 3, "rounds": 12, "evaluate_every": 12}
    secure_settings = {**settings, "runtime": "flower", "secure_sum": True, "rounds": 6, "evaluate_every": 6}

    def bytes_per_round(run: Result) -> float:
        """Returns the bytes of a round, up and down, without evaluations."""
        assert isinstance(run, Run)
        return sum(run.ledger.total.values()) / len(run.history)

    def round_times(seconds: Sequence[float]) -> list[float]:
        """Returns the times of all rounds except the first, and the last, which includes the final evaluation."""
        return [after - before for before, after in pairwise(seconds)][:-1]

    with tempfile.TemporaryDirectory() as folder:
        inline = run_experiment(build_experiment(parse_settings(settings)), Path(folder) / "inline")
        start = time.perf_counter()
        with local_cluster(Path(folder) / "cluster", 3) as server:
            remote = server.start(
                build_experiment(parse_settings({**settings, "runtime": "flower"})), Path(folder) / "flower"
            )
            startup = time.perf_counter() - start - remote.seconds
            secure = server.start(build_experiment(parse_settings(secure_settings)), Path(folder) / "secure")
        last_event = json.loads((Path(folder) / "flower/events.jsonl").read_text().splitlines()[-1])
        lines = (Path(folder) / "flower/ledger.csv").read_text().splitlines()[1:]
    over_flower, inline_times, secure_times = (
        round_times([entry["seconds"] for entry in run.history]) for run in (remote, inline, secure)
    )
    plain_bytes, secure_bytes = map(bytes_per_round, (remote, secure))
    sent = sum(int(line.rpartition(",")[2]) for line in lines)
    overhead_bytes = (last_event["transport_up"] + last_event["transport_down"] - sent) / len(lines)
    medians = median(over_flower), median(inline_times)
    detail = f"({medians[0]:.3g} s / {medians[1]:.3g} s; {min(over_flower):.2g} to {max(over_flower):.2g} s)"
    return [
        Measurement(
            "a round over Flower − a round inline",
            median(over_flower) - median(inline_times),
            "s",
            at_most=6,
            detail=detail,
        ),
        Measurement(
            "from launch to the first round", startup, "s", detail="(SuperLink, three SuperNodes, three clients)"
        ),
        Measurement(
            "Flower's overhead per message",
            overhead_bytes,
            "B",
            detail=f"({len(lines)} messages, {sent / len(lines):.0f} B each)",
        ),
        Measurement(
            "a round with a secure sum − a round without",
            median(secure_times) - median(over_flower),
            "s",
            detail=f"({median(secure_times):.3g} s / {medians[0]:.3g} s)",
        ),
        Measurement(
            "bytes of a round with a secure sum / without",
            secure_bytes / plain_bytes,
            "x",
            detail=f"({secure_bytes / 1000:.0f} kB / {plain_bytes / 1000:.0f} kB, up and down, three clients)",
        ),
    ]


def _measure_seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _start_bare_loop(rounds: int, directory: str | None, waits: bool = False) -> Process:
    return Process("benchmarks.work", str(rounds), *([directory] if directory else []), waits=waits)


def _start_fewer(rounds: int, settings: dict[str, Any], directory: str | None, waits: bool = False) -> Process:
    arguments = [directory] if directory else []
    return Process("benchmarks.federated", "work", str(rounds), json.dumps(settings), *arguments, waits=waits)


def _measure_ratio(name: str, numerators: list[float], denominators: list[float], **goal: float) -> Measurement:
    detail = f"({median(numerators):.3g} s / {median(denominators):.3g} s)"
    return Measurement(name, median_ratio(numerators, denominators), "x", detail=detail, **goal)


def dash(directory: str | None) -> list[Measurement]:
    """Response times of the dashboard on 1,000 runs with 1,000,000 events, half of them in one run."""
    from benchmarks.dashboard import find_long_run, make_runs, measure_follow, serve

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_runs(root, runs=1000, events=500, long_events=500_000)
        with serve(root) as request:
            cold, _ = request("runs")
            paged, filtered = alternate(
                15, lambda: request("runs?from=500")[0], lambda: request("runs?sort=metric&find=7")[0]
            )
            run = f"runs/{find_long_run(request)}"
            newest = [request(f"{run}/events?limit=50")[0] for _ in range(15)]
            slices: list[float] = []
            complete = False
            while not complete:
                seconds, tally = request(f"{run}/tally")
                slices.append(seconds)
                complete = tally["complete"]
            follow_times = [measure_follow(root, request) for _ in range(5)]
    return [
        Measurement("first list of all runs, nothing cached", cold, "s", at_most=3),
        Measurement("a page of the list", 1000 * median(paged), "ms", at_most=100),
        Measurement("a filtered and sorted page", 1000 * median(filtered), "ms", at_most=100),
        Measurement("newest of 500,000 events", 1000 * median(newest), "ms", at_most=100),
        Measurement(
            "faults and ledger of that run, one answer",
            1000 * max(slices),
            "ms",
            at_most=1000,
            detail=f"({len(slices)} answers)",
        ),
        Measurement("from the end of a round to its follower", median(follow_times), "s", at_most=2),
    ]


SUITE: dict[str, Callable[[str | None], list[Measurement]]] = {
    benchmark.__name__: benchmark
    for benchmark in (
        *(overhead, pool, end_to_end, help, population, features),
        *(wire, condense, few_rounds, metagrad, episode, machines, dash),
    )
}
