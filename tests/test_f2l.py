"""F2L against its equations, its baselines, and data with base, validation and novel classes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import fewer
from fewer.data import ArrayData, Data, RawDataset, federate
from fewer.data.episodes import Episode, apply_class_split, sample_episode
from fewer.errors import SettingError
from fewer.learning import adapt
from fewer.learning.adapt import meta_gradient, meta_gradients, trainable_weights
from fewer.methods import Method
from fewer.methods.f2l import F2L, PSI, distillation, mutual_information
from fewer.methods.fedfsl import FedFSL
from fewer.methods.fewshot import CURRENT, FewShot, load_n_way_net, logistic_regression
from fewer.methods.fl_maml import FLMAML, LocalMAML
from fewer.methods.fl_proto import FLProto, LocalProto
from fewer.models import EncoderHead, Weights
from fewer.models.sequences import MLP
from fewer.models.sets import SetEncoder
from fewer.runtime import Clients, Unable
from fewer.runtime.store import Store, client_folder
from fewer.wire import decode, message
from tests.test_cli import call

torch.set_num_threads(1)

WAY, SHOT, QUERIES, FEATURES = 3, 2, 2, 8
BASE, VALIDATION, NOVEL = 6, 4, 5
FAST: dict[str, Any] = {"way": WAY, "shot": SHOT, "queries": QUERIES, "tasks": 2, "test_tasks": 8, "validate_every": 2}


def make_clusters(spread: float = 0.4, per_class: int = 48, extra_noise: float = 0.0) -> RawDataset:
    """Gaussian clusters, one per class; two input dimensions are pure noise that the encoder must ignore."""
    rng = np.random.default_rng(0)
    classes = BASE + VALIDATION + NOVEL
    centers = rng.normal(0, 1, (classes, 6)).astype(np.float32)
    y = np.repeat(np.arange(classes), per_class)
    x = centers[y] + spread * rng.normal(0, 1, (len(y), 6)).astype(np.float32)
    noise = (3 + extra_noise) * rng.normal(0, 1, (len(y), 2)).astype(np.float32)
    return RawDataset(np.concatenate([x, noise], 1).astype(np.float32), y, split=(BASE, VALIDATION, NOVEL))


def make_data(clients: int = 4, **settings: Any) -> ArrayData:
    return federate(make_clusters(), clients=clients, partition="iid", name="clouds", **settings)


@pytest.fixture(scope="module")
def data() -> ArrayData:
    return make_data()


def net() -> MLP:
    return MLP((8,), BASE, hidden=FEATURES)


def run(method: Method, data: Data, **settings: Any) -> Any:
    return fewer.run(method, data, model=net, evaluate_every=method.rounds, **settings)


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


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def set_encoder(context: int, heads: int = 4, transductive: bool = False) -> SetEncoder:
    """A `SetEncoder` with noise on its weights, because some initial weights are zero."""
    torch.manual_seed(context)
    encoder = SetEncoder(FEATURES, context, heads, dropout=0.0, transductive=transductive).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return encoder


def test_the_initial_client_model_is_layer_norm() -> None:
    x = random_tensor(7, FEATURES).float()
    assert torch.allclose(SetEncoder(FEATURES, context=5, dropout=0.0)(x), F.layer_norm(x, (FEATURES,)), atol=1e-4)


def test_queries_attend_to_the_support_and_themselves_in_any_order() -> None:
    encoder = set_encoder(6)
    support, queries = random_tensor(6, FEATURES), random_tensor(4, FEATURES, seed=1)
    together = encoder(torch.cat([support, queries]))
    assert torch.allclose(together[:6], encoder(support))  # the support does not see queries
    for number, query in enumerate(queries):
        alone = encoder(torch.cat([support, query[None]]))[6]
        assert torch.allclose(together[6 + number], alone)
    order = torch.randperm(6)
    assert torch.allclose(encoder(torch.cat([support[order], queries]))[6:], together[6:])
    other = encoder(torch.cat([support + 1, queries]))
    assert not torch.allclose(other[6:], together[6:], atol=1e-3)
    transductive = set_encoder(6, transductive=True)
    assert not torch.allclose(transductive(torch.cat([support, queries]))[6:], together[6:], atol=1e-3)


def test_attention_matches_torch() -> None:
    encoder = set_encoder(3, heads=2)
    reference = nn.TransformerEncoderLayer(FEATURES, 2, 2 * FEATURES, 0.0, batch_first=True, dtype=torch.float64)
    weights = encoder.state_dict()
    names = {
        "self_attn.in_proj_weight": "in_proj.weight",
        "self_attn.in_proj_bias": "in_proj.bias",
        "self_attn.out_proj.weight": "out_proj.weight",
        "self_attn.out_proj.bias": "out_proj.bias",
        "linear1.weight": "feed_forward.0.weight",
        "linear1.bias": "feed_forward.0.bias",
        "linear2.weight": "feed_forward.3.weight",
        "linear2.bias": "feed_forward.3.bias",
        "norm1.weight": "norm1.weight",
        "norm1.bias": "norm1.bias",
        "norm2.weight": "norm2.weight",
        "norm2.bias": "norm2.bias",
    }
    reference.load_state_dict({name: weights[source] for name, source in names.items()})
    x = random_tensor(5, FEATURES)
    mask = torch.tensor([[False] * 3 + [row != 3, row != 4] for row in range(5)])
    assert torch.allclose(encoder(x), reference(x[None], src_mask=mask)[0], atol=1e-10)


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


def draw_task(data: ArrayData, seed: int = 0) -> Episode:
    return sample_episode(data.client(0).train, WAY, SHOT, QUERIES, torch.Generator().manual_seed(seed))


def make_client(data: Data, folder: Path, id: int = 0, round: int = 1) -> Any:
    from fewer.methods.base import ContextFactory
    from fewer.models import Task

    contexts = ContextFactory(data, Task((8,), BASE, net), 0, folder)
    return contexts(id, round)


@pytest.mark.parametrize(
    ("first_order", "learn_from", "zero_head", "client_lr"),
    [(False, "support", False, None), (True, "support", False, 0.0005), (False, "task", True, 0.0005)],
)
def test_one_task_updates_both_models_by_the_papers_equations(
    data: ArrayData, tmp_path: Path, first_order: bool, learn_from: str, zero_head: bool, client_lr: float | None
) -> None:
    """Plain autograd through Eqs 3 to 20, in the order of Algorithm 1. Here φ is updated by SGD and ψ by Adam."""
    settings = {
        "dropout": 0.0,
        "first_order": first_order,
        "learn_from": learn_from,
        "weight_decay": 0.01,
        "fine_tune_lr": 0.2,
        "fine_tune_steps": 2,
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
    client_features = functional_call(solver.client_model.encoder, encoder_weights, (features,))
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


def test_fl_maml_applies_weight_decay(data: ArrayData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(data, tmp_path)
    method = FLMAML(**FAST | {"tasks": 1, "weight_decay": 0.5, "lr": 0.01, "zero_head": False})
    start = {name: tensor + 0.1 for name, tensor in method.initial_weights(client.task, 0).items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    monkeypatch.setattr(FLMAML, "task_gradient", lambda *args: zeros)
    for name, tensor in method.fit(client, start).items():
        assert torch.allclose(tensor, start[name] - 0.01 * start[name].sign(), atol=1e-5), name


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

    def spy(kind: str, fields: Any) -> bytes:
        seen.append(original(kind, fields))
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


# --- behavior --------------------------------------------------------------------------------------------------

BASELINES: list[type[FewShot]] = [FLMAML, FLProto, FedFSL, LocalMAML, LocalProto]


@pytest.mark.parametrize("kind", [F2L, *BASELINES])
def test_every_method_learns_to_classify_novel_classes(kind: type[FewShot], data: ArrayData) -> None:
    settings = {**FAST, "rounds": 6, "tasks": 8, "lr": 0.01, "test_tasks": 40}
    if "fine_tune_lr" in kind.model_fields:
        settings["fine_tune_lr"] = 0.3
    result = run(kind(**settings), data)
    assert result.accuracy > 0.55, result.accuracy  # chance is a third
    assert result.metrics["tasks"] == 40 and result.metrics["absent"] == 0
    groups = result.metrics["groups"]
    assert len(groups) == 40 and sum(groups) / 40 == pytest.approx(result.accuracy)
    assert result.metrics["best_round"] in (2, 4, 6) and set(result.metrics["clients"]) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("kind", [F2L, FLMAML, LocalProto])
def test_pool_and_resume_give_the_same_result(kind: type[FewShot], data: ArrayData, tmp_path: Path) -> None:
    method = kind(**FAST | {"rounds": 4, "validate_every": 1})
    uninterrupted = run(method, data, out=tmp_path / "uninterrupted")
    pool = run(method, data, runtime="pool", workers=2)

    class Stop(Exception):
        pass

    class Interrupt:
        def on_run_start(self, method: str, done: int, rounds: int) -> None: ...

        def on_answer(self, round: int, done: int, asked: int) -> None:
            if round == 3 and done == 3:
                raise Stop

        def on_round_end(self, metrics: Any) -> None: ...

    with pytest.raises(Stop):
        run(method, data, out=tmp_path / "interrupted", progress=Interrupt())
    resumed = fewer.resume(tmp_path / "interrupted", method=method, data=data, model=net)
    for other in (pool, resumed):
        assert other.metrics["accuracy"] == uninterrupted.metrics["accuracy"]
        assert other.metrics["best_round"] == uninterrupted.metrics["best_round"]
        assert other.state.best_model.keys() == uninterrupted.state.best_model.keys()
        assert all(
            torch.equal(tensor, uninterrupted.state.best_model[name]) for name, tensor in other.state.best_model.items()
        )


def test_the_best_server_model_is_evaluated_with_the_client_models_of_its_round(
    data: ArrayData, tmp_path: Path
) -> None:
    class Worse(F2L):
        """Ruins all models after round 2, so the evaluated model must come from round 2."""

        def fit(self, client: Any, model: Weights) -> Weights:
            sent = super().fit(client, model)
            if client.round <= 2:
                return sent
            client.store.put(
                CURRENT, {**client.store.get(CURRENT), "weights": self._noise(client.store.get(CURRENT)["weights"])}
            )
            return self._noise(sent)

        def _noise(self, weights: Weights) -> Weights:
            return {name: torch.randn_like(tensor) * 3 for name, tensor in weights.items()}

    settings = FAST | {"tasks": 8, "lr": 0.01, "fine_tune_lr": 0.3, "test_tasks": 40}
    ruined = run(Worse(**settings, rounds=4), data, out=tmp_path / "ruined")
    two_rounds = run(F2L(**settings, rounds=2), data)
    # With one candidate there is no validation.
    assert two_rounds.metrics["best_round"] == 0 and two_rounds.metrics["validation_accuracy"] is None
    assert ruined.metrics["best_round"] == 2
    assert ruined.metrics["accuracy"] == two_rounds.metrics["accuracy"]
    assert (
        ruined.metrics["client"] == two_rounds.metrics["client"]
        and ruined.metrics["server"] == two_rounds.metrics["server"]
    )


def test_the_chosen_predictor_gives_the_accuracy(data: ArrayData) -> None:
    client_model, server_model = (
        run(F2L(**FAST, rounds=2, predictor=predictor), data).metrics for predictor in ("client", "server")
    )
    assert client_model["accuracy"] == client_model["client"] and server_model["accuracy"] == server_model["server"]
    assert client_model["server"] == server_model["server"]  # the same tasks, the same models


def test_tasks_are_the_same_for_all_methods_and_of_the_right_classes(data: ArrayData) -> None:
    seen: dict[str, list[tuple[Any, ...]]] = {}

    class RecordingF2L(F2L):
        def predict(self, solver: Any, task: Episode) -> dict[str, Tensor]:
            seen.setdefault(self.name, []).append((*task.classes.tolist(), float(task.query_x.sum())))
            return super().predict(solver, task)

    class RecordingProto(FLProto):
        def predict(self, solver: Any, task: Episode) -> dict[str, Tensor]:
            seen.setdefault(self.name, []).append((*task.classes.tolist(), float(task.query_x.sum())))
            return super().predict(solver, task)

    for kind in (RecordingF2L, RecordingProto):
        run(kind(**FAST | {"validate_every": 1}, rounds=2), data)
    first, second = seen.values()
    assert first == second and first[:8] == first[8:16] and len(first) == 24
    classes = [{c for *classes, _ in part for c in classes} for part in (first[:16], first[16:])]
    assert classes[0] <= set(range(BASE, BASE + VALIDATION))
    assert classes[1] <= set(range(BASE + VALIDATION, BASE + VALIDATION + NOVEL))


def test_a_tuning_trial_uses_only_validation_classes(data: ArrayData) -> None:
    method, same = F2L(**FAST | {"rounds": 2, "validate_every": 1}).tuning_split(data, 0.2, 0)
    assert same is data
    scores = run(method, data).metrics
    assert scores["accuracy"] == scores["validation_accuracy"]


def test_with_one_candidate_validation_is_skipped(data: ArrayData, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []
    original = FewShot.ask_task_counts

    def spy(*args: Any, **kwargs: Any) -> Any:
        parts.append(args[3])
        return original(*args, **kwargs)

    monkeypatch.setattr(FewShot, "ask_task_counts", spy)
    for interval, expected in ((2, ["test"]), (1, ["validation", "validation", "test"])):
        parts.clear()
        run(FLProto(**FAST | {"validate_every": interval}, rounds=2), data)
        assert parts == expected


def test_a_client_without_state_in_the_best_round_has_no_best_state(data: ArrayData, tmp_path: Path) -> None:
    method, client = F2L(**FAST), make_client(data, tmp_path)
    method.mark_best(client)
    client.store.put(CURRENT, {"later": torch.ones(1)})
    assert method.load_private(client, best=True) is None and method.load_private(client, best=False) is not None


def test_dropped_clients_do_not_count_as_clients_without_validation_classes(
    data: ArrayData, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Clients._draw_fault
    monkeypatch.setattr(
        Clients,
        "_draw_fault",
        lambda self, client, name: "drop" if name == "answer_tasks" else original(self, client, name),
    )
    with pytest.raises(fewer.errors.QuorumLost, match="0 of 4 clients answered.*4 dropped"):
        run(FLProto(**FAST, rounds=4), data)


def test_rows_of_a_comparison_are_measured_in_tasks(tmp_path: Path) -> None:
    data_settings: dict[str, Any] = {
        "data": "digits",
        "data_options": {"split": "4/3/3"},
        "clients": 3,
        "partition": "iid",
        "rounds": 1,
    }
    settings = {**data_settings, "method_options": {"way": 3, "queries": 2, "tasks": 1, "test_tasks": 6}}
    comparison = fewer.compare(["fl-proto", "local-proto"], seeds=2, out=tmp_path, **settings)
    for row in comparison.rows:
        assert (row.groups, row.units) == (12, "tasks") and [len(accuracies) for accuracies in row.unit_accuracies] == [
            6,
            6,
        ]


def test_a_client_with_too_few_classes_is_skipped_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = make_clusters()
    client_ids = np.arange(len(raw.y)) % 3
    client_ids[(raw.y < BASE) & (raw.y >= WAY - 1) & (client_ids == 2)] = 0  # client 2 has two base classes
    uneven = federate(
        RawDataset(raw.x, raw.y, client_ids=client_ids, split=raw.split), partition="natural", name="uneven"
    )
    monkeypatch.setattr("fewer.runs.engine._WARNED", set())
    result = run(F2L(**FAST, rounds=2), uneven)
    assert result.metrics["absent"] == 1 and result.metrics["tasks"] == 9
    assert caplog.messages == [
        "f2l: skipped client 2: base: 3-way 2-shot needs 3 classes with 2 + 2 samples each, got 2"
    ]
    with pytest.raises(fewer.errors.QuorumLost, match="needs 3 classes"):
        run(F2L(**FAST | {"shot": 40}, rounds=1), uneven)


def test_without_validation_classes_the_last_model_is_used_and_novel_classes_are_required() -> None:
    raw = make_clusters()
    few_validation = federate(
        RawDataset(raw.x, raw.y, split=(BASE, 2, VALIDATION - 2 + NOVEL)), clients=2, partition="iid"
    )
    assert run(FLProto(**FAST, rounds=4), few_validation).metrics["best_round"] == 4
    few_novel = federate(RawDataset(raw.x, raw.y, split=(BASE, VALIDATION + NOVEL - 2, 2)), clients=2, partition="iid")
    with pytest.raises(SettingError, match="no client has 3 novel classes with 2 \\+ 2 samples"):
        run(FLProto(**FAST, rounds=1), few_novel)


def test_fedfsl_is_fl_maml_plus_an_adversarial_loss(data: ArrayData, tmp_path: Path) -> None:
    settings = FAST | {"rounds": 2, "fine_tune_lr": 0.3}
    for zero_head in (True, False):
        maml, fedfsl = (
            run(FLMAML(**settings, zero_head=zero_head), data),
            run(FedFSL(**settings, zero_head=zero_head, adversarial_weight=0), data),
        )
        assert all(torch.equal(tensor, fedfsl.state.model[name]) for name, tensor in maml.state.model.items())
    method = FedFSL(**settings, adversarial_weight=0.7, first_order=False, zero_head=False)
    client = make_client(data, tmp_path)
    received = method.initial_weights(client.task, 0)
    net = load_n_way_net(client, received, WAY)
    torch.manual_seed(0)
    theta = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in trainable_weights(net).items()}
    task = draw_task(data)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}

    def fine_tune(weights: Weights) -> Weights:
        inner = F.cross_entropy(functional_call(net, weights, (task.support_x,)), task.support_y)
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        return {name: weights[name] - 0.3 * gradient for name, gradient in zip(weights, gradients, strict=True)}

    scores = functional_call(net, fine_tune(leaves), (task.query_x,))
    start = {name: received[name].clone().requires_grad_() for name in leaves}
    received_probabilities = functional_call(net, fine_tune(start), (task.query_x,)).softmax(1).detach()
    adversarial_loss = 0.7 * (scores.softmax(1) - received_probabilities).abs().mean()
    query_loss = F.cross_entropy(scores, task.query_y)
    task_gradients = method.task_gradient(net, theta, received, task)
    # With a zero head, only the encoder has gradients.
    encoder_gradients = FedFSL(**settings, adversarial_weight=0.7, zero_head=True).task_gradient(
        net, theta, received, task
    )
    assert encoder_gradients.keys() == {name for name in task_gradients if name.startswith("encoder.")}
    assert all(torch.equal(gradient, task_gradients[name]) for name, gradient in encoder_gradients.items())
    for part, loss in (("encoder.", query_loss + adversarial_loss), ("head.", query_loss - adversarial_loss)):
        names = [name for name in leaves if name.startswith(part)]
        expected_gradients = torch.autograd.grad(loss, [leaves[name] for name in names], retain_graph=True)
        for name, expected_gradient in zip(names, expected_gradients, strict=True):
            assert torch.allclose(task_gradients[name], expected_gradient, atol=1e-6), name


def test_clients_send_the_encoder_or_encoder_and_head(data: ArrayData) -> None:
    """The encoder has 8 × 8 + 8 weights, the head none, 8 × N + N or 8 × |C_b| + |C_b|."""
    encoder = 8 * FEATURES + FEATURES
    for kind, head in ((FLProto, 0), (FLMAML, FEATURES * WAY + WAY), (F2L, FEATURES * BASE + BASE)):
        state = kind(**FAST).init(make_client(data, Path("/nowhere")).task, 0)
        assert sum(tensor.numel() for tensor in state.model.values()) == encoder + head
    local = run(LocalProto(**FAST, rounds=1), data)
    assert not local.state.model and local.metrics["up"] < 4 * 4 * 2000


def test_logistic_regression_separates_clusters() -> None:
    y = torch.arange(3).repeat(4)
    features = F.one_hot(y, 3) * 3.0 + 0.1 * random_tensor(12, 3).float()
    assert torch.equal(logistic_regression(features[:6], y[:6], features[6:]), y[6:])


def test_logistic_regression_matches_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    draw = torch.Generator().manual_seed(0)
    support, queries, y = (
        torch.randn(12, 6, generator=draw),
        torch.randn(60, 6, generator=draw),
        torch.arange(3).repeat(4),
    )
    expected = LogisticRegression(tol=1e-8).fit(F.normalize(support, dim=1), y).predict(F.normalize(queries, dim=1))
    assert (logistic_regression(support, y, queries).numpy() == expected).mean() > 0.97


# --- data -------------------------------------------------------------------------------------------------------


def test_each_client_has_base_validation_and_novel_classes(data: ArrayData) -> None:
    assert data.novel and data.classes == BASE and len(data.test) == NOVEL * 48
    groups = (0, BASE), (BASE, BASE + VALIDATION), (BASE + VALIDATION, BASE + VALIDATION + NOVEL)
    seen: list[float] = []
    for client in range(4):
        for samples, (low, high) in zip(data.client(client), groups, strict=True):
            assert len(samples) and low <= int(samples.labels.min()) and int(samples.labels.max()) < high
            seen += samples.slice(0, len(samples))[0][:, 0].tolist()
    raw = make_clusters()
    assert sorted(seen) == sorted(np.asarray(raw.x)[:, 0].tolist())  # every sample once


def test_a_class_split_by_counts_or_names_pools_and_renumbers() -> None:
    x = np.arange(12, dtype=np.float32)[:, None]
    names = ("b.one", "a.one", "b.two", "c.one")
    raw = RawDataset(x[:8], np.arange(8) % 4, (x[8:], np.arange(4)), class_names=names)
    split = apply_class_split(raw, "b/c/a", "toy")
    assert split.class_names == ("b.one", "b.two", "c.one", "a.one") and split.split == (2, 1, 1) and split.test is None
    assert split.y.tolist() == [0, 3, 1, 2] * 3 and np.asarray(split.x).ravel().tolist() == list(range(12))
    by_counts = apply_class_split(raw, "1/1/1", "toy")  # the last class is dropped
    assert by_counts.y.tolist() == [0, 1, 2] * 3 and by_counts.class_names == names[:3]
    texts = apply_class_split(RawDataset([f"text {n}" for n in range(4)], np.arange(4)), "2/1/1", "toy")
    assert texts.x == ["text 0", "text 1", "text 2", "text 3"]
    for wrong, reason in (
        ("3/1/1", "must sum to at most 4"),
        ("0/2/2", "at least 1 base class"),
        ("2/2", "must be BASE/VALIDATION/NOVEL"),
        ("b/b/a", "two parts share a class"),
        ("b/x/a", "a part matches no class"),
    ):
        with pytest.raises(SettingError, match=reason):
            apply_class_split(raw, wrong, "toy")


def test_the_vocabulary_comes_from_base_classes_only() -> None:
    texts = [f"common base{c}" if c < 2 else f"common secret{c}" for c in range(4) for _ in range(12)]
    raw = RawDataset(texts, np.repeat(np.arange(4), 12), split=(2, 1, 1))
    data = federate(raw, clients=2, partition="iid", max_length=4)
    assert set(data.tokens) == {"<pad>", "<unknown>", "common", "base0", "base1"}


def test_fc100_is_cifar100_by_superclass(tmp_path: Path) -> None:
    import pickle

    order = np.random.default_rng(0).permutation(100)  # fine class f is in coarse class order[f] // 5
    for part in ("train", "test"):
        labels = list(range(100))
        batch = {
            b"data": np.zeros((100, 3072), np.uint8) + np.arange(100, dtype=np.uint8)[:, None],
            b"fine_labels": labels,
            b"coarse_labels": [int(order[f]) // 5 for f in labels],
        }
        (tmp_path / part).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"fine_label_names": [f"f{n}".encode() for n in range(100)], b"coarse_label_names": [b"c"] * 20}
    (tmp_path / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    from fewer.data.sources import read

    (tmp_path / "cifar100").mkdir()
    for part in ("train", "test", "meta"):
        (tmp_path / part).rename(tmp_path / "cifar100" / part)
    raw = read("fc100", tmp_path)
    assert raw.split == (60, 20, 20) and raw.test is None and len(raw.y) == 200
    coarse = [int(order[int(name[1:])]) // 5 for name in raw.class_names]
    assert set(coarse[:60]) == {1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19}
    assert set(coarse[60:80]) == {8, 11, 13, 16} and set(coarse[80:]) == {0, 7, 12, 14}
    assert all(raw.class_names[label] == f"f{int(image[0, 0, 0])}" for image, label in zip(raw.x, raw.y, strict=True))


@pytest.mark.parametrize("kind", [F2L, FLMAML, FedFSL, LocalMAML, FLProto])
def test_text_methods_solve_tasks_of_novel_classes(kind: type[FewShot]) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(BASE + VALIDATION + NOVEL), 16)
    texts = [" ".join([f"word{label}", *(f"w{n}" for n in rng.integers(20, size=4))]) for label in labels]
    text = federate(
        RawDataset(texts, labels, split=(BASE, VALIDATION, NOVEL)), clients=2, partition="iid", max_length=5
    )
    result = fewer.run(kind(**FAST, rounds=1), text, model="text-bilstm", model_options={"width": 8})
    assert result.metrics["tasks"] == 8


def test_word_vectors_of_related_words_are_similar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fewer.data import text
    from fewer.data.text import compute_word_vectors

    monkeypatch.setenv("FEWER_CACHE", str(tmp_path))
    rng = np.random.default_rng(0)
    topics = rng.integers(2, size=400)
    rows = 2 + 8 * topics[:, None] + rng.integers(8, size=(400, 6))
    rows[:, 5] = rng.integers(2, size=400)  # padding or an unknown word
    vectors = compute_word_vectors(rows, 18, 4)
    assert vectors.shape == (18, 4) and float(vectors[:2].abs().max()) == 0
    similarity = F.normalize(vectors[2:], dim=1) @ F.normalize(vectors[2:], dim=1).T
    assert float(similarity[:8, :8].mean()) > float(similarity[:8, 8:].mean()) + 0.5
    assert torch.equal(vectors, text._factorize_ppmi(rows[::-1].copy(), 18, 4))
    with pytest.raises(fewer.errors.DataError, match="too small for vectors"):
        compute_word_vectors(rows, 18, 18)
    with monkeypatch.context() as context:
        context.delattr(text, "_factorize_ppmi")
        assert torch.equal(vectors, compute_word_vectors(rows, 18, 4))  # from the cache
    assert compute_word_vectors(rows, 18, 3).shape == (18, 3) and len(list(tmp_path.glob("vectors-*[0-9a-f]"))) == 2


def test_methods_and_data_that_do_not_match_are_rejected(data: ArrayData) -> None:
    with pytest.raises(SettingError, match="split=BASE/VALIDATION/NOVEL"):
        fewer.run("f2l", "digits", rounds=1)
    with pytest.raises(SettingError, match="novel classes, which fedavg cannot predict"):
        fewer.run("fedavg", data, model=net, rounds=1)
    with pytest.raises(SettingError, match="split by classes"):
        make_data(validation=0.1)
    with pytest.raises(SettingError, match="split and unseen"):
        fewer.data.load("digits", data_options={"split": "4/3/3", "unseen_classes": "1"})


def test_the_command_line_runs_f2l_and_warns_about_shot_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewer.runs.engine._WARNED", set())
    args = (
        "--data",
        "digits",
        "--data-option",
        "split=4/3/3",
        "--clients",
        "3",
        "--partition",
        "iid",
        "--rounds",
        "1",
    )
    options = ("-o", "way=3", "-o", "tasks=1", "-o", "test_tasks=3", "--out", str(tmp_path / "run"))
    output = call("run", "f2l", *args, *options).stdout  # writes the report, too
    assert "Mean over 3 tasks" in output and "deploy" not in output
    inspected = call("data", "inspect", *args[1:8], "--out", tmp_path / "pictures")
    assert "classes                 4" in inspected.stdout and (tmp_path / "pictures/digits-examples.png").exists()
    assert len(caplog.messages) == 1 and "mutual information within a class is 0" in caplog.text
    # The server model has the base classes.
    assert fewer.open_run(tmp_path / "run").model(torch.zeros(1, 1, 8, 8)).shape == (1, 4)
