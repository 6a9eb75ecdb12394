"""Commands for runs between machines: keys, coordinator, parties, and all of it on one machine for a try."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewer.cli.options import with_settings
from fewer.cli.printing import GO_ON, Json, Out, Report, Track, finish, fresh, told

if TYPE_CHECKING:
    from fewer.runs.machines import Coordinator

HOST, PORT = "127.0.0.1", 8443
PANEL = "Between machines"
NOT_HERE = ("method", "runtime", "workers")
"""Settings that are given otherwise."""

Method = Annotated[str | None, typer.Argument(metavar="METHOD", help="A method's name.")]
Keys = Annotated[Path, typer.Option("--keys", metavar="DIR", help="The directory of `fewer keys init`.")]
Patience = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for all parties, then begin if they are a quorum.")
]

GoingOn = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run instead of beginning one.")
]
Host = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A name or address by which parties reach the coordinator; may be repeated."),
]
Days = Annotated[int, typer.Option(metavar="N", min=1, max=3650, help="How long the certificate is good.")]

KeyFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A party's folder of keys (party-N).", exists=True)]

keys_app = typer.Typer(help="Make keys and certificates for runs between machines.", no_args_is_help=True)


def add_machines(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(keys_app, name="keys", rich_help_panel=PANEL)
    for name, command in (("coordinator", coordinator), ("join", join), ("local-cluster", local_cluster)):
        app.command(name, rich_help_panel=PANEL)(command)


@keys_app.command("init")
@told
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory for the keys.")],
    parties: Annotated[int, typer.Option(metavar="N", min=1, help="How many parties there are.")],
    host: Host = None,
    days: Days = 825,
) -> None:
    """Make an authority, the coordinator's certificate, and a folder of keys for each party.

    [dim]fewer keys init keys --parties 3 --host coordinator.example.org[/dim]
    """
    _need_flower()
    from fewer.runtime.flower.credentials import Credentials

    made = Credentials.create(folder, parties, host or (), days)
    print(f"Keys are in {folder}. Each party gets its own folder, and nothing else:")
    for party in range(parties):
        print(f"  party {party}: {made.party(party)}")


@keys_app.command("renew")
@told
def renew(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of `fewer keys init`.")],
    host: Host = None,
    days: Days = 825,
) -> None:
    """Make a new certificate for the coordinator. The parties' keys stay as they are.

    [dim]fewer keys renew keys --host coordinator.example.org[/dim]
    """
    _need_flower()
    from fewer.runtime.flower.credentials import Credentials

    Credentials(folder).certify(host or (), days)
    print(f"{folder / 'server.crt'} is good for {days} days")


@keys_app.command("seal")
@told
def seal(folder: KeyFolder) -> None:
    """Make, on its own machine, a party's key for what parties pass to each other, and print the public half.

    [dim]fewer keys seal party-0[/dim]
    """
    from fewer.runtime.keys import PinnedKeys

    print(PinnedKeys(folder).create().hex())


@keys_app.command("trust")
@told
def trust(
    folder: KeyFolder,
    peers: Annotated[list[str], typer.Argument(metavar="N=KEY...", help="Other parties, with what `seal` printed.")],
    replace: Annotated[bool, typer.Option("--replace", help="Also where another key is pinned already.")] = False,
) -> None:
    """Pin the public keys of other parties, as their people told them: never as the coordinator did.

    [dim]fewer keys trust party-0 1=8f3a… 2=07c1…[/dim]
    """
    from fewer.errors import SettingError
    from fewer.runtime.keys import PinnedKeys
    from fewer.wire.sealing import KEY

    found: dict[int, bytes] = {}
    for peer in peers:
        number, _, key = peer.partition("=")
        try:
            party, found[party] = int(number), bytes.fromhex(key)
        except ValueError:
            party = -1
        if party < 0:
            raise SettingError(f"{peer}: not of the form N=KEY, with a key as `fewer keys seal` prints it")
        if len(found[party]) != KEY:
            raise SettingError(f"{peer}: a key has {2 * KEY} digits")
    PinnedKeys(folder).trust(found, replace)


@told
@with_settings(without=NOT_HERE)
def coordinator(
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
    """Train with parties on other machines, which `fewer join`. METHOD is a method's name.

    The data named here is only tested on: parties bring their own. With --resume, of the settings only --quorum,
    --deadline, --drop, --slow, --corrupt, --device and --data-dir may be given.

    [dim]fewer coordinator fedmk --keys keys --data fashion-mini --parties 3 --rounds 5[/dim]
    """
    _begin()
    from fewer.cli.progress import shown
    from fewer.errors import SettingError
    from fewer.runs.directory import RunDirectory, must_be_new
    from fewer.runs.job import check, job_from
    from fewer.runs.machines import Coordinator
    from fewer.runtime.flower.credentials import Credentials

    there = Coordinator(Credentials.open(keys), host, port, patience, _say, track)
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
        job = job_from(check({**given, "runtime": "flower"}))
        there.check(job)
        where = out or fresh(f"{job.method.name}-{job.settings.data}")
        must_be_new(where)
        with shown() as watch, there:
            GO_ON.append(_going_on(where, there))
            result = there.start(job, where, watch(job.method.name))
    finish(result, where, json_file, report)


@told
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the coordinator is.")],
    key: Annotated[Path, typer.Option("--key", metavar="DIR", help="This party's folder of keys (party-N).")],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its data: FORMAT:PATH, or a set. \\[default: its part of the set that the coordinator names]",
        ),
    ] = None,
    data_set: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Options of the data.")] = None,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where data files lie.")] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where this party remembers things. \\[default: KEY/store]")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Any torch device.")] = "cpu",
    method: Annotated[
        str | None, typer.Option(metavar="NAME", help="Take part in runs of this method alone. \\[default: any]")
    ] = None,
) -> None:
    """Take part in runs as a party, with your own data, which stays here. Ends with Ctrl-C.

    [dim]fewer join coordinator.example.org:443 --key party-0 --data npz:mine.npz[/dim]
    """
    _begin()
    from fewer.cli.options import assignments
    from fewer.methods import find
    from fewer.runs.machines import Station
    from fewer.runtime.keys import PinnedKeys

    options = assignments(data_set or [])
    only = find(method).name if method else None
    station = Station(store or key / "store", data, options, data_dir, device, PinnedKeys(key), _say, only)
    station.join(address, key)


@told
@with_settings(without=(*NOT_HERE, "parties"))
def local_cluster(
    given: dict[str, Any],
    parties: Annotated[int | None, typer.Argument(metavar="N", help="How many parties.")] = None,
    method: Method = None,
    patience: Patience = 600.0,
    going_on: GoingOn = None,
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Try runs between machines on this one: N parties in processes of their own, with keys and TLS, on loopback.

    Keys and what parties remember are in OUT-cluster. With --resume, of the settings only --quorum, --deadline, --drop,
    --slow, --corrupt, --device and --data-dir may be given.

    [dim]fewer local-cluster 3 fedmk --data fashion-mini --rounds 3[/dim]
    """
    _begin()
    from fewer.cli.progress import shown
    from fewer.errors import SettingError
    from fewer.runs.directory import RunDirectory, must_be_new
    from fewer.runs.job import check, job_from
    from fewer.runs.machines import local_cluster as together

    job = None
    if going_on is not None:
        if parties is not None or out is not None:
            raise SettingError("--resume RUN goes on with what it was (not with N, METHOD or --out)")
        where = going_on
        old = RunDirectory.open(where).description
        settings, count, name = check({**old["settings"], **given}), old["data"]["parties"], where.name
    elif parties is None:
        raise SettingError("N is missing: how many parties (or: --resume RUN)")
    else:
        if method is not None:
            given["method"] = method
        job = job_from(check({**given, "parties": parties, "runtime": "flower"}))
        settings, count, name = job.settings, len(job.data), job.method.name
        where = out or fresh(f"{name}-{settings.data}")
        must_be_new(where)
    home = where.with_name(f"{where.name}-cluster")
    with shown() as watch, together(home, count, settings.device, settings.data_dir, patience, _say, track) as there:
        GO_ON.append(f"Go on with: fewer local-cluster --resume {where}")
        result = there.start(job, where, watch(name)) if job else there.resume(where, watch(name), **given)
    finish(result, where, json_file, report)


def _going_on(where: Path, there: Coordinator) -> str:
    """What goes on with a run, at the address where its parties look for it."""
    also = f" --host {there.host}" if there.host != HOST else ""
    also += f" --port {there.port}" if there.port != PORT else ""
    return f"Go on with: fewer coordinator --resume {where} --keys {there.credentials.folder}{also}"


def _begin() -> None:
    """Flower must be there; and whoever is ended (systemd, docker) takes leave of the others first, as with Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _need_flower()


def _need_flower() -> None:
    from fewer.runtime.flower import need_flower

    need_flower()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
