"""Runs between machines: the server's side and a client's side. Engine and methods are the same as on one machine.

The server sends its clients the settings of the run. A client builds the experiment from them, as `fewer run` would,
but with its own data, and answers the server's calls. A client's private state stays in its own folder, by run. When a
server resumes a run, it says which rounds are complete, and clients delete their state from later rounds.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, Self

import torch

from fewer.data import ClientData, Data
from fewer.data.federated import ArrayData, Encoder, federate
from fewer.data.schema import Schema
from fewer.data.sources import find_files, names_word_vectors, read
from fewer.errors import DataError, FewerError, QuorumLost, RunError, SettingError
from fewer.methods import find
from fewer.models.frozen import hash_frozen
from fewer.models.objective import predicted_kind
from fewer.privacy import PrivacySettings
from fewer.runs import trackers
from fewer.runs.callbacks import Callback
from fewer.runs.directory import HOPS
from fewer.runs.engine import Connect, build_handler_runner, open_noise, resume, run_experiment, runtime_options
from fewer.runs.experiment import (
    Experiment,
    build_experiment,
    check_remote_privacy,
    make_device,
    parse_settings,
    regression_option,
)
from fewer.runs.result import Result
from fewer.runs.settings import Settings
from fewer.runtime.flower.clients import Flower, retry_until_answered
from fewer.runtime.flower.credentials import LOCAL_HOSTS, Credentials
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program, find_free_port
from fewer.runtime.flower.superlink import SuperLink, SuperLinkLost
from fewer.runtime.handlers import Call, HandlerRunner, Reply
from fewer.runtime.keys import Keys, PinnedKeys
from fewer.runtime.noise import SECRET
from fewer.runtime.ring import Journal
from fewer.runtime.store import delete_state_after, write_durably

RUN_ID = "machines.json"
"""File in a run's directory with the run's id and the number of its session."""
MAX_RESTARTS = 5
"""How many times a run restarts after the SuperLink has lost it. Then it fails."""


# --- the server -----------------------------------------------------------------------------------------------


@dataclass
class FlowerServer:
    """Runs experiments with remote clients: `with FlowerServer(…) as server: server.start(experiment, out)`.

    Clients connect to `host`:`port`. docs/how-to/machines.md says which parts of that port may be reachable, and by
    whom.
    """

    credentials: Credentials
    host: str = SuperLink.host
    port: int = SuperLink.port
    timeout: float = 600.0
    """Seconds to wait for all clients. After that, the run starts if enough clients for a quorum are online."""
    log: Callable[[str], None] = lambda text: None
    """Called with each log line."""
    track: Sequence[str] | None = None
    """Trackers; None for no trackers, or those of a resumed run."""

    def __enter__(self) -> Self:
        trackers.find(self.track or ())  # reports a wrong name before any client joins
        self.superlink = SuperLink(self.credentials, self.host, self.port).__enter__()
        self.log(f"listening on {self.host}:{self.port}")
        if self.host not in LOCAL_HOSTS:
            self.log(
                "warning: anyone who can reach this port can start and stop runs without a key; "
                "let clients reach /v1/fleet/ only"
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.superlink.__exit__(*error)

    def start(self, experiment: Experiment, out: Path, callbacks: Sequence[Callback] = ()) -> Result:
        """Starts a run."""
        self.check_experiment(experiment)
        connect = self._connect_to(out)
        attempt = partial(run_experiment, experiment, out, callbacks, connect, self.track or ())
        retry = partial(resume, out, callbacks=callbacks, connect=connect, progress=False)
        return self._run_with_restarts(attempt, retry)

    def resume(self, out: Path, callbacks: Sequence[Callback] = (), **changed: Any) -> Result:
        """Resumes a run."""
        retry = partial(resume, out, callbacks=callbacks, connect=self._connect_to(out), progress=False, **changed)
        return self._run_with_restarts(partial(retry, track=self.track), retry)  # a retry keeps the trackers

    def _run_with_restarts(self, attempt: Callable[[], Result], retry: Callable[[], Result]) -> Result:
        """Completes a run, even if the SuperLink loses it on the way."""
        for _ in range(MAX_RESTARTS):
            try:
                return attempt()
            except SuperLinkLost as lost:
                self.log(f"{lost}; resuming from the last checkpoint")
            attempt = retry
        return attempt()

    def check_experiment(self, experiment: Experiment, resumes: bool = False) -> None:
        """Raises SettingError if the experiment cannot run between machines, or the keys do not match its clients.

        A run that resumes may have fewer clients than there are keys: some may have been added since.
        """
        if experiment.method.simulation_only:
            reason = "it needs the samples of all clients in one place"
            raise SettingError(f"{experiment.method.name} runs in simulation only: {reason}")
        if experiment.settings.debug:
            raise SettingError("debug needs simulated clients: a traceback never leaves a client's machine")
        if experiment.settings.count_flops:
            raise SettingError("count_flops needs simulated clients: remote clients do not report their operations")
        if experiment.settings.lie is not None:
            raise SettingError("lie needs simulated clients: it is a fault of clients, and remote ones are real")
        reason = "which clients on other machines do not have"
        _reject_files(_shared_settings(experiment), ["method", "model", "loss", "metrics"], reason)
        clients, keys = len(experiment.data), list(self.credentials.public_keys)
        missing = {*range(clients)} - {*keys}
        if missing or (len(keys) > clients and not resumes):
            folder = self.credentials.folder
            advice = f" (add one with: fewer keys add NAME --keys {quote(str(folder))})" if missing else ""
            raise SettingError(f"clients = {clients}, but {folder} has keys of clients {keys}{advice}")

    def _connect_to(self, out: Path) -> Connect:
        """Starts a session of the run on the SuperLink and waits for the clients."""

        def connect(experiment: Experiment, folder: Path, done: int, **options: Any) -> Flower:
            self.check_experiment(experiment, resumes=True)
            session = _describe_session(experiment, out, done)
            if (privacy := options.get("privacy")) and privacy.settings.distributed:
                privacy.check_repeats(session["session"] - 1)
            self.superlink.start_run(json.dumps(session))
            handlers = build_handler_runner(experiment, folder)
            clients = Flower(
                **runtime_options(experiment),
                **options,
                noise=open_noise(experiment, folder),
                handlers=handlers,
                superlink=self.superlink,
            )
            self._wait_for_clients(clients)
            return clients

        return connect

    def _wait_for_clients(self, clients: Flower) -> None:
        """Waits until all clients are online, or until the timeout has passed and there is a quorum."""
        end = time.monotonic() + self.timeout
        last_logged: int | None = None
        while (online := len(self._online(clients))) < len(clients):
            if online != last_logged:
                self.log(f"{online} of {len(clients)} clients are online")
                last_logged = online
            if time.monotonic() > end:
                needed = clients.rules.min_answers(len(clients))
                if online < needed:
                    raise QuorumLost(f"{online} of {len(clients)} clients are online, {needed} needed")
                return
            time.sleep(0.5)
        self.log(f"all {online} clients are online")

    def _online(self, clients: Flower) -> list[int]:
        """The clients of the run that are online; others may have a key, too."""
        return [client for client in retry_until_answered(self.superlink.online_clients) if client < len(clients)]


def _shared_settings(experiment: Experiment) -> dict[str, Any]:
    """The settings that clients receive: without the names of files that only the server reads."""
    settings = experiment.settings.model_dump(mode="json")
    settings["method_options"] |= dict.fromkeys(experiment.method.file_options, "")
    return settings


def _reject_files(settings: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    """Raises SettingError if one of these settings, or one of its options, names a file."""
    values = [(name, settings.get(name)) for name in names]
    values += [option for name in names for option in settings.get(f"{name}_options", {}).items()]
    for name, value in values:
        for string in _find_strings(value):
            is_file = name == "vectors" and string != "own" and not names_word_vectors(string)
            if ":" in string or ".." in string or string.startswith("/") or is_file:
                raise SettingError(f"{name} = {string} names a file, {reason}")


def _find_strings(value: Any) -> Iterator[str]:
    """Yields all strings in a setting."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _find_strings(part)


def _describe_session(experiment: Experiment, out: Path, done: int) -> dict[str, Any]:
    """What clients receive at the start of a session: the run's id, its settings, and facts about its data."""
    path, data = out / RUN_ID, experiment.data
    session: dict[str, Any] = {"run": secrets.token_hex(8), "session": 0}
    if path.exists():
        session = json.loads(path.read_text())
    session["session"] += 1
    write_durably(path, json.dumps(session).encode())
    data_info = {
        "clients": len(data),
        "fingerprint": data.fingerprint(),
        "schema": data.schema.to_dict(),
        "frozen": hash_frozen(experiment.task),
        "word_vectors": _checksum_word_vectors(experiment),
    }
    return {
        **session,
        "done": done,
        "finished_clients": sorted(Journal(out / HOPS).finished_clients(done + 1)),
        "settings": _shared_settings(experiment),
        "data_info": data_info,
    }


def _checksum_word_vectors(experiment: Experiment) -> int | None:
    """A checksum of word vectors from a file. They are never sent, so server and clients must have the same."""
    if experiment.settings.model_options.get("vectors", "own") == "own":
        return None
    net, checksum = experiment.task.net(), 0
    sent = net.state_dict()
    for name, tensor in net.named_buffers():
        if name not in sent:
            checksum = zlib.crc32(tensor.cpu().contiguous().numpy().data, checksum)
    return checksum


# --- a client -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SingleClientData(Data):
    """The data of one client, in the format of the server's data. The other clients' data is unknown."""

    has_global_test = False
    data: ArrayData
    """The client's samples, as data of a single client."""
    clients: int
    classes: int

    def __post_init__(self) -> None:
        for name in ("name", "shape", "tokens", "class_names", "columns", "time_ordered", "test"):
            object.__setattr__(self, name, getattr(self.data, name))

    def __len__(self) -> int:
        return self.clients

    def client(self, index: int) -> ClientData:
        """The client's samples, whatever its number."""
        return self.data.client(0)

    def size(self, index: int) -> int:
        """The number of training samples."""
        return self.data.size(0)

    def fingerprint(self) -> str:
        """A checksum of the client's samples."""
        return self.data.fingerprint()

    def encode(self, encoder: Encoder) -> SingleClientData:
        """The same data with the features of an encoder as inputs."""
        return replace(self, data=self.data.encode(encoder))

    def rescale(self, schema: Schema) -> SingleClientData:
        """The same data, normalized as the schema says."""
        return replace(self, data=self.data.rescale(schema))

    def to(self, device: torch.device) -> SingleClientData:
        """Copies the data to a device."""
        return replace(self, data=self.data.to(device))


@dataclass
class ClientDaemon:
    """A client that takes part in runs: its own configuration, and the experiment it is working on."""

    folder: Path
    """The client's private state, by run."""
    data: str | None = None
    """The client's own data, FORMAT:PATH or the name of a dataset; None for its part of the server's dataset."""
    data_options: Mapping[str, Any] = field(default_factory=dict)
    data_dir: Path | None = None
    device: str = "cpu"
    keys: Keys | None = None
    """Keys for sealed messages to other clients."""
    log: Callable[[str], None] = lambda text: None
    """Called with each log line."""
    method: str | None = None
    """The only method that the client takes part in; None for any method."""
    secure_sum: bool = False
    """True if the client takes part only in runs with secure sums."""
    dp: str | None = None
    """The only `--dp` of runs that the client takes part in; None for any, and for none."""
    _experiment: str = ""
    _handlers: HandlerRunner | None = None

    def join(self, address: str, keys: Path) -> None:
        """Answers a server until stopped. Reports a wrong device or wrong data now, before any run."""
        torch.set_num_threads(1)
        make_device(self.device)
        if self.data:
            self._try_own_data(self.data)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the client's state reveals its data
        Node(address, keys, self.folder, self.log).serve(self.answer)

    def _try_own_data(self, data: str) -> None:
        """Reads the client's own data. The schema of a run may say more about its columns, so a run tries again."""
        find_files(data, self.data_dir)
        try:
            read(data, self.data_dir, **self.data_options)
        except DataError as error:
            self.log(f"{error}; the schema of a run may help")

    def answer(self, experiment: str, call: Call, blob: bytes) -> Reply:
        """Answers one call of an experiment."""
        if experiment != self._experiment or self._handlers is None:
            try:
                self._handlers = self._build_handlers(json.loads(experiment), call.client)
                self._experiment = experiment
            except FewerError as error:
                self.log(str(error))
                return Reply(b"", "unable", str(error))
            except (ValueError, KeyError, TypeError, AttributeError):
                return Reply(b"", "refused", "not an experiment")
        reply = self._handlers.answer(call, blob)
        outcome = f"{reply.failure}: {reply.detail}" if reply.failure else f"{len(reply.blob)} bytes"
        self.log(f"round {call.round}  {call.handler}  {reply.seconds:.1f} s  {outcome}")
        return reply

    def _build_handlers(self, description: Mapping[str, Any], client: int) -> HandlerRunner:
        """Builds the experiment that the server describes. Deletes state from rounds that are not complete."""
        folder = self.folder / "runs" / f"{int(str(description['run']), 16):016x}"
        path = folder / "session"
        last_session = int(path.read_text()) if path.exists() else 0
        session, done = int(description["session"]), int(description["done"])
        if session < last_session:
            raise RunError(f"session {session} of this run is over; session {last_session} has started")
        experiment = self._build_experiment(description["settings"], description["data_info"])
        dp = experiment.settings.dp
        privacy = None if dp is None else PrivacySettings.parse(dp)
        if session > last_session:
            if privacy and privacy.distributed:  # a round that is asked again has other noise
                (folder / SECRET).unlink(missing_ok=True)
            delete_state_after(folder, done, [int(finished) for finished in description["finished_clients"]])
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, str(session).encode())
        size = experiment.data.size(client)
        self.log(f"client {client} of {len(experiment.data)}: {experiment.method.name}, {size} samples")
        handlers = build_handler_runner(experiment, folder, self.keys, folder.name)
        return replace(handlers, always_protect=privacy is not None and privacy.protects_at_clients)

    def _build_experiment(self, settings: Mapping[str, Any], data_info: Mapping[str, Any]) -> Experiment:
        reason = "which this client does not accept from a server"
        _reject_files(settings, ["method", "model", "loss", "metrics", *([] if self.data else ["data"])], reason)
        for name in find(settings["method"]).file_options:
            if file := settings["method_options"].get(name):
                raise SettingError(f"{name} = {file} names a file, {reason}")
        if self.method not in (None, settings["method"]):
            raise SettingError(f"method = {settings['method']}, but this client takes part in {self.method} only")
        if self.secure_sum and not settings.get("secure_sum"):
            raise SettingError("this client takes part only in runs with secure sums (fewer server … --secure-sum)")
        if self.dp not in (None, settings.get("dp")):
            raise SettingError(
                f"dp = {settings.get('dp')}, but this client takes part in runs with dp = {self.dp} only"
            )
        local_settings = {"runtime": "inline", "device": self.device, "data_dir": self.data_dir}
        parsed = parse_settings({**settings, **local_settings})
        if parsed.dp is not None:
            check_remote_privacy(parsed)
        own_data = self._load_own_data(data_info, parsed) if self.data else None
        experiment = build_experiment(parsed, data=own_data, feature_folder=self.folder if own_data else None)
        fingerprint, expected = experiment.data.fingerprint(), data_info["fingerprint"]
        if not self.data and fingerprint != expected:
            difference = f"fingerprint {fingerprint}, expected {expected}"
            raise DataError(f"data '{parsed.data}' differs from the server's ({difference})")
        if not self.data and experiment.data.standardize:
            experiment.data = experiment.data.rescale(Schema.from_dict(data_info["schema"]))
        if hash_frozen(experiment.task) != data_info["frozen"]:
            raise DataError("the frozen weights of the model differ from the server's: use the same weights")
        if _checksum_word_vectors(experiment) != data_info["word_vectors"]:
            vectors = parsed.model_options.get("vectors")
            raise DataError(f"the word vectors (vectors = {vectors}) differ from the server's: use the same file")
        return experiment

    def _load_own_data(self, data_info: Mapping[str, Any], settings: Settings) -> SingleClientData:
        """The client's own data, with columns, classes, words and normalization as in the server's schema."""
        assert self.data
        schema = Schema.from_dict(data_info["schema"])
        options = {key: value for key, value in schema.options.items() if key not in ("label", "text")}  # columns
        _reject_files({"data_options": options}, ["data"], "which this client does not accept from a server")
        options = {**regression_option(self.data, settings), **self.data_options}
        raw = read(self.data, self.data_dir, schema=schema, **options)
        for note in raw.notes:
            self.log(f"data '{self.data}': {note}")
        raw = raw.use_tokens_of(schema, self.data)
        data = federate(raw, clients=1, partition="iid", validation=settings.validation, name=self.data)
        if predicted_kind(settings.loss) == "regression":
            data = data.as_numbers()
        if data.shape != schema.shape or str(data.source.x.dtype) != f"torch.{schema.dtype}":
            raise DataError(
                f"data '{self.data}' has inputs of {data.source.x.dtype} {data.shape}, "
                f"but the task needs torch.{schema.dtype} {schema.shape}"
            )
        return SingleClientData(data.rescale(schema), data_info["clients"], schema.classes)


def exchange_keys(folders: Sequence[Path]) -> None:
    """Creates a sealing key in each client's folder, and pins all public keys in all folders."""
    keys = [PinnedKeys(folder) for folder in folders]
    public_keys = {client: client_keys.create() for client, client_keys in enumerate(keys)}
    for client_keys in keys:
        client_keys.trust(public_keys)


# --- all on one machine ---------------------------------------------------------------------------------------


@contextmanager
def local_cluster(
    home: Path,
    clients: int,
    device: str = "cpu",
    data_dir: Path | None = None,
    timeout: float = FlowerServer.timeout,
    log: Callable[[str], None] = lambda text: None,
    track: Sequence[str] | None = None,
) -> Iterator[FlowerServer]:
    """Starts a server on loopback, and clients in their own processes. Their folders and keys are in `home`.

    Existing keys are reused.
    """
    trackers.find(track or ())  # reports a wrong name before any key is created
    keys = home / "keys"
    credentials = Credentials.open(keys) if (keys / "ca.key").exists() else Credentials.create(keys, clients)
    exchange_keys([credentials.client_folder(client) for client in credentials.public_keys])
    server = FlowerServer(credentials, port=find_free_port(), timeout=timeout, log=log, track=track)
    arguments = ["join", f"127.0.0.1:{server.port}", "--device", device]
    if data_dir:
        arguments += ["--data-dir", str(data_dir)]
    with ExitStack() as stack:
        for client in credentials.public_keys:
            key, store = credentials.client_folder(client), home / f"client-{client}"
            program = Program("fewer.cli:main", [*arguments, "--key", str(key), "--store", str(store)], store)
            program.start()
            stack.callback(program.stop)
        yield stack.enter_context(server)
