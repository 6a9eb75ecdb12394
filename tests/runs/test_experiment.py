"""Models of a user."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fewer
from fewer import FedAvg
from fewer.data import Data
from fewer.errors import RunError, SettingError
from tests.helpers import metrics, same_state

# --- using finished runs ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(self.flat(x))
        return scores


def test_a_user_model_works_as_class_and_as_object(digits: Data, tmp_path: Path) -> None:
    by_class = fewer.run(FedAvg(rounds=2, cohort=3), digits, model=Net, out=tmp_path / "class")
    assert isinstance(by_class.model, Net)
    start = Net()
    nn.init.constant_(start.layer.weight, 0.25)
    by_object = fewer.run(FedAvg(rounds=1, cohort=3, lr=1e-9), digits, model=start)
    assert torch.allclose(by_object.state.model["layer.weight"], torch.tensor(0.25))
    with pytest.raises(RunError, match="with your own model"):
        _ = fewer.open_run(tmp_path / "class").model
    net = fewer.open_run(tmp_path / "class", model=Net).model
    x, _ = digits.test.slice(0, 5)
    assert not net.training and torch.equal(net(x), by_class.model(x))


def test_a_model_that_does_not_fit_is_refused(digits: Data) -> None:
    with pytest.raises(SettingError, match="rejects inputs of shape"):
        fewer.run(FedAvg(), digits, model=nn.Linear(5, 10))
    with pytest.raises(SettingError, match="at least 10 classes"):
        fewer.run(FedAvg(), digits, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))


# --- command line -----------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A model whose output depends on a buffer that is not part of its weights."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.layer = nn.Flatten(), nn.Linear(64, 10)
        self.register_buffer("seen", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        scores: torch.Tensor = self.layer(self.flat(x)) * self.seen
        return scores


def test_buffers_of_a_model_do_not_leak_between_clients(digits: Data) -> None:
    inline = fewer.run(FedAvg(rounds=2, cohort=4, lr=0.01), digits, model=Counting)
    pooled = fewer.run(FedAvg(rounds=2, cohort=4, lr=0.01), digits, model=Counting, runtime="pool", workers=3)
    assert same_state(inline.state, pooled.state) and metrics(inline) == metrics(pooled)


def test_settings_of_an_object_belong_to_the_object(digits: Data) -> None:
    with pytest.raises(SettingError, match="rounds belongs to the method"):
        fewer.run(FedAvg(), digits, rounds=2)
    with pytest.raises(SettingError, match="clients belongs to the data"):
        fewer.run("fedavg", digits, clients=7)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: 3, "the model is of type int"),
        (lambda needed: nn.Linear(1, needed), "the model cannot be built: TypeError"),
        (lambda: nn.Linear(-5, 2), "the model cannot be built: RuntimeError"),
        (lambda: nn.Flatten(), "no trainable parameters"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(model: Any, text: str, digits: Data) -> None:
    with pytest.raises(SettingError, match=text):
        fewer.run(FedAvg(rounds=1), digits, model=model)
