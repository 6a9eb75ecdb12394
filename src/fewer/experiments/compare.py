"""Compares methods on the same task, over several seeds."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fewer.data import Data
from fewer.errors import QuorumLost, RunError, SettingError
from fewer.experiments.tune import TRIALS, Trial, choose_next_best, pooled_value, tune_experiment
from fewer.methods import Method, find
from fewer.runs import trackers
from fewer.runs.callbacks import Callback, Label, check_callbacks
from fewer.runs.engine import experiment_from_arguments, resume, run_experiment
from fewer.runs.experiment import Experiment, Model, build_experiment, load_data
from fewer.runs.metric import ACCURACY, PrimaryMetric
from fewer.runs.progress import show_progress
from fewer.runs.reader import RunReader
from fewer.runs.result import Result
from fewer.runs.settings import METHOD_SETTINGS, Settings
from fewer.runs.views import Viewable
from fewer.statistics import Interval, format_number, half_width, interval

MB = 1e6
CACHED_PARTITIONS = 3
"""Partitioned datasets that stay in memory for the next run."""


@dataclass(frozen=True)
class Row:
    """One method over all seeds. Numbers are means over seeds unless they say otherwise."""

    method: str
    accuracy: float
    """The primary metric (see `primary`): each client's model predicts that client's test samples."""
    ci95: float | None
    """Half-width of the 95 % confidence interval of the accuracy; None with one seed."""
    global_accuracy: float
    """The primary metric of each client's model on all clients' test samples."""
    rounds: int
    """Rounds of each run; of the longest if some ended early."""
    mb_up: float
    """Megabytes that clients sent."""
    mb_down: float
    """Megabytes that clients received."""
    seconds: float
    """Seconds of a run, without the seeds that count operations, if there are others."""
    seeds: list[int]
    accuracies: list[float]
    """The accuracy for each seed."""
    curves: list[list[dict[str, Any]]]
    """For each seed, the evaluated rounds: round, the primary metric, and the bytes (up, down) and seconds so far."""
    settings: dict[str, Any]
    """The method's options."""
    hash: str
    """The settings hash of the run with the first seed."""
    trials: list[Trial] = field(default_factory=list)
    """The trials that chose the options, if the method was tuned."""
    groups: int = 0
    """Evaluation groups over all seeds, if the method is evaluated on groups; the interval is then over them."""
    units: str = "groups"
    """What these groups are: groups of clients, or tasks."""
    unit_accuracies: list[dict[str, float]] = field(default_factory=list)
    """For each seed, the accuracy of each group, or of each client if there are no groups."""

    gflop: float | None = None
    """GFLOP that the clients of a run spend on training, if they were counted. Only the first seed counts them."""
    counted_rounds: int | None = None
    """The first rounds, if only these were counted; each later round then adds the mean of those after the first."""
    unseen_clients: list[float] = field(default_factory=list)
    """For each seed, the primary metric of clients that never trained, if there are any."""
    epsilon: float | None = None
    """The largest ε of the runs, if they have differential privacy."""
    metric: dict[str, Any] = field(default_factory=dict)
    """What `accuracy` and its relatives measure, if it is not accuracy: the fields of a `PrimaryMetric`."""

    @property
    def primary(self) -> PrimaryMetric:
        """The metric that ranks the methods."""
        return PrimaryMetric(**self.metric)

    def format_accuracy(self) -> str:
        """The primary metric, in % if it is a fraction, with its confidence interval."""
        return self.primary.format_interval(Interval(self.accuracy, self.ci95))

    def format_unseen_clients(self) -> str:
        """The primary metric of clients that never trained, with its confidence interval."""
        return self.primary.format_interval(interval(self.unseen_clients), 1)

    def format_cells(self) -> list[str]:
        """The cells of a table: the primary metric, also on the global test set, rounds, MB up and down, seconds."""
        megabytes = map(format_number, (self.mb_up, self.mb_down))
        means = self.format_accuracy(), self.primary.format_interval(Interval(self.global_accuracy, None))
        return [*means, str(self.rounds), *megabytes, f"{self.seconds:.1f}"]


@dataclass(frozen=True, repr=False)
class Comparison(Viewable):
    """One row per method. It displays itself in a notebook; see also `plot`, `to_pandas` and `report`."""

    view: ClassVar[str] = "comparison"

    rows: list[Row]
    labels: list[str]
    """The label of each row: the method's name, with its distinguishing options if two methods share it."""
    settings: dict[str, Any]
    """The settings that all runs share."""
    clients: int
    runs: list[Path] = field(default_factory=list)
    """The run directories, if they were kept."""

    def records(self) -> list[dict[str, Any]]:
        """The metrics of each method."""
        names, metric = ("rounds", "mb_up", "mb_down", "seconds"), self.metric.name
        return [
            {
                "method": label,
                metric: row.accuracy,
                "ci95": row.ci95,
                f"global_{metric}": row.global_accuracy,
                **({f"unseen_clients_{metric}": statistics.fmean(row.unseen_clients)} if row.unseen_clients else {}),
                **{name: getattr(row, name) for name in names},
                **({} if row.epsilon is None else {"epsilon": row.epsilon}),
                "seeds": len(row.seeds),
            }
            for label, row in zip(self.labels, self.rows, strict=True)
        ]

    @property
    def metric(self) -> PrimaryMetric:
        """The metric that ranks the methods."""
        return self.rows[0].primary

    def __repr__(self) -> str:
        """Three lines: what was compared, the methods from best to worst, and how to see more."""
        ranked = sorted(zip(self.labels, self.rows, strict=True), key=lambda pair: -self.metric.rank(pair[1].accuracy))
        values = ", ".join(f"{label} {row.format_accuracy()}{self.metric.unit}" for label, row in ranked)
        seeds = self.settings["seeds"]
        runs = f"{self.clients} clients, {seeds} {'seed' if seeds == 1 else 'seeds'}"
        return (
            f"Comparison on {self.settings['data'].strip('()')}: {runs}\n"
            f"  {self.metric.name}: {values}\n"
            "  print(…) shows a table; see also plot(), to_pandas() and report()"
        )

    def __str__(self) -> str:
        """One line per method: the primary metric, traffic and time."""
        width = max(map(len, self.labels))
        return "\n".join(
            f"{label:{width}}  {row.format_accuracy()}{self.metric.unit}  {row.rounds} rounds  "
            f"{format_number(row.mb_up)} MB up  {format_number(row.mb_down)} MB down  {row.seconds:.1f} s"
            for label, row in zip(self.labels, self.rows, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {**asdict(self), "runs": [str(path) for path in self.runs]}


def compare(
    methods: Sequence[Method | str],
    data: Data | str = "fashion-mini",
    *,
    model: Model | None = None,
    seeds: int = 1,
    tune: bool = False,
    trials: int = TRIALS,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Runs each method with `seeds` seeds on the same data and model, and collects one table.

        fewer.compare([FedAvg(lr=0.1), FedProx(mu=0.1), "fedmk"], data=my_data, model=MyNet, seeds=3, tune=True)

    `methods` are objects or names; `data`, `model`, `loss` and `metrics` are as in `fewer.run`. With `tune`, each
    method is first tuned by `trials` trials on held-out training data. `rounds`, `cohort` and `codec` apply to all
    methods; `method_options` apply to the methods given by name, as `{"mu": 0.1}` or `{"fedprox.mu": 0.1}`. `callbacks`
    follow all runs and all trials. `progress` is as in `fewer.run`.

    With `out`, run directories are kept there. Finished runs are reused, and interrupted ones continue. Data given as
    an object is the same for all seeds; data given by name is partitioned anew for each seed.
    """
    if isinstance(methods, str | Method | type):
        raise SettingError("methods must be a list, such as [FedAvg(), 'fedprox']")
    if not isinstance(seeds, int):
        raise SettingError(f"seeds must be the number of seeds, got {seeds!r}")
    if not methods:
        raise SettingError("no methods to compare: pass at least one")
    trials = trials if tune else 0
    experiments, given_methods = _build_experiments(methods, data, model, settings)
    labels = _make_labels([experiment.method for experiment in experiments])
    first = experiments[0]
    objects = {"model": model, "loss": settings.get("loss"), "metrics": settings.get("metrics")}
    own = {name: value for name, value in objects.items() if name in first.objects}
    own_data, folder = data if isinstance(data, Data) else None, None if out is None else Path(out)
    with show_progress(progress, callbacks, many=True) as callbacks:
        runner = SeedRunner(seeds, trials, folder, callbacks, track=track, data=own_data, objects=own)
        runner.total = len(methods) * seeds
        entries = zip(experiments, labels, given_methods, strict=True)
        rows = [runner.run(experiment.settings, label, method=method) for experiment, label, method in entries]
    shared = first.settings.model_dump(mode="json", exclude={"method", "method_options", *METHOD_SETTINGS})
    return Comparison(rows, labels, {**shared, "seeds": seeds, "trials": trials}, len(first.data), runner.paths)


def _build_experiments(
    methods: Sequence[Method | str], data: Data | str, model: Model | None, settings: Mapping[str, Any]
) -> tuple[list[Experiment], list[Method | None]]:
    """The experiment of each method, and the method if it was given as an object.

    All are built and initialized before the first run, so that mistakes show early.
    """
    common = {name: value for name, value in settings.items() if name not in ("method_options", *METHOD_SETTINGS)}
    overrides = {name: value for name in METHOD_SETTINGS if (value := settings.get(name)) is not None}
    objects = [_override(method, overrides) if isinstance(method, Method) else None for method in methods]
    named = [find(method) for method in methods if isinstance(method, str)]
    options = assign_options(named, settings.get("method_options", {}))
    experiments = []
    for given, method in zip(methods, objects, strict=True):
        chosen = common
        if isinstance(given, str):
            chosen = {**common, **overrides, "method_options": options[find(given).name]}
        experiments.append(experiment_from_arguments(method or given, data, model, chosen))
        experiments[-1].initial_state()
    return experiments, objects


def _override(method: Method, overrides: Mapping[str, Any]) -> Method:
    """The method with the settings that apply to all methods."""
    return type(method)(**{**method.model_dump(), **overrides}) if overrides else method


def _make_labels(methods: Sequence[Method]) -> list[str]:
    """Unique labels: the methods' names, with the options in which methods of the same name differ."""
    labels: list[str] = []
    for method in methods:
        namesakes = [other.model_dump() for other in methods if other.name == method.name]
        options = method.model_dump()
        differing = [name for name in options if any(other.get(name) != options[name] for other in namesakes)]
        label = " ".join([method.name, *(f"{name}={options[name]}" for name in differing)])
        while label in labels:
            label += "'"
        labels.append(label)
    return labels


@dataclass
class SeedRunner:
    """Runs methods with several seeds, after tuning if there are trials. Datasets are loaded once."""

    seeds: int
    trials: int
    out: Path | None
    callbacks: Sequence[Callback] = ()
    measure: Callable[[Result], float] = pooled_value
    track: Sequence[str] = ()
    data: Data | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    count_flops: bool = False
    """Counts the operations of the first seed."""
    total: int = 0
    """Number of runs of all methods, if labels shall count them."""
    trial_rounds: int | None = None
    """Rounds of a trial, if trials shall be shorter than runs."""
    paths: list[Path] = field(default_factory=list, init=False)
    """The run directories so far."""
    _started: int = field(default=0, init=False)
    _partitions: dict[str, Data] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise SettingError(f"seeds must be at least 1, got {self.seeds}")
        trackers.find(self.track)  # reports a wrong name before the first trial
        check_callbacks(self.callbacks)
        if self.out:
            self.out.mkdir(parents=True, exist_ok=True)

    def experiment(self, settings: Settings, method: Method | None = None) -> Experiment:
        """Builds the experiment that the settings name, with cached data if possible."""
        data = self.data if self.data is not None else self._load_partition(settings)
        return build_experiment(settings, method, data, **self.objects)

    def _load_partition(self, settings: Settings) -> Data:
        others = {"method", "method_options", *METHOD_SETTINGS, "model", "norm", "model_options", "count_flops"}
        key = settings.model_dump_json(exclude=others)
        if key not in self._partitions:
            while len(self._partitions) >= CACHED_PARTITIONS:
                self._partitions.pop(next(iter(self._partitions)))
            self._partitions[key] = load_data(settings)
        return self._partitions[key]

    def run(
        self, settings: Settings, label: str, tuned: bool | Sequence[str] = True, method: Method | None = None
    ) -> Row:
        """Runs all seeds of one method; `method` is the object, if it was given as one. `tuned` may list options."""
        experiment, done = self.experiment(settings, method), list[Trial]()
        stem = "".join(c if c.isalnum() or c in "-._=" else "-" for c in label)
        file = self.out and self.out / f"{stem}-trials.json"
        if self.trials and tuned:
            how: dict[str, Any] = {"label": f"{self.title} {label}".strip(), "measure": self.measure}
            how |= {"options": None if isinstance(tuned, bool) else tuned, "rounds": self.trial_rounds}
            experiment, done = tune_experiment(experiment, self.trials, file, self.callbacks, **how)
        while True:
            started, tuned_method = self._started, None if method is None else experiment.method
            try:
                results = self._run_seeds(experiment, label, stem, tuned_method)
            except QuorumLost as lost:  # all answers were refused: the weights are no longer finite
                if not done:
                    raise
                experiment, done = choose_next_best(experiment, done, file, str(lost))
                self._started = started
                self._discard_runs(stem)
                continue
            return _build_row(experiment, results, [self.measure(result) for result in results], done)

    def _run_seeds(self, experiment: Experiment, label: str, stem: str, method: Method | None) -> list[Result]:
        """Runs all seeds of an experiment; `method` is its method, if it was given as an object."""
        results, first = [], experiment.settings.seed
        for seed in range(first, first + self.seeds):
            changed = {"seed": seed} | ({"count_flops": seed == first} if self.count_flops else {})
            seeded = self.experiment(experiment.settings.model_copy(update=changed), method)
            self._started += 1
            number = f"{self._started}/{self.total}" if self.total > 1 else ""
            parts = number, self.title, label, f"seed {seed}" if self.seeds > 1 else ""
            run_label = Label(" ".join(filter(None, parts)), f"{self.title} {label}".strip(), self.seeds)
            callbacks = [run_label, *self.callbacks]
            path = self.out and self.out / f"{stem}-seed{seed}"
            results.append(self._run_or_resume(seeded, path, callbacks, method))
        return results

    def _discard_runs(self, stem: str) -> None:
        """Removes the runs of settings that diverged, because the next best settings take their place."""
        for path in [path for path in self.paths if path.name.rpartition("-seed")[0] == stem]:
            shutil.rmtree(path)
            self.paths.remove(path)

    def _run_or_resume(
        self, experiment: Experiment, path: Path | None, callbacks: Sequence[Callback], method: Method | None
    ) -> Result:
        """Starts a run, continues it, or reuses it if it is finished."""
        if path:
            self.paths.append(path)
        if path is None or not (path / "settings.json").exists():
            return run_experiment(experiment, path, callbacks, track=self.track)
        if RunReader(path).metadata["hash"] != experiment.hash:
            raise RunError(f"{path} holds a run with other settings: choose another --out")
        return resume(
            path,
            method=method,
            data=self.data,
            callbacks=callbacks,
            track=self.track or None,
            progress=False,
            debug=experiment.settings.debug or None,
            **self.objects,
        )


def assign_options(methods: Sequence[type[Method]], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Distributes options over methods: `mu` goes to every method that has it, `fedprox.mu` to one."""
    options: dict[str, dict[str, Any]] = {method.name: {} for method in methods}
    for key, value in given.items():
        owner, _, name = key.rpartition(".")
        matching = [method for method in methods if (method.name == owner if owner else name in method.model_fields)]
        if not matching:
            raise SettingError(f"no method has an option '{key}' (methods: {', '.join(options)})")
        for method in matching:
            options[method.name][name] = value
    return options


def read_unit_accuracies(scores: Mapping[str, Any]) -> dict[str, float]:
    """The accuracy by group, or by client if there are no groups."""
    if "groups" in scores:
        return {str(number): accuracy for number, accuracy in enumerate(scores["groups"])}
    return dict(scores.get("clients", {}))


def _build_row(experiment: Experiment, results: Sequence[Result], accuracies: list[float], trials: list[Trial]) -> Row:
    method = experiment.method
    last = [result.metrics for result in results]
    groups = [accuracy for scores in last for accuracy in scores.get("groups", ())]
    metric = experiment.metric
    names = "round", metric.name, "up", "down", "seconds", "flops"
    unseen_clients = f"unseen_clients_{metric.name}"
    uncounted = [result.seconds for result in results if not result.settings.count_flops]
    gflops = [scores["flops"] / 1e9 for scores in last if "flops" in scores]
    return Row(
        method=method.name,
        accuracy=statistics.fmean(accuracies),
        ci95=half_width(groups or accuracies),
        global_accuracy=statistics.fmean(scores.get(f"global_{metric.name}", scores[metric.name]) for scores in last),
        rounds=max(len(result.history) for result in results),
        mb_up=statistics.fmean(scores["up"] for scores in last) / MB,
        mb_down=statistics.fmean(scores["down"] for scores in last) / MB,
        seconds=statistics.fmean(uncounted or [result.seconds for result in results]),
        seeds=[result.settings.seed for result in results],
        accuracies=accuracies,
        curves=[
            [{name: line[name] for name in names if name in line} for line in result.history if metric.name in line]
            for result in results
        ],
        settings=method.model_dump(mode="json"),
        hash=experiment.hash,
        trials=trials,
        groups=len(groups),
        units="tasks" if "tasks" in last[0] else "groups",
        unit_accuracies=[read_unit_accuracies(scores) for scores in last],
        gflop=statistics.fmean(gflops) if gflops else None,
        unseen_clients=[scores[unseen_clients] for scores in last if unseen_clients in scores],
        epsilon=max((scores["epsilon"] for scores in last if "epsilon" in scores), default=None),
        metric={} if metric == ACCURACY else asdict(metric),
    )
