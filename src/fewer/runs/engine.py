"""The loop that every method runs in: rounds, evaluation, records, checkpoints."""

from __future__ import annotations

import inspect
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import fewer
from fewer.data import Data
from fewer.errors import RunError, SettingError
from fewer.methods import Method, find, names
from fewer.methods.base import ContextFactory
from fewer.runs import trackers
from fewer.runs.artifacts import keep_start, settled, write_prepared
from fewer.runs.directory import RunDirectory
from fewer.runs.experiment import Experiment, Model, build_experiment, parse_settings
from fewer.runs.result import Result
from fewer.runs.settings import MENDABLE, OUTSIDE, Settings
from fewer.runtime import Absent, Clients, Faults, Inline, Pool, Rules
from fewer.runtime.handlers import HandlerServer
from fewer.runtime.keys import Keys
from fewer.runtime.streams import global_streams
from fewer.wire import Ledger

_LOG = logging.getLogger("fewer")
_TOLD: set[str] = set()


class Progress(Protocol):
    """Told what a run does while it goes on."""

    def begin(self, method: str, done: int, rounds: int) -> None:
        """A run begins or goes on, with `done` of its rounds behind it."""

    def answer(self, round: int, done: int, asked: int) -> None:
        """An answer came in."""

    def round(self, figures: Mapping[str, Any]) -> None:
        """A round ended."""


def run(
    method: Method | str,
    data: Data | str = "fashion-mini",
    *,
    model: Model = "cnn",
    out: str | Path | None = None,
    progress: Progress | None = None,
    track: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train. `fewer.run(FedAvg(rounds=10), data, model=MyNet, seed=1, runtime="pool")`.

    `data` is a name or what `fewer.data` makes; `model` a name, an `nn.Module` (training starts from its weights) or
    a class or function that makes one. `out` is the run directory; without it nothing is kept on disk. `track` names
    trackers that get the figures too (`track=["tensorboard"]`); no number depends on them. The other settings
    are those of the command line, with underscores (`Settings` has them all).
    """
    for kind, given, groups in (("method", method, ("Method",)), ("data", data, ("Data",))):
        if not isinstance(given, str) and (double := _of_groups(settings, groups)):
            raise SettingError(f"{double} is a setting of the {kind}, which is an object here: give it to that")
    if isinstance(method, Method):
        settings |= {"method": _address(method), "method_options": method.model_dump(mode="json")}
    else:
        settings["method"] = method
    if isinstance(data, str):
        settings["data"] = data
    else:
        settings |= _origin(data)
    if isinstance(model, str):
        settings["model"] = model
    experiment = build_experiment(
        parse_settings(settings),
        method if isinstance(method, Method) else None,
        data if isinstance(data, Data) else None,
        model if not isinstance(model, str) else None,
    )
    return start(experiment, None if out is None else Path(out), progress, track=track)


def _of_groups(settings: Mapping[str, Any], groups: tuple[str, ...]) -> str | None:
    """The first of the settings that belongs to a group, but for those that go with any method or data."""
    fields = Settings.model_fields
    free = ("norm", "model_options", "data_dir")
    return next(
        (name for name in settings if name in fields and fields[name].title in groups and name not in free), None
    )


def _address(method: Method) -> str:
    """How the class of a method is found again: its name, or its file."""
    if method.name in names() and find(method.name) is type(method):
        return method.name
    try:
        return f"{inspect.getsourcefile(type(method))}:{type(method).__name__}"
    except (TypeError, OSError):
        return f"(interactive):{type(method).__name__}"


def _origin(data: Data) -> dict[str, Any]:
    """The settings by which data is made again, as far as it can be."""
    if data.origin is None:
        return {"data": f"({data.name})", "clients": len(data)}
    origin = dict(data.origin)
    names = {"name": "data", "directory": "data_dir", "seed": "data_seed"}
    return {names.get(name, name): value for name, value in origin.items()}


def start(
    experiment: Experiment,
    out: Path | None = None,
    progress: Progress | None = None,
    connect: Connect | None = None,
    track: Sequence[str] = (),
) -> Result:
    """Begin a run, in a new directory if one is named."""
    connect = connect or _here(experiment.settings)
    kinds = trackers.find(track)
    if track and out is None:
        raise SettingError(f"track = {track[0]}: only a run that is kept can be tracked (out=DIR)")
    state = initial_state(experiment)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="fewer-") as folder:
            return _execute(experiment, state, None, Path(folder), progress, connect, {})
    with RunDirectory.create(out, {**_description(experiment), "track": list(track)}) as directory:
        keep_start(experiment.method, directory.path)
        return _execute(experiment, state, directory, directory.clients, progress, connect, kinds)


def initial_state(experiment: Experiment) -> Any:
    """The state before the first round."""
    with one_thread(), global_streams(experiment.settings.seed, "start"):
        return experiment.method.init(experiment.task, experiment.settings.seed)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Data | None = None,
    model: Model | None = None,
    progress: Progress | None = None,
    connect: Connect | None = None,
    track: Sequence[str] | None = None,
    **settings: Any,
) -> Result:
    """Go on with a run from its last whole round; the end is the same as without the break.

    What came as Python objects must be given again. `runtime`, `workers`, `device` and `data_dir` may be changed, and
    so that a run that lost its quorum can go on, `quorum`, `deadline`, `drop`, `slow` and `corrupt`. `opening` reaches
    the clients where they are not on this machine. Trackers go on too; those in `track` take the place of the ones
    that followed the run before, and get the rounds before the break.
    """
    path = Path(path)
    directory = RunDirectory.open(path)
    old = directory.description
    asked = track is not None
    kinds = trackers.kept(old.get("track", ())) if track is None else trackers.find(track)
    changed = {name: value for name, value in settings.items() if value is not None}
    allowed = (*OUTSIDE, *MENDABLE)
    if odd := sorted(changed.keys() - set(allowed)):
        raise SettingError(f"{odd[0]} cannot be changed when a run goes on (allowed: {', '.join(allowed)})")
    given = {"method": method, "data": data, "model": model}
    for part in old["own"]:
        if given[part] is None:
            raise RunError(f"{path} was run with a {part} of your own: fewer.resume(path, {part}=…) from Python")
    experiment = build_experiment(parse_settings({**settled(old["settings"], path), **changed}), method, data, model)
    if (
        "flower" in (was := old["settings"]["runtime"], experiment.settings.runtime)
        and was != experiment.settings.runtime
    ):
        raise SettingError(
            f"runtime = {experiment.settings.runtime}: a run cannot move between this machine and others"
        )
    connect = connect or _here(experiment.settings)
    if (found := experiment.data.fingerprint()) != old["data"]["fingerprint"]:
        raise RunError(f"{path} was run on other data (fingerprint {old['data']['fingerprint']}, now {found})")
    with directory:
        if track is not None:
            directory.describe(track=list(track))
        return _execute(
            experiment,
            initial_state(experiment),
            directory,
            directory.clients,
            progress,
            connect,
            kinds,
            changed,
            asked,
        )


def _description(experiment: Experiment) -> dict[str, Any]:
    """What settings.json tells of a run."""
    return {
        "settings": experiment.settings.model_dump(mode="json"),
        "hash": experiment.hash,
        "own": list(experiment.own),
        "method": experiment.method.model_dump(mode="json"),
        "data": {
            "name": experiment.data.name,
            "clients": len(experiment.data),
            "fingerprint": experiment.data.fingerprint(),
        },
        "environment": {
            "fewer": fewer.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "command": sys.argv,
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread in this process: more of them spin against each other, and sums would depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Connect = Callable[[Experiment, Path, int], Clients]
"""Opens the way to the clients, of a job, with a folder for what they remember and so many rounds behind them."""


def _here(settings: Settings) -> Connect:
    """How clients on this machine are reached; SettingError where they are on others."""
    if settings.runtime == "flower":
        raise SettingError("runtime = flower: for clients on other machines (see: fewer server [--resume RUN], …)")
    return open_clients


def build_handler_server(
    experiment: Experiment, folder: Path, keys: Keys | None = None, run: str = ""
) -> HandlerServer:
    """Where the handlers of a job run, and clients remember things in a folder; `keys` if they are not there too.

    Such keys outlast a run: they seal for the one that `run` names.
    """
    place = ContextFactory(experiment.data, experiment.task, experiment.settings.seed, folder, sealing=keys)
    return HandlerServer(
        experiment.method, place, experiment.settings.seed, experiment.task.device, Rules.limit, run.encode()
    )


def common(experiment: Experiment) -> dict[str, Any]:
    """What every runtime is told of a job."""
    settings = experiment.settings
    faults = Faults(settings.drop, settings.slow, settings.corrupt)
    rules = Rules(settings.quorum, settings.deadline)
    return {"population": len(experiment.data), "seed": settings.seed, "faults": faults, "rules": rules}


def open_clients(experiment: Experiment, folder: Path, done: int = 0) -> Clients:
    """The runtime on this machine that the settings name."""
    handlers = build_handler_server(experiment, folder)
    if experiment.settings.runtime == "inline":
        return Inline(**common(experiment), handlers=handlers)
    return Pool(**common(experiment), handlers=handlers, workers=experiment.settings.workers, cost=experiment.data.size)


def _execute(
    experiment: Experiment,
    state: Any,
    directory: RunDirectory | None,
    folder: Path,
    progress: Progress | None,
    connect: Connect,
    kinds: Mapping[str, trackers.Kind],
    changed: Mapping[str, Any] | None = None,
    asked: bool = True,
) -> Result:
    """All rounds from the last checkpoint, or the first state, to the end."""
    method, settings = experiment.method, experiment.settings
    if directory and any(name in MENDABLE for name in changed or {}):
        directory.journal.clear()  # hops of a round that began under other rules
    kept = directory.go_back() if directory else None
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        result = Result(method, experiment.task, experiment.data, settings, state, folder if directory else None)
        if kept and directory:
            result.state = restore(type(state), kept["state"], directory.path)
            result.history, result.seconds = directory.history(), kept["seconds"]
            directory.event(
                "resume", round=kept["round"], changed={key: str(value) for key, value in (changed or {}).items()}
            )
        elif directory:
            directory.event("start", method=method.name, hash=experiment.hash)
        if progress:
            progress.begin(method.name, len(result.history), method.rounds)
        warn(method.name, method.notes())
        over = len(result.history) == method.rounds
        if over and not asked:  # its trackers know
            return result
        told = stack.enter_context(trackers.following(kinds, _about(experiment, folder), result.history, asked))
        if over:
            return result
        clients: Clients | None = None
        try:
            clients = stack.enter_context(connect(experiment, folder, len(result.history)))
            clients.ledger.total.update(kept["ledger"] if kept else {})
            clients.journal = directory.journal if directory else None
            for number in range(len(result.history) + 1, method.rounds + 1):
                figures = _round(experiment, clients, number, result, directory, progress)
                if directory:
                    directory.metrics(figures)
                    directory.messages(clients.ledger.take())
                    directory.checkpoint(
                        round=number,
                        state=vars(result.state),
                        ledger=dict(clients.ledger.total),
                        seconds=result.seconds,
                    )
                if progress:
                    progress.round(figures)
                told(figures)
        except BaseException as error:
            if directory:
                carried = clients.transport_bytes() if clients else {}
                reason = f"{type(error).__name__}: {error}"
                directory.event("stop", round=len(result.history), reason=reason, **carried)
            raise
        if directory:
            write_prepared(result, directory.path)
            directory.event("finish", round=method.rounds, **clients.transport_bytes())
    return result


def _about(experiment: Experiment, folder: Path) -> trackers.About:
    settings = experiment.settings.model_dump(mode="json", exclude={"method_options", "rounds", "cohort", "data_dir"})
    return trackers.About(
        folder.parent,
        experiment.method.name,
        experiment.hash,
        {**experiment.method.model_dump(mode="json"), **settings},
    )


def _round(
    experiment: Experiment,
    clients: Clients,
    number: int,
    result: Result,
    directory: RunDirectory | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """One round with its evaluation; puts the new state and its figures into the result."""
    method, settings = experiment.method, experiment.settings
    begun = time.perf_counter()
    absent: list[Absent] = []

    def note(one: Absent, handler: str) -> None:
        absent.append(one)
        if directory:
            directory.event(
                "absent", round=number, client=one.client, reason=one.reason, handler=handler, detail=one.detail
            )

    last = number == method.rounds
    clients.round, clients.evaluating = number, False
    clients.judged = last or number % settings.evaluate_every == 0
    clients.on_absent = note
    if progress:
        clients.on_progress = lambda done, asked: progress.answer(number, done, asked)
    with global_streams(settings.seed, number, "coordinator"):
        state = method.round(result.state, clients)
    figures: dict[str, Any] = {"round": number, "absent": len(absent)}
    clients.evaluating = True
    with global_streams(settings.seed, number, "evaluate"):
        if clients.judged:
            figures |= method.evaluate(state, clients, experiment.data)
        if last:
            figures |= method.report(state, clients, experiment.data)
    warn(method.name, _skipped(absent))
    if len(absent) > figures["absent"]:
        figures["unmeasured"] = len(absent) - figures["absent"]  # answers that the evaluation had to do without
    result.seconds += time.perf_counter() - begun
    figures |= {**_bytes(clients.ledger), "seconds": round(result.seconds, 3)}
    result.state = state
    result.history.append(figures)
    return figures


def warn(name: str, texts: Iterable[str]) -> None:
    """Tell what is no error but should be known: once in a process, however many runs it makes."""
    for text in texts:
        if (told := f"{name}: {text}") not in _TOLD:
            _TOLD.add(told)
            _LOG.warning(told)


def _skipped(absent: Sequence[Absent]) -> Iterator[str]:
    """Which clients could not do what they were asked, and why."""
    unable: dict[str, set[int]] = {}
    for one in absent:
        if one.reason == "unable":
            unable.setdefault(one.detail, set()).add(one.client)
    for reason, who in unable.items():
        some = ", ".join(map(str, sorted(who)[:10])) + (" …" if len(who) > 10 else "")
        yield f"skipped: {'client' if len(who) == 1 else 'clients'} {some}: {reason}"


def _bytes(ledger: Ledger) -> dict[str, int]:
    """Bytes so far, both ways."""
    return {"up": ledger.total["up"], "down": ledger.total["down"]}


def restore(kind: type[Any], kept: Mapping[str, Any], path: Path) -> Any:
    """A state from what a checkpoint holds."""
    if {part.name for part in fields(kind)} != kept.keys():
        raise RunError(f"{path} was written by another version of this method: its state has other parts")
    return kind(**kept)
