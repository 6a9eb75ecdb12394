"""Commands: they read settings, start runs and print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewer.cli import data as data_commands
from fewer.cli.data import DataDir
from fewer.cli.machines import add_machines
from fewer.cli.options import with_settings
from fewer.cli.printing import (
    GO_ON,
    RUNS,
    Json,
    Out,
    Report,
    Track,
    finish,
    fresh,
    print_rows,
    told,
    write_json,
    write_page,
)

if TYPE_CHECKING:
    from fewer.experiments import Comparison

app = typer.Typer(
    help="Federated learning in fewer rounds, with fewer samples and fewer bytes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.add_typer(data_commands.app, name="data", rich_help_panel="Look")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
One = Annotated[int | None, typer.Option("--client", metavar="N", help="Use this client's personal model.")]
DataSet = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Options of the data. \\[default: those of the run]")
]
Tune = Annotated[
    bool, typer.Option("--tune", help="First choose each method's rates on held-out training data, by equal effort.")
]
Trials = Annotated[int, typer.Option("--trials", metavar="N", min=1, help="Trials of --tune for each method.")]


def main() -> None:
    """Entry point."""
    app()


@app.command(rich_help_panel="Learn")
@told
@with_settings(without=("method",))
def run(
    given: dict[str, Any],
    method: Annotated[str | None, typer.Argument(metavar="METHOD", help="A method's name, or FILE.py:Name.")] = None,
    named: Annotated[str | None, typer.Option("--method", metavar="NAME", help="The same, as an option.")] = None,
    tune: Tune = False,
    trials: Trials = 8,
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Train with one method and keep everything in a run directory. METHOD is a method's name, or FILE.py:Name.

    [dim]fewer run fedavg --data fashion-mini --clients 20 --alpha 0.5 --rounds 10[/dim]
    """
    if (chosen := named if method is None else method) is not None:
        given["method"] = chosen
    _train(given, tune, trials, report, track, out, json_file)


@app.command(rich_help_panel="Learn")
@told
@with_settings(
    without=("method",),
    rounds="Rounds of communication; for frl a multiple of R + 1, 4 unless -o group_rounds says otherwise. "
    "[default: the method's own, for frl 80]",
    cohort="Clients asked in a round, K of an episode. [default: the method's own, 10]",
)
def prepare(
    given: dict[str, Any],
    method: Annotated[str, typer.Argument(metavar="METHOD", help="frl, or a baseline of it.")] = "frl",
    tune: Tune = False,
    trials: Trials = 8,
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Prepare a model from which later groups, with classes of their own, get a good one in a few rounds.

    It is a run like any other, which leaves prepared.safetensors for fewer deploy in its directory.

    [dim]fewer prepare --data glyphs --data-option unseen=0-9 --partition shards --clients 52 --evaluate-every 80[/dim]
    """
    from fewer.methods import find
    from fewer.runs.inference import preparing

    preparing(find(method))
    _train({**given, "method": method}, tune, trials, report, track, out, json_file)


@app.command(rich_help_panel="Use")
@told
@with_settings(
    without=("method", "model", "norm", "model_options"),
    rounds="Rounds of the group. [default: R of the preparation, usually 3]",
    cohort="Clients asked in a round. [default: all of the group]",
)
def deploy(
    given: dict[str, Any],
    prepared: Annotated[Path, typer.Argument(metavar="MODEL", help="A prepared model, or the run that made it.")],
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Let the clients of a group make their own model from a prepared one, in a few rounds.

    All clients of the data take part. Net, head and rates are those of the preparation, unless -o says otherwise.

    [dim]fewer deploy runs/… --data glyphs --data-option classes=0-4 --clients 10 --partition shards[/dim]
    """
    from fewer.cli.progress import shown
    from fewer.runs.engine import start
    from fewer.runs.experiment import build_experiment, parse_settings
    from fewer.runs.inference import deploying

    experiment = build_experiment(parse_settings(deploying(prepared, given)))
    where = out or fresh(f"{experiment.method.name}-{experiment.settings.data}")
    GO_ON.append(f"Go on with: fewer resume {where}")
    with shown() as watch:
        result = start(experiment, where, watch(experiment.method.name), track=track or ())
    finish(result, where, json_file, report)


@app.command(rich_help_panel="Learn")
@told
def resume(
    path: Run,
    runtime: Annotated[str | None, typer.Option(metavar="NAME", help="inline or pool; may differ from before.")] = None,
    workers: Annotated[int | None, typer.Option(metavar="N", help="Worker processes of the pool.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Any torch device.")] = None,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where data files lie now.")] = None,
    quorum: Annotated[float | None, typer.Option(metavar="X", help="After a lost quorum: ask for less.")] = None,
    deadline: Annotated[float | None, typer.Option(metavar="X", help="Give clients more time.")] = None,
    drop: Annotated[
        float | None, typer.Option(metavar="X", help="Inject fewer faults; also --slow, --corrupt.")
    ] = None,
    slow: Annotated[float | None, typer.Option(metavar="X", hidden=True)] = None,
    corrupt: Annotated[float | None, typer.Option(metavar="X", hidden=True)] = None,
    report: Report = True,
    track: Track = None,
    json_file: Json = None,
) -> None:
    """Go on with a run that was stopped, killed or lost its quorum. RUN is its directory.

    The end is the same as without the break.
    """
    from fewer.cli.progress import shown
    from fewer.runs import resume as go_on

    GO_ON.append(f"Go on with: fewer resume {path}")
    with shown() as watch:
        changed: dict[str, Any] = {"runtime": runtime, "workers": workers, "device": device, "data_dir": data_dir}
        changed |= {"quorum": quorum, "deadline": deadline, "drop": drop, "slow": slow, "corrupt": corrupt}
        result = go_on(path, progress=watch(path.name), track=track, **changed)
    finish(result, path, json_file, report)


@app.command(rich_help_panel="Learn")
@told
@with_settings(without=("method",))
def compare(
    given: dict[str, Any],
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Methods' names, or FILE.py:Name.")],
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each method, with seeds from --seed on.")] = 1,
    tune: Tune = False,
    trials: Trials = 8,
    report: Report = True,
    track: Track = None,
    out: Out = None,
    json_file: Json = None,
) -> None:
    """Train with several methods on the same task and print one table. METHOD is a name, or FILE.py:Name.

    [dim]fewer compare local fedavg fedprox fedbn --seeds 3 --tune[/dim]
    """
    from fewer.cli.progress import shown
    from fewer.experiments import compare as contest
    from fewer.runs.experiment import parse_settings

    where = out or fresh("compare")
    GO_ON.append(f"Go on with the same command and --out {where}")
    with shown() as watch:
        effort = trials if tune else 0
        table = contest(
            methods, parse_settings(given), seeds=seeds, trials=effort, out=where, watch=watch, track=track or ()
        )
    page = write_page(sorted(path.parent for path in where.glob("*/settings.json")), where) if report else None
    if not write_json(json_file, table.as_json()):
        _print_table(table)
        print(f"Kept in {where}" + (f", see {page}" if page else ""))


@app.command(rich_help_panel="Learn")
@told
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A recipe's name, or FILE.toml.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="In minutes, smaller: to try it.")] = False,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this column of the table; may be repeated.")
    ] = None,
    data_dir: DataDir = None,
    runtime: Annotated[str, typer.Option(metavar="NAME", help="inline or pool: the numbers are the same.")] = "inline",
    track: Track = None,
    out: Out = None,
    results: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("docs/results"),
    json_file: Json = None,
) -> None:
    """Run a paper's table and print ours beside theirs. NAME is a recipe's name, or FILE.toml.

    Stopped in the middle, the same command goes on.

    [dim]fewer reproduce baselines/mnist --quick[/dim]
    """
    from fewer.cli.progress import shown
    from fewer.experiments import recipes
    from fewer.report import png, recipe_picture, write_study

    if listed or name is None:
        for each, title in recipes.names().items():
            print(f"{each}  {title}")
        return
    results.mkdir(parents=True, exist_ok=True)
    where = out or RUNS / "reproduce" / (name.replace("/", "-") + ("-quick" if quick else ""))
    GO_ON.append("The same command goes on.")
    changes = {"data_dir": data_dir, "runtime": runtime}
    with shown() as watch:
        plan, cells = recipes.reproduce(
            name, where, quick=quick, columns=column or (), changes=changes, watch=watch, track=track or ()
        )
    study = recipes.carry_out(plan, cells, where)
    only = "".join(f' --column "{one}"' for one in column or ())
    command = f"fewer reproduce {name}" + (" --quick" if quick else "") + only
    figure = recipe_picture(plan, cells)
    short = "-".join([Path(name).stem if name.endswith(".toml") else name, *map(recipes.slug, column or ())])
    pages = recipes.write(short, plan, cells, results, command, quick, png(figure) if figure else None, study)
    if study:
        write_study(study, pages[0].with_suffix(""))
    if not write_json(json_file, json.loads(pages[1].read_text())):
        print(pages[0].read_text())
        print(f"Kept in {', '.join(map(str, pages))}, runs in {where}")


@app.command(rich_help_panel="Look")
@told
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or directories of runs.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where page and pictures go.")] = Path("report"),
) -> None:
    """Write one page on one or more runs: who won, at what cost and why, with pictures and all settings.

    The page, report.html, needs nothing else. Beside it are its pictures as PNG and SVG, and their figures as CSV.

    [dim]fewer report runs/compare-…[/dim]
    """
    from fewer.report import write_report

    page, *pictures = write_report([found for path in paths for found in _runs_in(path)], out)
    print(page)
    if pictures:
        print(f"{len(pictures)} files of its pictures are in {pictures[0].parent}")


@app.command(rich_help_panel="Look")
@told
def dash(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Runs under this directory. \\[default: runs]")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen on this address; if others can reach it, with a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Listen on this port; 0 for any.")] = 8650,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask for the token in this file, instead of a new one.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which browsers reach it (behind a proxy); may be repeated."),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Nothing can be stopped or resumed.")] = False,
    browse: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Watch the runs under DIR, or runs/, in a browser: list, follow, compare, stop and resume them.

    Ends with Ctrl-C.

    [dim]fewer dash --open[/dim]
    """
    from fewer.dash import need_dash
    from fewer.errors import SettingError

    need_dash()
    if folder is not None and not folder.is_dir():
        raise SettingError(f"there is no directory {folder}")
    from fewer.dash.server import serve

    options: dict[str, Any] = {"token_file": token_file, "names": name or (), "read_only": read_only, "browse": browse}
    serve(folder or RUNS, host, port, **options)


@app.command(rich_help_panel="Look")
@told
def audit(
    path: Run,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="\\[default: RUN/audit]")] = None,
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="How many clients' samples are attacked.")] = 10,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps of gradient matching.")] = 500,
    starts: Annotated[int, typer.Option(metavar="N", min=1, help="Random starts of it; the best is taken.")] = 2,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where data files lie now.")] = None,
    json_file: Json = None,
) -> None:
    """Attack a run and write a page on what leaks: near-copies in synthetic data, deep leakage, membership inference.

    For whoever simulates a federation: the attacks are judged by the clients' real data, which nobody else has.
    """
    from fewer.audit import audit as attack
    from fewer.audit.summary import HEADS, figure_rows
    from fewer.report import write_audit

    found = attack(path, data_dir=data_dir, clients=clients, steps=steps, starts=starts)
    files = write_audit(found, out or path / "audit")
    if write_json(json_file, found.as_json()):
        return
    print_rows(HEADS, figure_rows(found))
    for note in found.notes:
        print(note)
    print(f"An attack that fails proves no privacy. Page: {files[0]}")


@app.command(rich_help_panel="Look")
@told
def methods(
    name: Annotated[str | None, typer.Argument(metavar="METHOD", help="Show the settings of this one.")] = None,
    json_file: Json = None,
) -> None:
    """List the methods, or one method's settings."""
    from fewer.methods import find, names

    if name is None:
        texts = {each: (find(each).__doc__ or "").strip().splitlines()[0] for each in names()}
        if not write_json(json_file, texts):
            print_rows(("method", "what it does"), list(texts.items()))
            print("fewer methods NAME shows the settings of one.")
        return
    kind = find(name)
    fields = kind.model_fields.items()
    rows = {key: {"default": field.get_default(), "text": field.description or ""} for key, field in fields}
    if write_json(json_file, rows):
        return
    print(f"{kind.name}: {(kind.__doc__ or '').strip()}\n")
    print_rows(
        ("setting", "default", "meaning"), [(key, str(row["default"]), row["text"]) for key, row in rows.items()]
    )
    print("\nSet one with -o name=value; rounds and active have flags of their own.")


@app.command(rich_help_panel="Use")
@told
def predict(
    path: Run,
    data: Annotated[str, typer.Option(metavar="NAME", help="FORMAT:PATH (npz:FILE with an array x, …), or a set.")],
    data_dir: DataDir = None,
    data_options: DataSet = None,
    client: One = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Use these weights: model.safetensors of adapt or export."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.csv", help="Where to write; - for standard output.")
    ] = Path("-"),
) -> None:
    """Write a trained model's predictions for new data as CSV: sample, class, confidence."""
    from fewer.cli.options import assignments
    from fewer.runs.inference import predictions

    lines, accuracy = predictions(path, data, data_dir, client, assignments(data_options or []), weights)
    text = "".join(line + "\n" for line in lines)
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        out.write_text(text)
        print(f"{len(lines) - 1} predictions in {out}")
    if accuracy is not None:
        print(f"accuracy {accuracy:.2%} on the labels that came with the data", file=sys.stderr)


@app.command(rich_help_panel="Use")
@told
def adapt(
    path: Run,
    data: Annotated[str, typer.Option(metavar="NAME", help="FORMAT:PATH (npz:FILE with arrays x and y, …), or a set.")],
    data_dir: DataDir = None,
    data_options: DataSet = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the model goes.")] = Path("adapted"),
) -> None:
    """Take what a run has learned to a new client's data and write its personal model.

    The run's method must be one that learns to adapt: fedmeta, fedavg-meta, per-fedavg, reptile.

    [dim]fewer adapt runs/… --data npz:mine.npz --out mine[/dim]
    [dim]fewer predict runs/… --data npz:new.npz --weights mine/model.safetensors[/dim]
    """
    from fewer.cli.options import assignments
    from fewer.runs.inference import adapt as write

    files, count = write(path, data, out, data_dir, assignments(data_options or []))
    print(f"adapted to {count} samples", file=sys.stderr)
    for file in files:
        print(file)


@app.command(rich_help_panel="Use")
@told
def export(path: Run, client: One = None, out: Out = None) -> None:
    """Write a trained model for use elsewhere: plain safetensors, a torch.export program, and a note on its inputs."""
    from fewer.runs.inference import export as write

    for file in write(path, out or path / "export", client):
        print(file)


add_machines(app)  # last in --help: it is not what one begins with

# --- printing -------------------------------------------------------------------------------------------------


def _runs_in(path: Path) -> list[Path]:
    """A run directory itself, or all runs right below a directory, or below its folders as a recipe has them."""
    if (path / "settings.json").exists():
        return [path]
    below = [*path.glob("*/settings.json"), *path.glob("*/*/settings.json")]
    return sorted(found.parent for found in below) or [path]


def _chosen(method: Any) -> str:
    return ", ".join(f"{name} = {getattr(method, name):g}" for name in method.search_space())


def _train(
    given: dict[str, Any],
    tune: bool,
    trials: int,
    report: bool,
    track: list[str] | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """One run, from settings to the last word on it."""
    from fewer.cli.progress import shown
    from fewer.experiments import tune as sample_cohort
    from fewer.runs import trackers
    from fewer.runs.engine import start
    from fewer.runs.experiment import build_experiment, parse_settings

    experiment = build_experiment(parse_settings(given))
    trackers.find(track or ())  # before the first trial
    with shown() as watch:
        if tune:
            experiment, tried = sample_cohort(experiment, trials, None, watch(f"{experiment.method.name} tuning"))
            print(f"chosen of {len(tried)}: {_chosen(experiment.method)}", file=sys.stderr)
        where = out or fresh(f"{experiment.method.name}-{experiment.settings.data}")
        GO_ON.append(f"Go on with: fewer resume {where}")
        result = start(experiment, where, watch(experiment.method.name), track=track or ())
    finish(result, where, json_file, report)


def _print_table(table: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from fewer.runs.statistics import amount

    best = max(row.accuracy for row in table.rows)
    shown = Table(title=f"{table.settings['data']}, {table.clients} clients", title_justify="left")
    shown.add_column("method")
    for title in ("accuracy %", "everywhere %", "rounds", "MB up", "MB down", "seconds"):
        shown.add_column(title, justify="right")
    for row in table.rows:
        cells = [
            f"{100 * row.accuracy:.2f}" + ("" if row.ci95 is None else f" ± {100 * row.ci95:.2f}"),
            f"{100 * row.global_accuracy:.2f}",
            str(row.rounds),
            amount(row.mb_up),
            amount(row.mb_down),
            f"{row.seconds:.1f}",
        ]
        shown.add_row(row.method, *cells, style="bold" if row.accuracy == best else "")
    Console().print(shown)
    some = " (of a hundred clients, for methods with personal models)" if table.clients > 100 else ""
    if any(row.groups for row in table.rows):
        print("frl and its baselines: what groups make of the prepared model, mean ± 95 % over groups.")
    print(
        f"accuracy: each test sample judged by the model of the client that it belongs to{some}"
        + (f", ± 95 % over {table.settings['seeds']} seeds." if table.settings["seeds"] > 1 else ".")
    )
    print("everywhere: each client's model judged on all clients' test samples, mean.")
    for row in table.rows:
        if row.trials:
            tuned = ", ".join(f"{name} = {row.settings[name]:g}" for name in row.trials[0].settings)
            print(f"{row.method}: {tuned} (best of {len(row.trials)} trials on held-out training data)")
