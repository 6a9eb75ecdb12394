"""Runs between machines: the server's side, and a client's. The same engine, the same methods, another carrier.

The server tells its clients the settings of the run; a client builds from them what `fewer run` would, with its own
data, and answers. What belongs to a client stays in its own folder, by run. A server that goes on with a run says
how many rounds count, and what a client remembers from later ones is forgotten, as on one machine.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from fewer.data import ClientData, Data, Samples, text
from fewer.data.federated import ArrayData, federate
from fewer.data.raw_dataset import Inputs
from fewer.data.sources import read
from fewer.errors import DataError, FewerError, QuorumLost, RunError, SettingError
from fewer.methods import find
from fewer.runs import trackers
from fewer.runs.directory import HOPS
from fewer.runs.engine import Connect, Progress, build_handler_server, common, resume, start
from fewer.runs.experiment import Experiment, build_experiment, make_device, parse_settings
from fewer.runs.result import Result
from fewer.runtime.flower.clients import Flower, surely
from fewer.runtime.flower.credentials import LOCAL, Credentials
from fewer.runtime.flower.link import Link, LinkLost
from fewer.runtime.flower.node import Node
from fewer.runtime.flower.programs import Program, free_port
from fewer.runtime.handlers import Call, HandlerServer, Reply
from fewer.runtime.keys import Keys, PinnedKeys
from fewer.runtime.ring import Journal
from fewer.runtime.store import forget_after, write_durably

NOTE = "machines.json"
"""In a run's directory: its number, and that of the session."""
AGAIN = 5
"""How often a run is begun anew on a SuperLink that has lost it, before that is an error."""


# --- the server ------------------------------------------------------------------------------------------


@dataclass
class FlowerServer:
    """Runs jobs on clients elsewhere, who come to `host`:`port`: `with Server(…) as there: there.start(job, out)`.

    What of that port may be open to whom is told in docs/machines.md.
    """

    credentials: Credentials
    host: str = "127.0.0.1"
    port: int = 8443
    patience: float = 600.0
    """Seconds to wait for all clients; then it begins with those who are there, if they are a quorum."""
    say: Callable[[str], None] = lambda text: None
    track: Sequence[str] | None = None
    """Trackers; None for those that a run has that goes on."""

    def __enter__(self) -> Self:
        trackers.find(self.track or ())  # before anybody comes
        self.link = Link(self.credentials, self.host, self.port).__enter__()
        self.say(f"listening on {self.host}:{self.port}")
        if self.host not in LOCAL:
            self.say("who reaches this port can start and stop runs without a key: let clients at /v1/fleet/ alone")
        return self

    def __exit__(self, *error: object) -> None:
        self.link.__exit__(*error)

    def start(self, experiment: Experiment, out: Path, progress: Progress | None = None) -> Result:
        """Begin a run."""
        self.check(experiment)
        begin = partial(start, experiment, out, progress, self._opening(out), self.track or ())
        return self._steadily(begin, self._again(out, progress))

    def resume(self, out: Path, progress: Progress | None = None, **changed: Any) -> Result:
        """Go on with a run."""
        again = self._again(out, progress, **changed)  # the directory keeps its trackers, and settings as they were
        return self._steadily(partial(again, track=self.track), again)

    def _again(self, out: Path, progress: Progress | None, **changed: Any) -> Callable[..., Result]:
        return partial(resume, out, progress=progress, connect=self._opening(out), **changed)

    def _steadily(self, begin: Callable[[], Result], again: Callable[[], Result]) -> Result:
        """A run to its end, also where the SuperLink loses it in between."""
        for _ in range(AGAIN):
            try:
                return begin()
            except LinkLost as lost:
                self.say(f"{lost}; going on from the last checkpoint")
            begin = again
        return begin()

    def check(self, experiment: Experiment) -> None:
        """SettingError where this job cannot be run between machines, or not with these."""
        _no_files(
            _shared(experiment),
            ("method", "model"),
            ("method_options", "model_options"),
            ": clients on other machines do not have it",
        )
        if (keys := list(self.credentials.public_keys)) != list(range(len(experiment.data))):
            raise SettingError(
                f"clients = {len(experiment.data)}, but {self.credentials.folder} has keys of {len(keys)}: {keys}"
            )

    def _opening(self, out: Path) -> Connect:
        """Begins a session of the run on the SuperLink, and waits for the clients."""

        def open_clients(experiment: Experiment, folder: Path, done: int) -> Flower:
            self.check(experiment)
            self.link.begin_run(json.dumps(_told(experiment, out, done)))
            clients = Flower(**common(experiment), handlers=build_handler_server(experiment, folder), link=self.link)
            self._wait(clients)
            return clients

        return open_clients

    def _wait(self, clients: Flower) -> None:
        """Until all are there; or the time is up, and enough are."""
        end, told = time.monotonic() + self.patience, -1
        while (there := len(surely(self.link.there))) < len(clients):
            if there != told:
                self.say(f"{there} of {len(clients)} clients are there")
                told = there
            if time.monotonic() > end:
                needed = clients.rules.needed(len(clients))
                if there < needed:
                    raise QuorumLost(f"{there} of {len(clients)} clients are there, {needed} needed")
                return
            time.sleep(0.5)
        self.say(f"all {there} clients are there")


def _shared(experiment: Experiment) -> dict[str, Any]:
    """The settings as clients are told them: without the names of files that the server alone reads."""
    settings = experiment.settings.model_dump(mode="json")
    return {**settings, "method_options": {**settings["method_options"], **dict.fromkeys(experiment.method.files, "")}}


def _no_files(settings: Mapping[str, Any], names: Sequence[str], groups: Sequence[str], reason: str) -> None:
    """SettingError for the first of these settings, or of groups of them, that names a file."""
    given = [(name, settings[name]) for name in names]
    given += [pair for group in groups for pair in settings[group].items()]
    for name, value in given:
        for word in _words(value):
            if ":" in word or ".." in word or word.startswith("/") or (name == "vectors" and word != "own"):
                raise SettingError(f"{name} = {word} lies in a file{reason}")


def _words(value: Any) -> Iterator[str]:
    """All texts in a setting."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _words(part)


def _told(experiment: Experiment, out: Path, done: int) -> dict[str, Any]:
    """What clients are told of a job."""
    path = out / NOTE
    note: dict[str, Any] = {"run": secrets.token_hex(8), "session": 0}
    if path.exists():
        note = json.loads(path.read_text())
    note["session"] += 1
    write_durably(path, json.dumps(note).encode())
    test = experiment.data.test
    facts = {
        "clients": len(experiment.data),
        "shape": list(experiment.data.shape),
        "classes": experiment.data.classes,
        "tokens": list(experiment.data.tokens),
        "shift": test.shift,
        "scale": test.scale,
        "dtype": str(test.x.dtype),
        "fingerprint": experiment.data.fingerprint(),
    }
    spared = sorted(Journal(out / HOPS).finished(done + 1))
    return {**note, "done": done, "spared": spared, "settings": _shared(experiment), "facts": facts}


# --- a client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SingleClientData(Data):
    """The data of one client, in the form that the server's has; it does not know anybody else's."""

    alone = True
    own: ArrayData
    clients: int
    classes: int

    def __post_init__(self) -> None:
        for name in ("name", "shape", "tokens", "in_time", "test"):
            object.__setattr__(self, name, getattr(self.own, name))

    def __len__(self) -> int:
        return self.clients

    def client(self, number: int) -> ClientData:
        """What it holds."""
        return self.own.client(0)

    def size(self, number: int) -> int:
        """How many training samples it has."""
        return self.own.size(0)

    def fingerprint(self) -> str:
        """Of its own."""
        return self.own.fingerprint()

    def to(self, device: torch.device) -> SingleClientData:
        """The same data on another device."""
        return replace(self, own=self.own.to(device))


@dataclass
class ClientDaemon:
    """A client's place: what it brings along, and what it has built of the job that it is at."""

    folder: Path
    """What it remembers, by run."""
    data: str | None = None
    """Its own data, FORMAT:PATH or a set's name; None for its part of the set that the server names."""
    data_options: Mapping[str, Any] = field(default_factory=dict)
    data_dir: Path | None = None
    device: str = "cpu"
    keys: Keys | None = None
    """For what it passes to other clients."""
    say: Callable[[str], None] = lambda text: None
    method: str | None = None
    """The only one that it takes part in; None for any that a server chooses."""
    _experiment: str = ""
    _site: HandlerServer | None = None

    def join(self, address: str, keys: Path) -> None:
        """Answer a server until stopped. What is wrong with what it brings along is said now, not in a run."""
        torch.set_num_threads(1)
        make_device(self.device)
        if self.data:
            read(self.data, self.data_dir, **self.data_options)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what it remembers tells of its data
        Node(address, keys, self.folder, self.say).serve(self.answer)

    def answer(self, experiment: str, call: Call, blob: bytes) -> Reply:
        """The reply to one question of a job."""
        if experiment != self._experiment or self._site is None:
            try:
                self._site, self._experiment = self._build(json.loads(experiment), call.client), experiment
            except FewerError as error:
                self.say(str(error))
                return Reply(b"", "unable", str(error))
            except (ValueError, KeyError, TypeError, AttributeError):
                return Reply(b"", "refused", "not a job")
        reply = self._site.answer(call, blob)
        outcome = f"{reply.failure}: {reply.detail}" if reply.failure else f"{len(reply.blob)} bytes"
        self.say(f"round {call.round}  {call.handler}  {reply.seconds:.1f} s  {outcome}")
        return reply

    def _build(self, told: Mapping[str, Any], client: int) -> HandlerServer:
        """Where questions of this job are answered; forgets what came after the rounds that count."""
        folder = self.folder / "runs" / f"{int(str(told['run']), 16):016x}"
        path = folder / "session"
        last = int(path.read_text()) if path.exists() else 0
        session, done = int(told["session"]), int(told["done"])
        if session < last:
            raise RunError(f"session {session} of a run whose session {last} has begun")
        experiment = self._build_experiment(told["settings"], told["facts"])
        if session > last:
            forget_after(folder, done, [int(one) for one in told["spared"]])
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(path, str(session).encode())
        self.say(
            f"client {client} of {len(experiment.data)}: {experiment.method.name}, {experiment.data.size(client)} samples"
        )
        return build_handler_server(experiment, folder, self.keys, folder.name)

    def _build_experiment(self, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Experiment:
        names, groups, reason = (
            ["method", "model"],
            ["method_options", "model_options"],
            ", which is not taken from a server",
        )
        if not self.data:
            names, groups = [*names, "data"], [*groups, "data_options"]
        _no_files(settings, names, groups, reason)
        for name in find(settings["method"]).files:
            if named := settings["method_options"].get(name):
                raise SettingError(f"{name} = {named} lies in a file{reason}")
        if self.method not in (None, settings["method"]):
            raise SettingError(f"method = {settings['method']}: this client takes part in {self.method} alone")
        here = {"runtime": "inline", "device": self.device, "data_dir": self.data_dir}
        asked = parse_settings({**settings, **here})
        if self.data:
            return build_experiment(asked, data=self._own(facts, asked.max_length, asked.validation))
        experiment = build_experiment(asked)
        if (found := experiment.data.fingerprint()) != facts["fingerprint"]:
            raise DataError(f"data '{asked.data}' is another here (fingerprint {found}, not {facts['fingerprint']})")
        return experiment

    def _own(self, facts: Mapping[str, Any], length: int, validation: float) -> SingleClientData:
        """Its own data, normalized as the server's, or with its vocabulary."""
        assert self.data
        raw = read(self.data, self.data_dir, **self.data_options)
        if facts["tokens"]:
            tokens = tuple(facts["tokens"])

            def encoded(x: Inputs) -> Inputs:
                return text.encode(x, tokens, length) if isinstance(x, list) else x

            test = raw.test and (encoded(raw.test[0]), raw.test[1])
            raw = replace(raw, x=encoded(raw.x), test=test, tokens=tokens)
        own = federate(raw, clients=1, partition="iid", validation=validation, name=self.data)
        if list(own.shape) != facts["shape"] or str(own.source.x.dtype) != facts["dtype"]:
            raise DataError(
                f"data '{self.data}' has inputs of {own.source.x.dtype} {own.shape}; "
                f"the task takes {facts['dtype']} {tuple(facts['shape'])}"
            )
        if own.classes > facts["classes"]:
            raise DataError(f"data '{self.data}' has {own.classes} classes; the task has {facts['classes']}")

        def like(samples: Samples) -> Samples:
            return replace(samples, shift=facts["shift"], scale=facts["scale"])

        return SingleClientData(
            replace(own, source=like(own.source), common=like(own.common)), facts["clients"], facts["classes"]
        )


def acquaint(folders: Sequence[Path]) -> None:
    """Let clients in these folders, by number, make their own keys for sealing and pin those of the others."""
    keys = [PinnedKeys(folder) for folder in folders]
    public = {client: one.create() for client, one in enumerate(keys)}
    for one in keys:
        one.trust(public)


# --- all on one machine ---------------------------------------------------------------------------------------


@contextmanager
def local_cluster(
    home: Path,
    clients: int,
    device: str = "cpu",
    data_dir: Path | None = None,
    patience: float = FlowerServer.patience,
    say: Callable[[str], None] = lambda text: None,
    track: Sequence[str] | None = None,
) -> Iterator[FlowerServer]:
    """A server on loopback, and clients in processes of their own, with their folders and keys in `home`.

    Keys that are there are used again.
    """
    trackers.find(track or ())  # before keys are made
    keys = home / "keys"
    credentials = Credentials.open(keys) if (keys / "ca.key").exists() else Credentials.create(keys, clients)
    acquaint([credentials.client(client) for client in credentials.public_keys])
    server = FlowerServer(credentials, port=free_port(), patience=patience, say=say, track=track)
    words = ["join", f"127.0.0.1:{server.port}", "--device", device]
    if data_dir:
        words += ["--data-dir", str(data_dir)]
    with ExitStack() as stack:
        for client in credentials.public_keys:
            store = home / f"client-{client}"
            program = Program(
                "fewer.cli:main", [*words, "--key", str(credentials.client(client)), "--store", str(store)], store
            )
            program.start()
            stack.callback(program.stop)
        yield stack.enter_context(server)
