"""The training loop of all methods: rounds, evaluation, logs and checkpoints."""

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
from fewer.errors import DataError, RunError, SettingError
from fewer.methods import ContextFactory, Method, find, names
from fewer.methods.capabilities import HasSettingWarnings
from fewer.registry import METHODS
from fewer.runs import trackers
from fewer.runs.artifacts import copy_start_model, resolve_start_model, write_artifact
from fewer.runs.directory import RunDirectory
from fewer.runs.experiment import Experiment, Model, build_experiment, parse_settings
from fewer.runs.result import Result
from fewer.runs.settings import FAULT_SETTINGS, METHOD_SETTINGS, RUNTIME_SETTINGS, Settings, neutral_options
from fewer.runtime import Absent, Clients, Faults, Inline, Pool, RoundRules
from fewer.runtime.handlers import HandlerRunner
from fewer.runtime.keys import Keys
from fewer.runtime.streams import SERVER, global_streams
from fewer.wire import Ledger

_LOG = logging.getLogger("fewer")
_WARNED: set[str] = set()
"""Warnings that this process has logged."""


class Progress(Protocol):
    """Callbacks that display the progress of a run."""

    def on_run_start(self, method_name: str, finished_rounds: int, rounds: int) -> None:
        """Called when a run starts, or resumes after `finished_rounds` rounds."""

    def on_answer(self, round: int, answered: int, asked: int) -> None:
        """Called after each answer of a client: `answered` of `asked` clients have answered so far."""

    def on_round_end(self, metrics: Mapping[str, Any]) -> None:
        """Called after each round."""


Connect = Callable[[Experiment, Path, int], Clients]
"""`connect(experiment, client_folder, finished_rounds)` returns the clients of a run.

`client_folder` has the private state of all simulated clients.
"""


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
    """Trains a method and returns the result.

        fewer.run(FedAvg(lr=0.1), data, model=MyNet, seed=1, runtime="pool")

    - `method`: an object or a name.
    - `data`: an object made by `fewer.data`, or a name.
    - `model`: a name, a class or function that returns an `nn.Module`, or an `nn.Module`. Training starts from the
      weights of an `nn.Module`.
    - `out`: the run directory. Without it, nothing is kept on disk.
    - `track`: trackers that also receive the metrics, such as `["tensorboard"]`.
    - All other arguments are the options of the command line, with underscores. `Settings` lists them.
    """
    experiment = experiment_from_arguments(method, data, model, settings)
    return run_experiment(experiment, None if out is None else Path(out), progress, track=track)


def experiment_from_arguments(
    method: Method | str, data: Data | str, model: Model, settings: Mapping[str, Any]
) -> Experiment:
    """Builds an experiment from the arguments of `run`, which are objects or names."""
    settings = dict(settings)
    _check_arguments(method, data, model)
    if misplaced := next((name for name in settings if name not in Settings.model_fields and _is_option(name)), None):
        raise SettingError(
            f"{misplaced} is an option of a method: set it on the object, such as FedAvg({misplaced}=…), "
            f"or pass method_options={{'{misplaced}': …}}"
        )
    for kind, argument in (("method", method), ("data", data)):
        if not isinstance(argument, str) and (conflict := _find_conflict(settings, kind)):
            raise SettingError(f"{conflict} belongs to the {kind}, which is an object here: set it on that object")
    if isinstance(method, Method):
        settings |= {"method": _method_spec(method), "method_options": method.model_dump(mode="json")}
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


def _check_arguments(method: object, data: object, model: object) -> None:
    """Raises an error if an argument is neither a name nor an object of the right type."""
    if isinstance(method, type) and issubclass(method, Method):
        raise SettingError(f"method is the class {method.__name__}: pass an object, {method.__name__}()")
    if not isinstance(method, str | Method):
        raise SettingError(f"method must be a name or a fewer.Method, got {type(method).__name__}")
    if not isinstance(data, str | Data):
        raise DataError(
            "data must be a name, or made by fewer.data.from_arrays, from_clients or from_dataset, "
            f"got {type(data).__name__}"
        )
    if not isinstance(model, str | torch.nn.Module) and not callable(model):
        raise SettingError(
            f"model must be a name, an nn.Module, or a class or function that returns one, got {type(model).__name__}"
        )


def _is_option(name: str) -> bool:
    """Returns True if a method has an option of this name."""
    return any(name in find(method).model_fields for method in names())


def _find_conflict(settings: Mapping[str, Any], kind: str) -> str | None:
    """Returns the first setting that belongs to an object of this kind (method or data)."""
    # The title of a field is its group. These are in the groups Method and Data, but no part of such an object.
    allowed = ("norm", "model_options", "data_dir")
    fields = Settings.model_fields
    for name in settings:
        if name in fields and fields[name].title == kind.capitalize() and name not in allowed:
            return name
    return None


def _method_spec(method: Method) -> str:
    """Returns the name under which `resume` finds the method's class: its registered name, or FILE.py:Name."""
    if METHODS.is_installed(method.name) and find(method.name) is type(method):
        return method.name
    try:
        return f"{inspect.getsourcefile(type(method))}:{type(method).__name__}"
    except (TypeError, OSError):
        return f"(interactive):{type(method).__name__}"  # cannot be found again


def _data_settings(data: Data) -> dict[str, Any]:
    """Returns the settings that load this data again; only its name and size if it was made in Python."""
    if data.origin is None:
        return {"data": f"({data.name})", "clients": len(data)}
    renamed = {"name": "data", "seed": "data_seed"}
    return {renamed.get(name, name): value for name, value in data.origin.items()}


def run_experiment(
    experiment: Experiment,
    out: Path | None = None,
    progress: Progress | None = None,
    connect: Connect | None = None,
    track: Sequence[str] = (),
) -> Result:
    """Runs an experiment from its first round. `out` is the run directory to create."""
    connect = connect or _local_connect(experiment.settings)
    tracker_classes = trackers.find(track)
    if track and out is None:
        raise SettingError(f"track = {track[0]} needs a run directory: pass out=DIR")
    state = initial_state(experiment)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="fewer-") as folder:
            return _train(experiment, state, None, Path(folder), progress, connect, {})
    with RunDirectory.create(out, {**_run_metadata(experiment), "track": list(track)}) as directory:
        copy_start_model(experiment.method, directory.path)  # so that the run can resume without the original file
        return _train(experiment, state, directory, directory.clients, progress, connect, tracker_classes)


def initial_state(experiment: Experiment) -> Any:
    """Returns the state before the first round."""
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
    """Continues a run from its last checkpoint. Unless settings change, the numbers are those of an uninterrupted run.

    - `method`, `data`, `model`: pass them again if they were Python objects.
    - `connect`: how to reach remote clients, if the run has any.
    - `track`: replaces the run's trackers. New trackers receive all rounds.
    - Further arguments change settings. `runtime`, `workers` and `data_dir` do not affect the numbers; `device` may.
      `quorum`, `deadline`, `drop`, `slow` and `corrupt` do. Change them to continue a run that stopped because too few
      clients answered.
    """
    path = Path(path)
    directory = RunDirectory.open(path)
    recorded = directory.metadata
    tracker_classes = trackers.find_installed(recorded.get("track", ())) if track is None else trackers.find(track)
    changed = {name: value for name, value in settings.items() if value is not None}
    allowed = (*RUNTIME_SETTINGS, *FAULT_SETTINGS)
    if fixed := sorted(changed.keys() - set(allowed)):
        raise SettingError(f"{fixed[0]} cannot change when a run resumes (allowed: {', '.join(allowed)})")
    directory.reader.check_objects(method=method, data=data, model=model)
    new_settings = parse_settings({**resolve_start_model(recorded["settings"], path), **changed})
    experiment = build_experiment(new_settings, method, data, model)
    _check_options(experiment.method, recorded["method"])
    old_runtime, new_runtime = recorded["settings"]["runtime"], experiment.settings.runtime
    if "flower" in (old_runtime, new_runtime) and old_runtime != new_runtime:
        raise SettingError(f"runtime = {new_runtime}: a run cannot switch between simulated and remote clients")
    connect = connect or _local_connect(experiment.settings)
    if (fingerprint := experiment.data.fingerprint()) != recorded["data"]["fingerprint"]:
        raise RunError(
            f"{path} was run on other data: fingerprint {recorded['data']['fingerprint']}, now {fingerprint}"
        )
    with directory:
        if track is not None:
            directory.update_metadata(track=list(track))
        return _train(
            experiment,
            initial_state(experiment),
            directory,
            directory.clients,
            progress,
            connect,
            tracker_classes,
            changed,
            new_trackers=track is not None,
        )


def _check_options(method: Method, recorded: Mapping[str, Any]) -> None:
    """Raises SettingError if the method has other options than the run started with."""
    options = method.model_dump(mode="json", exclude=neutral_options(method) - recorded.keys())
    for name in {**recorded, **options}:
        old, new = recorded.get(name), options.get(name)
        if old != new and name not in method.file_options:
            raise SettingError(f"{method.name}: {name} cannot change when a run resumes: it was {old!r}, got {new!r}")


def _run_metadata(experiment: Experiment) -> dict[str, Any]:
    """Returns the content of settings.json: settings, data, environment and command."""
    data = experiment.data
    return {
        "settings": experiment.settings.model_dump(mode="json"),
        "hash": experiment.hash,
        "objects": list(experiment.objects),
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


def _local_connect(settings: Settings) -> Connect:
    """Returns the function that makes simulated clients. Raises SettingError if the runtime is remote."""
    if settings.runtime == "flower":
        raise SettingError("runtime = flower is for remote clients: use fewer server, or fewer server --resume RUN")
    return connect_clients


def connect_clients(experiment: Experiment, client_folder: Path, finished_rounds: int = 0) -> Clients:
    """Makes the simulated clients of an experiment, in this process (inline) or in a pool of worker processes."""
    handlers = build_handler_runner(experiment, client_folder)
    options = runtime_options(experiment)
    if experiment.settings.runtime == "inline":
        return Inline(**options, handlers=handlers)
    return Pool(**options, handlers=handlers, workers=experiment.settings.workers, cost=experiment.data.size)


def build_handler_runner(
    experiment: Experiment, client_folder: Path, keys: Keys | None = None, run_id: str = ""
) -> HandlerRunner:
    """Builds the object that runs the handlers of an experiment. `client_folder` has the clients' private state.

    `keys` encrypt (seal) messages from client to client. Default: the key files in `client_folder`. Several runs may
    share the same keys, so every sealed message also contains `run_id`.
    """
    seed = experiment.settings.seed
    contexts = ContextFactory(experiment.data, experiment.task, seed, client_folder, sealing_keys=keys)
    return HandlerRunner(experiment.method, contexts, seed, experiment.task.device, run_id.encode())


def runtime_options(experiment: Experiment) -> dict[str, Any]:
    """Returns the arguments that every runtime takes."""
    settings = experiment.settings
    faults = Faults(settings.drop, settings.slow, settings.corrupt)
    rules = RoundRules(settings.quorum, settings.deadline)
    return {"population": len(experiment.data), "seed": settings.seed, "faults": faults, "rules": rules}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread. Floating-point sums depend on the number of threads, and workers share the cores."""
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
    client_folder: Path,
    progress: Progress | None,
    connect: Connect,
    tracker_classes: Mapping[str, trackers.TrackerClass],
    changed: Mapping[str, Any] | None = None,
    new_trackers: bool = True,
) -> Result:
    """Runs the remaining rounds. Starts from the last checkpoint, or from `state` if no round has finished.

    `changed` are the settings that changed on resume. `new_trackers` is False if a resumed run keeps its trackers.
    """
    method, settings = experiment.method, experiment.settings
    if directory and any(name in FAULT_SETTINGS for name in changed or {}):
        directory.journal.clear()  # discards the messages of the unfinished round; it starts again
    checkpoint = directory.rewind_to_checkpoint() if directory else None
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        result = Result(method, experiment.task, experiment.data, settings, state, client_folder if directory else None)
        if checkpoint and directory:
            result.state = restore_state(type(state), checkpoint["state"], directory.path)
            result.history, result.seconds = directory.reader.history, checkpoint["seconds"]
            changes = {name: str(value) for name, value in (changed or {}).items()}
            directory.log_event("resume", round=checkpoint["round"], changed=changes)
        elif directory:
            directory.log_event("start", method=method.name, hash=experiment.hash)
        if progress:
            progress.on_run_start(method.name, len(result.history), method.rounds)
        if isinstance(method, HasSettingWarnings):
            warn_once(method.name, method.setting_warnings())
        finished = len(result.history) == method.rounds
        if finished and not new_trackers:
            return result
        run_info = _tracker_info(experiment, client_folder.parent)
        log_to_trackers = stack.enter_context(
            trackers.open_trackers(tracker_classes, run_info, result.history, new_trackers)
        )
        if finished:
            return result
        clients: Clients | None = None
        try:
            clients = stack.enter_context(connect(experiment, client_folder, len(result.history)))
            clients.ledger.total.update(checkpoint["ledger"] if checkpoint else {})
            clients.journal = directory.journal if directory else None
            for number in range(len(result.history) + 1, method.rounds + 1):
                metrics = _run_round(experiment, clients, number, result, directory, progress)
                if directory:
                    directory.log_metrics(metrics)
                    directory.log_messages(clients.ledger.drain())
                    directory.save_checkpoint(
                        round=number,
                        state=vars(result.state),
                        ledger=dict(clients.ledger.total),
                        seconds=result.seconds,
                    )
                if progress:
                    progress.on_round_end(metrics)
                log_to_trackers(metrics)
        except BaseException as error:  # Ctrl-C, too
            if directory:
                transport = clients.transport_bytes() if clients else {}
                reason = f"{type(error).__name__}: {error}"
                directory.log_event("stop", round=len(result.history), reason=reason, **transport)
            raise
        if directory:
            write_artifact(result, directory.path)
            directory.log_event("finish", round=method.rounds, **clients.transport_bytes())
    return result


def _tracker_info(experiment: Experiment, path: Path) -> trackers.RunInfo:
    """Returns the name, hash and hyperparameters of a run, for its trackers."""
    repeated = {"method_options", *METHOD_SETTINGS}  # they are among the method's fields
    settings = experiment.settings.model_dump(mode="json", exclude={*repeated, "data_dir"})
    options = experiment.method.model_dump(mode="json")
    return trackers.RunInfo(path, experiment.method.name, experiment.hash, {**options, **settings})


def _run_round(
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

    def record_absence(absent: Absent, handler: str) -> None:
        absences.append(absent)
        if directory:
            details = {"client": absent.client, "reason": absent.reason, "handler": handler, "detail": absent.detail}
            directory.log_event("absent", round=number, **details)

    last = number == method.rounds
    clients.round, clients.evaluating = number, False
    clients.is_last, clients.will_evaluate = last, last or number % settings.evaluate_every == 0
    clients.on_absent = record_absence
    if progress:
        clients.on_progress = lambda answered, asked: progress.on_answer(number, answered, asked)
    with global_streams(settings.seed, number, SERVER):
        state = method.round(result.state, clients)
    absent_in_training = len(absences)
    metrics: dict[str, Any] = {"round": number, "absent": absent_in_training}
    clients.evaluating = True
    with global_streams(settings.seed, number, "evaluate"):
        if clients.will_evaluate:
            metrics |= method.evaluate(state, clients, experiment.data).as_dict()
    warn_once(method.name, _skip_warnings(absences))
    if len(absences) > absent_in_training:
        metrics["unmeasured"] = len(absences) - absent_in_training
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


def _skip_warnings(absences: Sequence[Absent]) -> Iterator[str]:
    """Yields one warning per reason, with the clients that raised `Unable` for it."""
    clients_by_reason: dict[str, set[int]] = {}
    for absent in absences:
        if absent.reason == "unable":
            clients_by_reason.setdefault(absent.detail, set()).add(absent.client)
    for reason, clients in clients_by_reason.items():
        listed = ", ".join(map(str, sorted(clients)[:10])) + (" …" if len(clients) > 10 else "")
        yield f"skipped {'client' if len(clients) == 1 else 'clients'} {listed}: {reason}"


def _total_bytes(ledger: Ledger) -> dict[str, int]:
    """Returns the bytes that clients have sent (up) and received (down) so far."""
    return {"up": ledger.total["up"], "down": ledger.total["down"]}


def restore_state(state_class: type[Any], content: Mapping[str, Any], path: Path) -> Any:
    """Rebuilds a state from the content of a checkpoint."""
    if {field.name for field in fields(state_class)} != content.keys():
        raise RunError(f"{path} was written by another version of this method: its state has other fields")
    return state_class(**content)
