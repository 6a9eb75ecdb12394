"""The training loop of all methods: it runs and evaluates rounds. Callbacks record them."""

from __future__ import annotations

import inspect
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fewer
from fewer.data import Data
from fewer.data.schema import Schema
from fewer.errors import DataError, RunError, SettingError
from fewer.methods import ContextFactory, Method, Scores, find
from fewer.methods.capabilities import HasSettingWarnings
from fewer.methods.registry import find_option
from fewer.methods.standardize import standardize
from fewer.models.frozen import hash_frozen
from fewer.models.objective import Loss
from fewer.privacy import PrivacySettings
from fewer.registry import METHODS
from fewer.runs import trackers
from fewer.runs.artifacts import copy_start_model, resolve_start_model
from fewer.runs.callbacks import Callback, Observers, Run, Tracker, check_callbacks
from fewer.runs.directory import RunDirectory, explain_full_disk
from fewer.runs.experiment import Experiment, Metrics, Model, build_experiment, parse_settings, restore_state, warn_once
from fewer.runs.progress import show_progress
from fewer.runs.reader import RunReader
from fewer.runs.recorder import FailureLog, Recorder
from fewer.runs.result import Result
from fewer.runs.settings import (
    FAULT_SETTINGS,
    RUNTIME_SETTINGS,
    Settings,
    neutral_options,
    settings_hash,
    settings_in_group,
)
from fewer.runtime import Absent, Aggregation, Clients, Faults, Inline, Pool, RoundRules
from fewer.runtime.handlers import HandlerRunner
from fewer.runtime.keys import Keys
from fewer.runtime.noise import NoiseSource, open_secret
from fewer.runtime.streams import one_thread

_LOG = logging.getLogger("fewer")

Connect = Callable[..., Clients]
"""`connect(experiment, client_folder, finished_rounds, **options)` returns the clients of a run.

`client_folder` has the private state of all simulated clients. `options` are arguments of `Clients`.
"""


# --- starting and resuming ------------------------------------------------------------------------------------


def run(
    method: Method | str,
    data: Data | str = "fashion-mini",
    *,
    model: Model | None = None,
    loss: Loss | str | None = None,
    metrics: Metrics = (),
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Trains a method and returns the result.

        fewer.run(FedAvg(lr=0.1), data, model=MyNet, seed=1, runtime="pool")

    - `method`: an object or a name.
    - `data`: an object made by `fewer.data`, or a name.
    - `model`: a name, a class or function that returns an `nn.Module`, or an `nn.Module`. Training starts from the
      weights of an `nn.Module`. By default, a model that fits the data.
    - `loss`: a name (cross-entropy, bce, mse, mae, huber), or a function of outputs and targets.
    - `metrics`: names (mae, mse, rmse, r2, f1, exact-match), and functions of outputs and targets.
    - `out`: the run directory. Without it, nothing is kept on disk.
    - `callbacks`: objects that follow the run, such as `[EarlyStopping(patience=3)]`.
    - `track`: trackers that also receive the metrics, such as `["tensorboard"]`.
    - `progress`: False shows no progress bar; True shows progress even if there is neither a terminal nor a notebook.
    - All other arguments are the options of the command line, with underscores. `Settings` lists them.
    """
    experiment = experiment_from_arguments(method, data, model, {**settings, "loss": loss, "metrics": metrics})
    with show_progress(progress, callbacks) as callbacks:
        return run_experiment(experiment, None if out is None else Path(out), callbacks, track=track)


def experiment_from_arguments(
    method: Method | str, data: Data | str, model: Model | None, settings: Mapping[str, Any]
) -> Experiment:
    """Builds an experiment from the arguments of `run`, which are objects or names."""
    settings = dict(settings)
    _check_arguments(method, data, model)
    # These are in the groups Method and Data, but no part of such an object.
    independent = {"norm", "model_options", "freeze", "train", "loss", "metrics", "data_dir"}
    for name in settings:
        if name not in Settings.model_fields and (option := find_option(name, Settings.model_fields)):
            raise SettingError(
                f"{option} is an option of a method: set it on the object, such as FedAvg({option}=…), "
                f"or pass method_options={{'{option}': …}}"
            )
        for kind, argument in (("method", method), ("data", data)):
            if not isinstance(argument, str) and name in settings_in_group(kind.capitalize()) - independent:
                example = f"FedAvg({name}=…)" if kind == "method" else f"fewer.data.load(…, {name}=…)"
                raise SettingError(f"{name} belongs to the {kind}, which is an object here: set it there, {example}")
    if isinstance(method, Method):
        settings |= {"method": _method_spec(method), "method_options": method.model_dump(mode="json")}
    else:
        settings["method"] = method
    if isinstance(data, str):
        settings["data"] = data
    else:
        settings |= _data_settings(data)
    if model is not None:
        settings["model"] = model if isinstance(model, str) else _function_name(model)
    loss, metrics = settings.get("loss"), settings.get("metrics", ())
    if callable(loss):
        settings["loss"] = _function_name(loss)
    if own_metrics := any(map(callable, metrics)):
        settings["metrics"] = [_function_name(metric) if callable(metric) else metric for metric in metrics]
    return build_experiment(
        parse_settings(settings),
        method if isinstance(method, Method) else None,
        data if isinstance(data, Data) else None,
        model if not isinstance(model, str) else None,
        loss if callable(loss) else None,
        metrics if own_metrics else None,
    )


def _function_name(function: Any) -> str:
    """The name of a user's function, or of a user's net, in the settings of a run."""
    return f"({getattr(function, '__name__', type(function).__name__)})"


def _check_arguments(method: object, data: object, model: object) -> None:
    """Raises an error if an argument is neither a name nor an object of the right type."""
    if isinstance(method, type) and issubclass(method, Method):
        raise SettingError(f"method is the class {method.__name__}: pass an instance, {method.__name__}()")
    if not isinstance(method, str | Method):
        raise SettingError(f"method must be a name or a fewer.Method, got {type(method).__name__}")
    if not isinstance(data, str | Data):
        raise DataError(
            "data must be a name, or made by fewer.data.from_arrays, from_clients or from_dataset, "
            f"got {type(data).__name__}"
        )
    if not isinstance(model, str | torch.nn.Module | None) and not callable(model):
        kind = type(model).__name__
        raise SettingError(f"model must be a name, an nn.Module, or a class or function that returns one, got {kind}")


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
    callbacks: Sequence[Callback] = (),
    connect: Connect | None = None,
    track: Sequence[str] = (),
) -> Result:
    """Runs an experiment from its first round. `out` is the run directory to create."""
    connect = connect or _local_connect(experiment.settings)
    check_callbacks(callbacks)
    new_trackers = trackers.find(track)
    if track and out is None:
        raise SettingError(f"track = {track[0]} needs a run directory: pass out=DIR")
    privacy = experiment.open_privacy()
    run = Run(**vars(experiment), state=experiment.initial_state(), label=experiment.method.name, privacy=privacy)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="fewer-") as folder:
            observers = Observers(run, [FailureLog(Path(folder))], callbacks)
            return _train(run, Path(folder), observers, connect)
    with RunDirectory.create(out, {**_run_metadata(experiment), "track": list(track)}) as directory:
        with directory.explain_errors(full_disk_only=True):
            copy_start_model(experiment.method, directory.path)  # so that the run can resume without the original file
        return _train_recorded(run, Recorder(directory), new_trackers, callbacks, connect)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Data | None = None,
    model: Model | None = None,
    loss: Loss | None = None,
    metrics: Metrics | None = None,
    callbacks: Sequence[Callback] = (),
    connect: Connect | None = None,
    track: Sequence[str] | None = None,
    rounds: int | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Continues a run from its last checkpoint. Unless settings change, the numbers are those of an uninterrupted run.

    - `method`, `data`, `model`, `loss`, `metrics`: pass them again if they were Python objects.
    - `callbacks`: pass them again, too.
    - `connect`: how to reach remote clients, if the run has any.
    - `track`: replaces the run's trackers. New trackers receive all rounds.
    - `rounds`: another number of rounds, more than are done. A finished run continues. The result is that of a run with
      this number of rounds from the start. Methods whose rounds depend on their number refuse it.
    - `progress`: as in `run`.
    - Further arguments change settings. `runtime`, `workers`, `data_dir` and `debug` do not affect the numbers;
      `device` may. `quorum`, `deadline`, `drop`, `slow` and `corrupt` do. Change them to continue a run that stopped
      because too few clients answered.
    """
    path = Path(path)
    directory = RunDirectory(path)
    recorded = directory.metadata
    check_callbacks(callbacks)
    all_trackers = trackers.find_installed(recorded.get("track", ())) if track is None else trackers.find(track)
    changed = {name: value for name, value in settings.items() if value is not None}
    allowed = ("rounds", *RUNTIME_SETTINGS, *FAULT_SETTINGS)
    if fixed := sorted(changed.keys() - set(allowed)):
        raise SettingError(f"{fixed[0]} cannot change when a run resumes (allowed: {', '.join(allowed)})")
    directory.check_objects(method=method, data=data, model=model, loss=loss, metrics=metrics)
    start_settings = resolve_start_model(recorded["settings"], path)
    options = recorded["method"]
    if rounds is not None and (rounds != directory.rounds or RunReader(path).ended_early):
        changed["rounds"] = rounds
        start_settings, options = _set_rounds(start_settings, rounds), {**options, "rounds": rounds}
        method = method and type(method)(**{**method.model_dump(), "rounds": rounds})
    new_settings = parse_settings(start_settings | {name: changed[name] for name in changed if name != "rounds"})
    experiment = build_experiment(new_settings, method, data, model, loss, metrics)
    _check_options(experiment.method, options)
    old_runtime, new_runtime = recorded["settings"]["runtime"], experiment.settings.runtime
    if "flower" in (old_runtime, new_runtime) and old_runtime != new_runtime:
        raise SettingError(f"runtime = {new_runtime}: a run cannot switch between simulated and remote clients")
    connect = connect or _local_connect(experiment.settings)
    if (fingerprint := experiment.data.fingerprint()) != recorded["data"]["fingerprint"]:
        recorded_fingerprint = recorded["data"]["fingerprint"]
        raise RunError(f"{path} was run on other data: fingerprint {recorded_fingerprint}, now {fingerprint}")
    if hash_frozen(experiment.task) != recorded.get("frozen", ""):
        raise RunError(f"{path} was run with other frozen weights: pass the model with the same weights")
    state = experiment.initial_state()
    with show_progress(progress, callbacks) as callbacks, directory:
        if track is not None:
            directory.update_metadata(track=list(track))
        if "rounds" in changed:
            _change_rounds(directory, experiment)
        if any(name in ("rounds", *FAULT_SETTINGS) for name in changed):
            directory.journal.clear()  # discards the messages of the unfinished round; it starts again
        run = Run(**vars(experiment), state=state, label=path.name, privacy=experiment.open_privacy())
        return _train_recorded(run, Recorder(directory, changed), all_trackers, callbacks, connect)


def _set_rounds(settings: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """The settings with another number of rounds, which a method that was given as an object has in its options."""
    options = settings["method_options"]
    if "rounds" in options:
        return {**settings, "method_options": {**options, "rounds": rounds}}
    return {**settings, "rounds": rounds}


def _change_rounds(directory: RunDirectory, experiment: Experiment) -> None:
    """Records the experiment's number of rounds. Raises SettingError if the run cannot continue to this number."""
    method, planned = experiment.method, directory.rounds
    checkpoint = directory.read_checkpoint() or {"round": 0}
    done = checkpoint["round"]
    if method.rounds <= done:
        raise SettingError(
            f"rounds = {method.rounds}, but {directory.path} has done {done} (allowed: more than {done})"
        )
    if (dp := experiment.settings.dp) is not None and PrivacySettings.parse(dp).epsilon is not None:
        raise SettingError(
            f"rounds cannot change with dp = {dp}: the noise was chosen for {planned} rounds; start a new run"
        )
    unscheduled = bool(done % experiment.settings.evaluate_every)
    if done and (reason := method.why_not_extend(done, planned, unscheduled)):
        raise SettingError(
            f"{method.name} cannot change from {planned} to {method.rounds} rounds after round {done}: {reason}; "
            "start a new run"
        )
    if (done == planned or "stopped" in checkpoint) and "taken_back" not in checkpoint:
        directory.take_back_evaluation(checkpoint)  # first: a kill between these two lines changes nothing
    options = {**directory.metadata["method"], "rounds": method.rounds}
    settings = parse_settings(_set_rounds(directory.settings, method.rounds))
    same_files = method.model_copy(update={name: options[name] for name in method.file_options})
    hash = settings_hash(settings, same_files)
    directory.update_metadata(settings=settings.model_dump(mode="json"), method=options, hash=hash)


def _train_recorded(
    run: Run, recorder: Recorder, all_trackers: Sequence[Tracker], callbacks: Sequence[Callback], connect: Connect
) -> Result:
    """Runs the remaining rounds in the recorder's run directory, from its last checkpoint if it has one."""
    directory = recorder.directory
    run.path, run.folder = directory.path, directory.clients
    with directory.explain_errors(full_disk_only=True):
        checkpoint = directory.rewind_to_checkpoint()
    if checkpoint:
        run.state = restore_state(run.state, checkpoint["state"], directory.path)
        run.history, run.seconds = list(directory.history), checkpoint["seconds"]
        run.stopped = checkpoint.get("stopped", "")
        run.ledger.total.update(checkpoint["ledger"])
        if run.privacy:
            run.privacy.restore(checkpoint["privacy"])
        if run.data.standardize and directory.schema:
            run.data = run.data.rescale(Schema.from_dict(directory.schema))
        if taken_back := checkpoint.get("taken_back"):
            run.history.append(json.loads(taken_back))
            run.evaluates_again = True
    if run.finished:
        if run.stopped:
            done = f"{len(run.history)} of {run.method.rounds} rounds"
            _LOG.warning(f"{run.path} is finished after {done}: {run.stopped}")
        all_trackers = [tracker for tracker in all_trackers if tracker.required]
    observers = Observers(run, [recorder, *all_trackers], callbacks)
    return _train(run, directory.clients, observers, connect, directory)


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
        "metric": asdict(experiment.metric),
        "method": experiment.method.model_dump(mode="json"),
        "frozen": hash_frozen(experiment.task),
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
    if settings.secure_sum:
        raise SettingError(
            "secure_sum hides nothing in a simulation, where one process has all data: "
            "use fewer server or fewer local-cluster"
        )
    return connect_clients


def connect_clients(experiment: Experiment, client_folder: Path, finished_rounds: int = 0, **options: Any) -> Clients:
    """Makes the simulated clients of an experiment, in this process (inline) or in a pool of worker processes."""
    settings = experiment.settings
    options |= {**runtime_options(experiment), "handlers": build_handler_runner(experiment, client_folder)}
    options["noise"] = open_noise(experiment, client_folder)
    if settings.runtime == "inline" or settings.debug:
        if settings.runtime != "inline":
            _LOG.warning(f"debug: clients run inline instead of in the {settings.runtime}; the results are the same")
        return Inline(**options)
    return Pool(**options, workers=settings.workers, cost=experiment.data.size)


def build_handler_runner(
    experiment: Experiment, client_folder: Path, keys: Keys | None = None, run_id: str = ""
) -> HandlerRunner:
    """Builds the object that runs the handlers of an experiment. `client_folder` has the clients' private state.

    `keys` encrypt (seal) messages from client to client. Default: the key files in `client_folder`. Several runs may
    share the same keys, so every sealed message also contains `run_id`.
    """
    seed = experiment.settings.seed
    settings, device, lies = experiment.settings, experiment.task.device, experiment.lies
    liars = lies.liars(experiment.population, seed) if lies else frozenset()
    mislabeled = liars if lies and lies.kind == "label-flip" else frozenset()
    privacy = experiment.open_privacy()
    contexts = ContextFactory(
        experiment.data,
        experiment.task,
        seed,
        client_folder,
        sealing_keys=keys,
        mislabeled=mislabeled,
        protection=privacy.protection if privacy else None,
        noise=open_noise(experiment, client_folder),
    )
    flags = settings.debug, settings.count_flops
    options: dict[str, Any] = {"lies": lies, "liars": liars, "secure_sum": settings.secure_sum}
    return HandlerRunner(experiment.method, contexts, seed, device, run_id.encode(), *flags, **options)


def open_noise(experiment: Experiment, folder: Path) -> NoiseSource | None:
    """Where the noise of a run comes from, under differential privacy. The secret is in `folder`."""
    if experiment.settings.dp is None:
        return None
    public = PrivacySettings.parse(experiment.settings.dp).public_noise
    return NoiseSource(experiment.settings.seed, None if public else open_secret(folder), folder)


def runtime_options(experiment: Experiment) -> dict[str, Any]:
    """Returns the arguments that every runtime takes."""
    settings = experiment.settings
    faults = Faults(settings.drop, settings.slow, settings.corrupt)
    rules = RoundRules(settings.quorum, settings.deadline)
    return {
        "population": experiment.population,
        "seed": settings.seed,
        "faults": faults,
        "rules": rules,
        "aggregation": Aggregation(settings.aggregate, settings.liars),
        "lies": experiment.lies,
        "secure_sum": settings.secure_sum,
    }


# --- the loop -------------------------------------------------------------------------------------------------


def _train(
    run: Run, folder: Path, observers: Observers, connect: Connect, directory: RunDirectory | None = None
) -> Result:
    """Runs the remaining rounds. `folder` has the clients' private state."""

    def on_absent(absent: Absent, handler: str) -> None:
        run.absent.append(absent)
        observers.notify("on_absent", absent, handler)

    full_disk = directory.explain_errors(full_disk_only=True) if directory else explain_full_disk(folder)
    with one_thread(), observers.follow(), full_disk:
        for note in run.data.notes:
            warn_once(f"data '{run.data.name}': {note}")
        if run.privacy and run.privacy.settings.public_noise:
            warn_once("dp with public_noise: anyone who knows the seed can subtract the noise; only for public data")
        if isinstance(run.method, HasSettingWarnings):
            for warning in run.method.setting_warnings():
                warn_once(f"{run.method.name}: {warning}")
        if run.finished and not run.evaluates_again:
            return run
        hooks = {"on_answer": partial(observers.notify, "on_answer"), "on_absent": on_absent}

        @contextmanager
        def open_clients() -> Iterator[Clients]:
            with connect(
                run,
                folder,
                len(run.history),
                ledger=run.ledger,
                privacy=run.privacy,
                journal=directory and directory.journal,
                **hooks,
            ) as clients:
                try:
                    yield clients
                finally:
                    run.transport_bytes = Counter(run.transport_bytes) + Counter(clients.transport_bytes())

        if run.data.standardize and not run.history:
            with open_clients() as clients:
                schema = standardize(run.method, clients, run.data)
            run.data = run.data.rescale(schema)  # clients that are opened from now on have it, too
        with open_clients() as clients:
            clients.flops = run.history[-1].get("flops", 0) if run.history else 0
            if run.evaluates_again:
                _evaluate_again(run, clients, observers)
            while not run.finished:
                _run_round(run, clients, observers)
    return run


def _run_round(run: Run, clients: Clients, observers: Observers) -> None:
    """Runs, evaluates and records one round. It is the last one if a callback stops the run."""
    method = run.method
    started = time.perf_counter() - run.seconds
    run.round, run.absent = len(run.history) + 1, []
    observers.notify("on_round_start")
    last = run.round == method.rounds or bool(run.stop_request)
    will_evaluate = last or run.round % run.settings.evaluate_every == 0
    with clients.training_round(run.round, will_evaluate, last):
        state = method.round(run.state, clients)
    metrics: dict[str, Any] = {"round": run.round, "absent": len(run.absent)}
    evaluate = partial(_evaluate, run, clients, state, metrics, len(run.absent), started)
    evaluate(last)
    run.state = state
    run.history.append(metrics)
    try:
        observers.notify("on_round_end", metrics, among=observers.callbacks)
        if run.stop_request and will_evaluate and run.round < method.rounds:
            if not last:
                evaluate(True)
            run.stopped = run.stop_request
    except BaseException:
        if run.stop_request:
            run.history.pop()  # a resumed run repeats this round, and the callbacks decide again
        else:
            observers.notify("on_round_end", metrics, among=observers.recorders)
        raise
    observers.notify("on_round_end", metrics, among=observers.recorders)


def _evaluate(
    run: Run,
    clients: Clients,
    state: Any,
    metrics: dict[str, Any],
    absent_in_training: int,
    started: float,
    is_last: bool,
) -> None:
    """Adds the scores of a trained round, and the totals so far, to its metrics."""
    method = run.method
    del run.absent[absent_in_training:]  # those of an earlier evaluation
    if clients.will_evaluate:
        with clients.evaluation(is_last):
            scores = method.evaluate(state, clients, run.data)
        _check_scores(run, scores, is_last)
        metrics.update(scores.as_dict(is_last))
        if classes := metrics.get("classes"):
            metrics["classes"] = {"names": list(run.data.schema.labels)[: len(classes["support"])], **classes}
        if is_last and run.data.unseen_clients:
            with clients.join(run.data.unseen_clients):
                metrics[f"unseen_clients_{run.metric.name}"] = method.evaluate_unseen_clients(
                    state, clients, run.settings.join_rounds
                )
    for warning in _skip_warnings(run.absent):
        warn_once(f"{method.name}: {warning}")
    if len(run.absent) > absent_in_training:
        metrics["unmeasured"] = len(run.absent) - absent_in_training
    run.seconds = time.perf_counter() - started
    metrics.update(up=run.ledger.total["up"], down=run.ledger.total["down"], seconds=round(run.seconds, 3))
    metrics.update({"flops": clients.flops} if run.settings.count_flops else {})
    metrics.update({"epsilon": run.privacy.epsilon, "delta": run.privacy.settings.delta} if run.privacy else {})


def _evaluate_again(run: Run, clients: Clients, observers: Observers) -> None:
    """Evaluates and records the latest round again, because it was the last one of the run and no longer is."""
    started = time.perf_counter() - run.seconds
    recorded = run.history.pop()
    metrics = {name: recorded[name] for name in ("round", "absent")}
    run.round, run.absent = metrics["round"], []
    last = run.round == run.method.rounds
    clients.enter_round(run.round, last or run.round % run.settings.evaluate_every == 0, last)
    _evaluate(run, clients, run.state, metrics, 0, started, last)
    run.history.append(metrics)
    run.evaluates_again = False
    observers.notify("on_round_end", metrics, among=observers.recorders)


def _check_scores(run: Run, scores: Scores, is_last: bool) -> None:
    """Raises SettingError if an evaluation is not what reports need. Only the last one must measure something."""
    if not isinstance(scores, Scores):
        raise SettingError(f"{run.method.name}: evaluate must return fewer.Scores, got {type(scores).__name__}")
    if (scores.metrics or is_last) and run.metric.name not in scores.metrics:
        raise SettingError(f"{run.method.name}: the metrics of evaluate lack the primary metric '{run.metric.name}'")


def _skip_warnings(absences: Sequence[Absent]) -> Iterator[str]:
    """Yields one warning per reason, with the clients that raised `Unable` for it."""
    clients_by_reason: dict[str, set[int]] = {}
    for absent in absences:
        if absent.reason == "unable":
            clients_by_reason.setdefault(absent.detail, set()).add(absent.client)
    for reason, clients in clients_by_reason.items():
        listed = ", ".join(map(str, sorted(clients)[:10])) + (" …" if len(clients) > 10 else "")
        yield f"skipped {'client' if len(clients) == 1 else 'clients'} {listed}: {reason}"
