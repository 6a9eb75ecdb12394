"""What only some methods can do. Upper layers find it out with `isinstance`, and never by a method's name.

A method has a capability if it has its functions:

    if isinstance(method, HasSyntheticData):
        images = method.synthetic_data(state)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.methods.context import Client, Server
from fewer.models import Task, Weights


@runtime_checkable
class PreparesData(Protocol):
    """Transforms or checks the data before training."""

    def prepare_data(self, data: Data) -> Data:
        """Returns the data to train on."""


@runtime_checkable
class HasSettingWarnings(Protocol):
    """Warns about hyperparameters that are allowed but probably not wanted."""

    def setting_warnings(self) -> Sequence[str]:
        """Returns the warnings; they are shown once, before training."""


@runtime_checkable
class HasSearchSpace(Protocol):
    """Tunes other hyperparameters than `tunable`, depending on its settings."""

    def search_space(self) -> Mapping[str, Sequence[float]]:
        """Returns the hyperparameters that `--tune` searches, with starting values."""


@runtime_checkable
class HasTuningSplit(Protocol):
    """Needs other data for tuning than a held-out part of the training samples."""

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Self, Data]:
        """Returns the method and the data of a tuning trial, which never uses the test data."""


@runtime_checkable
class AdaptsToNewClients(Protocol):
    """Adapts its model to clients that did not train."""

    def initialization(self, shared: Weights) -> Weights:
        """Returns the weights that adaptation starts from, given `state.shared`."""

    def adapt(self, net: nn.Module, support: Samples, shared: Weights, task: Task) -> None:
        """Adapts a net with `initialization(shared)` to the support set of a new client, in place."""


# --- synthetic data and pictures --------------------------------------------------------------------------------


@runtime_checkable
class HasSyntheticData(Protocol):
    """Its clients send synthetic data."""

    def synthetic_data(self, state: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns the synthetic inputs and labels that each client sent last."""


@runtime_checkable
class SendsStatistics(Protocol):
    """Its clients send statistics of their features, under an encoder that everyone has."""

    def send_statistics(self, client: Client) -> dict[str, Any]:
        """Returns what a client sends. Mean features are `means`, one row each, of the classes in `classes`."""


@runtime_checkable
class SendsLogits(Protocol):
    """Its clients send mean logits of their samples by class."""

    def sent_logits(self, state: Any) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns the classes, and one row of mean logits for each, that each client sent last."""


class ImageGrid(NamedTuple):
    """Images for the report: one row per client or round, one column per class."""

    name: str
    """Used in file names."""
    title: str
    caption: str
    rows: Mapping[str, Mapping[int, Tensor]]
    """For each row, the images by class, as inputs of the net (count × sample shape)."""
    max_per_class: int = 1
    """How many images of one class a row shows at most."""


@runtime_checkable
class HasImageGrids(Protocol):
    """Has images to show in the report."""

    def image_grids(self, state: Any) -> Sequence[ImageGrid]:
        """Returns the images, in grids."""


class Embedding(NamedTuple):
    """Features of one group's samples and of its prototypes."""

    features: Tensor
    """Features of the samples that are predicted (n × width)."""
    labels: Tensor
    own_features: Tensor
    """Features of the samples that one member of the group trained on; may be empty."""
    own_labels: Tensor
    prototypes: Tensor
    """One per class."""
    prototype_labels: Tensor


@runtime_checkable
class HasEmbeddings(Protocol):
    """Predicts by prototypes, so that its features can be drawn with them."""

    def embedding(self, server: Server, state: Any, data: Data, group: int = 0, member: int = 0) -> Embedding | None:
        """Returns the features of a group of evaluation clients, by one member's model; None without prototypes."""


# --- artifacts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Artifact:
    """A prepared model that later runs start from."""

    weights: Weights
    method: str
    """The name of the method that starts from it."""
    rounds: int
    """Rounds that this method takes by default."""
    options: Mapping[str, Any]
    """Options of this method, as the model was prepared for them."""
    facts: Mapping[str, Any]
    """What the method checks before it starts, such as the shape of inputs."""


@runtime_checkable
class WritesArtifact(Protocol):
    """Prepares a model for later runs. The run writes it to prepared.safetensors."""

    def artifact(self, state: Any, task: Task, data: Data) -> Artifact:
        """Returns the prepared model."""
