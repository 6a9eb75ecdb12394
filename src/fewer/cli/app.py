"""The commands. They read settings, start runs and print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

import fewer
from fewer.cli import data as data_commands
from fewer.cli import printing
from fewer.cli.data import DataDir
from fewer.cli.machines import add_machines
from fewer.cli.options import App, complete_methods, parse_assignments, with_settings
from fewer.cli.printing import RUNS, Json, Out, Output, Report, Track
from fewer.errors import SettingError

if TYPE_CHECKING:
    from fewer.experiments import Comparison

app = App(
    help="Federated learning in fewer rounds, with fewer samples and fewer bytes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

app.add_typer(data_commands.app, name="data", rich_help_panel="Inspect")

Run = Annotated[Path, Argument(metavar="RUN", help="A run directory.")]
MethodName = Annotated[
    str | None, Argument(metavar="METHOD", help="A method's name, or FILE.py:Name.", autocompletion=complete_methods)
]
RunDataDir = Annotated[Path | None, Option(metavar="DIR", help="Directory of the data files. \\[default: the run's]")]
ClientNumber = Annotated[int | None, Option(metavar="N", help="Use this client's personal model.")]
DataOptions = Annotated[
    list[str] | None,
    Option("--data-option", metavar="NAME=VALUE", help="An option of the data. \\[default: the run's]"),
]
Tune = Annotated[
    bool, Option("--tune", help="First tune each method on held-out training data, with equally many trials.")
]
Trials = Annotated[int, Option(metavar="N", min=1, help="Trials of --tune for each method.")]


def main() -> None:
    """Entry point."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fewer {fewer.__version__}")
        raise typer.Exit


@app.callback()
def fewer_command(
    version: Annotated[
        bool, Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning in fewer rounds, with fewer samples and fewer bytes."""


@app.command(rich_help_panel="Train", no_args_is_help=True)
@with_settings(without=("method",))
def run(
    given: dict[str, Any], output: Output, method: MethodName = None, tune: Tune = False, trials: Trials = 8
) -> None:
    """Train with one method and keep everything in a run directory.

    `fewer methods` lists the methods, `fewer methods NAME` the options of one, `fewer data list` the data.

    [dim]fewer run fedavg --data fashion-mini --clients 20 --alpha 0.5 --rounds 10 -o lr=0.1[/dim]
    """
    if method is not None:
        given["method"] = method
    if "method" not in given:
        raise SettingError("METHOD is missing, as in fewer run fedavg (fewer methods lists them)")
    _train(given, output, tune, trials)


@app.command(rich_help_panel="Train")
@with_settings(
    without=("method",),
    rounds="Communication rounds; for frl a multiple of R + 1, which is 4 unless -o group_rounds=R changes it. "
    "[default: the method's, for frl 80]",
    cohort="Clients asked in each round (K of an episode). [default: the method's, usually 10]",
)
def prepare(
    given: dict[str, Any],
    output: Output,
    method: Annotated[
        str, Argument(metavar="METHOD", help="frl, or one of its baselines.", autocompletion=complete_methods)
    ] = "frl",
    tune: Tune = False,
    trials: Trials = 8,
) -> None:
    """Prepare an initial model, from which later groups train their own models in a few rounds.

    This is a run like any other. It also writes prepared.safetensors to its directory, for fewer deploy.

    [dim]fewer prepare --data glyphs --data-option unseen_classes=0-9 --partition shards --clients 52[/dim]
    """
    from fewer.methods import find
    from fewer.runs.inference import check_prepares

    check_prepares(find(method))
    _train({**given, "method": method}, output, tune, trials)


@app.command(rich_help_panel="Use")
@with_settings(
    without=("method", "model", "norm", "model_options"),
    rounds="Rounds of the group. [default: R of the preparation, usually 3]",
    cohort="Clients asked in each round. [default: all of the group]",
)
def deploy(
    given: dict[str, Any],
    output: Output,
    prepared: Annotated[Path, Argument(metavar="MODEL", help="A prepared model, or the run that made it.")],
) -> None:
    """Train a group's model from a prepared one, in a few rounds.

    All clients of the data take part. The net, the head and the learning rate are those of the preparation, unless -o
    changes them.

    [dim]fewer deploy runs/… --data glyphs --data-option classes=0-4 --clients 10 --partition shards[/dim]
    """
    from fewer.runs.artifacts import deploy_settings

    _train(deploy_settings(prepared, given), output)


@app.command(rich_help_panel="Train")
def resume(
    path: Run,
    rounds: Annotated[
        int | None, Option(metavar="N", help="Train to this round instead; also continues a finished run.")
    ] = None,
    runtime: Annotated[str | None, Option(metavar="NAME", help="inline or pool; may differ from before.")] = None,
    workers: Annotated[int | None, Option(metavar="N", help="Worker processes of the pool.")] = None,
    device: Annotated[str | None, Option(metavar="NAME", help="Any torch device.")] = None,
    data_dir: RunDataDir = None,
    quorum: Annotated[float | None, Option(metavar="X", help="A lower quorum, if the old one was lost.")] = None,
    deadline: Annotated[float | None, Option(metavar="X", help="More seconds for each client.")] = None,
    drop: Annotated[float | None, Option(metavar="X", help="Inject fewer faults; also --slow, --corrupt.")] = None,
    slow: Annotated[float | None, Option(metavar="X", hidden=True)] = None,
    corrupt: Annotated[float | None, Option(metavar="X", hidden=True)] = None,
    debug: Annotated[bool | None, Option("--debug", help="Run inline; show the traceback of a client.")] = None,
    report: Report = True,
    track: Track = None,
    json_file: Json = None,
) -> None:
    """Continue a run that was stopped, was killed, or lost its quorum; with --rounds also a finished one.

    The result is bit-identical to an uninterrupted run with as many rounds.

    [dim]fewer resume runs/… --rounds 15[/dim]
    """
    from fewer.runs.engine import resume as resume_run

    printing.print_if_finished(path, rounds, f"fewer resume {printing.quote(path)}")
    with printing.resumable(printing.resume_hint(path)):
        changed: dict[str, Any] = {"runtime": runtime, "workers": workers, "device": device, "data_dir": data_dir}
        changed |= {"quorum": quorum, "deadline": deadline, "drop": drop, "slow": slow, "corrupt": corrupt}
        changed |= {"debug": debug, "rounds": rounds}
        result = resume_run(path, track=track, progress=True, **changed)
    printing.print_result(result, path, Output(report, json_file=json_file))


@app.command(rich_help_panel="Train")
@with_settings(without=("method",))
def compare(
    given: dict[str, Any],
    output: Output,
    methods: Annotated[
        list[str],
        Argument(metavar="METHOD...", help="Methods' names, or FILE.py:Name.", autocompletion=complete_methods),
    ],
    seeds: Annotated[int, Option(metavar="N", min=1, help="Runs of each method, with seeds from --seed on.")] = 1,
    tune: Tune = False,
    trials: Trials = 8,
) -> None:
    """Train several methods on the same task and print one table.

    -o mu=0.1 sets an option of every method that has it, -o fedprox.mu=0.1 of one method.

    [dim]fewer compare local fedavg fedprox fedbn --seeds 3 --tune[/dim]
    """
    from fewer.experiments import compare as compare_methods
    from fewer.runs.settings import Settings

    folder = output.out or printing.new_run_path("compare")
    data, model = (given.pop(name, Settings.model_fields[name].default) for name in ("data", "model"))
    options: dict[str, Any] = {"seeds": seeds, "tune": tune, "trials": trials, "track": output.track or ()}
    with printing.resumable(f"Continue with the same command and --out {printing.quote(folder)}"):
        table = compare_methods(methods, data, model=model, out=folder, progress=True, **options, **given)
    page = printing.write_report_page(table.runs, folder) if output.report else None
    if not printing.write_json(output.json_file, table.to_json()):
        _print_comparison(table)
        printing.print_shortfalls(table.runs)
        print(f"Run directories: {folder}" + (f", report: {page}" if page else ""))


@app.command(rich_help_panel="Train")
def reproduce(
    name: Annotated[str | None, Argument(metavar="NAME", help="A recipe's name, or FILE.toml.")] = None,
    listed: Annotated[bool, Option("--list", help="List the recipes.")] = False,
    quick: Annotated[bool, Option("--quick", help="A smaller version that takes minutes.")] = False,
    column: Annotated[
        list[str] | None, Option(metavar="NAME", help="Only this column of the table; may be repeated.")
    ] = None,
    row: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Only this row, and keep the others of the published table; may be repeated."),
    ] = None,
    data_dir: DataDir = None,
    runtime: Annotated[str, Option(metavar="NAME", help="inline or pool; the results are the same.")] = "inline",
    track: Track = None,
    out: Out = None,
    results: Annotated[Path, Option(metavar="DIR", help="Directory of the tables.")] = Path("docs/results"),
    json_file: Json = None,
) -> None:
    """Run the recipe of a paper's table and print our numbers next to the paper's.

    If it is interrupted, run the same command again to continue.

    [dim]fewer reproduce baselines/mnist --quick[/dim]
    """
    from fewer.experiments import pages, recipes
    from fewer.experiments.studies import join_studies, keep_cells
    from fewer.report.style import png
    from fewer.report.tables import plot_recipe, write_study
    from fewer.runs.progress import show_progress

    if listed or name is None:
        for recipe_name, title in recipes.list_recipes().items():
            print(f"{recipe_name}  {title}")
        return
    results.mkdir(parents=True, exist_ok=True)
    title = Path(name).stem if name.endswith(".toml") else name
    folder = out or RUNS / "reproduce" / (title.replace("/", "-") + ("-quick" if quick else ""))
    if row and quick:
        raise SettingError("--row keeps rows of a published table, which --quick does not have; leave out one of both")
    changes = {"data_dir": data_dir, "runtime": runtime}
    stem = "-".join([title, *map(recipes.slugify, column or ())])
    with printing.resumable("Run the same command to continue."), show_progress(True, many=True) as progress:
        recipe, cells = recipes.reproduce(
            name,
            folder,
            quick=quick,
            columns=column or (),
            rows=row or (),
            published=results / f"{stem}.json",
            changes=changes,
            callbacks=progress,
            track=track or (),
        )
    earlier = json.loads((results / f"{stem}.json").read_text()) if row else {}
    study = recipes.run_study(recipe, [cell for cell in cells if not row or cell.row in row], folder)
    if row and study:
        others = {f"{cell.row}, {cell.column}" for cell in cells if cell.row not in row}
        study = join_studies([keep_cells(earlier, others), study.as_json(stem)])
    chosen_columns = "".join(f' --column "{title}"' for title in column or ())
    command = f"fewer reproduce {name}" + (" --quick" if quick else "") + chosen_columns
    pictures = {kind: png(figure) for kind, figure in plot_recipe(recipe, cells).items()}
    later = list(dict.fromkeys([*earlier.get("later", ()), *(row or ())]))
    notes = earlier.get("notes", ())
    written = pages.write_results(stem, recipe, cells, results, command, quick, pictures, study, later, notes)
    if study:
        write_study(study, written[0].with_suffix(""))
    if not printing.write_json(json_file, json.loads(written[1].read_text())):
        print(written[0].read_text())
        print(f"Written: {', '.join(map(str, written))}; run directories: {folder}")


@app.command(rich_help_panel="Inspect")
def report(
    paths: Annotated[list[Path], Argument(metavar="RUN...", help="Run directories, or directories of runs.")],
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Directory of the report. \\[default: RUN/report; for several RUNs report]"),
    ] = None,
) -> None:
    """Write an HTML report on one or more runs: who won, at what cost and why, with plots and all settings.

    The page, report.html, is self-contained. Its plots are also written as PNG and SVG, and their data as CSV.

    [dim]fewer report runs/compare-…[/dim]
    """
    from fewer.report.page import write_report

    folder = out or (paths[0] / "report" if len(paths) == 1 else Path("report"))
    page, *plots = write_report([run for path in paths for run in _runs_in(path)], folder)
    print(page)
    if plots:
        print(f"{len(plots)} plot files in {plots[0].parent}")


@app.command(rich_help_panel="Inspect")
def dash(
    folder: Annotated[
        Path | None, Argument(metavar="DIR", help="Show the runs in this directory. \\[default: runs]")
    ] = None,
    host: Annotated[
        str, Option(metavar="ADDRESS", help="Listen on this address. All but loopback need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(metavar="N", min=0, max=65535, help="Listen on this port; 0 for any.")] = 8650,
    token_file: Annotated[
        Path | None, Option(metavar="FILE", help="Use the token in this file instead of a new one.")
    ] = None,
    name: Annotated[
        list[str] | None, Option(metavar="NAME", help="A host name that browsers use, behind a proxy; may be repeated.")
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="Disable stopping and resuming runs.")] = False,
    browse: Annotated[bool, Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Watch runs in a browser: list, follow, compare, stop and resume them. Stop with Ctrl-C.

    [dim]fewer dash --open[/dim]
    """
    from fewer.dash import need_dash

    need_dash()
    if folder is not None and not folder.is_dir():
        raise SettingError(f"there is no directory {folder}")
    from fewer.dash.server import serve

    serve(folder or RUNS, host, port, token_file=token_file, names=name or (), read_only=read_only, browse=browse)


@app.command(rich_help_panel="Inspect")
def audit(
    path: Run,
    out: Annotated[Path | None, Option(metavar="DIR", help="Directory of the report. \\[default: RUN/audit]")] = None,
    clients: Annotated[int, Option(metavar="N", min=1, help="Number of clients to attack.")] = 10,
    steps: Annotated[int, Option(metavar="N", min=1, help="Steps of gradient matching.")] = 500,
    starts: Annotated[
        int, Option(metavar="N", min=1, help="Random starts of gradient matching; the best is used.")
    ] = 2,
    shadows: Annotated[
        int, Option(metavar="N", min=0, help="Train the run N more times with mislabeled canaries, such as 8.")
    ] = 0,
    data_dir: RunDataDir = None,
    json_file: Json = None,
) -> None:
    """Attack a run and write a report on what leaks: near-copies, deep leakage, membership, canaries.

    This is for simulated runs: the attacks are scored against the clients' real data.
    """
    from fewer.audit import audit as attack_run
    from fewer.audit.summary import HEADS, summary_rows, verdicts
    from fewer.report.audit import write_audit

    outcome = attack_run(path, data_dir=data_dir, clients=clients, steps=steps, starts=starts, shadows=shadows)
    files = write_audit(outcome, out or path / "audit")
    if printing.write_json(json_file, outcome.as_json()):
        return
    printing.print_rows(HEADS, summary_rows(outcome))
    for line in [*verdicts(outcome), *outcome.notes]:
        print(line)
    print(f"A failed attack does not prove privacy. Report: {files[0]}")


@app.command(rich_help_panel="Inspect")
def methods(
    name: Annotated[
        str | None, Argument(metavar="METHOD", help="Show the options of this method.", autocompletion=complete_methods)
    ] = None,
    with_papers: Annotated[
        bool, Option("--cite", help="Print the BibTeX entries of the method's papers instead.")
    ] = False,
    json_file: Json = None,
) -> None:
    """List the methods, or the options of one."""
    from typing import get_args

    from fewer.methods import Group, find, names
    from fewer.methods.citations import cite

    if with_papers:
        if name is None:
            raise SettingError("METHOD is missing, as in fewer methods fedavg --cite")
        method_name = find(name).name
        print("\n\n".join(cite(method_name)) or f"% {method_name} has no paper in this list")
        return

    if name is None:
        texts = {method: (find(method).__doc__ or "").strip().splitlines()[0] for method in names()}
        if printing.write_json(json_file, {name: {"group": find(name).group, "text": texts[name]} for name in texts}):
            return
        for group in get_args(Group):
            members = [(method, texts[method]) for method in texts if find(method).group == group]
            printing.print_rows((group, "what it does"), members)
            print()
        print("fewer methods NAME shows the options of one.")
        return
    method = find(name)
    fields = method.model_fields.items()
    rows = {option: {"default": field.get_default(), "text": field.description or ""} for option, field in fields}
    if printing.write_json(json_file, rows):
        return
    print(f"{method.name}: {(method.__doc__ or '').strip()}\n")
    printing.print_rows(
        ("option", "default", "meaning"), [(option, str(row["default"]), row["text"]) for option, row in rows.items()]
    )
    print("\nSet one with -o name=value; rounds, cohort and codec have their own flags.")


@app.command(rich_help_panel="Use")
def predict(
    path: Run,
    data: Annotated[str, Option(metavar="NAME", help="FORMAT:PATH (npz:FILE with an array x, …), or a dataset.")],
    data_dir: DataDir = None,
    data_options: DataOptions = None,
    client: ClientNumber = None,
    weights: Annotated[
        Path | None, Option(metavar="FILE", help="Use these weights: model.safetensors of adapt or export.")
    ] = None,
    out: Annotated[Path, Option(metavar="FILE.csv", help="The output file; - for standard output.")] = Path("-"),
) -> None:
    """Write a trained model's predictions for new data as CSV.

    The data needs no labels. Columns and classes go by name, as the run's schema says. The output has the class of each
    sample, its confidence and the probability of each class; or its labels, or its values.

    [dim]fewer predict runs/… --data csv:new.csv --out predictions.csv[/dim]
    """
    from fewer.runs.inference import predict as predict_data

    options = parse_assignments(data_options or [])
    predictions, metrics, notes = predict_data(path, data, data_dir, client, options, weights)
    text = predictions.to_csv()
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        out.write_text(text)
        print(f"{len(predictions)} predictions in {out}")
    for note in notes:
        print(note, file=sys.stderr)
    if metrics is not None:
        print(f"{metrics} on the labels of the data", file=sys.stderr)


@app.command(rich_help_panel="Use")
def adapt(
    path: Run,
    data: Annotated[str, Option(metavar="NAME", help="FORMAT:PATH (npz:FILE with arrays x and y, …), or a dataset.")],
    data_dir: DataDir = None,
    data_options: DataOptions = None,
    out: Annotated[Path, Option(metavar="DIR", help="Directory of the model.")] = Path("adapted"),
) -> None:
    """Adapt the model of a run to a new client's data and write the personal model.

    The run's method must be one that learns to adapt: fedmeta, fedavg-meta, per-fedavg, reptile.

    [dim]fewer adapt runs/… --data npz:mine.npz --out mine[/dim]
    [dim]fewer predict runs/… --data npz:new.npz --weights mine/model.safetensors[/dim]
    """
    from fewer.runs.inference import adapt as write_adapted

    files, count = write_adapted(path, data, out, data_dir, parse_assignments(data_options or []))
    print(f"adapted to {count} samples", file=sys.stderr)
    for file in files:
        print(file)


@app.command(rich_help_panel="Use")
def export(
    path: Run,
    client: ClientNumber = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Directory of the model. \\[default: RUN/export]")] = None,
) -> None:
    """Write a trained model for use elsewhere: safetensors, a torch.export program, and a description of its inputs."""
    from fewer.runs.inference import export as write_export

    for file in write_export(path, out or path / "export", client):
        print(file)


add_machines(app)  # last in --help, since it is not for beginners

# --- helpers --------------------------------------------------------------------------------------------------


def _runs_in(path: Path) -> list[Path]:
    """Returns a run directory itself, or all runs one or two levels below a directory."""
    if (path / "settings.json").exists():
        return [path]
    below = [*path.glob("*/settings.json"), *path.glob("*/*/settings.json")]
    return sorted(file.parent for file in below) or [path]


def _train(given: dict[str, Any], output: Output, tune: bool = False, trials: int = 0) -> None:
    """Runs one method from settings and prints the result."""
    from fewer.experiments.tune import find_search_space, tune_experiment
    from fewer.runs import trackers
    from fewer.runs.engine import run_experiment
    from fewer.runs.experiment import build_experiment, parse_settings
    from fewer.runs.progress import show_progress

    experiment = build_experiment(parse_settings(given))
    trackers.find(output.track or ())  # reports a wrong name before the first trial
    with show_progress(True) as progress:
        if tune:
            experiment, done = tune_experiment(experiment, trials, callbacks=progress)
            tuned = find_search_space(experiment.method)
            chosen = ", ".join(f"{name} = {getattr(experiment.method, name):g}" for name in tuned)
            print(f"best of {len(done)} trials: {chosen}", file=sys.stderr)
        path = output.out or printing.new_run_path(experiment.method.name, experiment.settings.data)
        with printing.resumable(printing.resume_hint(path), path):
            result = run_experiment(experiment, path, progress, track=output.track or ())
    printing.print_result(result, path, output)


def _print_comparison(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    metric = comparison.metric
    best = max(metric.rank(row.accuracy) for row in comparison.rows)
    title = f"{comparison.settings['data']}, {comparison.clients} clients"
    table = Table("method", title=title, title_justify="left")
    for head in (metric.label, f"global{metric.unit}", "rounds", "MB up", "MB down", "seconds"):
        table.add_column(head, justify="right")
    private = any(row.epsilon is not None for row in comparison.rows)
    if private:
        table.add_column("ε", justify="right")
    for label, row in zip(comparison.labels, comparison.rows, strict=True):
        epsilon = ["–" if row.epsilon is None else f"{row.epsilon:.3g}"] if private else []
        table.add_row(label, *row.format_cells(), *epsilon, style="bold" if metric.rank(row.accuracy) == best else "")
    Console().print(table)
    sampled = " (100 sampled clients, for methods with personal models)" if comparison.clients > 100 else ""
    if any(row.groups for row in comparison.rows):
        print("Rows evaluated on groups or tasks: mean ± 95 % CI over them.")
    seeds = comparison.settings["seeds"]
    print(
        f"{metric.name}: each test sample is predicted by its own client's model{sampled}"
        + (f"; ± 95 % CI over {seeds} seeds." if seeds > 1 else ".")
    )
    print("global: each client's model on all clients' test samples, averaged.")
    labeled = zip(comparison.labels, comparison.rows, strict=True)
    if joined := [f"{label} {row.format_unseen_clients()}" for label, row in labeled if row.unseen_clients]:
        print(f"Clients that never trained, {metric.label}: {', '.join(joined)}")
    for label, row in zip(comparison.labels, comparison.rows, strict=True):
        if row.trials:
            tuned = ", ".join(f"{name} = {row.settings[name]:g}" for name in row.trials[0].settings)
            print(f"{label}: {tuned} (best of {len(row.trials)} trials on held-out training data)")
