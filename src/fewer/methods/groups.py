"""Base class of methods that prepare a model for groups and are evaluated on groups.

Park, Han, Kim, Seo, Moon: Few-Round Learning for Federated Learning, NeurIPS 2021, Section 4. A group has a few
classes, most or all of them unseen in preparation. Their samples are divided among its members, evenly or by shards.
Each member's support set is half of its samples of each class. The group's global model is evaluated on the queries of
all members. Members are not clients of the run: their samples are from the global test set, so the server simulates
the groups.
"""

from __future__ import annotations

import logging
import statistics
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from fewer.data import Data, Samples
from fewer.data.episodes import split_support_query
from fewer.data.partition import PARTITIONERS, PartitionSpec
from fewer.errors import SettingError
from fewer.learning import Counts, evaluate_net
from fewer.learning.evaluate import EVAL_BATCH_SIZE
from fewer.methods import Method, Needs, Scores, Server, StateT
from fewer.models import Weights, all_finite
from fewer.runtime import Clients, on_server, seed_of, stream

_LOG = logging.getLogger("fewer")
TUNING_GROUPS = 30
"""Maximum number of groups that a tuning trial is evaluated on."""


class Group(NamedTuple):
    """The support set of each member, and the queries of all members."""

    supports: list[Samples]
    queries: Samples


class EvaluatedOnGroups(Method[StateT]):
    """A method that prepares a model with the clients of the run and is evaluated on groups with other classes."""

    needs: ClassVar[Needs] = "classes"

    eval_groups: PositiveInt = 100
    """Number of groups to evaluate on."""
    way: PositiveInt = 5
    """Classes of a group (τ)."""
    unseen_classes: NonNegativeInt | None = None
    """Classes of a group that no client trained on. [default: all, or as many as the data has]"""
    group_size: PositiveInt = 10
    """Clients of a group (K)."""
    partition: Literal["iid", "shards"] = "shards"
    """Divide a group's samples evenly, or give each member two shards of one class each."""
    samples_per_class: PositiveInt | None = None
    """Maximum samples of each class in a group. [default: all]"""
    support_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of a client's samples of each class in its support set. The rest is its query set."""

    @abstractmethod
    def group_model(self, server: Server, model: Weights, supports: Sequence[Samples], number: int) -> nn.Module:
        """Trains the model of a group from the prepared one."""

    def prepare_data(self, data: Data) -> Data:
        """Checks that groups can be drawn from the data, before the first round."""
        self.unseen_labels(data)
        return data

    def evaluate(self, state: StateT, clients: Clients, data: Data) -> Scores:
        """After a round: the accuracy of the groups' models, as the mean over groups."""
        counts = self.evaluate_groups(state, clients, data)
        accuracies = [count.accuracy for count in counts]
        loss = sum(count.loss for count in counts) / sum(count.total for count in counts)
        return Scores({"accuracy": statistics.fmean(accuracies), "loss": loss}, "groups", accuracies)

    def evaluate_groups(self, state: StateT, clients: Clients, data: Data) -> list[Counts]:
        """Counts the correct predictions of each group."""
        unseen, num_unseen = self.unseen_labels(data, clients.seed)
        answers = clients.map_on_server(
            self.evaluate_group,
            [{"number": number} for number in range(self.eval_groups)],
            model=state.shared,
            unseen=torch.tensor(unseen, dtype=torch.int64),
            num_unseen=num_unseen,
        )
        diverged = sum(not answer.pop("finite") for answer in answers)
        if diverged:
            _LOG.warning(
                f"{self.name}: the models of {diverged} of {self.eval_groups} groups diverged and count as wrong; "
                "lower `lr` and the learning rates of the preparation"
            )
        return [Counts(**answer) for answer in answers]

    def unseen_labels(self, data: Data, seed: int = 0) -> tuple[list[int], int]:
        """The unseen classes of the test data, and how many each group has; SettingError if groups are impossible."""
        labels = sorted(set(data.test.labels.tolist()))
        unseen = [label for label in labels if label in data.unseen_classes]
        num_unseen = min(self.way, len(unseen)) if self.unseen_classes is None else self.unseen_classes
        num_seen = self.way - num_unseen
        if num_seen < 0:
            raise SettingError(f"unseen_classes must be at most way = {self.way}, got {num_unseen}")
        if num_unseen > len(unseen) or num_seen > len(labels) - len(unseen):
            raise SettingError(
                f"a group needs {num_unseen} unseen and {num_seen} seen classes, but the test data has "
                f"{len(unseen)} and {len(labels) - len(unseen)}; change way or unseen_classes"
            )
        if not len(self.draw_group(data.test, unseen, num_unseen, seed, 0).queries):
            raise SettingError(
                f"a group of {self.group_size} members and {self.way} classes has no queries: no member has two "
                "samples of a class; lower group_size or raise samples_per_class"
            )
        return unseen, num_unseen

    @on_server(stream="play_group")
    def evaluate_group(
        self, server: Server, model: Weights, unseen: Tensor, num_unseen: int, number: int
    ) -> dict[str, Any]:
        """Trains one group's model and counts its correct predictions; a model that diverged has none."""
        group = self.draw_group(server.global_test, unseen.tolist(), num_unseen, server.seed, number)
        net = self.group_model(server, model, group.supports, number)
        finite = all_finite(net.state_dict())
        counts = evaluate_net(net, group.queries.chunks(EVAL_BATCH_SIZE))
        return {**(counts if finite else counts._replace(correct=0))._asdict(), "finite": finite}

    def draw_group(self, samples: Samples, unseen: Sequence[int], num_unseen: int, seed: int, number: int) -> Group:
        """Draws the group of this number: the same for all methods and rounds."""
        rng = np.random.default_rng(seed_of(seed, "group", number))
        labels = samples.labels.cpu().numpy()
        seen = np.setdiff1d(labels, unseen)
        classes = [
            *rng.choice(list(unseen), num_unseen, replace=False),
            *rng.choice(seen, self.way - num_unseen, False),
        ]
        rows = np.concatenate(
            [rng.permutation(np.flatnonzero(labels == label))[: self.samples_per_class] for label in classes]
        )
        parts = PARTITIONERS[self.partition](labels[rows], PartitionSpec(self.partition, self.group_size), rng)
        generator = stream(seed, "group", number)
        splits = [
            split_support_query(
                samples.select(torch.from_numpy(rows[parts.rows_of(member)])), self.support_fraction, generator, True
            )
            for member in range(self.group_size)
        ]
        query_rows = [queries.rows for _, queries in splits if queries.rows is not None]
        order = torch.randperm(sum(map(len, query_rows)), generator=generator).to(samples.y.device)
        shuffled = torch.cat(query_rows)[order]
        return Group([support for support, _ in splits if len(support)], replace(samples, rows=shuffled))

    @property
    def evaluates_clients(self) -> bool:
        """False: it is evaluated on groups."""
        return False

    def tuning_split(self, data: Data, fraction: float, seed: int) -> tuple[Self, Data]:
        """Tunes on training classes that are held out as unseen."""
        fewer_groups = {"eval_groups": min(self.eval_groups, TUNING_GROUPS)}
        return self.model_copy(update=fewer_groups), data.hold_out_classes(fraction, seed)
