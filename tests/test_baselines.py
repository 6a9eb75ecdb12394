"""FedDistill, FedEnsemble and FedGen against slow, literal readings of their equations."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fewer
from fewer import FedAvg, FedDistill, FedEnsemble, FedGen
from fewer.data import ArrayData, Data, from_clients
from fewer.errors import SettingError
from fewer.learning import Generator, weighted_mean
from fewer.methods import Client, Method
from fewer.methods.base import ContextFactory
from fewer.methods.feddistill import FedDistillLogits, FedDistillState
from fewer.methods.fedensemble import Ensemble
from fewer.models import EncoderHead, Task, Weights, get_weights, load_weights
from fewer.runtime import HandlerRunner, on_client, stream
from fewer.wire import decode, pack, unpack
from tests.test_cli import DIGITS, call
from tests.test_methods import Array, Bench, Wiretap, close, data_bytes
from tests.test_runtime import metrics

FEATURES, CLASSES, SEED = 3, 3, 5
HELD = ([0, 1], [0, 1, 2], [1])
"""Classes of each client: 0 is held by two, 1 by all, 2 by one alone."""
SIZES = (6, 9, 4)
DRAW = np.random.default_rng(2)
PAIRS = [
    (DRAW.normal(0, 1, (size, FEATURES)).astype(np.float32), np.array([held[n % len(held)] for n in range(size)]))
    for held, size in zip(HELD, SIZES, strict=True)
]
EMPTY = (np.zeros((0, FEATURES), np.float32), np.zeros(0, np.int64))


def federation(pairs: Sequence[tuple[Any, Any]] = PAIRS) -> ArrayData:
    return from_clients(pairs, test=(np.concatenate([x for x, _ in PAIRS]), np.concatenate([y for _, y in PAIRS])))


def linear(outputs: int = CLASSES) -> nn.Module:
    net = nn.Linear(FEATURES, outputs, bias=False)
    draw = np.random.default_rng(7).normal(0, 0.5, (outputs, FEATURES)).astype(np.float32)
    load_weights(net, {"weight": torch.from_numpy(draw)})
    return net


def split() -> EncoderHead:
    torch.manual_seed(3)
    return EncoderHead(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), 4, CLASSES)


def bench(method: Method, net: nn.Module, folder: Path, pairs: Sequence[tuple[Any, Any]] = PAIRS) -> Bench:
    data = federation(pairs)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return Bench(method, task, Wiretap(len(data), SEED, handlers=handlers), contexts, method.init(task, SEED))


def numbers(method: FedAvg, client: int, round: int) -> Tensor:
    """Which samples a client uses in each step."""
    drawn = stream(SEED, round, client, "batches")
    return torch.randint(SIZES[client], (method.local_steps, method.batch_size), generator=drawn)


def softmax(scores: Array) -> Array:
    likely = np.exp(scores - scores.max())
    return np.asarray(likely / likely.sum())


# --- FedDistill -----------------------------------------------------------------------------------------------

Lesson = dict[int, Array]
"""Mean logits by class."""


def lesson(w: Array, method: FedDistill, client: int, round: int, teacher: Lesson) -> tuple[Array, Lesson]:
    """Sample by sample: the derivative of cross-entropy is softmax − one-hot, that of the KL softmax − teacher's."""
    seen: dict[int, list[Array]] = {}
    x, y = PAIRS[client]
    for row in numbers(method, client, round).tolist():
        gradient = np.zeros_like(w)
        for number in row:
            inputs, label = x[number].astype(np.float64), int(y[number])
            scores = w @ inputs
            away = softmax(scores) - np.eye(len(w))[label]
            if label in teacher:
                away[:CLASSES] += method.distill_weight * (softmax(scores[:CLASSES]) - softmax(teacher[label]))
            gradient += np.outer(away, inputs) / len(row)
            seen.setdefault(label, []).append(scores[:CLASSES])
        w = w - method.lr * gradient
    return w, {label: np.asarray(np.mean(found, axis=0)) for label, found in seen.items()}


def others(lessons: Mapping[int, Lesson], client: int) -> Lesson:
    """The mean by class over the other clients that hold it, each counted once."""
    mean: Lesson = {}
    for label in range(CLASSES):
        found = [lesson[label] for other, lesson in lessons.items() if other != client and label in lesson]
        if found:
            mean[label] = sum(found[1:], found[0]) / len(found)
    return mean


def check_lessons(state: FedDistillState, lessons: Mapping[int, Lesson]) -> None:
    assert sorted(state.clients) == sorted(lessons)
    for place, client in enumerate(state.clients):
        assert set(state.held[place].nonzero()[:, 0].tolist()) == lessons[client].keys()
        for label, logits in lessons[client].items():
            assert close(state.logits[place, label], logits, 1e-5)


@pytest.mark.parametrize("outputs", [CLASSES, 5])
def test_feddistill_by_hand(outputs: int, tmp_path: Path) -> None:
    method = FedDistill(local_steps=3, batch_size=4, lr=0.5, distill_weight=2.0)
    work = bench(method, linear(outputs), tmp_path)
    w = get_weights(linear(outputs))["weight"].double().numpy()
    lessons: dict[int, Lesson] = {}
    for round in (1, 2, 3):
        ends = {client: lesson(w, method, client, round, others(lessons, client)) for client in range(3)}
        w = np.asarray(sum(size * ends[client][0] for client, size in enumerate(SIZES)) / sum(SIZES))
        lessons = {client: end[1] for client, end in ends.items()}
        state = work.rounds(1)
        assert close(state.model["weight"], w, 1e-5)
        check_lessons(state, lessons)
    assert any(1 in found and 2 not in found for found in lessons.values())  # not all hold all


def test_feddistill_teacher_by_hand() -> None:
    logits = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [99, 99]], [[0, 1], [7, 8]]])
    state = FedDistillState({}, [4, 9, 2], logits, torch.tensor([[True, True], [True, False], [False, True]]))
    for client, teacher, known in (
        (4, [[5, 6], [7, 8]], [True, True]),
        (9, [[1, 2], [5, 6]], [True, True]),
        (2, [[3, 4], [3, 4]], [True, True]),
        (7, [[3, 4], [5, 6]], [True, True]),  # was not there: all are others
    ):
        mean, some = state.teacher(client)
        assert mean.tolist() == teacher and some.tolist() == known
    alone = FedDistillState({}, [4], logits[:1], torch.tensor([[True, False]]))
    assert alone.teacher(4)[1].tolist() == [False, False] and alone.teacher(5)[1].tolist() == [True, False]


def test_feddistill_without_weight_or_in_its_first_round_is_fedavg() -> None:
    def trained(method: FedAvg) -> Tensor:
        weight = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
        assert isinstance(weight, Tensor)
        return weight

    same: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "lr": 0.3}
    assert torch.equal(trained(FedDistill(rounds=2, distill_weight=0, **same)), trained(FedAvg(rounds=2, **same)))
    assert torch.equal(trained(FedDistill(rounds=1, distill_weight=3, **same)), trained(FedAvg(rounds=1, **same)))
    assert not torch.equal(trained(FedDistill(rounds=2, distill_weight=3, **same)), trained(FedAvg(rounds=2, **same)))


def test_feddistill_bytes(tmp_path: Path) -> None:
    """The model, nine logits of four bytes, and three truth values of one."""
    work = bench(FedDistill(local_steps=2, batch_size=8), linear(), tmp_path)
    work.rounds(2)
    traffic = work.clients.down + work.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert data_bytes(blob) == 4 * FEATURES * CLASSES + 4 * CLASSES * CLASSES + CLASSES
    assert sum(work.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic)
    sent = {call.client: decode(blob)[1] for call, blob in work.clients.up}
    assert sent[2]["held"].tolist() == [False, True, False]
    assert sent[2]["logits"][[0, 2]].eq(0).all() and sent[2]["size"] == SIZES[2]
    half = bench(FedDistill(local_steps=2, batch_size=8, codec="float16"), linear(), tmp_path)
    half.rounds(1)
    assert data_bytes(half.clients.up[0][1]) == 2 * FEATURES * CLASSES + 2 * CLASSES * CLASSES + CLASSES


def test_feddistill_logits_by_hand(tmp_path: Path) -> None:
    method = FedDistillLogits(local_steps=3, batch_size=4, lr=0.5, distill_weight=2.0)
    work = bench(method, linear(), tmp_path)
    own = {client: get_weights(linear())["weight"].double().numpy() for client in range(3)}
    lessons: dict[int, Lesson] = {}
    for round in (1, 2, 3):
        ends = {client: lesson(own[client], method, client, round, others(lessons, client)) for client in range(3)}
        own, lessons = (
            {client: end[0] for client, end in ends.items()},
            {client: end[1] for client, end in ends.items()},
        )
        state = work.rounds(1)
        check_lessons(state, lessons)
        for client in range(3):
            assert close(work.personal_model(client)["weight"], own[client], 1e-5)


def test_feddistill_logits_sends_no_model(tmp_path: Path) -> None:
    work = bench(FedDistillLogits(local_steps=2, batch_size=4), linear(), tmp_path)
    work.rounds(2)
    for _, blob in work.clients.down + work.clients.up:
        assert decode(blob)[1]["model"] == {} and data_bytes(blob) == 4 * CLASSES * CLASSES + CLASSES
    assert work.state.model == {}
    result = fewer.run(FedDistillLogits(rounds=1), federation(), model=linear(), seed=SEED)
    assert {"personal_accuracy", "global_accuracy"} <= result.metrics.keys()
    with pytest.raises(SettingError, match="feddistill-logits has no global model"):
        _ = result.model


# --- FedEnsemble ----------------------------------------------------------------------------------------------


def test_fedensemble_trains_as_fedavg_and_keeps_what_came(tmp_path: Path) -> None:
    method = FedEnsemble(local_steps=3, batch_size=4, lr=0.5)
    work, plain = (
        bench(method, split(), tmp_path),
        bench(FedAvg(local_steps=3, batch_size=4, lr=0.5), split(), tmp_path),
    )
    for _ in range(2):
        state, mean = work.rounds(1), plain.rounds(1).model
        assert all(torch.equal(state.model[name], tensor) for name, tensor in mean.items())
        for place, (_, blob) in enumerate(work.clients.up[-3:]):
            sent = decode(blob)[1]["model"]
            assert all(torch.equal(state.members[name][place], tensor) for name, tensor in sent.items())
    assert [len(blob) for _, blob in work.clients.up] == [len(blob) for _, blob in plain.clients.up]


def test_fedensemble_is_judged_by_its_mean_logits(tmp_path: Path) -> None:
    result = fewer.run("fedensemble", "digits", clients=6, cohort=3, rounds=2, out=tmp_path / "run", seed=1)
    x, y = result.data.test.slice(0, len(result.data.test))
    logits = []
    for number in range(3):
        net = result.task.net().eval()
        load_weights(net, {name: tensor[number] for name, tensor in result.state.members.items()})
        logits.append(net(x).detach().double().numpy())
    total = sum(logits[1:], logits[0])
    likely = np.array([softmax(row / 3)[label] for row, label in zip(total, y.tolist(), strict=True)])
    assert result.accuracy == pytest.approx((total.argmax(1) == y.numpy()).mean())
    assert result.metrics["loss"] == pytest.approx(-np.log(likely).mean(), rel=1e-4)
    mean = result.task.net().eval()
    load_weights(mean, result.state.model)
    assert (mean(x).argmax(1).numpy() != total.argmax(1)).any()  # the mean model would say something else

    for net in (result.model, result.personal_model(2), fewer.open_run(tmp_path / "run").model):
        assert isinstance(net, Ensemble) and len(net.members) == 3 and not net.members[0].training
        assert np.abs(net(x).detach().numpy() - total / 3).max() < 1e-4
    said = call("predict", tmp_path / "run", "--data", "digits", "--out", tmp_path / "said.csv").stderr
    assert f"accuracy {result.accuracy:.2%}" in said
    call("export", tmp_path / "run", "--out", tmp_path / "export")
    program = torch.export.load(tmp_path / "export/model.pt2").module()
    assert np.abs(program(x).detach().numpy() - total / 3).max() < 1e-4
    kept = safetensors.torch.load_file(tmp_path / "export/model.safetensors")
    for name, tensor in result.state.members.items():
        assert torch.equal(kept[f"members.2.{name}"], tensor[2])


def test_fedensemble_has_as_many_members_as_answered(tmp_path: Path) -> None:
    work = bench(FedEnsemble(local_steps=2, batch_size=4), split(), tmp_path, [PAIRS[0], EMPTY, PAIRS[2]])
    assert len(work.state.members["head.bias"]) == 1  # before the first round, the initial model
    state = work.rounds(1)
    members = [{name: tensor[place] for name, tensor in state.members.items()} for place in range(2)]
    sizes = [decode(blob)[1]["size"] for _, blob in work.clients.up if blob]
    assert sorted(sizes) == [4, 6] and len(state.members["head.bias"]) == 2
    for name, tensor in weighted_mean(members, sizes).items():
        assert torch.equal(tensor, state.model[name])


# --- FedGen ---------------------------------------------------------------------------------------------------


def made(weights: Weights, noise: Tensor, y: Tensor, training: bool) -> Tensor:
    """The generator, layer by layer."""
    z = torch.cat([noise, torch.eye(CLASSES, dtype=noise.dtype)[y]], 1)
    z = z @ weights["body.0.weight"].T + weights["body.0.bias"]
    mean, var = weights["body.1.running_mean"], weights["body.1.running_var"]
    if training:
        mean, var = z.mean(0), z.var(0, unbiased=False)
    z = (z - mean) / (var + 1e-5).sqrt() * weights["body.1.weight"] + weights["body.1.bias"]
    return z.clamp(min=0) @ weights["body.3.weight"].T + weights["body.3.bias"]


def entropy(logits: Tensor, label: int) -> Tensor:
    return -(logits[label] - logits.exp().sum().log())


def double(weights: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def client_by_hand(method: FedGen, state: Any, client: int, round: int) -> Weights:
    """Eq 5 sample by sample, in float64."""
    model = {name: tensor.requires_grad_() for name, tensor in double(state.model).items()}
    generator = double(state.generator)
    draw = stream(SEED, round, client, "generator")
    x, y = torch.from_numpy(PAIRS[client][0]).double(), torch.from_numpy(PAIRS[client][1])

    def head(z: Tensor) -> Tensor:
        return z @ model["head.weight"].T + model["head.bias"]

    for row in numbers(method, client, round):
        batch = len(row)
        scores = head(torch.tanh(x[row] @ model["encoder.0.weight"].T + model["encoder.0.bias"]))
        loss = sum(entropy(scores[n], int(y[row[n]])) for n in range(batch)) / batch
        if round > 1:
            noise = torch.randn(batch, 32, generator=draw).double()
            other = torch.multinomial(state.class_weights, batch, replacement=True, generator=draw)
            logits = head(made(generator, noise, other, False))
            imagined = sum(entropy(logits[n], int(other[n])) for n in range(batch)) / batch
            noise = torch.randn(batch, 32, generator=draw).double()
            torch.randint(CLASSES, (batch,), generator=draw)
            teacher = head(made(generator, noise, y[row], False)).softmax(1).detach()
            apart = (
                sum((t * (t.log() - s.softmax(0).log())).sum() for t, s in zip(teacher, scores, strict=True)) / batch
            )
            loss = loss + method.generator_weight * method.generator_decay ** (round - 1) * (imagined + apart)
        gradients = torch.autograd.grad(loss, list(model.values()))  # type: ignore[arg-type]
        model = {
            name: (tensor - method.lr * gradient).detach().requires_grad_()
            for (name, tensor), gradient in zip(model.items(), gradients, strict=True)
        }
    return {name: tensor.detach() for name, tensor in model.items()}


def generator_by_hand(
    method: FedGen, state: Any, models: Sequence[Weights], clients: Sequence[int], round: int
) -> Weights:
    """Eq 4 sample by sample, and Adam by its formulas, in float64."""
    generator = double(state.generator)
    learns = [name for name in generator if "running" not in name and "tracked" not in name]
    counts = torch.tensor([[int((PAIRS[client][1] == label).sum()) for label in range(CLASSES)] for client in clients])
    first = {name: torch.zeros_like(generator[name]) for name in learns}
    second = {name: torch.zeros_like(generator[name]) for name in learns}
    draw = stream(SEED, round, -1, "generator")
    count = method.generator_batch_size
    for step in range(1, method.generator_steps + 1):
        noise = torch.randn(count, 32, generator=draw)
        y = torch.multinomial((counts.sum(0) / counts.sum()).float(), count, replacement=True, generator=draw)
        noise = noise.double()
        for name in learns:
            generator[name].requires_grad_()
        z = made(generator, noise, y, True)
        loss: Any = 0.0
        for n, label in enumerate(y.tolist()):
            logits: Any = 0.0
            for place, model in enumerate(double(one) for one in models):
                share = counts[place, label] / counts[:, label].sum()
                logits = logits + share * (model["head.weight"] @ z[n] + model["head.bias"])
            loss = loss + entropy(logits, label) / count
        near: Any = 0.0
        for i in range(count):
            for j in range(count):
                near = near + ((noise[i] - noise[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() / count**2
        gradients = torch.autograd.grad(loss + torch.exp(-near), [generator[name] for name in learns])
        with torch.no_grad():
            hidden = torch.cat([noise, torch.eye(CLASSES).double()[y]], 1) @ generator["body.0.weight"].T
            hidden += generator["body.0.bias"]
        for name, gradient in zip(learns, gradients, strict=True):
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            fit = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            generator[name] = (generator[name] - method.generator_lr * fit).detach()
        generator["body.1.running_mean"] = 0.9 * generator["body.1.running_mean"] + 0.1 * hidden.mean(0)
        generator["body.1.running_var"] = 0.9 * generator["body.1.running_var"] + 0.1 * hidden.var(0)
        generator["body.1.num_batches_tracked"] = generator["body.1.num_batches_tracked"] + 1
    return generator


def near(given: Weights, expected: Weights, tolerance: float) -> bool:
    return given.keys() == expected.keys() and all(
        close(tensor, expected[name].double().numpy(), tolerance) for name, tensor in given.items()
    )


def test_fedgen_by_hand(tmp_path: Path) -> None:
    method = FedGen(
        local_steps=2,
        batch_size=4,
        lr=0.1,
        generator_weight=2.0,
        generator_decay=0.5,
        generator_steps=2,
        generator_batch_size=5,
    )
    work = bench(method, split(), tmp_path)
    for round in (1, 2, 3):
        before = work.state
        state = work.rounds(1)
        answers = [(call.client, decode(blob)[1]) for call, blob in work.clients.up if call.round == round]
        asked, sent = zip(*(answer for answer in answers if answer[0] >= 0), strict=True)
        for client, fields in zip(asked, sent, strict=True):
            assert near(fields["model"], client_by_hand(method, before, client, round), 2e-6)
            assert fields["counts"].tolist() == [int((PAIRS[client][1] == label).sum()) for label in range(CLASSES)]
        models = [fields["model"] for fields in sent]
        sizes = [SIZES[client] for client in asked]
        assert all(torch.equal(state.model[n], t) for n, t in weighted_mean(models, sizes).items())
        assert state.class_weights.tolist() == pytest.approx([6 / 19, 10 / 19, 3 / 19])
        expected = generator_by_hand(method, before, models, asked, round)
        for name, tensor in state.generator.items():
            if name != "body.0.bias":  # what comes next takes it out again, so Adam follows rounding errors there
                loose = name == "body.1.running_mean"
                tolerance = method.generator_lr / 5 if loose else 5e-6
                assert close(tensor, expected[name].double().numpy(), tolerance), name
        moved = (state.generator["body.3.weight"] - before.generator["body.3.weight"]).abs().max()
        assert moved > method.generator_lr


def test_fedgen_generator_learns_what_the_heads_know(tmp_path: Path) -> None:
    work = bench(FedGen(generator_lr=0.01, generator_steps=100), split(), tmp_path)
    state = work.rounds(2)
    generator = Generator(CLASSES, 4)
    load_weights(generator, state.generator)
    noise, y = generator.eval().draw(300, torch.Generator().manual_seed(0))
    features = generator(noise, y)
    scores = features @ state.model["head.weight"].T + state.model["head.bias"]
    assert (scores.argmax(1) == y).float().mean() > 0.9
    assert features[y == 1].std(0).min() > 0.01  # they have not fallen together


def test_fedgen_generates_no_classes_that_no_client_holds(tmp_path: Path) -> None:
    work = bench(FedGen(local_steps=2, batch_size=4, generator_steps=3), split(), tmp_path, [PAIRS[0], EMPTY, PAIRS[2]])
    state = work.rounds(2)
    assert state.class_weights.tolist() == pytest.approx([0.3, 0.7, 0])
    _, y = Generator(CLASSES, 4).draw(5000, torch.Generator().manual_seed(0), state.class_weights)
    assert (torch.bincount(y, minlength=3) / 5000).tolist() == pytest.approx([0.3, 0.7, 0], abs=0.03)
    _, y = Generator(CLASSES, 4).draw(6000, torch.Generator().manual_seed(0))
    assert (torch.bincount(y, minlength=3) / 6000).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


def test_fedgen_bytes(tmp_path: Path) -> None:
    """Clients also get the generator and three class weights, and send three counts."""
    work = bench(FedGen(local_steps=1, batch_size=2, generator_steps=1), split(), tmp_path)
    work.rounds(2)
    model = 4 * ((FEATURES + 1) * 4 + (4 + 1) * CLASSES)
    generator = 4 * ((32 + CLASSES + 1) * 256 + 4 * 256 + (256 + 1) * 4) + 8
    down, up = (
        [blob for call, blob in way if call.client >= 0]  # the others are the server's own work
        for way in (work.clients.down, work.clients.up)
    )
    assert [data_bytes(blob) for blob in down] == [model + generator + 4 * CLASSES] * 6
    assert [data_bytes(blob) for blob in up] == [model + 8 * CLASSES] * 6
    assert work.clients.ledger.total == {"down": sum(map(len, down)), "up": sum(map(len, up))}


class Liars(FedGen):
    """Client 0 sends a head of enormous numbers; all send impossible counts."""

    enormous: bool = True

    @on_client(stream="learn")
    def train_with_generator(
        self, client: Client, model: Weights, generator: Weights, class_weights: Tensor
    ) -> dict[str, Any]:
        answer = super().train_with_generator(client, model, generator, class_weights)
        if not self.enormous:
            return {**answer, "counts": answer["counts"] - 1000}
        if client.id == 0:
            answer["model"].value["head.weight"].fill_(3e38)
            answer["counts"] = answer["counts"].fill_(2**62)
        return answer


def test_fedgen_lies_do_not_break_a_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work = bench(Liars(local_steps=1, batch_size=2, generator_steps=2), split(), tmp_path)
    before, state = work.state.generator, work.rounds(1)
    assert all(torch.equal(state.generator[name], tensor) for name, tensor in before.items())
    assert state.class_weights.sum().item() == pytest.approx(1)
    assert "round 1: the generator diverged, so the last one is kept" in caplog.text
    work = bench(Liars(local_steps=3, batch_size=4, generator_steps=2, enormous=False), split(), tmp_path / "counts")
    plain = bench(FedAvg(local_steps=3, batch_size=4), split(), tmp_path / "plain")
    state, mean = work.rounds(2), plain.rounds(2).model
    assert state.class_weights.tolist() == [0, 0, 0]
    assert all(torch.equal(state.model[name], tensor) for name, tensor in mean.items())


def test_fedgen_needs_features() -> None:
    with pytest.raises(SettingError, match=r"works on features, and the model Linear has no encoder and no head"):
        fewer.run(FedGen(rounds=1), federation(), model=linear(), seed=0)
    net = split()
    net.encoder = nn.Unflatten(1, (1, -1))
    net.head = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))  # type: ignore[assignment]
    with pytest.raises(SettingError, match=r"needs an encoder that gives one vector per sample, not outputs of shape"):
        fewer.run(FedGen(rounds=1), federation(), model=net, seed=0)


# --- all of them ----------------------------------------------------------------------------------------------

KINDS: list[type[FedAvg]] = [FedDistill, FedDistillLogits, FedEnsemble, FedGen]


def left(path: Path) -> dict[str, Any]:
    """All of a run that must not depend on where it ran or how often it was broken off."""
    kept = unpack((path / "checkpoint.safetensors").read_bytes())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {
        "state": pack(kept["state"]),
        "metrics": [{name: value for name, value in line.items() if name != "seconds"} for line in metrics],
        "ledger": (path / "ledger.csv").read_bytes(),
        "clients": {f.relative_to(path): f.read_bytes() for f in path.glob("clients/*/*/*.safetensors")},
    }


class Breaking:
    """Breaks a run off in the middle of its second round."""

    def on_run_start(self, method: str, done: int, rounds: int) -> None: ...

    def on_answer(self, round: int, done: int, asked: int) -> None:
        if round == 2 and done == 3:
            raise KeyboardInterrupt

    def on_round_end(self, metrics: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("kind", KINDS)
def test_pool_and_resume_give_the_same_bits(kind: type[FedAvg], digits: Data, tmp_path: Path) -> None:
    method = kind(rounds=3, cohort=5, local_steps=4)
    settings: dict[str, Any] = {"drop": 0.2, "slow": 0.1, "corrupt": 0.2, "seed": 3}
    one = fewer.run(method, digits, out=tmp_path / "inline", **settings)
    two = fewer.run(method, digits, out=tmp_path / "pool", runtime="pool", workers=2, **settings)
    assert metrics(one) == metrics(two) and any(line["absent"] for line in one.history)
    assert left(tmp_path / "inline") == left(tmp_path / "pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, digits, out=tmp_path / "broken", progress=Breaking(), **settings)
    fewer.resume(tmp_path / "broken")
    assert left(tmp_path / "broken") == left(tmp_path / "inline")


@pytest.mark.parametrize("kind", KINDS)
def test_clients_with_nothing_or_one_class_break_nothing(kind: type[FedAvg], tmp_path: Path) -> None:
    result = fewer.run(kind(rounds=3), federation([*PAIRS, EMPTY]), model=split(), seed=SEED, norm="none")
    assert [line["absent"] for line in result.history] == [1, 1, 1]
    alone = fewer.run(kind(rounds=3), federation([PAIRS[2], EMPTY]), model=split(), seed=SEED)
    assert len(alone.history) == 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["feddistill", "-o", "distill_weight=-1"],
            "feddistill: distill_weight must be >= 0, got -1",
        ),
        (
            ["fedgen", "-o", "generator_weight=-1"],
            "fedgen: generator_weight must be >= 0, got -1",
        ),
        (
            ["fedgen", "-o", "generator_decay=1.1"],
            "fedgen: generator_decay must be <= 1, got 1.1",
        ),
        (
            ["fedgen", "-o", "generator_batch_size=1"],
            "generator_batch_size must be >= 2, got 1",
        ),
        (["fedensemble", "-o", "weight=1"], "unknown option of fedensemble 'weight'"),
    ],
)
def test_a_wrong_setting_gets_one_line(words: list[str], text: str) -> None:
    result = call("run", *words, *DIGITS, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1 and text in result.stderr


def test_all_can_be_compared(tmp_path: Path) -> None:
    names = ["fedavg", "fedprox", "feddistill", "fedensemble", "fedgen", "fedmk", "feddistill-logits"]
    small = ["matching_steps=30", "outer_steps=1", "server_steps=100", "per_class=5"]  # of FedMK
    options = [word for option in small for word in ("-o", option)]
    call("compare", *names, *DIGITS, "--rounds", "2", *options, "--out", tmp_path, "--json", tmp_path / "table.json")
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == names and all(row["accuracy"] > 0.2 for row in rows)
    for kind in KINDS:
        assert next(iter(kind.tunable)) == "lr" and len(kind.tunable) <= 2
        assert all(getattr(kind(), name) in grid for name, grid in kind.tunable.items())
