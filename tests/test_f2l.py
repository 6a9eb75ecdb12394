"""F2L against its formulas, its baselines, and data whose classes are base, validation and novel ones."""

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
from fewer.data.episodes import Episode, by_class, episode
from fewer.errors import SettingError
from fewer.learning import adapt
from fewer.learning.adapt import learnable, meta_gradient, meta_gradients
from fewer.methods import Method
from fewer.methods.f2l import CLIENT, F2L, distillation, mutual_information
from fewer.methods.fedfsl import FedFSL
from fewer.methods.fewshot import FewShot, logistic_regression
from fewer.methods.fl_maml import FLMAML, LocalMAML
from fewer.methods.fl_proto import FLProto, LocalProto
from fewer.models import Split, Weights
from fewer.models.sequences import MLP
from fewer.models.sets import SetEncoder
from fewer.runtime import Clients, Unable
from fewer.runtime.store import Store, folder_of
from fewer.wire import decode, message
from tests.test_cli import call

torch.set_num_threads(1)

WAY, SHOT, QUERIES, FEATURES = 3, 2, 2, 8
BASE, VALIDATION, NOVEL = 6, 4, 5
FAST: dict[str, Any] = {"way": WAY, "shot": SHOT, "queries": QUERIES, "tasks": 2, "test_tasks": 8, "validate_every": 2}


def clouds(spread: float = 0.4, per_class: int = 48, lean: float = 0.0) -> RawDataset:
    """Points about a center for each class; all classes are alike in two directions, which must be unlearned."""
    draw = np.random.default_rng(0)
    classes = BASE + VALIDATION + NOVEL
    centers = draw.normal(0, 1, (classes, 6)).astype(np.float32)
    y = np.repeat(np.arange(classes), per_class)
    x = centers[y] + spread * draw.normal(0, 1, (len(y), 6)).astype(np.float32)
    noise = (3 + lean) * draw.normal(0, 1, (len(y), 2)).astype(np.float32)
    return RawDataset(np.concatenate([x, noise], 1).astype(np.float32), y, split=(BASE, VALIDATION, NOVEL))


def cloud_data(clients: int = 4, **settings: Any) -> ArrayData:
    return federate(clouds(), clients=clients, partition="iid", name="clouds", **settings)


@pytest.fixture(scope="module")
def data() -> ArrayData:
    return cloud_data()


def net() -> MLP:
    return MLP((8,), BASE, hidden=FEATURES)


def run(method: Method, data: Data, **settings: Any) -> Any:
    return fewer.run(method, data, model=net, evaluate_every=method.rounds, **settings)


# --- the losses, as the paper writes them -----------------------------------------------------------------------


def literal_mutual_information(h_phi: Tensor, h_psi: Tensor, p_psi: Tensor, y: list[int], across: bool) -> float:
    """Eqs 9, 10 and 13 term by term."""
    count = len(y)
    total = 0.0
    for j in range(count):
        same = [k for k in range(count) if y[k] == y[j]]
        for i in same:
            weight = float(p_psi[i, y[j]]) / sum(float(p_psi[k, y[j]]) for k in same)

            def term(k: int, i: int = i) -> float:
                one, two = h_phi[i] / h_phi[i].norm(), h_psi[k] / h_psi[k].norm()
                return math.exp(-float((one - two).square().sum()) / 2)

            near = range(count) if across else [k for k in range(count) if y[k] == y[i]]
            total += weight * math.log(term(j) / sum(term(k) for k in near))
    return -total / count


def literal_distillation(z_psi: Tensor, z_phi: Tensor, y: list[int]) -> float:
    """Eqs 16 to 19 term by term."""
    total = 0.0
    for i, own in enumerate(y):
        ratio = max(math.exp(float(z_phi[i, c])) for c in range(z_phi.shape[1]) if c != own)
        temperature = 1 / (1 + math.exp(-ratio / math.exp(float(z_phi[i, own]))))

        def share(z: Tensor, c: int, i: int = i, temperature: float = temperature) -> float:
            return math.exp(float(z[i, c]) / temperature) / sum(
                math.exp(float(z[i, k]) / temperature) for k in range(z.shape[1])
            )

        for c in range(z_phi.shape[1]):
            total -= share(z_phi, c) * math.log(share(z_psi, c))
    return total / len(y)


def tensors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("across", [False, True])
def test_mutual_information_is_the_paper_s_double_sum(across: bool) -> None:
    y = [0, 1, 2, 0, 1, 2, 2]  # classes of different size
    server_model, client_model, sure = tensors(7, 5), tensors(7, 5, seed=1), tensors(7, 3, seed=2).softmax(1)
    found = mutual_information(server_model, client_model, sure, torch.tensor(y), across)
    assert float(found) == pytest.approx(
        literal_mutual_information(server_model, client_model, sure, y, across), rel=1e-10
    )


def test_one_sample_of_a_class_has_no_mutual_information_within_it_but_has_across() -> None:
    server_model = tensors(4, 5).requires_grad_()
    client_model, sure, y = tensors(4, 5, seed=1), tensors(4, 4, seed=2).softmax(1), torch.arange(4)
    within = mutual_information(server_model, client_model, sure, y)
    assert float(within) == pytest.approx(0, abs=1e-12)
    assert float(torch.autograd.grad(within, server_model)[0].abs().max()) < 1e-12
    across = mutual_information(server_model, client_model, sure, y, across=True)
    assert float(torch.autograd.grad(across, server_model)[0].abs().max()) > 1e-3
    (note,) = F2L(shot=1).notes()
    assert "mi = across" in note
    for fine in ({"mi_scope": "across"}, {"shot": 5}, {"mi_weight": 0}, {"learn_from": "task"}):
        assert not F2L(**{"shot": 1, **fine}).notes()


def test_distillation_is_the_paper_s_double_sum() -> None:
    client_model, server_model, y = tensors(6, 4), tensors(6, 4, seed=1), [0, 3, 1, 2, 2, 0]
    found = distillation(client_model, server_model, torch.tensor(y))
    assert float(found) == pytest.approx(literal_distillation(client_model, server_model, y), rel=1e-10)


def test_a_server_that_is_far_off_does_not_break_distillation() -> None:
    server_model = torch.tensor([[500.0, -500.0], [-500.0, 500.0]])
    assert torch.isfinite(distillation(torch.zeros(2, 2), server_model, torch.tensor([1, 1])))


# --- the client model -------------------------------------------------------------------------------------------


def set_encoder(context: int, heads: int = 4, transductive: bool = False) -> SetEncoder:
    """With random weights everywhere: it begins with zeros in some places."""
    torch.manual_seed(context)
    encoder = SetEncoder(FEATURES, context, heads, drop=0.0, transductive=transductive).double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return encoder


def test_at_first_the_client_model_only_normalizes() -> None:
    x = tensors(7, FEATURES).float()
    assert torch.allclose(SetEncoder(FEATURES, context=5, drop=0.0)(x), F.layer_norm(x, (FEATURES,)), atol=1e-4)


def test_queries_see_the_support_and_themselves_and_no_order() -> None:
    encoder = set_encoder(6)
    support, queries = tensors(6, FEATURES), tensors(4, FEATURES, seed=1)
    together = encoder(torch.cat([support, queries]))
    assert torch.allclose(together[:6], encoder(support))  # the support does not see queries
    for number, query in enumerate(queries):
        alone = encoder(torch.cat([support, query[None]]))[6]
        assert torch.allclose(together[6 + number], alone)
    mixed = torch.randperm(6)
    assert torch.allclose(encoder(torch.cat([support[mixed], queries]))[6:], together[6:])
    other = encoder(torch.cat([support + 1, queries]))
    assert not torch.allclose(other[6:], together[6:], atol=1e-3)
    free = set_encoder(6, transductive=True)
    assert not torch.allclose(free(torch.cat([support, queries]))[6:], together[6:], atol=1e-3)


def test_attention_is_that_of_torch() -> None:
    encoder = set_encoder(3, heads=2)
    theirs = nn.TransformerEncoderLayer(FEATURES, 2, 2 * FEATURES, 0.0, batch_first=True, dtype=torch.float64)
    own = encoder.state_dict()
    names = {
        "self_attn.in_proj_weight": "look.weight",
        "self_attn.in_proj_bias": "look.bias",
        "self_attn.out_proj.weight": "gather.weight",
        "self_attn.out_proj.bias": "gather.bias",
        "linear1.weight": "think.0.weight",
        "linear1.bias": "think.0.bias",
        "linear2.weight": "think.3.weight",
        "linear2.bias": "think.3.bias",
        "norm1.weight": "first.weight",
        "norm1.bias": "first.bias",
        "norm2.weight": "second.weight",
        "norm2.bias": "second.bias",
    }
    theirs.load_state_dict({name: own[mine] for name, mine in names.items()})
    x = tensors(5, FEATURES)
    hidden = torch.tensor([[False] * 3 + [row != 3, row != 4] for row in range(5)])
    assert torch.allclose(encoder(x), theirs(x[None], src_mask=hidden)[0], atol=1e-10)


def client_case() -> tuple[Split, Weights, list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], Any]:
    client_model = Split(set_encoder(6, heads=2), FEATURES, 3).double()
    support, queries = tensors(6, FEATURES), tensors(6, FEATURES, seed=1)
    y, teacher = torch.tensor([0, 0, 1, 1, 2, 2]), tensors(6, 3, seed=3)

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        mine = scores[6:]
        return 0.3 * F.cross_entropy(mine, labels) + 0.7 * distillation(mine, teacher, labels)

    return client_model, learnable(client_model), [(support, y)], (torch.cat([support, queries]), y), loss


@pytest.mark.parametrize("exact", [True, False])
def test_the_meta_gradient_of_the_client_model_agrees_with_finite_differences(exact: bool) -> None:
    client_model, psi, support, query, loss = client_case()
    found = meta_gradient(client_model, psi, support, query, 0.3, not exact, loss)

    def after(psi: Weights) -> float:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in psi.items()}
        inner = F.cross_entropy(functional_call(client_model, leaves, (support[0][0],)), support[0][1])
        slopes = torch.autograd.grad(inner, list(leaves.values()))
        tuned = {name: leaf - 0.3 * slope for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)}
        return float(loss(functional_call(client_model, tuned, (query[0],)), query[1]))

    way = {name: torch.randn_like(tensor) for name, tensor in psi.items()}
    small = 1e-6
    ends = [after({name: psi[name] + far * way[name] for name in psi}) for far in (small, -small)]
    along = sum(float((found.weights[name] * way[name]).sum()) for name in way)
    close = along == pytest.approx((ends[0] - ends[1]) / (2 * small), rel=1e-5, abs=1e-7)
    assert close == exact


# --- a step of training -----------------------------------------------------------------------------------------


def one_task(data: ArrayData, seed: int = 0) -> Episode:
    return episode(data.client(0).train, WAY, SHOT, QUERIES, torch.Generator().manual_seed(seed))


def make_client(data: Data, folder: Path, id: int = 0, round: int = 1) -> Any:
    from fewer.methods.base import ContextFactory
    from fewer.models import Task

    place = ContextFactory(data, Task((8,), BASE, net), 0, folder)
    return place(id, round)


@pytest.mark.parametrize(
    ("order", "learn_from", "zero_head", "client_lr"),
    [("exact", "support", False, None), ("first", "support", False, 0.0005), ("exact", "task", True, 0.0005)],
)
def test_one_task_is_one_step_of_each_model_by_the_paper_s_equations(
    data: ArrayData, tmp_path: Path, order: str, learn_from: str, zero_head: bool, client_lr: float | None
) -> None:
    """Plain autograd through Eqs 3 to 20, in the order of Algorithm 1; φ moves by gradient descent here, ψ by Adam."""
    settings = {
        "dropout": 0.0,
        "order": order,
        "learn_from": learn_from,
        "weight_decay": 0.01,
        "fine_tune_lr": 0.2,
        "fine_tune_steps": 2,
    }
    settings |= {"mi_weight": 0.3, "kd_weight": 0.8, "mi_scope": "across", "mi_temperature": 0.2}
    method = F2L(**FAST | settings, lr=0.002, client_lr=client_lr, zero_head=zero_head)
    client = make_client(data, tmp_path)
    pair = method.prepare(client, client.initial(), kept=False)
    torch.manual_seed(4)
    pair.own["weights"] = {n: t + 0.1 * torch.randn_like(t) for n, t in pair.own["weights"].items()}
    task = one_task(data)
    phi = {name: tensor.clone().requires_grad_() for name, tensor in pair.server_model.named_parameters()}
    psi = {name: tensor.clone().requires_grad_() for name, tensor in pair.own["weights"].items()}

    def encoded(x: Tensor) -> Tensor:
        return F.relu(F.linear(x, phi["encoder.1.weight"], phi["encoder.1.bias"]))

    support = encoded(task.support_x)
    queries = encoded(task.query_x)
    teacher = F.linear(queries, phi["head.weight"], phi["head.bias"])[:, task.classes].detach()
    tuned = psi
    for _ in range(2):
        inner = F.cross_entropy(functional_call(pair.client_model, tuned, (support.detach(),)), task.support_y)
        slopes = torch.autograd.grad(inner, list(tuned.values()), create_graph=True)
        if order == "first":
            slopes = tuple(slope.detach() for slope in slopes)
        tuned = {name: tuned[name] - 0.2 * slope for name, slope in zip(tuned, slopes, strict=True)}
    both = torch.cat([support.detach(), queries.detach()])
    scores = functional_call(pair.client_model, tuned, (both,))[WAY * SHOT :]
    client_loss = 0.2 * F.cross_entropy(scores, task.query_y) + 0.8 * distillation(scores, teacher, task.query_y)
    rows = WAY * SHOT if learn_from == "support" else WAY * (SHOT + QUERIES)
    seen, y = torch.cat([support, queries])[:rows], torch.cat([task.support_y, task.query_y])[:rows]
    fixed = {name: tensor.detach() for name, tensor in tuned.items()}
    inside = {name.removeprefix("encoder."): tensor for name, tensor in fixed.items() if "encoder." in name}
    theirs = functional_call(pair.client_model.encoder, inside, (seen,))  # h_ψ, which depends on φ too
    sure = F.linear(theirs, fixed["head.weight"], fixed["head.bias"]).softmax(1).detach()
    base = F.cross_entropy(F.linear(seen, phi["head.weight"], phi["head.bias"]), task.classes[y])
    server_loss = 0.7 * base + 0.3 * mutual_information(seen, theirs, sure, y, True, 0.2)
    method.learn_task(pair, torch.optim.SGD(pair.server_model.parameters(), lr=1.0), task)
    now = dict(pair.server_model.named_parameters())
    for name, slope in zip(phi, torch.autograd.grad(server_loss, list(phi.values())), strict=True):
        assert torch.allclose(phi[name] - now[name], slope, atol=1e-6), name
    for name, slope in zip(psi, torch.autograd.grad(client_loss, list(psi.values())), strict=True):
        if zero_head and name.startswith("head."):
            assert torch.equal(pair.own["weights"][name], psi[name])  # it stays
            continue
        whole = slope + 0.01 * psi[name]  # with weight decay
        assert torch.allclose(pair.own["first"][name], 0.1 * whole, atol=1e-6), name
        after = psi[name] - (client_lr or 0.002) * whole / (whole.abs() + 1e-8)  # Adam's first step
        assert torch.allclose(pair.own["weights"][name], after, atol=2e-5), name
    assert pair.own["step"] == 1


def test_over_all_orders_of_classes_the_head_s_meta_gradient_is_0_and_all_else_is_as_in_one_order() -> None:
    """So a head of zeros may stay."""
    client_model, psi, [(support, y)], (both, _), _ = client_case()
    psi = {name: tensor * (not name.startswith("head.")) for name, tensor in psi.items()}
    teacher = tensors(6, 3, seed=3)
    found = []
    for order in itertools.permutations(range(3)):
        places = torch.tensor(order)[y]

        def loss(scores: Tensor, labels: Tensor, back: tuple[int, ...] = order) -> Tensor:
            mine, apart = scores[6:], (scores[6:].softmax(1)[:, back] - teacher.softmax(1)).abs().mean()
            return F.cross_entropy(mine, labels) + distillation(mine[:, back], teacher, y) + apart

        found.append(
            meta_gradient(client_model, psi, [(support, places)] * 2, (both, places), 0.3, False, loss).weights
        )
    for name in psi:
        slopes = torch.stack([one[name] for one in found])
        if name.startswith("head."):
            assert float(slopes.mean(0).abs().max()) < 1e-12
            assert name == "head.bias" or float(slopes.abs().max()) > 1e-3  # what one order alone would do
        else:
            assert torch.allclose(slopes, slopes[:1], atol=1e-12), name


@pytest.mark.parametrize("kind", [F2L, FLMAML, FedFSL])
@pytest.mark.parametrize("zero_head", [True, False])
def test_a_head_of_zeros_stays_where_it_is_to(
    kind: type[FewShot], zero_head: bool, data: ArrayData, tmp_path: Path
) -> None:
    client = make_client(data, tmp_path)
    method = kind(**FAST | {"fine_tune_lr": 0.3, "zero_head": zero_head})
    learned = method.learn(client, method.begin(client.task, 0))
    own = client.store.get("own")["weights"] if kind is F2L else learned
    assert (float(own["head.weight"].abs().max()) == 0) == zero_head


def test_several_meta_gradients_take_the_inner_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client_model, psi, support, query, loss = client_case()

    def other(scores: Tensor, labels: Tensor) -> Tensor:
        return scores[6:].square().mean()

    alone = [meta_gradient(client_model, psi, support * 2, query, 0.3, False, one) for one in (loss, other)]
    taken: list[int] = []
    true = adapt._slopes

    def spy(*given: Any, **more: Any) -> Any:
        taken.append(1)
        return true(*given, **more)

    monkeypatch.setattr(adapt, "_slopes", spy)
    together = meta_gradients(client_model, psi, support * 2, query, 0.3, False, [loss, other])
    assert len(taken) == 2
    for one, same in zip(alone, together, strict=True):
        assert one.loss == same.loss
        for part in ("weights", "rates"):
            assert all(torch.equal(tensor, getattr(same, part)[name]) for name, tensor in getattr(one, part).items())


def test_fl_maml_s_first_step_has_weight_decay(
    data: ArrayData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(data, tmp_path)
    method = FLMAML(**FAST | {"tasks": 1, "weight_decay": 0.5, "lr": 0.01, "zero_head": False})
    start = {name: tensor + 0.1 for name, tensor in method.begin(client.task, 0).items()}
    nothing = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    monkeypatch.setattr(FLMAML, "slopes", lambda *given: nothing)
    for name, tensor in method.learn(client, start).items():
        assert torch.allclose(tensor, start[name] - 0.01 * start[name].sign(), atol=1e-5), name


@pytest.mark.parametrize("kind", [F2L, FLMAML])
def test_a_novel_task_gets_its_own_number_of_steps(
    kind: type[FewShot], data: ArrayData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def count(net: nn.Module, weights: Weights, batches: list[Any], lr: float) -> Weights:
        taken.append(len(batches))
        return dict(weights)

    monkeypatch.setattr(f"{kind.__module__}.adapted", count)
    client = make_client(data, tmp_path)
    for steps in (None, 5):
        method = kind(**FAST | {"fine_tune_steps": 2, "adapt_steps": steps})
        method.answer(method.prepare(client, method.begin(client.task, 0), kept=False), one_task(data))
    assert taken == [2, 5]


@pytest.mark.parametrize("kind", [F2L, FLMAML])
def test_a_task_leaves_no_trace_in_what_answers_the_next(kind: type[FewShot], data: ArrayData, tmp_path: Path) -> None:
    client = make_client(data, tmp_path)
    method = kind(**FAST | {"fine_tune_lr": 1.0})
    again, fresh = (method.prepare(client, method.begin(client.task, 0), kept=False) for _ in range(2))
    method.answer(again, one_task(data, seed=1))
    for name, tensor in method.answer(again, one_task(data)).items():
        assert torch.equal(tensor, method.answer(fresh, one_task(data))[name]), name
    start = again.own["weights"] if kind is F2L else dict(again.named_parameters())
    assert float(start["head.weight"].abs().max()) == 0


@pytest.mark.parametrize("kind", [F2L, LocalMAML, LocalProto])
def test_a_client_whose_own_model_diverges_says_so_and_keeps_the_one_it_had(
    kind: type[FewShot], data: ArrayData, tmp_path: Path
) -> None:
    client = make_client(data, tmp_path)
    method: Any = kind(**FAST | {"lr": 1e30})
    with pytest.raises(Unable, match=r"its training diverged \(rate 1e\+30\)"):
        method.learn(client, method.begin(client.task, 0)) if kind is F2L else method.practise(client)
    assert client.store.get("own") is None


def test_what_clients_learn_is_averaged_with_equal_shares(data: ArrayData, tmp_path: Path) -> None:
    method = F2L(**FAST | {"rounds": 1})
    result = run(method, data, out=tmp_path / "run")
    answers = []
    for number in range(4):
        client = make_client(data, tmp_path / "again", number)
        from fewer.runtime.streams import global_streams

        with global_streams(0, 1, number, "train"):
            answers.append(method.learn(client, client.initial()))
    for name, tensor in result.state.model.items():
        mean = torch.stack([answer[name] for answer in answers]).double().mean(0)
        assert torch.allclose(tensor.double(), mean, atol=1e-6)


# --- ψ never leaves ---------------------------------------------------------------------------------------------


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every message that is encoded, questions and answers alike."""
    seen: list[bytes] = []
    true = message.encode

    def spy(kind: str, fields: Any) -> bytes:
        seen.append(true(kind, fields))
        return seen[-1]

    monkeypatch.setattr("fewer.runtime.handlers.encode", spy)
    monkeypatch.setattr("fewer.runtime.clients.encode", spy)
    return seen


def leaves_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value.values() for leaf in leaves_of(part)] if isinstance(value, dict) else []


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_client_model_is_in_no_message(
    data: ArrayData, tmp_path: Path, messages: list[bytes], decoupled: bool
) -> None:
    """Its every weight and moment, of every client and round, is sought in every message that is encoded.

    Without decoupling it is averaged, so it must be found: the search works.
    """
    kept: list[Tensor] = []

    class Watched(F2L):
        def learn(self, client: Any, model: Weights) -> Weights:
            sent = super().learn(client, model)
            own = client.store.get("own") or {n: t for n, t in sent.items() if n.startswith(CLIENT)}
            kept.extend(leaves_of(own))
            return sent

    result = run(Watched(**FAST | {"rounds": 3, "decoupled": decoupled}), data, out=tmp_path / "run")
    assert len(messages) >= 40 and len(kept) >= 3 * 4 * 14
    private = {tensor.shape for tensor in kept} - {
        tensor.shape for tensor in make_client(data, tmp_path).initial().values()
    }
    found = 0
    sent = {name for blob in messages for field in decode(blob)[1].values() for name in _names(field)}
    for blob in messages:
        for tensor in kept:
            if tensor.numel() >= FEATURES and float(tensor.abs().sum()) > 0:
                found += blob.find(tensor.float().numpy().tobytes()[:32]) >= 0
        for field in decode(blob)[1].values():
            found += sum(leaf.shape in private for leaf in leaves_of(field))
    if decoupled:
        assert found == 0
        assert sent == {*make_client(data, tmp_path).initial(), *F2L.predictors}
        assert not any("own" in file.name for file in (tmp_path / "run").glob("*") if file.is_file())
        for number in range(4):
            own: Any = Store(folder_of(tmp_path / "run/clients", number), 3).get("own")
            assert own["step"] == 6
    else:
        assert found > 0 and any(name.startswith(CLIENT) for name in sent)
        assert any(name.startswith(CLIENT) for name in result.state.model)


def _names(field: Any) -> list[str]:
    return list(field) if isinstance(field, dict) else []


# --- behavior --------------------------------------------------------------------------------------------------

BASELINES: list[type[FewShot]] = [FLMAML, FLProto, FedFSL, LocalMAML, LocalProto]


@pytest.mark.parametrize("kind", [F2L, *BASELINES])
def test_every_method_learns_to_tell_novel_classes_apart(kind: type[FewShot], data: ArrayData) -> None:
    settings = {**FAST, "rounds": 6, "tasks": 8, "lr": 0.01, "test_tasks": 40}
    if "fine_lr" in kind.model_fields:
        settings["fine_lr"] = 0.3
    result = run(kind(**settings), data)
    assert result.accuracy > 0.55, result.accuracy  # chance is a third
    assert result.scores["tasks"] == 40 and result.scores["absent"] == 0
    groups = result.scores["groups"]
    assert len(groups) == 40 and sum(groups) / 40 == pytest.approx(result.accuracy)
    assert result.scores["chosen"] in (2, 4, 6) and set(result.scores["clients"]) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("kind", [F2L, FLMAML, LocalProto])
def test_a_resumed_run_ends_as_an_unbroken_one_and_a_pool_as_one_process(
    kind: type[FewShot], data: ArrayData, tmp_path: Path
) -> None:
    method = kind(**FAST | {"rounds": 4, "validate_every": 1})
    whole = run(method, data, out=tmp_path / "whole")
    pool = run(method, data, runtime="pool", workers=2)

    class Stop(Exception):
        pass

    class Breaks:
        def begin(self, method: str, done: int, rounds: int) -> None: ...

        def answer(self, round: int, done: int, asked: int) -> None:
            if round == 3 and done == 3:
                raise Stop

        def round(self, figures: Any) -> None: ...

    with pytest.raises(Stop):
        run(method, data, out=tmp_path / "broken", progress=Breaks())
    again = fewer.resume(tmp_path / "broken", method=method, data=data, model=net)
    for other in (pool, again):
        assert other.scores["accuracy"] == whole.scores["accuracy"]
        assert other.scores["chosen"] == whole.scores["chosen"]
        assert other.state.best.keys() == whole.state.best.keys()
        assert all(torch.equal(tensor, whole.state.best[name]) for name, tensor in other.state.best.items())


def test_the_best_model_on_validation_classes_is_judged_with_the_client_models_of_its_round(
    data: ArrayData, tmp_path: Path
) -> None:
    class Worse(F2L):
        """After round 2 all is spoilt: what is judged must be round 2."""

        def learn(self, client: Any, model: Weights) -> Weights:
            sent = super().learn(client, model)
            if client.round <= 2:
                return sent
            client.store.put(
                "own", {**client.store.get("own"), "weights": self._noise(client.store.get("own")["weights"])}
            )
            return self._noise(sent)

        def _noise(self, weights: Weights) -> Weights:
            return {name: torch.randn_like(tensor) * 3 for name, tensor in weights.items()}

    settings = FAST | {"tasks": 8, "lr": 0.01, "fine_tune_lr": 0.3, "test_tasks": 40}
    spoilt = run(Worse(**settings, rounds=4), data, out=tmp_path / "spoilt")
    two = run(F2L(**settings, rounds=2), data)
    assert two.scores["chosen"] == 0 and two.scores["validation"] is None  # there was one to choose from
    assert spoilt.scores["chosen"] == 2
    assert spoilt.scores["accuracy"] == two.scores["accuracy"]
    assert spoilt.scores["client"] == two.scores["client"] and spoilt.scores["server"] == two.scores["server"]


def test_the_reading_that_is_set_is_the_accuracy(data: ArrayData) -> None:
    client_model, server_model = (
        run(F2L(**FAST, rounds=2, predictor=reading), data).scores for reading in ("client", "server")
    )
    assert client_model["accuracy"] == client_model["client"] and server_model["accuracy"] == server_model["server"]
    assert client_model["server"] == server_model["server"]  # the same tasks, the same models


def test_tasks_are_the_same_for_all_methods_and_of_the_right_classes(data: ArrayData) -> None:
    seen: dict[str, list[tuple[Any, ...]]] = {}

    class SeenF2L(F2L):
        def answer(self, ready: Any, task: Episode) -> dict[str, Tensor]:
            seen.setdefault(self.name, []).append((*task.classes.tolist(), float(task.query_x.sum())))
            return super().answer(ready, task)

    class SeenProto(FLProto):
        def answer(self, ready: Any, task: Episode) -> dict[str, Tensor]:
            seen.setdefault(self.name, []).append((*task.classes.tolist(), float(task.query_x.sum())))
            return super().answer(ready, task)

    for kind in (SeenF2L, SeenProto):
        run(kind(**FAST | {"validate_every": 1}, rounds=2), data)
    one, two = seen.values()
    assert one == two and one[:8] == one[8:16] and len(one) == 24
    classes = [{c for *classes, _ in part for c in classes} for part in (one[:16], one[16:])]
    assert classes[0] <= set(range(BASE, BASE + VALIDATION))
    assert classes[1] <= set(range(BASE + VALIDATION, BASE + VALIDATION + NOVEL))


def test_a_trial_looks_at_validation_classes_alone(data: ArrayData) -> None:
    method, same = F2L(**FAST | {"rounds": 2, "validate_every": 1}).tuning_split(data, 0.2, 0)
    assert same is data
    scores = run(method, data).scores
    assert scores["accuracy"] == scores["validation"]


def test_where_there_is_one_model_to_choose_from_no_validation_classes_are_looked_at(
    data: ArrayData, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    true = FewShot.ask_tasks

    def spy(*given: Any, **more: Any) -> Any:
        asked.append(given[3])
        return true(*given, **more)

    monkeypatch.setattr(FewShot, "ask_tasks", spy)
    for every, wanted in ((2, ["test"]), (1, ["validation", "validation", "test"])):
        asked.clear()
        run(FLProto(**FAST | {"validate_every": every}, rounds=2), data)
        assert asked == wanted


def test_a_client_that_had_nothing_of_its_own_when_the_model_was_chosen_has_nothing_then(
    data: ArrayData, tmp_path: Path
) -> None:
    method, client = F2L(**FAST), make_client(data, tmp_path)
    method.keep(client)
    client.store.put("own", {"later": torch.ones(1)})
    assert method.own(client, kept=True) is None and method.own(client, kept=False) is not None


def test_a_choice_that_clients_missed_is_not_taken_for_one_that_nobody_can_make(
    data: ArrayData, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = Clients._fate
    monkeypatch.setattr(
        Clients, "_fate", lambda self, client, name: "drop" if name == "answer_tasks" else true(self, client, name)
    )
    with pytest.raises(fewer.errors.QuorumLost, match="0 of 4 clients answered.*4 dropped"):
        run(FLProto(**FAST, rounds=4), data)


def test_what_a_row_says_it_was_judged_on_is_tasks(tmp_path: Path) -> None:
    few: dict[str, Any] = {
        "data": "digits",
        "data_options": {"split": "4/3/3"},
        "clients": 3,
        "partition": "iid",
        "rounds": 1,
    }
    given = {**few, "method_options": {"way": 3, "queries": 2, "tasks": 1, "test_tasks": 6}}
    found = fewer.compare(["fl-proto", "local-proto"], seeds=2, out=tmp_path, **given)
    for row in found.rows:
        assert (row.groups, row.units) == (12, "tasks") and [len(one) for one in row.judged] == [6, 6]


def test_a_client_with_too_few_classes_is_skipped_with_a_word(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = clouds()
    owner = np.arange(len(raw.y)) % 3
    owner[(raw.y < BASE) & (raw.y >= WAY - 1) & (owner == 2)] = 0  # client 2 has two base classes
    lame = federate(RawDataset(raw.x, raw.y, client_ids=owner, split=raw.split), partition="natural", name="lame")
    monkeypatch.setattr("fewer.runs.engine._TOLD", set())
    result = run(F2L(**FAST, rounds=2), lame)
    assert result.scores["absent"] == 1 and result.scores["tasks"] == 9
    assert caplog.messages == [
        "f2l: skipped: client 2: base: 2 classes have 2 + 2 samples, 3 are needed (3-way 2-shot)"
    ]
    with pytest.raises(fewer.errors.QuorumLost, match="3 are needed"):
        run(F2L(**FAST | {"shot": 40}, rounds=1), lame)


def test_where_nobody_can_choose_the_last_model_is_taken_and_where_nobody_can_be_judged_that_is_told() -> None:
    raw = clouds()
    few = federate(RawDataset(raw.x, raw.y, split=(BASE, 2, VALIDATION - 2 + NOVEL)), clients=2, partition="iid")
    assert run(FLProto(**FAST, rounds=4), few).scores["chosen"] == 4
    none = federate(RawDataset(raw.x, raw.y, split=(BASE, VALIDATION + NOVEL - 2, 2)), clients=2, partition="iid")
    with pytest.raises(SettingError, match="no client has 3 novel classes with 2 \\+ 2 samples"):
        run(FLProto(**FAST, rounds=1), none)


def test_without_adversary_fedfsl_is_fl_maml_and_with_it_head_and_encoder_pull_apart(
    data: ArrayData, tmp_path: Path
) -> None:
    settings = FAST | {"rounds": 2, "fine_tune_lr": 0.3}
    for zero in (True, False):
        plain, none = (
            run(FLMAML(**settings, zero_head=zero), data),
            run(FedFSL(**settings, zero_head=zero, adversarial_weight=0), data),
        )
        assert all(torch.equal(tensor, none.state.model[name]) for name, tensor in plain.state.model.items())
    method = FedFSL(**settings, adversarial_weight=0.7, first_order=False, zero_head=False)
    client = make_client(data, tmp_path)
    received = method.begin(client.task, 0)
    from fewer.methods.fewshot import small_net

    made = small_net(client, received, WAY)
    torch.manual_seed(0)
    theta = {name: tensor + 0.3 * torch.randn_like(tensor) for name, tensor in learnable(made).items()}
    task = one_task(data)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}

    def tuned(weights: Weights) -> Weights:
        inner = F.cross_entropy(functional_call(made, weights, (task.support_x,)), task.support_y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        return {name: weights[name] - 0.3 * slope for name, slope in zip(weights, slopes, strict=True)}

    ours = functional_call(made, tuned(leaves), (task.query_x,))
    start = {name: received[name].clone().requires_grad_() for name in leaves}
    theirs = functional_call(made, tuned(start), (task.query_x,)).softmax(1).detach()
    apart = 0.7 * (ours.softmax(1) - theirs).abs().mean()
    right = F.cross_entropy(ours, task.query_y)
    found = method.slopes(made, theta, received, task)
    alone = FedFSL(**settings, adversarial_weight=0.7, zero_head=True).slopes(
        made, theta, received, task
    )  # without the head
    assert alone.keys() == {name for name in found if name.startswith("encoder.")}
    assert all(torch.equal(slope, found[name]) for name, slope in alone.items())
    for part, loss in (("encoder.", right + apart), ("head.", right - apart)):
        names = [name for name in leaves if name.startswith(part)]
        grads = torch.autograd.grad(loss, [leaves[name] for name in names], retain_graph=True)
        for name, grad in zip(names, grads, strict=True):
            assert torch.allclose(found[name], grad, atol=1e-6), name


def test_what_is_sent_is_the_encoder_alone_or_both_parts(data: ArrayData) -> None:
    """Bytes by arithmetic: 8 × 8 + 8 weights of the encoder, and a head of 8 × N + N or 8 × |C_b| + |C_b|."""
    encoder = 8 * FEATURES + FEATURES
    for kind, head in ((FLProto, 0), (FLMAML, FEATURES * WAY + WAY), (F2L, FEATURES * BASE + BASE)):
        state = kind(**FAST).init(make_client(data, Path("/nowhere")).task, 0)
        assert sum(tensor.numel() for tensor in state.model.values()) == encoder + head
    local = run(LocalProto(**FAST, rounds=1), data)
    assert not local.state.model and local.scores["up"] < 4 * 4 * 2000


def test_logistic_regression_tells_clouds_apart() -> None:
    y = torch.arange(3).repeat(4)
    features = F.one_hot(y, 3) * 3.0 + 0.1 * tensors(12, 3).float()
    assert torch.equal(logistic_regression(features[:6], y[:6], features[6:]), y[6:])


def test_logistic_regression_is_that_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    draw = torch.Generator().manual_seed(0)
    support, queries, y = (
        torch.randn(12, 6, generator=draw),
        torch.randn(60, 6, generator=draw),
        torch.arange(3).repeat(4),
    )
    theirs = LogisticRegression(tol=1e-8).fit(F.normalize(support, dim=1), y).predict(F.normalize(queries, dim=1))
    assert (logistic_regression(support, y, queries).numpy() == theirs).mean() > 0.97


# --- data -------------------------------------------------------------------------------------------------------


def test_classes_are_divided_and_each_client_has_its_part_of_all_three(data: ArrayData) -> None:
    assert data.novel and data.classes == BASE and len(data.test) == NOVEL * 48
    groups = (0, BASE), (BASE, BASE + VALIDATION), (BASE + VALIDATION, BASE + VALIDATION + NOVEL)
    seen: list[float] = []
    for number in range(4):
        for samples, (low, high) in zip(data.client(number), groups, strict=True):
            assert len(samples) and low <= int(samples.labels.min()) and int(samples.labels.max()) < high
            seen += samples.slice(0, len(samples))[0][:, 0].tolist()
    raw = clouds()
    assert sorted(seen) == sorted(np.asarray(raw.x)[:, 0].tolist())  # all of them, once


def test_a_split_by_numbers_or_by_names_pools_and_renumbers() -> None:
    x = np.arange(12, dtype=np.float32)[:, None]
    names = ("b.one", "a.one", "b.two", "c.one")
    raw = RawDataset(x[:8], np.arange(8) % 4, (x[8:], np.arange(4)), names=names)
    split = by_class(raw, "b/c/a", "toy")
    assert split.names == ("b.one", "b.two", "c.one", "a.one") and split.split == (2, 1, 1) and split.test is None
    assert split.y.tolist() == [0, 3, 1, 2] * 3 and np.asarray(split.x).ravel().tolist() == list(range(12))
    numbers = by_class(raw, "1/1/1", "toy")  # the last class is dropped
    assert numbers.y.tolist() == [0, 1, 2] * 3 and numbers.names == names[:3]
    texts = by_class(RawDataset([f"text {n}" for n in range(4)], np.arange(4)), "2/1/1", "toy")
    assert texts.x == ["text 0", "text 1", "text 2", "text 3"]
    for wrong, reason in (
        ("3/1/1", "there are 4"),
        ("0/2/2", "1 base class or more"),
        ("2/2", "allowed"),
        ("b/b/a", "two share one"),
        ("b/x/a", "no classes"),
    ):
        with pytest.raises(SettingError, match=reason):
            by_class(raw, wrong, "toy")


def test_words_are_known_from_training_text_of_base_classes_alone() -> None:
    texts = [f"common base{c}" if c < 2 else f"common secret{c}" for c in range(4) for _ in range(12)]
    raw = RawDataset(texts, np.repeat(np.arange(4), 12), split=(2, 1, 1))
    data = federate(raw, clients=2, partition="iid", max_length=4)
    assert set(data.tokens) == {"<pad>", "<unknown>", "common", "base0", "base1"}


def test_fc100_is_cifar100_by_superclass(tmp_path: Path) -> None:
    import pickle

    fine = np.random.default_rng(0).permutation(100)  # fine class f is in coarse class fine[f] // 5
    for part in ("train", "test"):
        labels = list(range(100))
        batch = {
            b"data": np.zeros((100, 3072), np.uint8) + np.arange(100, dtype=np.uint8)[:, None],
            b"fine_labels": labels,
            b"coarse_labels": [int(fine[f]) // 5 for f in labels],
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
    coarse = [int(fine[int(name[1:])]) // 5 for name in raw.names]
    assert set(coarse[:60]) == {1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19}
    assert set(coarse[60:80]) == {8, 11, 13, 16} and set(coarse[80:]) == {0, 7, 12, 14}
    assert all(raw.names[label] == f"f{int(image[0, 0, 0])}" for image, label in zip(raw.x, raw.y, strict=True))


@pytest.mark.parametrize("kind", [F2L, FLMAML, FedFSL, LocalMAML, FLProto])
def test_novel_classes_of_text_are_learned_of_too(kind: type[FewShot]) -> None:
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(BASE + VALIDATION + NOVEL), 16)
    texts = [" ".join([f"word{label}", *(f"w{n}" for n in draw.integers(20, size=4))]) for label in labels]
    text = federate(
        RawDataset(texts, labels, split=(BASE, VALIDATION, NOVEL)), clients=2, partition="iid", max_length=5
    )
    result = fewer.run(kind(**FAST, rounds=1), text, model="text-bilstm", model_options={"width": 8})
    assert result.scores["tasks"] == 8


def test_word_vectors_of_the_text_itself_put_words_of_one_kind_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fewer.data import text
    from fewer.data.text import own_vectors

    monkeypatch.setenv("FEWER_CACHE", str(tmp_path))
    draw = np.random.default_rng(0)
    kinds = draw.integers(2, size=400)
    rows = 2 + 8 * kinds[:, None] + draw.integers(8, size=(400, 6))
    rows[:, 5] = draw.integers(2, size=400)  # filled up, or an unknown word
    vectors = own_vectors(rows, 18, 4)
    assert vectors.shape == (18, 4) and float(vectors[:2].abs().max()) == 0
    likeness = F.normalize(vectors[2:], dim=1) @ F.normalize(vectors[2:], dim=1).T
    assert float(likeness[:8, :8].mean()) > float(likeness[:8, 8:].mean()) + 0.5
    assert torch.equal(vectors, text._own_vectors(rows[::-1].copy(), 18, 4))
    with pytest.raises(fewer.errors.DataError, match="too few"):
        own_vectors(rows, 18, 18)
    with monkeypatch.context() as patch:
        patch.delattr(text, "_own_vectors")
        assert torch.equal(vectors, own_vectors(rows, 18, 4))  # kept
    assert own_vectors(rows, 18, 3).shape == (18, 3) and len(list(tmp_path.glob("vectors-*[0-9a-f]"))) == 2


def test_methods_and_data_that_do_not_go_together_are_told_apart(data: ArrayData) -> None:
    with pytest.raises(SettingError, match="split=BASE/VALIDATION/NOVEL"):
        fewer.run("f2l", "digits", rounds=1)
    with pytest.raises(SettingError, match="novel classes, fedavg on known ones"):
        fewer.run("fedavg", data, model=net, rounds=1)
    with pytest.raises(SettingError, match="divided by classes"):
        cloud_data(validation=0.1)
    with pytest.raises(SettingError, match="split and unseen"):
        fewer.data.load("digits", data_options={"split": "4/3/3", "unseen_classes": "1"})


def test_the_command_line_runs_it_and_says_what_shot_1_means(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fewer.runs.engine._TOLD", set())
    given = (
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
    small = ("-o", "way=3", "-o", "tasks=1", "-o", "test_tasks=3", "--out", str(tmp_path / "run"))
    told = call("run", "f2l", *given, *small).stdout  # with its report
    assert "Mean over 3 tasks" in told and "deploy" not in told
    inspected = call("data", "inspect", *given[1:8], "--out", tmp_path / "pictures")
    assert "classes                 4" in inspected.stdout and (tmp_path / "pictures/digits-examples.png").exists()
    assert len(caplog.messages) == 1 and "mutual information within a class is 0" in caplog.text
    assert fewer.load(tmp_path / "run")(torch.zeros(1, 1, 8, 8)).shape == (1, 4)  # the server model: base classes
