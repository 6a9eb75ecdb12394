"""What methods share that prepare a model for groups: which groups they are judged on, and how.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 4. A group has some classes,
most or all of them never met in preparation, whose samples are divided among its members evenly or by shards; each
member has half of its samples of each class as support. The group's global model is judged on the queries of all
members. No client of the run is one of them: their samples are of the common test set, so groups are played by the
server.
"""

from __future__ import annotations

import logging
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.episodes import support_query
from fewer.data.partition import WAYS, Division
from fewer.errors import SettingError
from fewer.learning import Counts, score
from fewer.methods.base import CHUNK, Method, Scores, Server
from fewer.models import Weights, finite
from fewer.runtime import Clients, on_server, seed_of, stream

_LOG = logging.getLogger("fewer")
TRIAL_GROUPS = 30
"""Groups that a trial is judged on at most."""


class Drawn(NamedTuple):
    """A group: what each member learns from, and all their queries."""

    supports: list[Samples]
    queries: Samples


class OnGroups(Method):
    """A method that prepares a model with the clients of the run, and is judged on groups with other classes."""

    eval_groups: PositiveInt = 100
    """How many groups it is judged on."""
    way: PositiveInt = 5
    """Classes of a group (τ)."""
    unseen_classes: NonNegativeInt | None = None
    """How many of them nobody trained on; by default all, or as many as the data has."""
    group_size: PositiveInt = 10
    """Clients of a group (K)."""
    partition: Literal["iid", "shards"] = "shards"
    """How a group's samples are divided: evenly, or two shards of one class each to a member."""
    samples_per_class: PositiveInt | None = None
    """Samples of each class that a group has at most; by default all."""
    support_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of its samples of each class that a client learns from; the others are its queries."""

    @abstractmethod
    def group_model(self, server: Server, model: Weights, supports: Sequence[Samples], number: int) -> nn.Module:
        """The model that a group makes of the prepared one."""

    def prepare_data(self, data: Data) -> Data:
        """The data as it is; what is wrong with groups of it shows before the first round."""
        self.classes_of(data)
        return data

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        """After a round: what groups make of the prepared model, mean over groups."""
        counts = self.ask_groups(state, clients, data)
        return {
            "accuracy": statistics.fmean(count.correct / count.total for count in counts),
            "loss": sum(count.loss for count in counts) / sum(count.total for count in counts),
            "groups": [count.correct / count.total for count in counts],
        }

    def report(self, state: Any, clients: Clients, data: Data) -> Scores:
        """Nothing more: no client has a model of its own."""
        return {}

    def ask_groups(self, state: Any, clients: Clients, data: Data) -> list[Counts]:
        """What is counted in each group."""
        never, wanted = self.classes_of(data, clients.seed)
        items = [{"number": number} for number in range(self.eval_groups)]
        labels = torch.tensor(never, dtype=torch.int64)
        found = clients.map_on_server(self.play_group, items, model=self.broadcast(state), never=labels, wanted=wanted)
        lost = sum(not count.pop("sound") for count in found)
        if lost:
            _LOG.warning(
                f"{self.name}: the models of {lost} of {self.eval_groups} groups are no longer finite and answer nothing "
                "(smaller steps: -o rate and those of the preparation)"
            )
        return [Counts(**count) for count in found]

    def classes_of(self, data: Data, seed: int = 0) -> tuple[list[int], int]:
        """Classes never met, and how many of them a group has; SettingError where the data has no such groups."""
        there = sorted(set(data.test.labels.tolist()))
        never = [label for label in there if label in data.unseen]
        wanted = min(self.way, len(never)) if self.unseen_classes is None else self.unseen_classes
        if wanted > self.way:
            raise SettingError(f"unseen = {wanted} classes of a group with way = {self.way} (allowed: 0 … {self.way})")
        if wanted > len(never) or self.way - wanted > len(there) - len(never):
            raise SettingError(
                f"groups of {wanted} classes never met and {self.way - wanted} others, but the test samples are of "
                f"{len(never)} and {len(there) - len(never)} (-o way, -o unseen_classes, --data-option unseen_classes=CLASSES)"
            )
        if not len(self.draw_group(data.test, never, wanted, seed, 0).queries):
            raise SettingError(
                f"groups of {self.group_size} members and {self.way} classes have no queries: no member has two samples "
                "of a class (-o members, -o samples)"
            )
        return never, wanted

    @on_server
    def play_group(self, server: Server, model: Weights, never: Tensor, wanted: int, number: int) -> dict[str, Any]:
        """All rounds of one group, and right answers on its queries."""
        group = self.draw_group(server.common, never.tolist(), wanted, server.seed, number)
        net = self.group_model(server, model, group.supports, number)
        sound = finite(net.state_dict())
        found = score(net, group.queries.chunks(CHUNK))
        return {**(found if sound else found._replace(correct=0))._asdict(), "sound": sound}

    def draw_group(self, samples: Samples, never: Sequence[int], wanted: int, seed: int, number: int) -> Drawn:
        """The group of this number: the same for all methods and rounds."""
        draw = np.random.default_rng(seed_of(seed, "group", number))
        labels = samples.labels.cpu().numpy()
        others = np.setdiff1d(labels, never)
        classes = [*draw.choice(list(never), wanted, replace=False), *draw.choice(others, self.way - wanted, False)]
        rows = np.concatenate(
            [draw.permutation(np.flatnonzero(labels == label))[: self.samples_per_class] for label in classes]
        )
        parts = WAYS[self.partition](labels[rows], Division(self.partition, self.group_size), draw)
        divide = stream(seed, "group", number)
        halves = [
            support_query(samples.only(torch.from_numpy(rows[parts.of(member)])), self.support_fraction, divide, True)
            for member in range(self.group_size)
        ]
        queries = [half.rows for _, half in halves if half.rows is not None]
        mixed = torch.cat(queries)[torch.randperm(sum(map(len, queries)), generator=divide).to(samples.y.device)]
        return Drawn([half for half, _ in halves if len(half)], replace(samples, rows=mixed))

    def tuning_split(self, data: Data, share: float, seed: int) -> tuple[Method, Data]:
        """A trial is judged on classes of the training data that are set apart for it."""
        fewer = {"groups": min(self.eval_groups, TRIAL_GROUPS)}
        return self.model_copy(update=fewer), data.held_classes(share, seed)
