"""Commands for runs between machines: keys, server, clients, and a local cluster to try them."""

from __future__ import annotations

import re
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fewer.cli.data import DataDir
from fewer.cli.options import App, complete_methods, parse_assignments, with_settings
from fewer.cli.printing import Output, new_run_path, print_if_finished, print_result, quote, resumable

if TYPE_CHECKING:
    from fewer.runs.experiment import Experiment
    from fewer.runs.machines import FlowerServer

HOST, PORT, TIMEOUT = "127.0.0.1", 8443, 600.0
HELP_PANEL = "Between machines"
OTHER_SETTINGS = ("method", "runtime", "workers", "debug", "count_flops")
"""Settings without an option: METHOD is an argument, and the runtime is always Flower, without debugging."""

Method = Annotated[str | None, Argument(metavar="METHOD", help="A method's name.", autocompletion=complete_methods)]
Keys = Annotated[Path, Option(metavar="DIR", help="The directory from `fewer keys init`.")]
Timeout = Annotated[
    float, Option(metavar="SECONDS", min=0, help="Wait this long for all clients, then start if there is a quorum.")
]
Resume = Annotated[Path | None, Option(metavar="RUN", help="Resume this run instead of starting a new one.")]
Host = Annotated[
    list[str] | None,
    Option(metavar="NAME", help="A name or address by which clients reach the server; may be repeated."),
]
Days = Annotated[int, Option(metavar="N", min=1, max=3650, help="Days for which the certificate is valid.")]

KeyFolder = Annotated[Path, Argument(metavar="DIR", help="A client's folder of keys (client-N).", exists=True)]

keys_app = App(help="Create keys and certificates for runs between machines.", no_args_is_help=True)


def add_machines(app: App) -> None:
    """Adds the commands to the app."""
    app.add_typer(keys_app, name="keys", rich_help_panel=HELP_PANEL)
    for name, command in (("server", server), ("join", join), ("local-cluster", local_cluster)):
        app.command(name, rich_help_panel=HELP_PANEL)(command)


@keys_app.command("init")
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="A new directory for the keys.")],
    clients: Annotated[
        int, Option(metavar="N", min=0, help="Number of clients; 0 if all of them make their own keys.")
    ],
    host: Host = None,
    days: Days = 825,
) -> None:
    """Create a certificate authority, the server's certificate, and a folder of keys for each client.

    [dim]fewer keys init keys --clients 3 --host server.example.org[/dim]
    """
    from fewer.runtime.flower import require_flower

    require_flower()
    from fewer.runtime.flower.credentials import Credentials

    credentials = Credentials.create(folder, clients, host or (), days)
    print(f"Keys are in {folder}. " + ("Give each client its own folder, and nothing else:" if clients else ""))
    for client in range(clients):
        print(f"  client {client}: {credentials.client_folder(client)}")
    print(f"To add a client: fewer keys add NAME --keys {quote(folder)}")


@keys_app.command("add")
def add(
    name: Annotated[str, Argument(metavar="NAME", help="A new name for the client: letters, digits, - and _.")],
    keys: Keys = Path("keys"),
    public: Annotated[
        Path | None, Option(metavar="FILE", help="The client's own public key, its node.pub. \\[default: a new key]")
    ] = None,
) -> None:
    """Add one more client to an existing directory of keys.

    Without --public, this creates the client's private key, too. With --public, it stays with the client.

    [dim]fewer keys add clinic-b --keys keys[/dim]
    [dim]fewer keys add clinic-b --keys keys --public node.pub[/dim]
    """
    from fewer.runtime.flower import require_flower

    require_flower()
    from fewer.runtime.flower.credentials import Credentials

    folder = keys / name
    print(f"{name} is client {Credentials(keys).add_client(name, public)}.")
    if public is None:
        print(f"Send {folder} to the client so that only the client can read it (scp, a USB stick), and nothing else.")
        print(f"Then delete {folder / 'node.key'} here.")
    else:
        print(f"Send {folder / 'ca.crt'} to the client. It is not secret; the client trusts the server by it.")
    print("A server that is running accepts the client after its next start, in new runs.")


@keys_app.command("make-client")
def make_client(folder: Annotated[Path, Argument(metavar="DIR", help="A new folder for the keys.")]) -> None:
    """Create a client's own key. Run this on the client's machine: the private key never leaves it.

    [dim]fewer keys make-client clinic-b[/dim]
    """
    from fewer.runtime.flower import require_flower

    require_flower()
    from fewer.runtime.flower.credentials import create_node_key

    create_node_key(folder)
    print(f"{folder / 'node.key'} is private: keep it here.")
    print(f"Send {folder / 'node.pub'} to the server's operator, who runs: fewer keys add NAME --public node.pub")
    print(f"Put the ca.crt that comes back into {folder}. Then: fewer join HOST:PORT --key {quote(folder)} --data …")


@keys_app.command("renew")
def renew(
    folder: Annotated[Path, Argument(metavar="DIR", help="The directory from `fewer keys init`.")],
    host: Host = None,
    days: Days = 825,
) -> None:
    """Create a new certificate for the server. The clients' keys stay the same.

    [dim]fewer keys renew keys --host server.example.org[/dim]
    """
    from fewer.runtime.flower import require_flower

    require_flower()
    from fewer.runtime.flower.credentials import Credentials

    Credentials(folder).issue_certificate(host or (), days)
    print(f"{folder / 'server.crt'} is valid for {days} days")


@keys_app.command("seal")
def seal(folder: KeyFolder) -> None:
    """Create a client's key for sealed messages, and print the public key. Run this on the client's machine.

    [dim]fewer keys seal client-0[/dim]
    """
    from fewer.runtime.keys import PinnedKeys

    print(PinnedKeys(folder).create().hex())


@keys_app.command("trust")
def trust(
    folder: KeyFolder,
    peers: Annotated[
        list[str], Argument(metavar="N=KEY...", help="Other clients and their keys, as printed by `seal`.")
    ],
    replace: Annotated[bool, Option("--replace", help="Replace a key that is already pinned.")] = False,
) -> None:
    """Pin the public keys of other clients. Get the keys from the clients themselves, never from the server.

    [dim]fewer keys trust client-0 1=8f3a… 2=07c1…[/dim]
    """
    from fewer.errors import SettingError
    from fewer.runtime.keys import PinnedKeys
    from fewer.wire.sealing import KEY_BYTES

    keys: dict[int, bytes] = {}
    for peer in peers:
        match = re.fullmatch(r"(\d+)=([0-9a-fA-F]+)", peer)
        if match is None:
            raise SettingError(f"{peer}: expected N=KEY, with a key from `fewer keys seal`")
        if len(match[2]) != 2 * KEY_BYTES:
            raise SettingError(f"{peer}: a key must have {2 * KEY_BYTES} hexadecimal digits")
        keys[int(match[1])] = bytes.fromhex(match[2])
    PinnedKeys(folder).trust(keys, replace)


@with_settings(without=OTHER_SETTINGS, clients="Number of clients. [default: as many as there are keys]")
def server(
    given: dict[str, Any],
    output: Output,
    method: Method = None,
    keys: Keys = Path("keys"),
    host: Annotated[str, Option(metavar="ADDRESS", help="Listen on this address of this machine.")] = HOST,
    port: Annotated[int, Option(metavar="N", min=1, max=65535, help="Listen on this port.")] = PORT,
    timeout: Timeout = TIMEOUT,
    resume: Resume = None,
) -> None:
    """Train with clients on other machines, which run `fewer join`.

    The server uses the data named here only for testing; each client trains on its own data. All clients with a key
    take part. With --resume, the only settings allowed are --rounds, --quorum, --deadline, --drop, --slow, --corrupt,
    --device and --data-dir.

    [dim]fewer server fedmk --keys keys --data npz:public.npz --rounds 5[/dim]
    """
    _prepare_process()
    from fewer.errors import SettingError
    from fewer.runs.machines import FlowerServer
    from fewer.runs.reader import RunReader
    from fewer.runtime.flower.credentials import Credentials

    credentials = Credentials.open(keys)
    flower_server = FlowerServer(credentials, host, port, timeout, _log, output.track)
    experiment = None
    if resume is None:
        if not (clients := len(credentials.public_keys)):
            raise SettingError(f"{keys} has no client (add one with: fewer keys add NAME --keys {quote(keys)})")
        experiment, path = _new_run({"clients": clients, **given}, method, output.out)
        flower_server.check_experiment(experiment)
    elif method is not None or output.out is not None:
        raise SettingError("--resume RUN cannot be combined with METHOD or --out")
    else:
        path = resume
        RunReader(path).check_objects()  # RunError if it is not a run directory
    options = f" --host {host}" if host != HOST else ""
    options += f" --port {port}" if port != PORT else ""
    command = f"fewer server --resume {quote(path)} --keys {quote(keys)}{options}"
    _train(flower_server, experiment, path, command, given, output)


def join(
    address: Annotated[str, Argument(metavar="HOST:PORT", help="The server's address.")],
    key: Annotated[Path, Option(metavar="DIR", help="This client's folder of keys (client-N).")],
    data: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="This client's data: FORMAT:PATH, or a dataset. \\[default: its part of the server's dataset]",
        ),
    ] = None,
    data_options: Annotated[
        list[str] | None, Option("--data-option", metavar="NAME=VALUE", help="An option of the data; may be repeated.")
    ] = None,
    data_dir: DataDir = None,
    store: Annotated[
        Path | None, Option(metavar="DIR", help="Directory of this client's private state. \\[default: KEY/store]")
    ] = None,
    device: Annotated[str, Option(metavar="NAME", help="Any torch device.")] = "cpu",
    method: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Take part only in runs of this method. \\[default: any method]",
            autocompletion=complete_methods,
        ),
    ] = None,
    secure_sum: Annotated[bool, Option("--secure-sum", help="Take part only in runs with secure sums.")] = False,
    dp: Annotated[
        str | None, Option(metavar="TEXT", help="Take part only in runs with this --dp, such as record:epsilon=8.")
    ] = None,
) -> None:
    """Take part in runs as a client, until Ctrl-C. Your data stays on this machine.

    [dim]fewer join server.example.org:443 --key client-0 --data npz:mine.npz[/dim]
    """
    _prepare_process()
    from fewer.methods import find
    from fewer.privacy import PrivacySettings
    from fewer.runs.machines import ClientDaemon
    from fewer.runtime.keys import PinnedKeys

    if dp is not None:
        PrivacySettings.parse(dp)  # reports a typo now: no run would ever fit it
    options = parse_assignments(data_options or [])
    method_name = find(method).name if method else None
    limits = method_name, secure_sum, dp
    daemon = ClientDaemon(store or key / "store", data, options, data_dir, device, PinnedKeys(key), _log, *limits)
    daemon.join(address, key)


@with_settings(without=(*OTHER_SETTINGS, "clients"))
def local_cluster(
    given: dict[str, Any],
    output: Output,
    clients: Annotated[int | None, Argument(metavar="N", help="Number of clients.")] = None,
    method: Method = None,
    timeout: Timeout = TIMEOUT,
    resume: Resume = None,
) -> None:
    """Try a run between machines on this machine: a server and N client processes on loopback, with keys and TLS.

    The keys and the clients' private state are in OUT-cluster. With --resume, the only settings allowed are --rounds,
    --quorum, --deadline, --drop, --slow, --corrupt, --device and --data-dir.

    [dim]fewer local-cluster 3 fedmk --data fashion-mini --rounds 3[/dim]
    """
    _prepare_process()
    from fewer.errors import SettingError
    from fewer.runs.experiment import parse_settings
    from fewer.runs.machines import local_cluster as start_cluster
    from fewer.runs.reader import RunReader

    experiment = None
    if resume is not None:
        if clients is not None or output.out is not None:
            raise SettingError("--resume RUN cannot be combined with N, METHOD or --out")
        path = resume
        run = RunReader(path)
        settings, count = parse_settings({**run.settings, **given}), run.metadata["data"]["clients"]
    elif clients is None:
        raise SettingError("N is missing: pass the number of clients, or --resume RUN")
    else:
        experiment, path = _new_run({**given, "clients": clients}, method, output.out)
        settings, count = experiment.settings, len(experiment.data)
    home = path.with_name(f"{path.name}-cluster")
    cluster = start_cluster(home, count, settings.device, settings.data_dir, timeout, _log, output.track)
    _train(cluster, experiment, path, f"fewer local-cluster --resume {quote(path)}", given, output)


def _new_run(given: dict[str, Any], method: str | None, out: Path | None) -> tuple[Experiment, Path]:
    """Builds the experiment of a new run. Checks that its directory is unused."""
    from fewer.runs.directory import check_unused
    from fewer.runs.experiment import build_experiment, parse_settings

    if method is not None:
        given = {**given, "method": method}
    experiment = build_experiment(parse_settings({**given, "runtime": "flower"}))
    path = out or new_run_path(experiment.method.name, experiment.settings.data)
    check_unused(path)
    return experiment, path


def _train(
    server: AbstractContextManager[FlowerServer],
    experiment: Experiment | None,
    path: Path,
    command: str,
    given: dict[str, Any],
    output: Output,
) -> None:
    """Starts the run of an experiment, or resumes the run at `path`, as `command` does, with the settings given."""
    from fewer.runs.progress import show_progress

    if not experiment and print_if_finished(path, given.get("rounds"), command):
        return
    hint = f"Resume with: {command}"
    with show_progress(True) as progress, server as flower_server, resumable(hint, path):
        if experiment:
            result = flower_server.start(experiment, path, progress)
        else:
            result = flower_server.resume(path, progress, **given)
    print_result(result, path, output)


def _prepare_process() -> None:
    """Checks that Flower is installed. Treats SIGTERM (systemd, docker) like Ctrl-C, for a clean stop."""
    from fewer.runtime.flower import require_flower

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    require_flower()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
