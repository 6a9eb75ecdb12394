"""Attacks on a run, reported as metrics and as rows of images.

The attacker sees what the server sees: the global model, and synthetic data if clients send it. Scoring an attack needs
the clients' real samples, so only a simulated federation can be audited.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewer.audit.canaries import attack_canaries
from fewer.audit.distance import nearest_neighbors, typical_distance, value_range
from fewer.audit.leakage import compute_gradients, invert_features, psnr, restore_images
from fewer.audit.membership import DELTA, estimate_proportion, loss_gaps, losses, membership
from fewer.data import Data
from fewer.errors import FewerError, RunError, SettingError
from fewer.methods.capabilities import HasSyntheticData, SendsLogits, SendsStatistics
from fewer.models import load_weights
from fewer.models.split import split_net
from fewer.runs.reader import RunReader
from fewer.runs.result import Result, load_run_data, open_run
from fewer.runs.settings import settings_hash
from fewer.runtime.streams import stream

CLIENTS = 10
STEPS, STARTS = 500, 2
COLUMNS = 8
"""Images in a row, one per class."""
SHOWN_CLIENTS = 3
"""Clients whose synthetic data D̂ is shown."""
MAX_SAMPLES = 1000
"""Maximum number of members per client in membership inference; there are equally many nonmembers."""
COPY_RATIO = 0.5
"""A synthetic image closer to a real one than this fraction of the typical distance counts as a near-copy."""

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""


@dataclass(frozen=True)
class Block:
    """Rows of images aligned by column, with an optional note under each column."""

    rows: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AttackImages:
    """Blocks of images for one picture, with title and caption. `limits` are the values of black and white."""

    name: str
    title: str
    caption: str
    blocks: list[Block]
    limits: tuple[float, float]


@dataclass(frozen=True)
class Audit:
    """Results of the attacks."""

    method: str
    data: str
    rounds: int
    hash: str
    """Hash of the run's settings."""
    clients: list[int]
    """Clients whose samples were attacked."""
    metrics: dict[str, Any]
    images: list[AttackImages] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list)
    """Attacks that do not apply to this run, with the reason."""

    def as_json(self) -> dict[str, Any]:
        """Everything but the images, as plain values."""
        return {name: value for name, value in asdict(replace(self, images=[])).items() if name != "images"}


def audit(
    path: str | Path | Result,
    *,
    data: Data | None = None,
    model: Any = None,
    data_dir: Path | None = None,
    clients: int = CLIENTS,
    steps: int = STEPS,
    starts: int = STARTS,
    shadows: int = 0,
) -> Audit:
    """Attacks a run, given as its directory or as a result that has one, on the samples of up to `clients` clients.

    Pass `data` and `model` again if they were Python objects.
    The attacks are: distance of synthetic images to real ones, deep leakage from gradients, and membership inference.
    `steps` and `starts` set the steps and random starts of gradient matching. With `shadows`, the run is trained again
    this many times, with mislabeled canaries; an even number from 4 on.
    """
    if isinstance(path, Result):
        if path.folder is None:
            raise RunError("only a run with a directory can be audited: run with out=DIR")
        result, path = path, path.folder.parent
    else:
        path = Path(path)
        result = open_run(path, data=load_run_data(RunReader(path), data, data_dir), model=model)
    if not result.task.has_classes:
        raise SettingError(f"{path} is a {result.task.kind} run; the attacks need classes")
    attacked = _AttackedRun(result, RunReader(path).participants, clients)
    metrics: dict[str, Any] = {}
    images: list[AttackImages] = []
    if attacked.synthetic:
        metrics["copies"], shown = attacked.compare_to_real()
        images += [shown] if shown else []
    if attacked.has_images and attacked.nets:
        metrics["leakage"], shown = attacked.restore_from_gradients(steps, starts)
        images.append(shown)
    if attacked.sent_means:
        metrics["prototypes"], shown = attacked.invert_means(steps, starts)
        images.append(shown)
    if attacked.sent_logits:
        metrics["logits"], shown = attacked.invert_logits(steps, starts)
        images.append(shown)
    claimed = {name: result.metrics[name] for name in ("epsilon", "delta") if name in result.metrics}
    if claimed:
        metrics["claimed"] = claimed
    scores = dict(attacked.membership_scores())
    if shadows:
        scores["canaries"] = attacked.canary_scores(shadows)
    delta = claimed.get("delta", DELTA)
    metrics["membership"] = {name: asdict(membership(*pair, delta)) for name, pair in scores.items()}
    names, hash = (result.method.name, result.data.name), settings_hash(result.settings, result.method)
    notes = list(attacked.limitations())
    return Audit(*names, len(result.history), hash, attacked.clients, metrics, images, notes)


def measure_copies(path: Path, clients: int = CLIENTS) -> dict[str, Any]:
    """Compares a run's synthetic images with real ones, as `audit` does. Empty if its clients send none."""
    result = open_run(path)
    if not isinstance(result.method, HasSyntheticData):
        return {}
    return _AttackedRun(result, RunReader(path).participants, clients).compare_to_real()[0]


class _AttackedRun:
    """A run under attack."""

    def __init__(self, result: Result, participants: list[int], clients: int) -> None:
        self.result = result
        self.has_images = len(result.data.shape) == 3 and not result.data.test.is_text
        self.nets = _global_models(result)
        sent = result.method.synthetic_data(result.state) if isinstance(result.method, HasSyntheticData) else {}
        if not self.nets and not sent:
            raise FewerError(
                f"{result.method.name} has no global model and its clients send no synthetic data: "
                "no attack of this audit applies"
            )
        candidates = [client for client in participants if not sent or (client in sent and len(sent[client][1]))]
        if not candidates:
            raise FewerError("no client has taken part yet, so there is nothing to audit")
        drawn = torch.randperm(len(candidates), generator=self.stream("parties"))[:clients]
        self.clients = sorted(candidates[index] for index in drawn.tolist())
        self.limits = value_range(result.data.test)
        device = result.task.device
        self.synthetic: dict[int, Samples] = {
            client: (sent[client][0].clamp(*self.limits).to(device), sent[client][1].to(device))
            for client in self.clients
            if client in sent
        }
        """Synthetic images of the attacked clients, clipped to the range of pixel values."""
        raw = result.data.raw or result.data
        sent_statistics: dict[str, Any] = {}
        is_image = len(raw.shape) == 3 and not raw.test.is_text
        if isinstance(result.method, SendsStatistics) and self.nets and is_image:
            sent_statistics = result.method.send_statistics(result.contexts()(self.clients[0], 1))
        self.sent_means = None
        if "means" in sent_statistics:
            self.sent_means = sent_statistics["classes"], sent_statistics["means"].float()
        """Classes and mean features that the first attacked client sends, if its samples are images."""
        logits: dict[int, Samples] = {}
        if isinstance(result.method, SendsLogits) and self.nets and self.has_images:
            logits = result.method.sent_logits(result.state)
        self.sent_logits = {client: logits[client] for client in self.clients if client in logits}
        """Classes and mean logits that attacked clients sent last, if their samples are images."""

    def stream(self, purpose: str) -> torch.Generator:
        return stream(self.result.settings.seed, "audit", purpose)

    def training_samples(self, client: int) -> Samples:
        """All training samples of a client."""
        return self.result.data.client(client).train.all()

    # --- synthetic images and the nearest real ones ---

    def compare_to_real(self) -> tuple[dict[str, Any], AttackImages | None]:
        """Compares the distance from synthetic to real images with the distance between real images."""
        ratios: dict[int, list[float]] = {}
        nearest_members: list[bool] = []
        blocks: dict[int, Block] = {}
        closest: tuple[float, dict[str, int]] | None = None
        for client, (images, labels) in self.synthetic.items():
            x, y = self.training_samples(client)
            ratios[client] = []
            columns: list[tuple[Tensor, Tensor, str]] = []
            for label in sorted(set(labels.tolist()) & set(y.tolist())):
                real, class_images = x[y == label], images[labels == label]
                # a class with a single sample falls back to all images of the client
                typical = typical_distance(real) or typical_distance(x)
                if typical is None:
                    continue
                distances, indices = nearest_neighbors(class_images, real)
                class_ratios = (distances / typical).tolist()
                ratios[client] += class_ratios
                nearest_members += self.nearest_is_member(class_images, real, self.unseen_samples(client, label))
                if closest is None or min(class_ratios) < closest[0]:
                    closest = min(class_ratios), {"client": client, "class": label, "samples": len(real)}
                index = int(distances.argmin())
                columns.append((class_images[index], real[indices[index]], f"{class_ratios[index]:.2f}"))
            if self.has_images and columns:
                synthetic, originals, notes = zip(*columns[: COLUMNS + 2], strict=True)
                rows = {f"client {client}: D̂": torch.stack(synthetic), "nearest real": torch.stack(originals)}
                blocks[client] = Block(rows, list(notes))
        pooled = sorted(ratio for client_ratios in ratios.values() for ratio in client_ratios)
        metrics: dict[str, Any] = {"images": len(pooled)}
        if closest:
            metrics |= {"closest": closest[1], "min": pooled[0], "median": statistics.median(pooled)}
            metrics["near_copies"] = sum(ratio < COPY_RATIO for ratio in pooled) / len(pooled)
            if nearest_members:
                metrics["nearest_is_member"] = estimate_proportion(sum(nearest_members), len(nearest_members))
            metrics["by_client"] = {
                str(client): {"min": min(client_ratios), "median": statistics.median(client_ratios)}
                for client, client_ratios in ratios.items()
                if client_ratios
            }
        caption = (
            "For each class: the synthetic image closest to a real image of its client, and that real image. "
            "Number below: their distance, divided by the median distance between a real image of the class and its "
            "nearest neighbor. Clients with the closest images come first."
        )
        closest_first = sorted(blocks, key=lambda client: min(ratios[client]))
        shown = [blocks[client] for client in closest_first[:SHOWN_CLIENTS]]
        title = "Synthetic images and the nearest real ones"
        return metrics, AttackImages("copies", title, caption, shown, self.limits) if shown else None

    def unseen_samples(self, client: int, label: int) -> Tensor:
        """Test samples of a class: from the global test set, or the client's own if the partition is natural."""
        natural = self.result.settings.partition == "natural"
        test = self.result.data.client(client).test if natural else self.result.data.test
        return test.pick(torch.nonzero(test.labels == label).squeeze(1))[0]

    def nearest_is_member(self, images: Tensor, real: Tensor, unseen: Tensor) -> list[bool]:
        """Returns True for each image whose nearest neighbor is a training image, among as many unseen images."""
        count = min(len(real), len(unseen))
        if not count:
            return []
        draw = self.stream(f"nearest {len(real)}")
        candidates = [side[torch.randperm(len(side), generator=draw)[:count]] for side in (real, unseen)]
        is_member: list[bool] = (nearest_neighbors(images, torch.cat(candidates))[1] < count).tolist()
        return is_member

    # --- deep leakage ---

    def restore_from_gradients(self, steps: int, starts: int) -> tuple[dict[str, Any], AttackImages]:
        """Restores images from gradients: of synthetic images if clients send them, else of real ones."""
        client = max(self.clients, key=lambda client: len(set(self.training_samples(client)[1].tolist())))
        x, y = self.training_samples(client)
        order = torch.randperm(len(y), generator=self.stream("targets")).to(y.device)
        targets, originals, lookalikes, labels = [], [], [], []
        for label in sorted(set(y.tolist())):
            rows_of_class = order[y[order] == label]
            target = original = x[rows_of_class[0]]
            if self.synthetic:
                class_images = self.synthetic[client][0][self.synthetic[client][1] == label]
                if not len(class_images):
                    continue
                target = class_images[0]
                original = x[rows_of_class][int(nearest_neighbors(class_images[:1], x[rows_of_class])[1])]
            others = torch.cat([x[rows_of_class], x[y != label][:1]])  # another class if this one has a single sample
            distances = (others - original).flatten(1).norm(dim=1)
            distances[distances == 0] = torch.inf
            targets.append(target)
            originals.append(original)
            lookalikes.append(others[int(distances.argmin())])
            labels.append(label)
            if len(labels) == COLUMNS:
                break
        target, original, lookalike = torch.stack(targets), torch.stack(originals), torch.stack(lookalikes)
        target_labels = torch.tensor(labels, device=y.device)
        low, high = self.limits

        def mean_psnr(images: Tensor, real: Tensor) -> float:
            return float(psnr(images, real, high - low).mean())

        rows = {"nearest real" if self.synthetic else "original": original}
        if self.synthetic:
            rows["D̂"] = target
        attacks = []
        for name, net in self.nets.items():
            sizes = {1} if self.synthetic or name != "first" else {1, len(target)}
            for size in sorted(sizes):
                batch = target.view(-1, size, *target.shape[1:]), target_labels.view(-1, size)
                gradients = compute_gradients(net, *batch).detach()
                draw = self.stream(f"restoring {name} {size}")
                images, mismatch = restore_images(net, gradients, batch[1], x, draw, steps=steps, starts=starts)
                images = images.flatten(0, 1)
                rows[f"restored, {name} model" + (f", {size} at once" if size > 1 else "")] = images
                metrics = {"model": name, "batch_size": size, "psnr": mean_psnr(images, original)}
                if self.synthetic:
                    metrics["psnr_to_synthetic"] = mean_psnr(images, target)
                attacks.append({**metrics, "mismatch": float(mismatch.mean())})
        metrics = {"client": client, "gradients_of": "synthetic" if self.synthetic else "real", "attacks": attacks}
        metrics["psnr_of_lookalike"] = mean_psnr(lookalike, original)
        if self.synthetic:
            metrics["psnr_of_synthetic"] = mean_psnr(target, original)
        caption = f"Deep leakage on client {client}, under the first and the trained model. "
        if self.synthetic:
            caption += "Images are restored from the gradients of synthetic images. The attacker knows the labels."
        else:
            caption += (
                "Training images are restored from the gradient of a single step. The attacker knows the labels; in "
                "the easiest case, each image has its own gradient."
            )
        return metrics, AttackImages("leakage", "Deep leakage from gradients", caption, [Block(rows)], self.limits)

    # --- class means of features and logits ---

    def invert_means(self, steps: int, starts: int) -> tuple[dict[str, Any], AttackImages]:
        """Restores an image from each class mean that a client sends, and compares it with the client's images."""
        assert self.sent_means
        encoder = self.result.task.encoder or split_net(self.nets["first"])[0]
        return self._invert(encoder, self.clients[0], self.sent_means, "prototypes", "class means", steps, starts)

    def invert_logits(self, steps: int, starts: int) -> tuple[dict[str, Any], AttackImages]:
        """Restores an image from the mean logits of each class that a client sent, under the global model."""
        client, sent = next(iter(self.sent_logits.items()))
        return self._invert(self.nets["trained"], client, sent, "logits", "class logits", steps, starts)

    def _invert(
        self, net: nn.Module, client: int, sent: Samples, name: str, what: str, steps: int, starts: int
    ) -> tuple[dict[str, Any], AttackImages]:
        classes, targets = (part[:COLUMNS] for part in sent)
        data = self.result.data.raw or self.result.data
        x, y = data.client(client).train.all()
        draw = self.stream("inverting")
        images, mismatch = invert_features(net.eval(), targets, x, draw, steps=steps, starts=starts)
        low, high = value_range(data.test)
        restored, lookalike, originals = [], [], []
        for image, label in zip(images, classes.tolist(), strict=True):
            real = x[y == label]
            original = real[int(nearest_neighbors(image[None], real)[1])]
            others = x[(x != original).flatten(1).any(1)]
            other = others[int(nearest_neighbors(original[None], others)[1])]
            originals.append(original)
            restored.append(float(psnr(image[None], original[None], high - low)))
            lookalike.append(float(psnr(other[None], original[None], high - low)))
        metrics = {"client": client, "means": len(images), "mismatch": float(mismatch.mean())}
        metrics |= {"psnr": statistics.fmean(restored), "psnr_of_lookalike": statistics.fmean(lookalike)}
        rows = {f"client {client}: from its {what}": images, "nearest real": torch.stack(originals)}
        kind = "features" if name == "prototypes" else name
        caption = f"Images with the mean {kind} that client {client} sends for each class, and its nearest images."
        return metrics, AttackImages(name, f"Images restored from {what}", caption, [Block(rows)], (low, high))

    # --- membership ---

    def membership_scores(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yields the scores of members and nonmembers by attack, equally many of each class and client."""
        pairs = {client: pair for client in self.clients if (pair := self.matched_samples(client))}
        if not pairs:
            return
        x, y, other_x, other_y = (
            torch.cat([pair[side][part] for pair in pairs.values()]) for side in (0, 1) for part in (0, 1)
        )
        if len(y) < 2:
            return
        if net := self.nets.get("trained"):
            yield "loss", (-losses(net, x, y), -losses(net, other_x, other_y))
            if self.has_images:
                draw = self.stream("variants")
                yield "variants", (loss_gaps(net, x, y, draw), loss_gaps(net, other_x, other_y, draw))
        scores = [self.nearness_scores(client, pair) for client, pair in pairs.items() if client in self.synthetic]
        inside, outside = (torch.cat([x.new_empty(0), *(pair[side] for pair in scores)]) for side in (0, 1))
        if len(inside) > 1:
            yield "distance", (inside, outside)

    def nearness_scores(self, client: int, pair: tuple[Samples, Samples]) -> list[Tensor]:
        """Negative distance from each sample to the nearest D̂ of its class, for classes that the client condensed."""
        images, labels = self.synthetic[client]

        def nearness(x: Tensor, y: Tensor) -> Tensor:
            classes = sorted(set(labels.tolist()) & set(y.tolist()))
            scores = [-nearest_neighbors(x[y == label], images[labels == label])[0] for label in classes]
            return torch.cat([x.new_empty(0), *scores])

        return [nearness(*side) for side in pair]

    def matched_samples(self, client: int) -> tuple[Samples, Samples] | None:
        """Training and test samples of a client, equally many of each class."""
        train, _, test = self.result.data.client(client)
        draw = self.stream(f"members {client}")
        inside, outside = (torch.randperm(len(part), generator=draw).to(part.y.device) for part in (train, test))
        train_labels, test_labels = train.labels[inside], test.labels[outside]
        chosen: tuple[list[Tensor], list[Tensor]] = [], []
        for label in sorted(set(train_labels.tolist()) & set(test_labels.tolist())):
            members, others = inside[train_labels == label], outside[test_labels == label]
            count = min(len(members), len(others))
            chosen[0].append(members[:count])
            chosen[1].append(others[:count])
        if not chosen[0]:
            return None
        subset = torch.randperm(sum(map(len, chosen[0])), generator=draw).to(train.y.device)[:MAX_SAMPLES]
        return train.pick(torch.cat(chosen[0])[subset]), test.pick(torch.cat(chosen[1])[subset])

    def canary_scores(self, shadows: int) -> tuple[Tensor, Tensor]:
        """Scores of canaries that shadow runs trained on, and of canaries that they did not train on."""
        if not self.nets:
            raise SettingError(f"shadows needs a global model, and {self.result.method.name} has none")
        return attack_canaries(self.result, self.clients, shadows)

    # --- limitations ---

    def limitations(self) -> Iterator[str]:
        """Attacks that do not apply to this run, with the reason."""
        name = self.result.method.name
        if not self.synthetic:
            yield f"Clients of {name} send no synthetic data that could be compared with real samples."
        if not self.nets:
            yield f"{name} has no global model, so the attacks on gradients and on the loss do not apply."
        elif not self.has_images:
            yield f"Samples of shape {self.result.data.shape} are not images, so deep leakage does not apply."
        elif not self.synthetic:
            steps, batch_size = (getattr(self.result.method, option, None) for option in ("local_steps", "batch_size"))
            if steps and batch_size:
                yield (
                    "Deep leakage is shown in its strongest form: from the gradient of one step on one sample. "
                    f"Clients of this run sent the result of {steps} steps on {batch_size} samples each, "
                    "which should reveal less."
                )


def _global_models(result: Result) -> dict[str, nn.Module]:
    """The global model before the first round and now; empty if the method has no global model."""
    try:
        trained = result.trained_net.train()
    except SettingError:
        return {}
    first = result.task.net()
    load_weights(first, result.task.initial_weights(result.settings.seed))
    return {"first": first, "trained": trained}
