"""Commands for runs between machines: keys, server, clients, and all of it on one machine for a try."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewer.cli.options import with_settings
from fewer.cli.printing import GO_ON, Json, Out, Report, Track, finish, fresh, told

if TYPE_CHECKING:
    from fewer.runs.machines import FlowerServer

HOST, PORT = "127.0.0.1", 8443
PANEL = "Between machines"
NOT_HERE = ("method", "runtime", "workers")
"""Settings that are given otherwise."""

Method = Annotated[str | None, typer.Argument(metavar="METHOD", help="A method's name.")]
Keys = Annotated[Path, typer.Option("--keys", metavar="DIR", help="The directory of `fewer keys init`.")]
Patience = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for all clients, then begin if they are a quorum.")
]

GoingOn = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run instead of beginning one.")
]
Host = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A name or address by which clients reach the server; may be repeated."),
]
Days = Annotated[int, typer.Option(metavar="N", min=1, max=3650, help="How long the certificate is good.")]

KeyFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A client's folder of keys (client-N).", exists=True)]

keys_app = typer.Typer(help="Make keys and certificates for runs between machines.", no_args_is_help=True)


def add_machines(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(keys_app, name="keys", rich_help_panel=PANEL)
    for name, command in (("server", server), ("join", join), ("local-cluster", local_cluster)):
        app.command(name, rich_help_panel=PANEL)(command)


@keys_app.command("init")
@told
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the keys.")],
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="How many clients there are.")],
    host: Host = None,
    days: Days = 825,
) -> None:
    """Make an authority, the server's certificate, and a folder of keys for each client.

    [dim]fewer keys init keys --clients 3 --host server.example.org[/dim]
    """
    _need_flower()
    from fewer.runtime.flower.credentials import Credentials

    made = Credentials.create(folder, clients, host or (), days)
    print(f"Keys are in {folder}. Each client gets its own folder, and nothing else:")
    for client in range(clients):
        print(f"  client {client}: {made.client(client)}")


@keys_app.command("renew")
@told
def renew(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of `fewer keys init`.")],
    host: Host = None,
    days: Days = 825,
) -> None:
    """Make a new certificate for the server. The clients' keys stay as they are.

    [dim]fewer keys renew keys --host server.example.org[/dim]
    """
    _need_flower()
    from fewer.runtime.flower.credentials import Credentials

    Credentials(folder).certify(host or (), days)
    print(f"{folder / 'server.crt'} is good for {days} days")


@keys_app.command("seal")
@told
def seal(folder: KeyFolder) -> None:
    """Make, on its own machine, a client's key for what clients pass to each other, and print the public half.

    [dim]fewer keys seal client-0[/dim]
    """
    from fewer.runtime.keys import PinnedKeys

    print(PinnedKeys(folder).create().hex())


@keys_app.command("trust")
@told
def trust(
    folder: KeyFolder,
    peers: Annotated[list[str], typer.Argument(metavar="N=KEY...", help="Other clients, with what `seal` printed.")],
    replace: Annotated[bool, typer.Option("--replace", help="Also where another key is pinned already.")] = False,
) -> None:
    """Pin the public keys of other clients, as their people told them: never as the server did.

    [dim]fewer keys trust client-0 1=8f3a… 2=07c1…[/dim]
    """
    from fewer.errors import SettingError
    from fewer.runtime.keys import PinnedKeys
    from fewer.wire.sealing import KEY

    found: dict[int, bytes] = {}
    for peer in peers:
        number, _, key = peer.partition("=")
        try:
            client, found[client] = int(number), bytes.fromhex(key)
        except ValueError:
            client = -1
        if client < 0:
            raise SettingError(f"{peer}: not of the form N=KEY, with a key as `fewer keys seal` prints it")
        if len(found[client]) != KEY:
            raise SettingError(f"{peer}: a key has {2 * KEY} digits")
    PinnedKeys(folder).trust(found, replace)


@told
@with_settings(without=NOT_HERE)
def server(
    given: dict[str, Any],
    method: Method = None,
    keys: Keys = Path("keys"),
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address of this machine.")] = HOST,
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Listen on this port.")] = PORT,
    patience: Patience = 600.0,
    going_on: GoingOn = None,
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Train with clients on other machines, which `fewer join`. METHOD is a method's name.

    The data named here is only tested on: clients bring their own. With --resume, of the settings only --quorum,
    --deadline, --drop, --slow, --corrupt, --device and --data-dir may be given.

    [dim]fewer server fedmk --keys keys --data fashion-mini --clients 3 --rounds 5[/dim]
    """
    _begin()
    from fewer.cli.progress import shown
    from fewer.errors import SettingError
    from fewer.runs.directory import RunDirectory, must_be_new
    from fewer.runs.experiment import build_experiment, parse_settings
    from fewer.runs.machines import FlowerServer
    from fewer.runtime.flower.credentials import Credentials

    there = FlowerServer(Credentials.open(keys), host, port, patience, _say, track)
    if going_on is not None:
        if method is not None or out is not None:
            raise SettingError("--resume RUN goes on with what it was (not with METHOD or --out)")
        where = RunDirectory.open(going_on).path
        with shown() as watch, there:
            GO_ON.append(_going_on(where, there))
            result = there.resume(where, watch(where.name), **given)
    else:
        if method is not None:
            given["method"] = method
        experiment = build_experiment(parse_settings({**given, "runtime": "flower"}))
        there.check(experiment)
        where = out or fresh(f"{experiment.method.name}-{experiment.settings.data}")
        must_be_new(where)
        with shown() as watch, there:
            GO_ON.append(_going_on(where, there))
            result = there.start(experiment, where, watch(experiment.method.name))
    finish(result, where, json_file, report)


@told
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the server is.")],
    key: Annotated[Path, typer.Option("--key", metavar="DIR", help="This client's folder of keys (client-N).")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its data: FORMAT:PATH, or a set. \\[default: its part of the set that the server names]",
        ),
    ] = None,
    data_options: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Options of the data.")] = None,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where data files lie.")] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where this client remembers things. \\[default: KEY/store]")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Any torch device.")] = "cpu",
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take part in runs of this method alone. \\[default: any]")
    ] = None,
) -> None:
    """Take part in runs as a client, with your own data, which stays here. Ends with Ctrl-C.

    [dim]fewer join server.example.org:443 --key client-0 --data npz:mine.npz[/dim]
    """
    _begin()
    from fewer.cli.options import assignments
    from fewer.methods import find
    from fewer.runs.machines import ClientDaemon
    from fewer.runtime.keys import PinnedKeys

    options = assignments(data_options or [])
    only = find(method).name if method else None
    station = ClientDaemon(store or key / "store", data, options, data_dir, device, PinnedKeys(key), _say, only)
    station.join(address, key)


@told
@with_settings(without=(*NOT_HERE, "clients"))
def local_cluster(
    given: dict[str, Any],
    clients: Annotated[int | None, typer.Argument(metavar="N", help="How many clients.")] = None,
    method: Method = None,
    patience: Patience = 600.0,
    going_on: GoingOn = None,
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Try runs between machines on this one: N clients in processes of their own, with keys and TLS, on loopback.

    Keys and what clients remember are in OUT-cluster. With --resume, of the settings only --quorum, --deadline, --drop,
    --slow, --corrupt, --device and --data-dir may be given.

    [dim]fewer local-cluster 3 fedmk --data fashion-mini --rounds 3[/dim]
    """
    _begin()
    from fewer.cli.progress import shown
    from fewer.errors import SettingError
    from fewer.runs.directory import RunDirectory, must_be_new
    from fewer.runs.experiment import build_experiment, parse_settings
    from fewer.runs.machines import local_cluster as together

    experiment = None
    if going_on is not None:
        if clients is not None or out is not None:
            raise SettingError("--resume RUN goes on with what it was (not with N, METHOD or --out)")
        where = going_on
        old = RunDirectory.open(where).description
        settings, count, name = parse_settings({**old["settings"], **given}), old["data"]["clients"], where.name
    elif clients is None:
        raise SettingError("N is missing: how many clients (or: --resume RUN)")
    else:
        if method is not None:
            given["method"] = method
        experiment = build_experiment(parse_settings({**given, "clients": clients, "runtime": "flower"}))
        settings, count, name = experiment.settings, len(experiment.data), experiment.method.name
        where = out or fresh(f"{name}-{settings.data}")
        must_be_new(where)
    home = where.with_name(f"{where.name}-cluster")
    with shown() as watch, together(home, count, settings.device, settings.data_dir, patience, _say, track) as there:
        GO_ON.append(f"Go on with: fewer local-cluster --resume {where}")
        result = (
            there.start(experiment, where, watch(name)) if experiment else there.resume(where, watch(name), **given)
        )
    finish(result, where, json_file, report)


def _going_on(where: Path, there: FlowerServer) -> str:
    """What goes on with a run, at the address where its clients look for it."""
    also = f" --host {there.host}" if there.host != HOST else ""
    also += f" --port {there.port}" if there.port != PORT else ""
    return f"Go on with: fewer server --resume {where} --keys {there.credentials.folder}{also}"


def _begin() -> None:
    """Flower must be there; and whoever is ended (systemd, docker) takes leave of the others first, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _need_flower()


def _need_flower() -> None:
    from fewer.runtime.flower import need_flower

    need_flower()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
