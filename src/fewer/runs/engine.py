"""The training loop that every method shares: rounds, evaluation, records and checkpoints."""

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
from fewer.runs.artifacts import copy_start_model, resolve_start_model, write_prepared
from fewer.runs.directory import RunDirectory
from fewer.runs.experiment import Experiment, Model, build_experiment, parse_settings
from fewer.runs.result import Result
from fewer.runs.settings import CHANGEABLE, HOW_TO_RUN, Settings
from fewer.runtime import Absent, Clients, Faults, Inline, Pool, Rules
from fewer.runtime.handlers import HandlerServer
from fewer.runtime.keys import Keys
from fewer.runtime.streams import global_streams
from fewer.wire import Ledger

_LOG = logging.getLogger("fewer")
_WARNED: set[str] = set()


class Progress(Protocol):
    """Watches a run."""

    def on_run_start(self, method: str, done: int, rounds: int) -> None:
        """A run starts, or resumes after `done` rounds."""

    def on_answer(self, round: int, done: int, asked: int) -> None:
        """A client answered; `done` of the `asked` clients have."""

    def on_round_end(self, metrics: Mapping[str, Any]) -> None:
        """A round ended."""


Connect = Callable[[Experiment, Path, int], Clients]
"""`connect(experiment, folder, done)` connects an experiment to its clients, starting after round `done`."""


# --- starting and resuming ------------------------------------------------------------------------------------


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
    """Train: `fewer.run(FedAvg(lr=0.1), data, model=MyNet, seed=1, runtime="pool")`.

    `method` is an object or a name. `data` is a name, or an object made by `fewer.data`. `model` is a name, a class or
    function that returns an `nn.Module`, or an `nn.Module`, whose weights are the initial ones.

    `out` is the run directory; without it nothing is kept on disk. `track` names trackers that also receive the
    metrics, such as `["tensorboard"]`. All other settings are those of the command line, with underscores; `Settings`
    lists them.
    """
    experiment = describe_experiment(method, data, model, settings)
    return start_run(experiment, None if out is None else Path(out), progress, track=track)


def describe_experiment(
    method: Method | str, data: Data | str, model: Model, settings: Mapping[str, Any]
) -> Experiment:
    """The experiment that `run` starts, from objects or names."""
    settings = dict(settings)
    for kind, given, group in (("method", method, "Method"), ("data", data, "Data")):
        if not isinstance(given, str) and (misplaced := _first_of_group(settings, group)):
            raise SettingError(f"{misplaced} belongs to the {kind}, which is an object here: set it on that object")
    if isinstance(method, Method):
        settings |= {"method": _method_address(method), "method_options": method.model_dump(mode="json")}
    else:
        settings["method"] = method
    if isinstance(data, str):
        settings["data"] = data
    else:
        settings |= _data_settings(data)
    if isinstance(model, str):
        settings["model"] = model
    return build_experiment(
        parse_settings(settings),
        method if isinstance(method, Method) else None,
        data if isinstance(data, Data) else None,
        model if not isinstance(model, str) else None,
    )


def _first_of_group(settings: Mapping[str, Any], group: str) -> str | None:
    """The first setting of a group that cannot accompany an object."""
    known = Settings.model_fields
    allowed = ("norm", "model_options", "data_dir")
    return next(
        (name for name in settings if name in known and known[name].title == group and name not in allowed), None
    )


def _method_address(method: Method) -> str:
    """Where `resume` finds the method's class: its registered name, or its file."""
    if method.name in names() and find(method.name) is type(method):
        return method.name
    try:
        return f"{inspect.getsourcefile(type(method))}:{type(method).__name__}"
    except (TypeError, OSError):
        return f"(interactive):{type(method).__name__}"


def _data_settings(data: Data) -> dict[str, Any]:
    """The settings that load this data again, as far as they are known."""
    if data.origin is None:
        return {"data": f"({data.name})", "clients": len(data)}
    renamed = {"name": "data", "directory": "data_dir", "seed": "data_seed"}
    return {renamed.get(name, name): value for name, value in data.origin.items()}


def start_run(
    experiment: Experiment,
    out: Path | None = None,
    progress: Progress | None = None,
    connect: Connect | None = None,
    track: Sequence[str] = (),
) -> Result:
    """Runs an experiment from its first round; `out` is the directory to create for it."""
    connect = connect or _connect_here(experiment.settings)
    tracker_classes = trackers.find(track)
    if track and out is None:
        raise SettingError(f"track = {track[0]} needs a run directory: pass out=DIR")
    state = initial_state(experiment)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="fewer-") as folder:
            return _train(experiment, state, None, Path(folder), progress, connect, {})
    with RunDirectory.create(out, {**_description(experiment), "track": list(track)}) as directory:
        copy_start_model(experiment.method, directory.path)
        return _train(experiment, state, directory, directory.clients, progress, connect, tracker_classes)


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
    """Continues a run from its last checkpoint. The result is bit-identical to an uninterrupted run.

    Pass `method`, `data` and `model` again if they were Python objects. `runtime`, `workers`, `device` and `data_dir`
    may change. So may `quorum`, `deadline`, `drop`, `slow` and `corrupt`, so that a run that lost its quorum can
    continue. `connect` reaches remote clients. `track` replaces the run's trackers; new ones receive all rounds.
    """
    path = Path(path)
    directory = RunDirectory.open(path)
    recorded = directory.description
    requested = track is not None
    tracker_classes = trackers.find_installed(recorded.get("track", ())) if track is None else trackers.find(track)
    changed = {name: value for name, value in settings.items() if value is not None}
    allowed = (*HOW_TO_RUN, *CHANGEABLE)
    if fixed := sorted(changed.keys() - set(allowed)):
        raise SettingError(f"{fixed[0]} cannot change when a run resumes (allowed: {', '.join(allowed)})")
    given = {"method": method, "data": data, "model": model}
    for part in recorded["own"]:
        if given[part] is None:
            raise RunError(f"{path} was run with your own {part}: pass it to fewer.resume(path, {part}=…)")
    new_settings = parse_settings({**resolve_start_model(recorded["settings"], path), **changed})
    experiment = build_experiment(new_settings, method, data, model)
    before, now = recorded["settings"]["runtime"], experiment.settings.runtime
    if "flower" in (before, now) and before != now:
        raise SettingError(f"runtime = {now}: a run cannot move between this machine and remote clients")
    connect = connect or _connect_here(experiment.settings)
    if (fingerprint := experiment.data.fingerprint()) != recorded["data"]["fingerprint"]:
        raise RunError(
            f"{path} was run on other data: fingerprint {recorded['data']['fingerprint']}, this data has {fingerprint}"
        )
    with directory:
        if track is not None:
            directory.update_description(track=list(track))
        state = initial_state(experiment)
        return _train(
            experiment, state, directory, directory.clients, progress, connect, tracker_classes, changed, requested
        )


def _description(experiment: Experiment) -> dict[str, Any]:
    """The content of settings.json."""
    data = experiment.data
    return {
        "settings": experiment.settings.model_dump(mode="json"),
        "hash": experiment.hash,
        "own": list(experiment.own),
        "method": experiment.method.model_dump(mode="json"),
        "data": {"name": data.name, "clients": len(data), "fingerprint": data.fingerprint()},
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


# --- connecting to clients ------------------------------------------------------------------------------------


def _connect_here(settings: Settings) -> Connect:
    """Connects to simulated clients on this machine; SettingError if the clients are remote."""
    if settings.runtime == "flower":
        raise SettingError("runtime = flower is for remote clients: use fewer server, or fewer server --resume RUN")
    return connect_clients


def connect_clients(experiment: Experiment, folder: Path, done: int = 0) -> Clients:
    """The simulated clients of an experiment, in the runtime that its settings name."""
    handlers = build_handler_server(experiment, folder)
    options = runtime_options(experiment)
    if experiment.settings.runtime == "inline":
        return Inline(**options, handlers=handlers)
    return Pool(**options, handlers=handlers, workers=experiment.settings.workers, cost=experiment.data.size)


def build_handler_server(
    experiment: Experiment, folder: Path, keys: Keys | None = None, run: str = ""
) -> HandlerServer:
    """Answers handler calls of an experiment; `folder` holds the clients' private state.

    `keys` seals messages if the keys are not in `folder`. Such keys outlive a run, so `run` tells runs apart.
    """
    contexts = ContextFactory(experiment.data, experiment.task, experiment.settings.seed, folder, sealing=keys)
    seed, device = experiment.settings.seed, experiment.task.device
    return HandlerServer(experiment.method, contexts, seed, device, Rules.limit, run.encode())


def runtime_options(experiment: Experiment) -> dict[str, Any]:
    """The arguments that every runtime takes."""
    settings = experiment.settings
    faults = Faults(settings.drop, settings.slow, settings.corrupt)
    rules = Rules(settings.quorum, settings.deadline)
    return {"population": len(experiment.data), "seed": settings.seed, "faults": faults, "rules": rules}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread. More threads contend for busy cores, and sums would depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- the loop -------------------------------------------------------------------------------------------------


def _train(
    experiment: Experiment,
    state: Any,
    directory: RunDirectory | None,
    folder: Path,
    progress: Progress | None,
    connect: Connect,
    tracker_classes: Mapping[str, trackers.TrackerClass],
    changed: Mapping[str, Any] | None = None,
    requested: bool = True,
) -> Result:
    """Runs all remaining rounds, from the last checkpoint or from `state`.

    `changed` holds the settings that changed on resume. `requested` is True if the user named the trackers just now.
    """
    method, settings = experiment.method, experiment.settings
    if directory and any(name in CHANGEABLE for name in changed or {}):
        directory.journal.clear()  # its hops belong to a round under the old rules
    checkpoint = directory.rewind() if directory else None
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        result = Result(method, experiment.task, experiment.data, settings, state, folder if directory else None)
        if checkpoint and directory:
            result.state = restore_state(type(state), checkpoint["state"], directory.path)
            result.history, result.seconds = directory.history(), checkpoint["seconds"]
            changes = {name: str(value) for name, value in (changed or {}).items()}
            directory.log_event("resume", round=checkpoint["round"], changed=changes)
        elif directory:
            directory.log_event("start", method=method.name, hash=experiment.hash)
        if progress:
            progress.on_run_start(method.name, len(result.history), method.rounds)
        warn_once(method.name, method.notes())
        finished = len(result.history) == method.rounds
        if finished and not requested:  # its trackers have everything
            return result
        about = _tracker_info(experiment, folder)
        track = stack.enter_context(trackers.follow(tracker_classes, about, result.history, requested))
        if finished:
            return result
        clients: Clients | None = None
        try:
            clients = stack.enter_context(connect(experiment, folder, len(result.history)))
            clients.ledger.total.update(checkpoint["ledger"] if checkpoint else {})
            clients.journal = directory.journal if directory else None
            for number in range(len(result.history) + 1, method.rounds + 1):
                metrics = _round(experiment, clients, number, result, directory, progress)
                if directory:
                    directory.log_metrics(metrics)
                    directory.log_messages(clients.ledger.take())
                    directory.checkpoint(
                        round=number,
                        state=vars(result.state),
                        ledger=dict(clients.ledger.total),
                        seconds=result.seconds,
                    )
                if progress:
                    progress.on_round_end(metrics)
                track(metrics)
        except BaseException as error:
            if directory:
                transport = clients.transport_bytes() if clients else {}
                reason = f"{type(error).__name__}: {error}"
                directory.log_event("stop", round=len(result.history), reason=reason, **transport)
            raise
        if directory:
            write_prepared(result, directory.path)
            directory.log_event("finish", round=method.rounds, **clients.transport_bytes())
    return result


def _tracker_info(experiment: Experiment, folder: Path) -> trackers.RunInfo:
    excluded = {"method_options", "rounds", "cohort", "data_dir"}
    settings = experiment.settings.model_dump(mode="json", exclude=excluded)
    options = experiment.method.model_dump(mode="json")
    return trackers.RunInfo(folder.parent, experiment.method.name, experiment.hash, {**options, **settings})


def _round(
    experiment: Experiment,
    clients: Clients,
    number: int,
    result: Result,
    directory: RunDirectory | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Runs and evaluates one round. Updates `result` and returns the metrics of the round."""
    method, settings = experiment.method, experiment.settings
    started = time.perf_counter()
    absences: list[Absent] = []

    def note_absence(absent: Absent, handler: str) -> None:
        absences.append(absent)
        if directory:
            details = {"client": absent.client, "reason": absent.reason, "handler": handler, "detail": absent.detail}
            directory.log_event("absent", round=number, **details)

    last = number == method.rounds
    clients.round, clients.evaluating = number, False
    clients.will_evaluate = last or number % settings.evaluate_every == 0
    clients.on_absent = note_absence
    if progress:
        clients.on_progress = lambda done, asked: progress.on_answer(number, done, asked)
    with global_streams(settings.seed, number, "coordinator"):
        state = method.round(result.state, clients)
    metrics: dict[str, Any] = {"round": number, "absent": len(absences)}
    clients.evaluating = True
    with global_streams(settings.seed, number, "evaluate"):
        if clients.will_evaluate:
            metrics |= method.evaluate(state, clients, experiment.data)
        if last:
            metrics |= method.report(state, clients, experiment.data)
    warn_once(method.name, _skipped_clients(absences))
    if len(absences) > metrics["absent"]:
        metrics["unmeasured"] = len(absences) - metrics["absent"]  # absent from the evaluation only
    result.seconds += time.perf_counter() - started
    metrics |= {**_total_bytes(clients.ledger), "seconds": round(result.seconds, 3)}
    result.state = state
    result.history.append(metrics)
    return metrics


def warn_once(name: str, texts: Iterable[str]) -> None:
    """Logs each warning once per process."""
    for text in texts:
        if (warning := f"{name}: {text}") not in _WARNED:
            _WARNED.add(warning)
            _LOG.warning(warning)


def _skipped_clients(absences: Sequence[Absent]) -> Iterator[str]:
    """One line per reason for the clients that raised `Unable`."""
    clients_by_reason: dict[str, set[int]] = {}
    for absent in absences:
        if absent.reason == "unable":
            clients_by_reason.setdefault(absent.detail, set()).add(absent.client)
    for reason, clients in clients_by_reason.items():
        listed = ", ".join(map(str, sorted(clients)[:10])) + (" …" if len(clients) > 10 else "")
        yield f"skipped: {'client' if len(clients) == 1 else 'clients'} {listed}: {reason}"


def _total_bytes(ledger: Ledger) -> dict[str, int]:
    """Bytes sent so far, in both directions."""
    return {"up": ledger.total["up"], "down": ledger.total["down"]}


def restore_state(state_class: type[Any], content: Mapping[str, Any], path: Path) -> Any:
    """The state that a checkpoint holds."""
    if {part.name for part in fields(state_class)} != content.keys():
        raise RunError(f"{path} was written by another version of this method: its state has other fields")
    return state_class(**content)
