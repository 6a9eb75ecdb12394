"""FedDistill, FedEnsemble and FedGen against slow, literal implementations of their equations."""

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
from tests.test_methods import Array, Harness, Wiretap, data_bytes, is_close
from tests.test_runtime import metrics

FEATURES, CLASSES, SEED = 3, 3, 5
HELD = ([0, 1], [0, 1, 2], [1])
"""Classes of each client: two clients hold class 0, all hold class 1, one holds class 2."""
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


def encoder_head_net() -> EncoderHead:
    torch.manual_seed(3)
    return EncoderHead(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), 4, CLASSES)


def make_harness(method: Method, net: nn.Module, folder: Path, pairs: Sequence[tuple[Any, Any]] = PAIRS) -> Harness:
    data = federation(pairs)
    task = Task((FEATURES,), CLASSES, lambda: copy.deepcopy(net), pretrained=get_weights(net))
    contexts = ContextFactory(data, task, SEED, folder)
    handlers = HandlerRunner(method, contexts, SEED, torch.device("cpu"))
    return Harness(method, task, Wiretap(len(data), SEED, handlers=handlers), contexts, method.init(task, SEED))


def sample_indices(method: FedAvg, client: int, round: int) -> Tensor:
    """Indices of the samples that a client uses in each step."""
    generator = stream(SEED, round, client, "batches")
    return torch.randint(SIZES[client], (method.local_steps, method.batch_size), generator=generator)


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max())
    return np.asarray(exponentials / exponentials.sum())


# --- FedDistill -----------------------------------------------------------------------------------------------

ClassLogits = dict[int, Array]
"""Mean logits by class."""


def distill_client(
    weight: Array, method: FedDistill, client: int, round: int, teacher: ClassLogits
) -> tuple[Array, ClassLogits]:
    """Trains sample by sample: cross-entropy has the derivative softmax − one-hot, the KL loss softmax − teacher."""
    seen: dict[int, list[Array]] = {}
    x, y = PAIRS[client]
    for row in sample_indices(method, client, round).tolist():
        gradient = np.zeros_like(weight)
        for index in row:
            inputs, label = x[index].astype(np.float64), int(y[index])
            scores = weight @ inputs
            d_scores = softmax(scores) - np.eye(len(weight))[label]
            if label in teacher:
                d_scores[:CLASSES] += method.distill_weight * (softmax(scores[:CLASSES]) - softmax(teacher[label]))
            gradient += np.outer(d_scores, inputs) / len(row)
            seen.setdefault(label, []).append(scores[:CLASSES])
        weight = weight - method.lr * gradient
    return weight, {label: np.asarray(np.mean(logits, axis=0)) for label, logits in seen.items()}


def mean_logits_of_others(all_logits: Mapping[int, ClassLogits], client: int) -> ClassLogits:
    """The mean logits by class over the other clients that hold the class, with equal weights."""
    mean: ClassLogits = {}
    for label in range(CLASSES):
        logits = [
            own_logits[label] for other, own_logits in all_logits.items() if other != client and label in own_logits
        ]
        if logits:
            mean[label] = sum(logits[1:], logits[0]) / len(logits)
    return mean


def check_class_logits(state: FedDistillState, all_logits: Mapping[int, ClassLogits]) -> None:
    assert sorted(state.clients) == sorted(all_logits)
    for row, client in enumerate(state.clients):
        assert set(state.held[row].nonzero()[:, 0].tolist()) == all_logits[client].keys()
        for label, logits in all_logits[client].items():
            assert is_close(state.logits[row, label], logits, 1e-5)


@pytest.mark.parametrize("outputs", [CLASSES, 5])
def test_feddistill_matches_numpy(outputs: int, tmp_path: Path) -> None:
    method = FedDistill(local_steps=3, batch_size=4, lr=0.5, distill_weight=2.0)
    harness = make_harness(method, linear(outputs), tmp_path)
    weight = get_weights(linear(outputs))["weight"].double().numpy()
    all_logits: dict[int, ClassLogits] = {}
    for round in (1, 2, 3):
        results = {
            client: distill_client(weight, method, client, round, mean_logits_of_others(all_logits, client))
            for client in range(3)
        }
        weight = np.asarray(sum(size * results[client][0] for client, size in enumerate(SIZES)) / sum(SIZES))
        all_logits = {client: result[1] for client, result in results.items()}
        state = harness.rounds(1)
        assert is_close(state.model["weight"], weight, 1e-5)
        check_class_logits(state, all_logits)
    assert any(1 in logits and 2 not in logits for logits in all_logits.values())  # some clients lack a class


def test_feddistill_teacher_is_the_mean_of_the_other_clients() -> None:
    logits = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [99, 99]], [[0, 1], [7, 8]]])
    state = FedDistillState({}, [4, 9, 2], logits, torch.tensor([[True, True], [True, False], [False, True]]))
    for client, teacher, known in (
        (4, [[5, 6], [7, 8]], [True, True]),
        (9, [[1, 2], [5, 6]], [True, True]),
        (2, [[3, 4], [3, 4]], [True, True]),
        (7, [[3, 4], [5, 6]], [True, True]),  # not in the cohort: the mean over all clients
    ):
        mean, is_known = state.teacher(client)
        assert mean.tolist() == teacher and is_known.tolist() == known
    single = FedDistillState({}, [4], logits[:1], torch.tensor([[True, False]]))
    assert single.teacher(4)[1].tolist() == [False, False] and single.teacher(5)[1].tolist() == [True, False]


def test_feddistill_with_zero_weight_or_in_round_1_is_fedavg() -> None:
    def trained_weight(method: FedAvg) -> Tensor:
        weight = fewer.run(method, federation(), model=linear(), seed=SEED).state.model["weight"]
        assert isinstance(weight, Tensor)
        return weight

    settings: dict[str, Any] = {"local_steps": 3, "batch_size": 4, "lr": 0.3}
    assert torch.equal(
        trained_weight(FedDistill(rounds=2, distill_weight=0, **settings)), trained_weight(FedAvg(rounds=2, **settings))
    )
    assert torch.equal(
        trained_weight(FedDistill(rounds=1, distill_weight=3, **settings)), trained_weight(FedAvg(rounds=1, **settings))
    )
    assert not torch.equal(
        trained_weight(FedDistill(rounds=2, distill_weight=3, **settings)), trained_weight(FedAvg(rounds=2, **settings))
    )


def test_feddistill_bytes(tmp_path: Path) -> None:
    """The model, nine logits of four bytes, and three truth values of one."""
    harness = make_harness(FedDistill(local_steps=2, batch_size=8), linear(), tmp_path)
    harness.rounds(2)
    traffic = harness.clients.down + harness.clients.up
    assert len(traffic) == 12
    for _, blob in traffic:
        assert data_bytes(blob) == 4 * FEATURES * CLASSES + 4 * CLASSES * CLASSES + CLASSES
    assert sum(harness.clients.ledger.total.values()) == sum(len(blob) for _, blob in traffic)
    sent = {call.client: decode(blob)[1] for call, blob in harness.clients.up}
    assert sent[2]["held"].tolist() == [False, True, False]
    assert sent[2]["logits"][[0, 2]].eq(0).all() and sent[2]["size"] == SIZES[2]
    half = make_harness(FedDistill(local_steps=2, batch_size=8, codec="float16"), linear(), tmp_path)
    half.rounds(1)
    assert data_bytes(half.clients.up[0][1]) == 2 * FEATURES * CLASSES + 2 * CLASSES * CLASSES + CLASSES


def test_feddistill_logits_matches_numpy(tmp_path: Path) -> None:
    method = FedDistillLogits(local_steps=3, batch_size=4, lr=0.5, distill_weight=2.0)
    harness = make_harness(method, linear(), tmp_path)
    models = {client: get_weights(linear())["weight"].double().numpy() for client in range(3)}
    all_logits: dict[int, ClassLogits] = {}
    for round in (1, 2, 3):
        results = {
            client: distill_client(models[client], method, client, round, mean_logits_of_others(all_logits, client))
            for client in range(3)
        }
        models, all_logits = (
            {client: result[0] for client, result in results.items()},
            {client: result[1] for client, result in results.items()},
        )
        state = harness.rounds(1)
        check_class_logits(state, all_logits)
        for client in range(3):
            assert is_close(harness.personal_model(client)["weight"], models[client], 1e-5)


def test_feddistill_logits_sends_no_model(tmp_path: Path) -> None:
    harness = make_harness(FedDistillLogits(local_steps=2, batch_size=4), linear(), tmp_path)
    harness.rounds(2)
    for _, blob in harness.clients.down + harness.clients.up:
        assert decode(blob)[1]["model"] == {} and data_bytes(blob) == 4 * CLASSES * CLASSES + CLASSES
    assert harness.state.model == {}
    result = fewer.run(FedDistillLogits(rounds=1), federation(), model=linear(), seed=SEED)
    assert {"personal_accuracy", "global_accuracy"} <= result.metrics.keys()
    with pytest.raises(SettingError, match="feddistill-logits has no global model"):
        _ = result.model


# --- FedEnsemble ----------------------------------------------------------------------------------------------


def test_fedensemble_trains_like_fedavg_and_keeps_the_local_models(tmp_path: Path) -> None:
    method = FedEnsemble(local_steps=3, batch_size=4, lr=0.5)
    harness, fedavg = (
        make_harness(method, encoder_head_net(), tmp_path),
        make_harness(FedAvg(local_steps=3, batch_size=4, lr=0.5), encoder_head_net(), tmp_path),
    )
    for _ in range(2):
        state, mean = harness.rounds(1), fedavg.rounds(1).model
        assert all(torch.equal(state.model[name], tensor) for name, tensor in mean.items())
        for member, (_, blob) in enumerate(harness.clients.up[-3:]):
            sent = decode(blob)[1]["model"]
            assert all(torch.equal(state.members[name][member], tensor) for name, tensor in sent.items())
    assert [len(blob) for _, blob in harness.clients.up] == [len(blob) for _, blob in fedavg.clients.up]


def test_fedensemble_predicts_by_mean_logits(tmp_path: Path) -> None:
    result = fewer.run("fedensemble", "digits", clients=6, cohort=3, rounds=2, out=tmp_path / "run", seed=1)
    x, y = result.data.test.slice(0, len(result.data.test))
    logits = []
    for member in range(3):
        net = result.task.net().eval()
        load_weights(net, {name: tensor[member] for name, tensor in result.state.members.items()})
        logits.append(net(x).detach().double().numpy())
    total = sum(logits[1:], logits[0])
    probabilities = np.array([softmax(row / 3)[label] for row, label in zip(total, y.tolist(), strict=True)])
    assert result.accuracy == pytest.approx((total.argmax(1) == y.numpy()).mean())
    assert result.metrics["loss"] == pytest.approx(-np.log(probabilities).mean(), rel=1e-4)
    mean = result.task.net().eval()
    load_weights(mean, result.state.model)
    assert (mean(x).argmax(1).numpy() != total.argmax(1)).any()  # the mean model predicts differently

    for net in (result.model, result.personal_model(2), fewer.open_run(tmp_path / "run").model):
        assert isinstance(net, Ensemble) and len(net.members) == 3 and not net.members[0].training
        assert np.abs(net(x).detach().numpy() - total / 3).max() < 1e-4
    stderr = call("predict", tmp_path / "run", "--data", "digits", "--out", tmp_path / "predictions.csv").stderr
    assert f"accuracy {result.accuracy:.2%}" in stderr
    call("export", tmp_path / "run", "--out", tmp_path / "export")
    program = torch.export.load(tmp_path / "export/model.pt2").module()
    assert np.abs(program(x).detach().numpy() - total / 3).max() < 1e-4
    exported = safetensors.torch.load_file(tmp_path / "export/model.safetensors")
    for name, tensor in result.state.members.items():
        assert torch.equal(exported[f"members.2.{name}"], tensor[2])


def test_fedensemble_has_one_member_per_answer(tmp_path: Path) -> None:
    harness = make_harness(
        FedEnsemble(local_steps=2, batch_size=4), encoder_head_net(), tmp_path, [PAIRS[0], EMPTY, PAIRS[2]]
    )
    assert len(harness.state.members["head.bias"]) == 1  # before the first round, the initial model
    state = harness.rounds(1)
    members = [{name: tensor[number] for name, tensor in state.members.items()} for number in range(2)]
    sizes = [decode(blob)[1]["size"] for _, blob in harness.clients.up if blob]
    assert sorted(sizes) == [4, 6] and len(state.members["head.bias"]) == 2
    for name, tensor in weighted_mean(members, sizes).items():
        assert torch.equal(tensor, state.model[name])


# --- FedGen ---------------------------------------------------------------------------------------------------


def generate_features(weights: Weights, noise: Tensor, y: Tensor, training: bool) -> Tensor:
    """Runs the generator layer by layer."""
    z = torch.cat([noise, torch.eye(CLASSES, dtype=noise.dtype)[y]], 1)
    z = z @ weights["body.0.weight"].T + weights["body.0.bias"]
    mean, var = weights["body.1.running_mean"], weights["body.1.running_var"]
    if training:
        mean, var = z.mean(0), z.var(0, unbiased=False)
    z = (z - mean) / (var + 1e-5).sqrt() * weights["body.1.weight"] + weights["body.1.bias"]
    return z.clamp(min=0) @ weights["body.3.weight"].T + weights["body.3.bias"]


def cross_entropy(logits: Tensor, label: int) -> Tensor:
    return -(logits[label] - logits.exp().sum().log())


def to_double(weights: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def train_client_reference(method: FedGen, state: Any, client: int, round: int) -> Weights:
    """Eq 5 sample by sample, in float64."""
    model = {name: tensor.requires_grad_() for name, tensor in to_double(state.model).items()}
    generator = to_double(state.generator)
    draw = stream(SEED, round, client, "generator")
    x, y = torch.from_numpy(PAIRS[client][0]).double(), torch.from_numpy(PAIRS[client][1])

    def head(z: Tensor) -> Tensor:
        return z @ model["head.weight"].T + model["head.bias"]

    for row in sample_indices(method, client, round):
        batch_size = len(row)
        scores = head(torch.tanh(x[row] @ model["encoder.0.weight"].T + model["encoder.0.bias"]))
        loss = sum(cross_entropy(scores[n], int(y[row[n]])) for n in range(batch_size)) / batch_size
        if round > 1:
            noise = torch.randn(batch_size, 32, generator=draw).double()
            sampled = torch.multinomial(state.class_weights, batch_size, replacement=True, generator=draw)
            logits = head(generate_features(generator, noise, sampled, False))
            generated_loss = sum(cross_entropy(logits[n], int(sampled[n])) for n in range(batch_size)) / batch_size
            noise = torch.randn(batch_size, 32, generator=draw).double()
            torch.randint(CLASSES, (batch_size,), generator=draw)
            teacher = head(generate_features(generator, noise, y[row], False)).softmax(1).detach()
            kl = (
                sum((t * (t.log() - s.softmax(0).log())).sum() for t, s in zip(teacher, scores, strict=True))
                / batch_size
            )
            loss = loss + method.generator_weight * method.generator_decay ** (round - 1) * (generated_loss + kl)
        gradients = torch.autograd.grad(loss, list(model.values()))  # type: ignore[arg-type]
        model = {
            name: (tensor - method.lr * gradient).detach().requires_grad_()
            for (name, tensor), gradient in zip(model.items(), gradients, strict=True)
        }
    return {name: tensor.detach() for name, tensor in model.items()}


def train_generator_reference(
    method: FedGen, state: Any, models: Sequence[Weights], clients: Sequence[int], round: int
) -> Weights:
    """Eq 4 sample by sample, and Adam by its formulas, in float64."""
    generator = to_double(state.generator)
    trainable = [name for name in generator if "running" not in name and "tracked" not in name]
    counts = torch.tensor([[int((PAIRS[client][1] == label).sum()) for label in range(CLASSES)] for client in clients])
    first_moment = {name: torch.zeros_like(generator[name]) for name in trainable}
    second_moment = {name: torch.zeros_like(generator[name]) for name in trainable}
    draw = stream(SEED, round, -1, "generator")
    count = method.generator_batch_size
    for step in range(1, method.generator_steps + 1):
        noise = torch.randn(count, 32, generator=draw)
        y = torch.multinomial((counts.sum(0) / counts.sum()).float(), count, replacement=True, generator=draw)
        noise = noise.double()
        for name in trainable:
            generator[name].requires_grad_()
        z = generate_features(generator, noise, y, True)
        loss: Any = 0.0
        for n, label in enumerate(y.tolist()):
            logits: Any = 0.0
            for row, model in enumerate(to_double(weights) for weights in models):
                share = counts[row, label] / counts[:, label].sum()
                logits = logits + share * (model["head.weight"] @ z[n] + model["head.bias"])
            loss = loss + cross_entropy(logits, label) / count
        distance: Any = 0.0
        for i in range(count):
            for j in range(count):
                distance = distance + ((noise[i] - noise[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() / count**2
        gradients = torch.autograd.grad(loss + torch.exp(-distance), [generator[name] for name in trainable])
        with torch.no_grad():
            hidden = torch.cat([noise, torch.eye(CLASSES).double()[y]], 1) @ generator["body.0.weight"].T
            hidden += generator["body.0.bias"]
        for name, gradient in zip(trainable, gradients, strict=True):
            first_moment[name] = 0.9 * first_moment[name] + 0.1 * gradient
            second_moment[name] = 0.999 * second_moment[name] + 0.001 * gradient**2
            update = (first_moment[name] / (1 - 0.9**step)) / ((second_moment[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            generator[name] = (generator[name] - method.generator_lr * update).detach()
        generator["body.1.running_mean"] = 0.9 * generator["body.1.running_mean"] + 0.1 * hidden.mean(0)
        generator["body.1.running_var"] = 0.9 * generator["body.1.running_var"] + 0.1 * hidden.var(0)
        generator["body.1.num_batches_tracked"] = generator["body.1.num_batches_tracked"] + 1
    return generator


def all_close(actual: Weights, expected: Weights, tolerance: float) -> bool:
    return actual.keys() == expected.keys() and all(
        is_close(tensor, expected[name].double().numpy(), tolerance) for name, tensor in actual.items()
    )


def test_fedgen_matches_the_reference(tmp_path: Path) -> None:
    method = FedGen(
        local_steps=2,
        batch_size=4,
        lr=0.1,
        generator_weight=2.0,
        generator_decay=0.5,
        generator_steps=2,
        generator_batch_size=5,
    )
    harness = make_harness(method, encoder_head_net(), tmp_path)
    for round in (1, 2, 3):
        before = harness.state
        state = harness.rounds(1)
        answers = [(call.client, decode(blob)[1]) for call, blob in harness.clients.up if call.round == round]
        asked, sent = zip(*(answer for answer in answers if answer[0] >= 0), strict=True)
        for client, fields in zip(asked, sent, strict=True):
            assert all_close(fields["model"], train_client_reference(method, before, client, round), 2e-6)
            assert fields["counts"].tolist() == [int((PAIRS[client][1] == label).sum()) for label in range(CLASSES)]
        models = [fields["model"] for fields in sent]
        sizes = [SIZES[client] for client in asked]
        assert all(torch.equal(state.model[n], t) for n, t in weighted_mean(models, sizes).items())
        assert state.class_weights.tolist() == pytest.approx([6 / 19, 10 / 19, 3 / 19])
        expected = train_generator_reference(method, before, models, asked, round)
        for name, tensor in state.generator.items():
            if name != "body.0.bias":  # batch norm cancels this bias, so its gradients are rounding errors
                is_running_mean = name == "body.1.running_mean"
                tolerance = method.generator_lr / 5 if is_running_mean else 5e-6
                assert is_close(tensor, expected[name].double().numpy(), tolerance), name
        moved = (state.generator["body.3.weight"] - before.generator["body.3.weight"]).abs().max()
        assert moved > method.generator_lr


def test_fedgen_generator_learns_features_that_the_head_classifies(tmp_path: Path) -> None:
    harness = make_harness(FedGen(generator_lr=0.01, generator_steps=100), encoder_head_net(), tmp_path)
    state = harness.rounds(2)
    generator = Generator(CLASSES, 4)
    load_weights(generator, state.generator)
    noise, y = generator.eval().draw(300, torch.Generator().manual_seed(0))
    features = generator(noise, y)
    scores = features @ state.model["head.weight"].T + state.model["head.bias"]
    assert (scores.argmax(1) == y).float().mean() > 0.9
    assert features[y == 1].std(0).min() > 0.01  # features of a class have not collapsed


def test_fedgen_generates_no_classes_that_no_client_holds(tmp_path: Path) -> None:
    harness = make_harness(
        FedGen(local_steps=2, batch_size=4, generator_steps=3),
        encoder_head_net(),
        tmp_path,
        [PAIRS[0], EMPTY, PAIRS[2]],
    )
    state = harness.rounds(2)
    assert state.class_weights.tolist() == pytest.approx([0.3, 0.7, 0])
    _, y = Generator(CLASSES, 4).draw(5000, torch.Generator().manual_seed(0), state.class_weights)
    assert (torch.bincount(y, minlength=3) / 5000).tolist() == pytest.approx([0.3, 0.7, 0], abs=0.03)
    _, y = Generator(CLASSES, 4).draw(6000, torch.Generator().manual_seed(0))
    assert (torch.bincount(y, minlength=3) / 6000).tolist() == pytest.approx([1 / 3] * 3, abs=0.03)


def test_fedgen_bytes(tmp_path: Path) -> None:
    """Clients also get the generator and three class weights, and send three counts."""
    harness = make_harness(FedGen(local_steps=1, batch_size=2, generator_steps=1), encoder_head_net(), tmp_path)
    harness.rounds(2)
    model = 4 * ((FEATURES + 1) * 4 + (4 + 1) * CLASSES)
    generator = 4 * ((32 + CLASSES + 1) * 256 + 4 * 256 + (256 + 1) * 4) + 8
    down, up = (
        [blob for call, blob in messages if call.client >= 0]  # the others stay on the server
        for messages in (harness.clients.down, harness.clients.up)
    )
    assert [data_bytes(blob) for blob in down] == [model + generator + 4 * CLASSES] * 6
    assert [data_bytes(blob) for blob in up] == [model + 8 * CLASSES] * 6
    assert harness.clients.ledger.total == {"down": sum(map(len, down)), "up": sum(map(len, up))}


class Liars(FedGen):
    """Client 0 sends a head with huge values; if not `huge`, all clients send negative counts."""

    huge: bool = True

    @on_client(stream="learn")
    def train_with_generator(
        self, client: Client, model: Weights, generator: Weights, class_weights: Tensor
    ) -> dict[str, Any]:
        answer = super().train_with_generator(client, model, generator, class_weights)
        if not self.huge:
            return {**answer, "counts": answer["counts"] - 1000}
        if client.id == 0:
            answer["model"]["head.weight"].fill_(3e38)
            answer["counts"] = answer["counts"].fill_(2**62)
        return answer


def test_fedgen_survives_invalid_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harness = make_harness(Liars(local_steps=1, batch_size=2, generator_steps=2), encoder_head_net(), tmp_path)
    before, state = harness.state.generator, harness.rounds(1)
    assert all(torch.equal(state.generator[name], tensor) for name, tensor in before.items())
    assert state.class_weights.sum().item() == pytest.approx(1)
    assert "round 1: the generator diverged, so the last one is kept" in caplog.text
    harness = make_harness(
        Liars(local_steps=3, batch_size=4, generator_steps=2, huge=False), encoder_head_net(), tmp_path / "counts"
    )
    fedavg = make_harness(FedAvg(local_steps=3, batch_size=4), encoder_head_net(), tmp_path / "plain")
    state, mean = harness.rounds(2), fedavg.rounds(2).model
    assert state.class_weights.tolist() == [0, 0, 0]
    assert all(torch.equal(state.model[name], tensor) for name, tensor in mean.items())


def test_fedgen_needs_an_encoder_with_vector_outputs() -> None:
    with pytest.raises(SettingError, match=r"works on features, but model Linear has no encoder and no head"):
        fewer.run(FedGen(rounds=1), federation(), model=linear(), seed=0)
    net = encoder_head_net()
    net.encoder = nn.Unflatten(1, (1, -1))
    net.head = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))  # type: ignore[assignment]
    with pytest.raises(
        SettingError, match=r"needs an encoder that outputs one vector per sample, got outputs of shape"
    ):
        fewer.run(FedGen(rounds=1), federation(), model=net, seed=0)


# --- all methods ----------------------------------------------------------------------------------------------

KINDS: list[type[FedAvg]] = [FedDistill, FedDistillLogits, FedEnsemble, FedGen]


def run_contents(path: Path) -> dict[str, Any]:
    """The parts of a run that must not depend on the runtime or on interruptions."""
    checkpoint = unpack((path / "checkpoint.safetensors").read_bytes())
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {
        "state": pack(checkpoint["state"]),
        "metrics": [{name: value for name, value in line.items() if name != "seconds"} for line in metrics],
        "ledger": (path / "ledger.csv").read_bytes(),
        "clients": {f.relative_to(path): f.read_bytes() for f in path.glob("clients/*/*/*.safetensors")},
    }


class Interrupt:
    """Interrupts a run in the middle of its second round."""

    def on_run_start(self, method: str, done: int, rounds: int) -> None: ...

    def on_answer(self, round: int, done: int, asked: int) -> None:
        if round == 2 and done == 3:
            raise KeyboardInterrupt

    def on_round_end(self, metrics: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("kind", KINDS)
def test_pool_and_resume_give_the_same_bits(kind: type[FedAvg], digits: Data, tmp_path: Path) -> None:
    method = kind(rounds=3, cohort=5, local_steps=4)
    settings: dict[str, Any] = {"drop": 0.2, "slow": 0.1, "corrupt": 0.2, "seed": 3}
    inline = fewer.run(method, digits, out=tmp_path / "inline", **settings)
    pool = fewer.run(method, digits, out=tmp_path / "pool", runtime="pool", workers=2, **settings)
    assert metrics(inline) == metrics(pool) and any(line["absent"] for line in inline.history)
    assert run_contents(tmp_path / "inline") == run_contents(tmp_path / "pool")
    with pytest.raises(KeyboardInterrupt):
        fewer.run(method, digits, out=tmp_path / "interrupted", progress=Interrupt(), **settings)
    fewer.resume(tmp_path / "interrupted")
    assert run_contents(tmp_path / "interrupted") == run_contents(tmp_path / "inline")


@pytest.mark.parametrize("kind", KINDS)
def test_runs_survive_empty_clients_and_clients_with_one_class(kind: type[FedAvg], tmp_path: Path) -> None:
    result = fewer.run(kind(rounds=3), federation([*PAIRS, EMPTY]), model=encoder_head_net(), seed=SEED, norm="none")
    assert [line["absent"] for line in result.history] == [1, 1, 1]
    single = fewer.run(kind(rounds=3), federation([PAIRS[2], EMPTY]), model=encoder_head_net(), seed=SEED)
    assert len(single.history) == 3


@pytest.mark.parametrize(
    ("args", "text"),
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
def test_a_wrong_setting_is_reported_in_one_line(args: list[str], text: str) -> None:
    result = call("run", *args, *DIGITS, code=2)
    assert result.stderr.startswith("fewer: ") and result.stderr.count("\n") == 1 and text in result.stderr


def test_all_methods_can_be_compared(tmp_path: Path) -> None:
    names = ["fedavg", "fedprox", "feddistill", "fedensemble", "fedgen", "fedmk", "feddistill-logits"]
    small = ["matching_steps=30", "outer_steps=1", "server_steps=100", "per_class=5"]  # of FedMK
    options = [arg for option in small for arg in ("-o", option)]
    call("compare", *names, *DIGITS, "--rounds", "2", *options, "--out", tmp_path, "--json", tmp_path / "table.json")
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["method"] for row in rows] == names and all(row["accuracy"] > 0.2 for row in rows)
    for kind in KINDS:
        assert next(iter(kind.tunable)) == "lr" and len(kind.tunable) <= 2
        assert all(getattr(kind(), name) in grid for name, grid in kind.tunable.items())
