"""What a run leaves: figures, and models to use."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.federated import inputs_of, labels_of
from fewer.errors import DataError, RunError, SettingError
from fewer.methods import Client, Method, find, names
from fewer.methods.base import ContextFactory
from fewer.methods.new_clients import NewClients
from fewer.models import Task, Weights, load_weights
from fewer.runs.directory import RunDirectory
from fewer.runs.settings import Settings
from fewer.runs.trackers import scalars
from fewer.runs.views import Shown


@dataclass
class Result(Shown):
    """A finished run, or one that is under way. It shows itself in a notebook; see also `plot` and `to_pandas`."""

    view: ClassVar[str] = "run"

    method: Method
    task: Task = field(repr=False)
    data: Data = field(repr=False)
    settings: Settings = field(repr=False)
    state: Any = field(repr=False)
    folder: Path | None = field(default=None, repr=False)
    """Where the clients' own state lies, if it was kept."""
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Figures of each round: accuracy, loss, bytes up and down so far, seconds so far."""
    seconds: float = 0.0

    @property
    def scores(self) -> dict[str, Any]:
        """The figures after the last round."""
        return self.history[-1] if self.history else {}

    def records(self) -> list[dict[str, Any]]:
        """The figures of each round, without those by client."""
        return [{"round": line["round"], **scalars(line)} for line in self.history]

    @property
    def accuracy(self) -> float:
        """Accuracy after the last round."""
        return float(self.scores["accuracy"])

    @property
    def model(self) -> nn.Module:
        """The trained global model, ready to use."""
        weights = self.method.global_weights(self.state)
        if weights is None:
            raise SettingError(f"{self.method.name} has no global model: ask for a client's (0 … {len(self.data) - 1})")
        return self.method.build_model(self._net, weights).eval()

    def _net(self, weights: Weights) -> nn.Module:
        net = self.task.net()
        load_weights(net, weights)
        return net

    def personal_model(self, client: int) -> nn.Module:
        """The model of one client, ready to use."""
        if not 0 <= client < len(self.data):
            raise SettingError(f"client = {client} (allowed: 0 … {len(self.data) - 1})")
        if self.settings.runtime == "flower":
            raise RunError(f"the model of client {client} is where that client is, and nowhere else")
        if self.folder is None:
            raise RunError("clients' models are kept only in a run directory: run with out=DIR")
        contexts = ContextFactory(self.data, self.task, self.settings.seed, self.folder)
        context = contexts(client, len(self.history))
        assert isinstance(context, Client)
        return self.method.personal_model(context, self.method.broadcast(self.state)).eval()

    def like(self, x: Tensor, name: str) -> Samples:
        """Inputs in the form of those that the model was trained on, normalized alike."""
        if tuple(x.shape[1:]) != self.data.shape:
            raise DataError(
                f"data '{name}' has inputs of shape {tuple(x.shape[1:])}; the model takes {self.data.shape}"
            )
        if x.dtype != self.data.test.x.dtype:
            raise DataError(f"data '{name}' has {x.dtype} inputs; the model was trained on {self.data.test.x.dtype}")
        return replace(self.data.test, x=x, y=torch.zeros(len(x), dtype=torch.int64), rows=None)

    def adapt(self, x: Samples | ArrayLike | Tensor, y: ArrayLike | Tensor) -> nn.Module:
        """The model of a client that was never met, from its own inputs and labels, ready to use.

        Arrays are normalized as the data of the run was; the method must be one that learns to adapt.
        """
        if not isinstance(self.method, NewClients):
            known = [name for name in names() if issubclass(find(name), NewClients)]
            raise SettingError(f"{self.method.name} has not learned to adapt to new data (allowed: {', '.join(known)})")
        samples = x if isinstance(x, Samples) else self.like(inputs_of(x, "x"), "x")
        labels = torch.from_numpy(labels_of(y, "y"))
        if not len(labels) or len(labels) != len(samples.x):
            raise DataError(
                f"{len(samples.x)} inputs and {len(labels)} labels to adapt to (allowed: as many, at least 1)"
            )
        if int(labels.max()) >= self.data.classes:
            raise DataError(f"a label of {int(labels.max())} to adapt to (allowed: 0 … {self.data.classes - 1})")
        from fewer.runs.engine import one_thread

        shared = self.method.broadcast(self.state)
        net = self.task.net()
        load_weights(net, self.method.initialization(shared))
        own = replace(samples, y=labels).to(self.task.device)
        with one_thread():
            self.method.adapt(net, own, shared)
        return net.eval()


def open_result(path: str | Path, method: Method | None = None, data: Data | None = None, model: Any = None) -> Result:
    """The result of a run from its directory, as far as it has come."""
    from fewer.runs.artifacts import settled
    from fewer.runs.engine import initial_state, restore
    from fewer.runs.experiment import build_experiment, parse_settings

    directory = RunDirectory.open(Path(path))
    for part, given in (("data", data), ("model", model)):
        if part in directory.description["own"] and given is None:
            raise RunError(f"{path} was run with a {part} of your own: fewer.load(path, {part}=…) from Python")
    kept = directory.read()
    experiment = build_experiment(
        parse_settings(settled(directory.description["settings"], directory.path)), method, data, model
    )
    state = restore(type(initial_state(experiment)), kept["state"], directory.path)
    history = directory.history()[: kept["round"]]
    return Result(
        experiment.method,
        experiment.task,
        experiment.data,
        experiment.settings,
        state,
        directory.clients,
        history,
        kept["seconds"],
    )


def load(
    path: str | Path,
    *,
    client: int | None = None,
    method: Method | None = None,
    data: Data | None = None,
    model: Any = None,
) -> nn.Module:
    """The trained model of a run, or one client's personal model, in evaluation mode."""
    result = open_result(path, method, data, model)
    return result.model if client is None else result.personal_model(client)
