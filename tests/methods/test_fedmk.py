"""FedMK's rounds: what is sent, kept, refused and resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer.errors import SettingError
from fewer.methods.condensed import Knowledge, concatenate_images
from fewer.methods.context import Client
from fewer.methods.fedmk import FedMK
from fewer.methods.fedmk_paper import FedMKPaper
from fewer.models import EncoderHead, Task, Weights
from fewer.runtime import HandlerRunner, Inline, on_client
from fewer.wire import Refused, Shaped, decode, encode
from tests.methods.fedmk_harness import (
    CLASSES,
    COUNTS,
    DATA,
    SEED,
    SHAPE,
    SMALL,
    is_same,
    make_client,
    make_contexts,
    make_task,
)


def make_clients(method: FedMK, folder: Path, **options: Any) -> Inline:
    handlers = HandlerRunner(method, make_contexts(folder), SEED, torch.device("cpu"))
    return Inline(len(DATA), SEED, handlers=handlers, **options)


# --- rounds -----------------------------------------------------------------------------------------------------


def run(folder: Path, method: FedMK | None = None, **settings: Any) -> fewer.Result:
    method = method or FedMK(rounds=2, cohort=3, **SMALL)
    return fewer.run(method, DATA, model="cnn", seed=SEED, out=folder, **settings)


@pytest.mark.parametrize("init_from", ["own", "shared"])
def test_pool_and_resume_give_the_same_bits(init_from: str, tmp_path: Path) -> None:
    method = FedMK(rounds=3, cohort=2, **{**SMALL, "init_from": init_from})
    uninterrupted = run(tmp_path / "a", method)
    pool = run(tmp_path / "b", method, runtime="pool", workers=2)
    assert is_same(uninterrupted.state, pool.state)

    class Stop(Exception): ...

    class Interrupt(fewer.Callback):
        def on_answer(self, run: fewer.Run, answered: int, asked: int) -> None:
            if run.round == 2 and answered == 2:
                raise Stop

    with pytest.raises(Stop):
        run(tmp_path / "c", method, callbacks=[Interrupt()])
    resumed = fewer.resume(tmp_path / "c", method=method, data=DATA)
    assert is_same(uninterrupted.state, resumed.state)
    assert (tmp_path / "a/ledger.csv").read_text() == (tmp_path / "c/ledger.csv").read_text()


def test_upload_has_the_size_of_the_images(tmp_path: Path) -> None:
    """An image has 64 values of 1, 2 or 4 bytes; headers add little."""
    for codec, width in (("uint8", 1), ("float16", 2), ("float32", 4)):
        result = run(tmp_path / codec, FedMK(rounds=1, cohort=4, **{**SMALL, "codec": codec}))
        images = sum(len(tensor) for knowledge in result.state.knowledge.values() for tensor in knowledge.values())
        assert images == 2 * (2 + 3 + 3 + 1)
        up = result.metrics["up"]
        assert images * 64 * width < up < images * 64 * width + 4 * 700


def test_the_server_stores_the_decoded_images(tmp_path: Path) -> None:
    """The server stores the decoded D̂: with uint8, at most 256 levels per class."""
    result = run(tmp_path, FedMK(rounds=1, cohort=4, **{**SMALL, "codec": "uint8", "per_class": 6}))
    images = result.state.knowledge[2]["1"]
    levels = ((images - images.min()) / ((images.max() - images.min()) / 255)).double()
    assert torch.allclose(levels, levels.round(), atol=1e-3)


def test_keep_images_trains_on_all_latest_images_or_on_the_rounds(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Spy(FedMK):
        def train_global_model(self, *args: Any, **fields: Any) -> dict[str, Any]:
            sizes.append(len(fields["images"]))
            return super().train_global_model(*args, **fields)

        train_global_model.__side__ = "server"  # type: ignore[attr-defined]

    for keep in ("latest", "round"):
        method = Spy(rounds=3, cohort=1, **{**SMALL, "keep_images": keep, "matching_steps": 1, "outer_steps": 0})
        folder = tmp_path / keep
        clients, state = make_clients(method, folder), method.init(make_task(), SEED)
        sizes.clear()
        asked = []
        for round in (1, 2, 3):
            clients.round = round
            asked.append(method.sample_cohort(clients)[0])
            state = method.round(state, clients)
        of_round = [2 * sum(count > 0 for count in COUNTS[client]) for client in asked]
        of_all = [
            2 * sum(count > 0 for client in set(asked[: index + 1]) for count in COUNTS[client]) for index in range(3)
        ]
        assert sizes == (of_all if keep == "latest" else of_round)
        assert set(state.knowledge) == set(asked)


def test_the_image_history_follows_the_first_client(tmp_path: Path) -> None:
    result = run(tmp_path, FedMK(rounds=3, cohort=4, **SMALL))
    first_client = next(iter(result.state.knowledge))
    assert list(result.state.image_history) == [1, 2, 3]
    last = result.state.image_history[3]
    assert all(torch.equal(image, result.state.knowledge[first_client][label][:1]) for label, image in last.items())
    assert not is_same(result.state.image_history[1], last)


def test_answers_that_do_not_fit_are_refused() -> None:
    schema = {"knowledge": {"0": Shaped((range(3), *SHAPE)), "1": Shaped((range(3), *SHAPE))}}

    def decode_knowledge(zero: Tensor, one: Tensor) -> Any:
        return decode(encode("condense", {"knowledge": {"0": zero, "1": one}}), schema)[1]["knowledge"]

    good = torch.zeros(2, *SHAPE)
    assert decode_knowledge(good, good[:0])["1"].shape == (0, *SHAPE)
    for bad in (torch.zeros(3, *SHAPE), torch.zeros(2, 1, 8, 9), torch.zeros(2, *SHAPE, dtype=torch.float64)):
        with pytest.raises(Refused):
            decode_knowledge(good, bad)
    with pytest.raises(Refused):
        decode(encode("condense", {"knowledge": {"0": good}}), schema)
    with pytest.raises(Refused):
        decode_knowledge(good, torch.full((1, *SHAPE), torch.nan))


class Liar(FedMK):
    """Client 0 sends `value` in all pixels, or all clients send no images."""

    value: float = 0.0
    no_images: bool = False

    @on_client
    def condense(self, client: Client, model: Weights, shared: Knowledge) -> dict[str, Any]:
        answer = super().condense(client, model, shared)
        if client.id == 0 or self.no_images:
            answer["knowledge"] = {
                label: images[:0] if self.no_images else torch.full_like(images, self.value)
                for label, images in answer["knowledge"].items()
            }
        return answer


def test_a_run_survives_invalid_knowledge(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    huge = run(tmp_path / "a", Liar(rounds=2, cohort=4, value=3e38, **SMALL))
    assert 0 not in huge.state.knowledge and "diverged" not in caplog.text
    assert "beyond 1000" in (tmp_path / "a/events.jsonl").read_text()
    large = run(tmp_path / "b", Liar(rounds=2, cohort=4, value=999.0, **{**SMALL, "server_lr": 1e6}))
    assert all(bool(tensor.isfinite().all()) for tensor in large.state.model.values())
    assert "round 1: training on D̂ diverged, so the last model is kept" in caplog.text
    empty = Liar(rounds=1, cohort=4, no_images=True, **SMALL)
    assert is_same(run(tmp_path / "c", empty).state, empty.init(make_task(), SEED))


def test_a_run_survives_absent_clients_and_a_client_with_too_few_samples(tmp_path: Path) -> None:
    result = run(tmp_path, FedMK(rounds=3, cohort=4, **{**SMALL, "min_samples": 3}), drop=0.3)
    assert 3 not in result.state.knowledge  # two samples only
    assert "unable" in (tmp_path / "events.jsonl").read_text()
    assert math.isfinite(result.metrics["loss"])


def test_wrong_settings_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="nothing would be condensed"):
        FedMK(matching_steps=0, outer_steps=0).init(make_task(), SEED)
    flat = Task((4,), 2, lambda: EncoderHead(nn.Linear(4, 3), 3, 2))
    with pytest.raises(SettingError, match="augment = true"):
        FedMK().init(flat, SEED)
    assert FedMK(augment=False).init(flat, SEED).empty["0"].shape == (0, 4)
    tokens = Task((4,), 2, lambda: EncoderHead(nn.Sequential(nn.Embedding(9, 3), nn.Flatten()), 12, 2))
    with pytest.raises(SettingError, match="real-valued inputs"):
        FedMK(augment=False).init(tokens, SEED)


def test_without_a_generator_any_model_works() -> None:
    task = Task(SHAPE, CLASSES, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES), nn.Tanh()))
    with pytest.raises(SettingError, match="no encoder"):
        FedMK().init(task, SEED)
    result = fewer.run(FedMK(rounds=2, **{**SMALL, "pseudo_weight": 0}), DATA, model=task.build_net, seed=SEED)
    assert result.state.generator == {}
    assert len(result.state.knowledge) == 4


def test_a_plain_net_with_a_linear_head_has_a_generator() -> None:
    quick = {**SMALL, "pseudo_weight": 0.5, "server_steps": 3}
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    result = fewer.run(FedMK(rounds=2, **quick), DATA, model=net, seed=SEED)
    assert result.state.generator["body.3.weight"].shape[0] == 6  # as many features as the last layer takes


def test_outer_steps_start_in_the_given_round(tmp_path: Path) -> None:
    model, empty = make_task().initial_weights(SEED), FedMK().init(make_task(), SEED).empty
    late, never = (FedMK(**{**SMALL, "refine_from": 2, "outer_steps": steps}) for steps in (2, 0))
    for round, equal in ((1, True), (2, False)):
        results = []
        for name, method in (("late", late), ("never", never)):
            torch.manual_seed(0)  # random nets come from the global stream
            answer = method.condense(make_client(tmp_path / name, 0, round), model=model, shared=empty)
            results.append(answer["knowledge"]["0"])
        assert torch.equal(*results) == equal


def test_the_papers_variant_is_the_literal_reading() -> None:
    """Each option as in Algorithm 1. The two that are not are Adam and 256 samples per outer step."""
    method = FedMKPaper()
    assert (method.optimizer, method.outer_batch_size) == ("adam", 256)
    assert (method.matching_steps, method.augment, method.inner_batch_size) == (0, False, None)
    assert (method.restart_every, method.server_lr, method.labels) == (None, None, "all")
    assert method.inner_steps > 1
    assert (method.refine_from, method.momentum, method.lr_decay) == (1, 0.0, False)
    assert (method.init_from, method.keep_images, method.min_samples, method.codec) == ("shared", "round", 1, "float32")
    assert (method.sample_weights, method.tau, method.per_class) == ("dynamic", 5.0, 20)


def test_concatenated_images_keep_their_labels() -> None:
    knowledge: list[Knowledge] = [
        {"0": torch.ones(2, 1), "1": torch.ones(0, 1)},
        {"0": torch.ones(0, 1), "1": torch.zeros(1, 1)},
    ]
    images, labels = concatenate_images(knowledge)
    assert images.flatten().tolist() == [1.0, 1.0, 0.0]
    assert labels.tolist() == [0, 0, 1]


# --- options ----------------------------------------------------------------------------------------------------


def test_matching_gets_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []

    def spy(net: Any, images: Tensor, *_: Any, **options: Any) -> Tensor:
        settings.append(options)
        return images

    monkeypatch.setattr("fewer.methods.fedmk.match_statistics", spy)
    for augment in (False, True):
        method = FedMK(**{**SMALL, "matching_steps": 7, "matching_lr": 0.3, "augment": augment, "outer_steps": 0})
        method.condense(
            make_client(tmp_path / str(augment), 0),
            model=make_task().initial_weights(SEED),
            shared=method.init(make_task(), SEED).empty,
        )
    assert [(options["steps"], options["lr"], options["augment"]) for options in settings] == [
        (7, 0.3, False),
        (7, 0.3, True),
    ]


def test_a_diverged_d_is_not_stored_for_the_next_round(tmp_path: Path) -> None:
    class DivergesOnTau7(FedMK):
        def outer_loop(self, *args: Any) -> Tensor:
            return super().outer_loop(*args) * (float("nan") if self.tau == 7 else 1)

    good, bad = (DivergesOnTau7(**{**SMALL, "tau": tau}) for tau in (5, 7))
    model, empty = make_task().initial_weights(SEED), good.init(make_task(), SEED).empty
    for round, method in enumerate((good, bad, good), 1):
        try:
            knowledge = method.condense(make_client(tmp_path, 0, round), model=model, shared=empty)["knowledge"]
        except Exception as error:
            assert method is bad and type(error).__name__ == "Unable"
    assert knowledge["0"].isfinite().all()


@pytest.mark.parametrize("kind", [FedMK, FedMKPaper])
def test_tuning_grids_contain_the_defaults(kind: type[FedMK]) -> None:
    assert all(getattr(kind(), name) in grid for name, grid in kind.tunable.items())
