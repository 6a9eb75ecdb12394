"""Callbacks: what they see, how they end a run, and that a resumed run makes the same decisions."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer import Callback, EarlyStopping, FedAvg, Run
from fewer.data import Data
from fewer.errors import SettingError
from fewer.methods.scores import Scores
from fewer.runs.reader import RunReader
from fewer.runtime import Absent, Clients
from tests.helpers import Buggy

METHOD = FedAvg(rounds=6, cohort=3, local_steps=1)


class Recording(Callback):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_run_start(self, run: Run) -> None:
        self.calls.append(("run start", run.path, len(run.history)))

    def on_round_start(self, run: Run) -> None:
        self.calls.append(("round start", run.round))

    def on_answer(self, run: Run, answered: int, asked: int) -> None:
        self.calls.append(("answer", answered, asked))

    def on_absent(self, run: Run, absent: Absent, handler: str) -> None:
        self.calls.append(("absent", absent.client, absent.reason, handler))

    def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
        assert metrics == run.history[-1] == run.metrics and metrics["round"] == run.round
        assert run.model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
        self.calls.append(("round end", run.round))

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        self.calls.append(("run end", type(error)))


class StopAfter(Callback):
    """Stops a run in a hook of a round."""

    def __init__(self, hook: str, round: int) -> None:
        def stop(run: Run, *_: Any) -> None:
            if run.round == round:
                run.stop("enough")

        setattr(self, hook, stop)


class FinalScore(FedAvg):
    """A method with a final evaluation."""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        assert clients.evaluating
        scores = super().evaluate(state, clients, data)
        return replace(scores, metrics={**scores.metrics, "final": 1.0 + clients.round}) if clients.is_last else scores


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def records(path: Path) -> tuple[str, bytes]:
    """The metrics without seconds, and the ledger."""
    return re.sub(r'"seconds": [\d.]+', "", (path / "metrics.jsonl").read_text()), (path / "ledger.csv").read_bytes()


def test_every_hook_is_called_in_order(digits: Data, tmp_path: Path) -> None:
    callback = Recording()
    fewer.run(Buggy(rounds=2, cohort=6), digits, out=tmp_path / "run", callbacks=[callback])
    one_round = [*(("answer", n, 6) for n in range(1, 7)), ("absent", 0, "failed", "local_train")]
    assert callback.calls[0] == ("run start", tmp_path / "run", 0) and callback.calls[1] == ("round start", 1)
    for call in one_round:
        assert call in callback.calls
    order = [call[0] for call in callback.calls if call[0] not in ("answer", "absent")]
    assert order == ["run start", "round start", "round end", "round start", "round end", "run end"]
    assert callback.calls[-1] == ("run end", type(None))


def test_callbacks_do_not_change_the_records(digits: Data, tmp_path: Path) -> None:
    fewer.run(METHOD, digits, out=tmp_path / "plain", drop=0.2)
    fewer.run(METHOD, digits, out=tmp_path / "watched", drop=0.2, callbacks=[Recording(), EarlyStopping(patience=99)])
    assert records(tmp_path / "plain") == records(tmp_path / "watched")


@pytest.mark.parametrize("hook", ["on_round_start", "on_answer", "on_round_end"])
def test_a_stopped_run_has_its_final_evaluation_and_is_finished(
    hook: str, digits: Data, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method, path = FinalScore(rounds=6, cohort=3, local_steps=1), tmp_path / "run"
    result = fewer.run(method, digits, out=path, callbacks=[StopAfter(hook, 2)])
    assert [metrics.get("final") for metrics in result.history] == [None, 3.0] and result.stopped == "enough"
    assert [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()] == result.history
    last = events(path)[-1]
    assert (last["event"], last["round"], last["reason"]) == ("finish", 2, "enough")
    before = records(path)
    again = Recording()
    resumed = fewer.resume(path, method=method, data=digits, callbacks=[again])
    assert [call[0] for call in again.calls] == ["run start", "run end"]  # no further round
    assert resumed.history == result.history and records(path) == before and events(path)[-1]["reason"] == "enough"
    assert caplog.records[-1].getMessage() == f"{path} is finished after 2 of 6 rounds: enough"
    assert fewer.open_run(path, method=method, data=digits).stopped == "enough"


def test_a_run_stops_only_after_an_evaluated_round(digits: Data) -> None:
    result = fewer.run(METHOD, digits, evaluate_every=3, callbacks=[StopAfter("on_round_end", 1)])
    assert ["accuracy" in metrics for metrics in result.history] == [False, True]
    complete = fewer.run(METHOD, digits, callbacks=[StopAfter("on_round_end", 6)])
    assert len(complete.history) == 6 and not complete.stopped  # all rounds are done anyway


class Script(FedAvg):
    """Has the accuracies and losses of a script."""

    script: tuple[float, ...] = (0.3, 0.5, 0.501, 0.4, 0.6, 0.6, 0.2)

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        value = self.script[clients.round - 1]
        return Scores({"accuracy": value, "loss": -value})


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({"patience": 1}, 4),
        ({"patience": 2}, 7),
        ({"patience": 2, "min_delta": 0.01}, 4),
        ({"patience": 1, "metric": "loss"}, 4),
        ({"patience": 1, "metric": "loss", "mode": "max"}, 2),
        ({"patience": 3}, 7),
    ],
)
def test_early_stopping(options: dict[str, Any], rounds: int, digits: Data) -> None:
    method, callback = Script(rounds=7, cohort=2, local_steps=1), EarlyStopping(**options)
    for _ in range(2):  # the same object may follow several runs
        result = fewer.run(method, digits, callbacks=[callback])
        assert len(result.history) == rounds and bool(result.stopped) == (rounds < 7)


class InterruptedScript(Script):
    """Is interrupted in its final evaluation, once."""

    mark: str = ""

    def evaluate(self, state: Any, clients: Clients, data: Data) -> Scores:
        scores = super().evaluate(state, clients, data)
        if not clients.is_last:
            return scores
        if self.mark and not Path(self.mark).exists():
            Path(self.mark).touch()
            raise KeyboardInterrupt
        return Scores({**scores.metrics, "final": 1})


@pytest.mark.parametrize("where", ["before it decides", "after it decides", "final evaluation"])
def test_early_stopping_makes_the_same_decision_after_an_interruption(where: str, digits: Data, tmp_path: Path) -> None:
    method = InterruptedScript(rounds=7, cohort=2, local_steps=1)
    fewer.run(method, digits, out=tmp_path / "whole", callbacks=[EarlyStopping(patience=1, min_delta=0.01)])
    assert events(tmp_path / "whole")[-1]["reason"] == "accuracy has not improved on 0.5 in 1 evaluations"

    class Interrupt(Callback):
        def on_round_end(self, run: Run, metrics: Mapping[str, Any]) -> None:
            if (run.round, where) in ((2, "before it decides"), (3, "after it decides")):
                raise KeyboardInterrupt

    path = tmp_path / "interrupted"
    interrupted = InterruptedScript(**method.model_dump(exclude={"mark"}), mark=str(tmp_path / "mark"))
    if where != "final evaluation":
        interrupted = method
    with pytest.raises(KeyboardInterrupt):
        callbacks = [EarlyStopping(patience=1, min_delta=0.01), Interrupt()]
        fewer.run(interrupted, digits, out=path, callbacks=callbacks)
    assert (events(path)[-1]["event"], events(path)[-1]["round"]) == ("stop", 2)
    result = fewer.resume(path, method=interrupted, data=digits, callbacks=[EarlyStopping(patience=1, min_delta=0.01)])
    assert len(result.history) == 3 and result.metrics["final"]
    assert records(path) == records(tmp_path / "whole")


def test_a_comparison_stops_early_too(digits: Data) -> None:
    table = fewer.compare([METHOD], digits, seeds=2, callbacks=[EarlyStopping("seconds", 2, mode="min")])
    assert table.rows[0].rounds == 3
    assert [[line["round"] for line in curve] for curve in table.rows[0].curves] == [[1, 2, 3]] * 2


@pytest.mark.parametrize("hook", ["on_run_start", "on_round_start", "on_answer", "on_round_end"])
def test_a_callback_that_raises_stops_the_run_which_can_resume(hook: str, digits: Data, tmp_path: Path) -> None:
    def fail(run: Run, *_: Any) -> None:
        if hook == "on_run_start" or run.round == 2:
            raise ZeroDivisionError("mine")

    failing, after = Recording(), Recording()
    setattr(failing, hook, fail)
    path = tmp_path / "run"
    with pytest.raises(ZeroDivisionError, match="mine"):
        fewer.run(METHOD, digits, out=path, callbacks=[failing, after])
    last = events(path)[-1]
    done = {"on_run_start": 0, "on_round_end": 2}.get(hook, 1)
    assert (last["event"], last["round"], last["reason"]) == ("stop", done, "ZeroDivisionError: mine")
    assert not done or (RunReader(path).read_checkpoint() or {})["round"] == done
    ended = [] if hook == "on_run_start" else [("run end", ZeroDivisionError)]  # not called if it has not started
    assert failing.calls[-1:] == after.calls[-1:] == ended
    fewer.resume(path, data=digits)
    fewer.run(METHOD, digits, out=tmp_path / "plain")
    assert records(path) == records(tmp_path / "plain")


def test_the_checkpoint_of_a_run_without_callbacks_has_no_reason(digits: Data, tmp_path: Path) -> None:
    fewer.run(FedAvg(rounds=1, cohort=2, local_steps=1), digits, out=tmp_path / "run")
    checkpoint = RunReader(tmp_path / "run").read_checkpoint()
    assert checkpoint and checkpoint.keys() == {"round", "state", "ledger", "seconds", "lengths"}


def test_the_example_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/callbacks.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    names: dict[str, Any] = {}
    small = 'rounds=4, data="digits", clients=4'
    exec(example.replace("rounds=50", small).replace("patience=3", 'metric="up", patience=1, mode="min"'), names)
    assert len(names["result"].history) == 2 and names["result"].stopped
    assert capsys.readouterr().out.splitlines()[1] == f"2 {names['result'].accuracy}"


def test_wrong_callbacks_get_one_clear_line(digits: Data, tmp_path: Path) -> None:
    wrong: Any
    for wrong, message in (
        ([Recording], "callbacks must be objects of type fewer.Callback, got the class Recording"),
        ([print], "callbacks must be objects of type fewer.Callback, got builtin_function_or_method"),
        (Recording(), r"callbacks must be a list, such as \[EarlyStopping\(\)\], got Recording"),
    ):
        for start in (fewer.run, fewer.compare):
            method: Any = METHOD if start is fewer.run else [METHOD]
            with pytest.raises(SettingError, match=message):
                start(method, digits, out=tmp_path / "run", callbacks=wrong)
    with pytest.raises(SettingError, match=r"EarlyStopping needs patience >= 1.*, got 0, 0.0 and None"):
        EarlyStopping(patience=0)
    with pytest.raises(SettingError, match="fedavg has no metric 'acuracy' .*accuracy, loss"):
        fewer.run(METHOD, digits, callbacks=[EarlyStopping("acuracy")])
