"""F2L against its equations, and its client model is never sent."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fewer.data import ArrayData
from fewer.learning import adapt
from fewer.learning.adapt import meta_gradient, meta_gradients, trainable_weights
from fewer.methods.f2l import F2L, PSI, distillation, mutual_information
from fewer.methods.fedfsl import FedFSL
from fewer.methods.fewshot import CURRENT, FewShot
from fewer.methods.fl_maml import FLMAML, LocalMAML
from fewer.methods.fl_proto import LocalProto
from fewer.models import EncoderHead, Weights
from fewer.runtime import Unable
from fewer.runtime.store import Store, client_folder
from fewer.wire import decode, message
from tests.methods.f2l_harness import (
    FAST,
    FEATURES,
    QUERIES,
    SHOT,
    WAY,
    draw_task,
    make_client,
    random_tensor,
    run,
    set_encoder,
)

# --- losses as in the paper -------------------------------------------------------------------------------------


def literal_mutual_information(h_phi: Tensor, h_psi: Tensor, p_psi: Tensor, y: list[int], across: bool) -> float:
    """Eqs 9, 10 and 13 term by term."""
    count = len(y)
    total = 0.0
    for j in range(count):
        same = [k for k in range(count) if y[k] == y[j]]
        for i in same:
            weight = float(p_psi[i, y[j]]) / sum(float(p_psi[k, y[j]]) for k in same)

            def term(k: int, i: int = i) -> float:
                phi, psi = h_phi[i] / h_phi[i].norm(), h_psi[k] / h_psi[k].norm()
                return math.exp(-float((phi - psi).square().sum()) / 2)

            compared = range(count) if across else [k for k in range(count) if y[k] == y[i]]
            total += weight * math.log(term(j) / sum(term(k) for k in compared))
    return -total / count


def literal_distillation(z_psi: Tensor, z_phi: Tensor, y: list[int]) -> float:
    """Eqs 16 to 19 term by term."""
    total = 0.0
    for i, label in enumerate(y):
        ratio = max(math.exp(float(z_phi[i, c])) for c in range(z_phi.shape[1]) if c != label)
        temperature = 1 / (1 + math.exp(-ratio / math.exp(float(z_phi[i, label]))))

        def share(z: Tensor, c: int, i: int = i, temperature: float = temperature) -> float:
            return math.exp(float(z[i, c]) / temperature) / sum(
                math.exp(float(z[i, k]) / temperature) for k in range(z.shape[1])
            )

        for c in range(z_phi.shape[1]):
            total -= share(z_phi, c) * math.log(share(z_psi, c))
    return total / len(y)


@pytest.mark.parametrize("across", [False, True])
def test_mutual_information_is_the_papers_double_sum(across: bool) -> None:
    y = [0, 1, 2, 0, 1, 2, 2]  # classes of different size
    server_model, client_model, confidences = (
        random_tensor(7, 5),
        random_tensor(7, 5, seed=1),
        random_tensor(7, 3, seed=2).softmax(1),
    )
    loss = mutual_information(server_model, client_model, confidences, torch.tensor(y), across)
    assert float(loss) == pytest.approx(
        literal_mutual_information(server_model, client_model, confidences, y, across), rel=1e-10
    )


def test_with_one_shot_mutual_information_exists_only_across_classes() -> None:
    server_model = random_tensor(4, 5).requires_grad_()
    client_model, confidences, y = random_tensor(4, 5, seed=1), random_tensor(4, 4, seed=2).softmax(1), torch.arange(4)
    within = mutual_information(server_model, client_model, confidences, y)
    assert float(within) == pytest.approx(0, abs=1e-12)
    assert float(torch.autograd.grad(within, server_model)[0].abs().max()) < 1e-12
    across = mutual_information(server_model, client_model, confidences, y, across=True)
    assert float(torch.autograd.grad(across, server_model)[0].abs().max()) > 1e-3
    (warning,) = F2L(shot=1).setting_warnings()
    assert "mi_scope = across" in warning
    for options in ({"mi_scope": "across"}, {"shot": 5}, {"mi_weight": 0}, {"learn_from": "task"}):
        assert not F2L(**{"shot": 1, **options}).setting_warnings()


def test_distillation_is_the_papers_double_sum() -> None:
    client_model, server_model, y = random_tensor(6, 4), random_tensor(6, 4, seed=1), [0, 3, 1, 2, 2, 0]
    loss = distillation(client_model, server_model, torch.tensor(y))
    assert float(loss) == pytest.approx(literal_distillation(client_model, server_model, y), rel=1e-10)


def test_distillation_is_finite_for_extreme_server_scores() -> None:
    server_model = torch.tensor([[500.0, -500.0], [-500.0, 500.0]])
    assert torch.isfinite(distillation(torch.zeros(2, 2), server_model, torch.tensor([1, 1])))


# --- the client model -------------------------------------------------------------------------------------------


def make_client_case() -> tuple[EncoderHead, Weights, list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], Any]:
    client_model = EncoderHead(set_encoder(6, heads=2), FEATURES, 3).double()
    support, queries = random_tensor(6, FEATURES), random_tensor(6, FEATURES, seed=1)
    y, teacher = torch.tensor([0, 0, 1, 1, 2, 2]), random_tensor(6, 3, seed=3)

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        query_scores = scores[6:]
        return 0.3 * F.cross_entropy(query_scores, labels) + 0.7 * distillation(query_scores, teacher, labels)

    return client_model, trainable_weights(client_model), [(support, y)], (torch.cat([support, queries]), y), loss


@pytest.mark.parametrize("exact", [True, False])
def test_the_meta_gradient_of_the_client_model_matches_finite_differences(exact: bool) -> None:
    client_model, psi, support, query, loss = make_client_case()
    meta = meta_gradient(client_model, psi, support, query, 0.3, not exact, loss)

    def loss_after_tuning(psi: Weights) -> float:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in psi.items()}
        inner = F.cross_entropy(functional_call(client_model, leaves, (support[0][0],)), support[0][1])
        gradients = torch.autograd.grad(inner, list(leaves.values()))
        tuned = {name: leaf - 0.3 * gradient for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)}
        return float(loss(functional_call(client_model, tuned, (query[0],)), query[1]))

    direction = {name: torch.randn_like(tensor) for name, tensor in psi.items()}
    step = 1e-6
    losses = [
        loss_after_tuning({name: psi[name] + offset * direction[name] for name in psi}) for offset in (step, -step)
    ]
    derivative = sum(float((meta.weights[name] * direction[name]).sum()) for name in direction)
    matches = derivative == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-5, abs=1e-7)
    assert matches == exact


# --- a step of training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_order", "learn_from", "zero_head", "client_lr", "detach"),
    [
        (False, "support", False, None, True),
        (True, "support", False, 0.0005, False),
        (False, "task", True, 0.0005, True),
        (False, "task", True, 0.0005, False),
    ],
)
def test_one_task_updates_both_models_by_the_papers_equations(
    data: ArrayData,
    tmp_path: Path,
    first_order: bool,
    learn_from: str,
    zero_head: bool,
    client_lr: float | None,
    detach: bool,
) -> None:
    """Plain autograd through Eqs 3 to 20, in the order of Algorithm 1. Here φ is updated by SGD and ψ by Adam."""
    settings = {
        "dropout": 0.0,
        "first_order": first_order,
        "learn_from": learn_from,
        "weight_decay": 0.01,
        "fine_tune_lr": 0.2,
        "fine_tune_steps": 2,
        "detach_client_features": detach,
    }
    settings |= {"mi_weight": 0.3, "kd_weight": 0.8, "mi_scope": "across", "mi_temperature": 0.2}
    method = F2L(**FAST | settings, lr=0.002, client_lr=client_lr, zero_head=zero_head)
    client = make_client(data, tmp_path)
    solver = method.task_solver(client, client.initial_weights(), best=False)
    torch.manual_seed(4)
    solver.private["weights"] = {
        name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in solver.private["weights"].items()
    }
    task = draw_task(data)
    phi = {name: tensor.clone().requires_grad_() for name, tensor in solver.server_model.named_parameters()}
    psi = {name: tensor.clone().requires_grad_() for name, tensor in solver.private["weights"].items()}

    def encode(x: Tensor) -> Tensor:
        return F.relu(F.linear(x, phi["encoder.1.weight"], phi["encoder.1.bias"]))

    support = encode(task.support_x)
    queries = encode(task.query_x)
    teacher = F.linear(queries, phi["head.weight"], phi["head.bias"])[:, task.classes].detach()
    tuned = psi
    for _ in range(2):
        inner = F.cross_entropy(functional_call(solver.client_model, tuned, (support.detach(),)), task.support_y)
        gradients = torch.autograd.grad(inner, list(tuned.values()), create_graph=True)
        if first_order:
            gradients = tuple(gradient.detach() for gradient in gradients)
        tuned = {name: tuned[name] - 0.2 * gradient for name, gradient in zip(tuned, gradients, strict=True)}
    all_features = torch.cat([support.detach(), queries.detach()])
    scores = functional_call(solver.client_model, tuned, (all_features,))[WAY * SHOT :]
    client_loss = 0.2 * F.cross_entropy(scores, task.query_y) + 0.8 * distillation(scores, teacher, task.query_y)
    rows = WAY * SHOT if learn_from == "support" else WAY * (SHOT + QUERIES)
    features, y = torch.cat([support, queries])[:rows], torch.cat([task.support_y, task.query_y])[:rows]
    fixed = {name: tensor.detach() for name, tensor in tuned.items()}
    encoder_weights = {name.removeprefix("encoder."): tensor for name, tensor in fixed.items() if "encoder." in name}
    # The client features h_ψ depend on φ, too.
    inputs = features.detach() if detach else features
    client_features = functional_call(solver.client_model.encoder, encoder_weights, (inputs,))
    confidences = F.linear(client_features, fixed["head.weight"], fixed["head.bias"]).softmax(1).detach()
    base = F.cross_entropy(F.linear(features, phi["head.weight"], phi["head.bias"]), task.classes[y])
    server_loss = 0.7 * base + 0.3 * mutual_information(features, client_features, confidences, y, True, 0.2)
    method.train_on_task(solver, torch.optim.SGD(solver.server_model.parameters(), lr=1.0), task)
    updated = dict(solver.server_model.named_parameters())
    for name, gradient in zip(phi, torch.autograd.grad(server_loss, list(phi.values())), strict=True):
        assert torch.allclose(phi[name] - updated[name], gradient, atol=1e-6), name
    for name, gradient in zip(psi, torch.autograd.grad(client_loss, list(psi.values())), strict=True):
        if zero_head and name.startswith("head."):
            assert torch.equal(solver.private["weights"][name], psi[name])  # not updated
            continue
        decayed = gradient + 0.01 * psi[name]  # weight decay
        assert torch.allclose(solver.private["first"][name], 0.1 * decayed, atol=1e-6), name
        expected = psi[name] - (client_lr or 0.002) * decayed / (decayed.abs() + 1e-8)  # Adam's first step
        assert torch.allclose(solver.private["weights"][name], expected, atol=2e-5), name
    assert solver.private["step"] == 1


def test_over_all_class_orders_only_the_heads_meta_gradient_averages_to_0() -> None:
    """Therefore a zero head can stay zero."""
    client_model, psi, [(support, y)], (inputs, _), _ = make_client_case()
    psi = {name: tensor * (not name.startswith("head.")) for name, tensor in psi.items()}
    teacher = random_tensor(6, 3, seed=3)
    gradients_by_order = []
    for order in itertools.permutations(range(3)):
        permuted = torch.tensor(order)[y]

        def loss(scores: Tensor, labels: Tensor, columns: tuple[int, ...] = order) -> Tensor:
            query_scores, distance = scores[6:], (scores[6:].softmax(1)[:, columns] - teacher.softmax(1)).abs().mean()
            return F.cross_entropy(query_scores, labels) + distillation(query_scores[:, columns], teacher, y) + distance

        gradients_by_order.append(
            meta_gradient(client_model, psi, [(support, permuted)] * 2, (inputs, permuted), 0.3, False, loss).weights
        )
    for name in psi:
        gradients = torch.stack([weights[name] for weights in gradients_by_order])
        if name.startswith("head."):
            assert float(gradients.mean(0).abs().max()) < 1e-12
            assert name == "head.bias" or float(gradients.abs().max()) > 1e-3  # not zero for a single order
        else:
            assert torch.allclose(gradients, gradients[:1], atol=1e-12), name


@pytest.mark.parametrize("kind", [F2L, FLMAML, FedFSL])
@pytest.mark.parametrize("zero_head", [True, False])
def test_zero_head_keeps_the_head_at_zero(
    kind: type[FewShot], zero_head: bool, data: ArrayData, tmp_path: Path
) -> None:
    client = make_client(data, tmp_path)
    method = kind(**FAST | {"fine_tune_lr": 0.3, "zero_head": zero_head})
    trained = method.fit(client, method.initial_weights(client.task, 0))
    weights = client.store.get(CURRENT)["weights"] if kind is F2L else trained
    assert (float(weights["head.weight"].abs().max()) == 0) == zero_head


def test_several_meta_gradients_share_the_inner_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    client_model, psi, support, query, loss = make_client_case()

    def second_loss(scores: Tensor, labels: Tensor) -> Tensor:
        return scores[6:].square().mean()

    separate = [
        meta_gradient(client_model, psi, support * 2, query, 0.3, False, loss_function)
        for loss_function in (loss, second_loss)
    ]
    inner_steps: list[int] = []
    original = adapt._inner_gradients

    def spy(*args: Any, **kwargs: Any) -> Any:
        inner_steps.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(adapt, "_inner_gradients", spy)
    together = meta_gradients(client_model, psi, support * 2, query, 0.3, False, [loss, second_loss])
    assert len(inner_steps) == 2
    for expected, actual in zip(separate, together, strict=True):
        assert expected.loss == actual.loss
        for part in ("weights", "lrs"):
            assert all(
                torch.equal(tensor, getattr(actual, part)[name]) for name, tensor in getattr(expected, part).items()
            )


@pytest.mark.parametrize("kind", [F2L, FLMAML])
def test_adapt_steps_sets_the_steps_on_a_novel_task(
    kind: type[FewShot], data: ArrayData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_counts: list[int] = []

    def count(net: nn.Module, weights: Weights, batches: list[Any], lr: float) -> Weights:
        step_counts.append(len(batches))
        return dict(weights)

    monkeypatch.setattr(f"{kind.__module__}.adapt_weights", count)
    client = make_client(data, tmp_path)
    for steps in (None, 5):
        method = kind(**FAST | {"fine_tune_steps": 2, "adapt_steps": steps})
        method.predict(method.task_solver(client, method.initial_weights(client.task, 0), best=False), draw_task(data))
    assert step_counts == [2, 5]


@pytest.mark.parametrize("kind", [F2L, FLMAML])
def test_solving_a_task_does_not_change_the_solver(kind: type[FewShot], data: ArrayData, tmp_path: Path) -> None:
    client = make_client(data, tmp_path)
    method = kind(**FAST | {"fine_tune_lr": 1.0})
    used, fresh = (method.task_solver(client, method.initial_weights(client.task, 0), best=False) for _ in range(2))
    method.predict(used, draw_task(data, seed=1))
    for name, tensor in method.predict(used, draw_task(data)).items():
        assert torch.equal(tensor, method.predict(fresh, draw_task(data))[name]), name
    start = used.private["weights"] if kind is F2L else dict(used.named_parameters())
    assert float(start["head.weight"].abs().max()) == 0


@pytest.mark.parametrize("kind", [F2L, LocalMAML, LocalProto])
def test_a_client_whose_own_model_diverges_is_unable_and_saves_nothing(
    kind: type[FewShot], data: ArrayData, tmp_path: Path
) -> None:
    client = make_client(data, tmp_path)
    method: Any = kind(**FAST | {"lr": 1e30})
    with pytest.raises(Unable, match=r"training diverged; lower lr \(now 1e\+30\)"):
        method.fit(client, method.initial_weights(client.task, 0)) if kind is F2L else method.train_personal(client)
    assert client.store.get(CURRENT) is None


def test_client_models_are_averaged_with_equal_weights(data: ArrayData, tmp_path: Path) -> None:
    method = F2L(**FAST | {"rounds": 1})
    result = run(method, data, out=tmp_path / "run")
    answers = []
    for client_id in range(4):
        client = make_client(data, tmp_path / "again", client_id)
        from fewer.runtime.streams import global_streams

        with global_streams(0, 1, client_id, "train"):
            answers.append(method.fit(client, client.initial_weights()))
    for name, tensor in result.state.model.items():
        mean = torch.stack([answer[name] for answer in answers]).double().mean(0)
        assert torch.allclose(tensor.double(), mean, atol=1e-6)


# --- ψ is never sent --------------------------------------------------------------------------------------------


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every encoded message, requests and answers."""
    seen: list[bytes] = []
    original = message.encode

    def spy(*args: Any) -> bytes:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr("fewer.runtime.handlers.encode", spy)
    monkeypatch.setattr("fewer.runtime.clients.encode", spy)
    return seen


def collect_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value.values() for leaf in collect_tensors(part)] if isinstance(value, dict) else []


@pytest.mark.parametrize("decoupled", [True, False])
def test_no_message_contains_the_client_model(
    data: ArrayData, tmp_path: Path, messages: list[bytes], decoupled: bool
) -> None:
    """Searches every encoded message for every private weight and moment of every client and round.

    Without decoupling the client model is averaged, so the search must find it.
    """
    private_tensors: list[Tensor] = []

    class Watched(F2L):
        def fit(self, client: Any, model: Weights) -> Weights:
            sent = super().fit(client, model)
            state = client.store.get(CURRENT) or {n: t for n, t in sent.items() if n.startswith(PSI)}
            private_tensors.extend(collect_tensors(state))
            return sent

    result = run(Watched(**FAST | {"rounds": 3, "decoupled": decoupled}), data, out=tmp_path / "run")
    assert len(messages) >= 40 and len(private_tensors) >= 3 * 4 * 14
    private_shapes = {tensor.shape for tensor in private_tensors} - {
        tensor.shape for tensor in make_client(data, tmp_path).initial_weights().values()
    }
    matches = 0
    sent = {name for blob in messages for field in decode(blob)[1].values() for name in _field_names(field)}
    for blob in messages:
        for tensor in private_tensors:
            if tensor.numel() >= FEATURES and float(tensor.abs().sum()) > 0:
                matches += blob.find(tensor.float().numpy().tobytes()[:32]) >= 0
        for field in decode(blob)[1].values():
            matches += sum(leaf.shape in private_shapes for leaf in collect_tensors(field))
    if decoupled:
        assert matches == 0
        assert sent == {*make_client(data, tmp_path).initial_weights(), *F2L.predictors}
        assert not any(CURRENT in file.name for file in (tmp_path / "run").glob("*") if file.is_file())
        for client_id in range(4):
            state: Any = Store(client_folder(tmp_path / "run/clients", client_id), 3).get(CURRENT)
            assert state["step"] == 6
    else:
        assert matches > 0 and any(name.startswith(PSI) for name in sent)
        assert any(name.startswith(PSI) for name in result.state.model)


def _field_names(field: Any) -> list[str]:
    return list(field) if isinstance(field, dict) else []
