"""FedGen against a slow, literal implementation of its equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fewer
from fewer import FedAvg, FedGen
from fewer.errors import SettingError
from fewer.learning import Generator, weighted_mean
from fewer.methods import Client
from fewer.models import Weights, load_weights
from fewer.runtime import on_client, stream
from fewer.wire import decode
from tests.helpers import data_bytes, is_close
from tests.methods.class_harness import (
    CLASSES,
    EMPTY,
    FEATURES,
    PAIRS,
    SEED,
    SIZES,
    encoder_head_net,
    federation,
    linear,
    make_harness,
    sample_indices,
)


def generate_features(weights: Weights, noise: Tensor, y: Tensor, training: bool) -> Tensor:
    """Runs the generator layer by layer. It ends with tanh, as the encoder of the net does."""
    z = torch.cat([noise, torch.eye(CLASSES, dtype=noise.dtype)[y]], 1)
    z = z @ weights["body.0.weight"].T + weights["body.0.bias"]
    mean, var = weights["body.1.running_mean"], weights["body.1.running_var"]
    if training:
        mean, var = z.mean(0), z.var(0, unbiased=False)
    z = (z - mean) / (var + 1e-5).sqrt() * weights["body.1.weight"] + weights["body.1.bias"]
    return torch.tanh(z.clamp(min=0) @ weights["body.3.weight"].T + weights["body.3.bias"])


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
        calls = [(call, blob) for call, blob in harness.clients.up if call.round == round and not call.on_server]
        asked, sent = zip(*((call.client, decode(blob)[1]) for call, blob in calls), strict=True)
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
    method = FedGen(generator_lr=0.01, generator_steps=100, generator_output="linear")
    harness = make_harness(method, encoder_head_net(), tmp_path)
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


def test_fedgen_sends_the_generator_and_counts_too(tmp_path: Path) -> None:
    """Clients also get the generator and three class weights, and send three counts."""
    harness = make_harness(FedGen(local_steps=1, batch_size=2, generator_steps=1), encoder_head_net(), tmp_path)
    harness.rounds(2)
    model = 4 * ((FEATURES + 1) * 4 + (4 + 1) * CLASSES)
    generator = 4 * ((32 + CLASSES + 1) * 256 + 4 * 256 + (256 + 1) * 4) + 8
    down, up = (
        [blob for call, blob in messages if not call.on_server]  # the others stay on the server
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
