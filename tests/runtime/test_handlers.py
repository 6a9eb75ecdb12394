"""Only marked handlers can be asked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fewer import FedAvg
from fewer.data import Data
from fewer.errors import QuorumLost
from fewer.runtime import Each, on_client, on_server
from fewer.runtime.handlers import Unsent
from fewer.wire import Number
from tests.runtime.harness import make_experiment


class EchoMethod(FedAvg):
    def peek(self, client: Any) -> dict[str, Any]:
        return {}

    @on_client
    def echo(self, client: Any, number: int) -> dict[str, Any]:
        return {"number": number * 10 + client.id}

    @on_client
    def count(self, client: Any, secret: bool) -> dict[str, Any]:
        counts = Unsent({"labels": torch.tensor([client.id, 7])} if secret else {})
        return {"number": client.id, "counts": counts}

    @on_server
    def count_on_server(self, server: Any, item: int) -> dict[str, Any]:
        return {"counts": Unsent({"labels": torch.tensor([item])})}


def test_only_marked_handlers_can_be_asked(digits: Data, tmp_path: Path) -> None:
    experiment, connect = make_experiment(digits, EchoMethod())
    with connect(tmp_path) as clients:
        with pytest.raises(QuorumLost, match="'peek' is not an @on_client handler"):
            clients.ask([0], experiment.method.peek, returns={})  # type: ignore[attr-defined]
        with pytest.raises(QuorumLost, match="do not match the parameters of 'echo'"):
            clients.ask([0], experiment.method.echo, wrong=1, returns={})  # type: ignore[attr-defined]


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_a_field_for_each_client(runtime: str, digits: Data, tmp_path: Path) -> None:
    experiment, connect = make_experiment(digits, EchoMethod(), runtime=runtime)
    with connect(tmp_path) as clients:
        numbers = Each({1: 100, 4: 200})
        answers = clients.ask([4, 1], experiment.method.echo, number=numbers, returns={"number": Number(int)})  # type: ignore[attr-defined]
    assert [(answer.client, answer["number"]) for answer in answers] == [(4, 2004), (1, 1001)]


@pytest.mark.parametrize("runtime", ["inline", "pool"])
def test_an_unsent_field_reaches_the_simulation_but_no_message(runtime: str, digits: Data, tmp_path: Path) -> None:
    experiment, connect = make_experiment(digits, EchoMethod(), runtime=runtime)
    method: Any = experiment.method
    with connect(tmp_path) as clients:
        (answer,) = clients.ask([3], method.count, secret=True, returns={"number": Number(int)})
        (empty,) = clients.ask([3], method.count, secret=False, returns={"number": Number(int)})
        (result,) = clients.map_on_server(method.count_on_server, [{"item": 5}])
    assert answer["counts"].tensors["labels"].tolist() == [3, 7] and answer["number"] == 3
    assert "counts" not in empty.fields
    assert result["counts"].tensors["labels"].tolist() == [5]
    with_counts, without = (entry.bytes for entry in clients.ledger.entries if entry.direction == "up")
    assert with_counts == without
