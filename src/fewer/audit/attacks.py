"""The look: attacks on a run, as figures and as rows of images.

The attacker sees what the server does: the global model, and synthetic data where clients send it. Only whoever
simulates a federation can judge the attacks, as they are held against the clients' real samples.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewer.audit.distance import nearest, span_of, typical
from fewer.audit.leakage import gradients_of, psnr, restore
from fewer.audit.membership import above_variants, losses, membership, share
from fewer.errors import FewerError, RunError
from fewer.models import load_weights
from fewer.runs.directory import RunDirectory
from fewer.runs.experiment import load_data, parse_settings
from fewer.runs.result import Result, open_result
from fewer.runs.settings import settings_hash
from fewer.runtime.streams import stream
from fewer.wire.ledger import EVALUATION

CLIENTS = 10
STEPS, STARTS = 500, 2
COLUMNS = 8
"""Images in a row, one of each class."""
SHOWN = 3
"""Clients whose D̂ is shown."""
SAMPLES = 1000
"""Of each client, at most so many members and as many others are judged."""
COPY = 0.5
"""A synthetic image is called a near-copy when it is nearer to a real one than this share of what is typical."""

Sent = dict[int, tuple[Tensor, Tensor]]
"""Synthetic images and their labels, by client."""


@dataclass(frozen=True)
class Block:
    """Rows of images that belong together, column by column, and a word under each column."""

    rows: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class AttackImages:
    """Blocks of images in one picture, with what is said about them; values from `low` to `high` are black to white."""

    name: str
    title: str
    caption: str
    blocks: list[Block]
    low: float
    high: float


@dataclass(frozen=True)
class Audit:
    """What the attacks gave."""

    method: str
    data: str
    rounds: int
    hash: str
    """Of the settings of the run."""
    clients: list[int]
    """Whose samples were attacked."""
    figures: dict[str, Any]
    sheets: list[AttackImages] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list)
    """What does not apply to this run, and why."""

    def as_json(self) -> dict[str, Any]:
        """All figures as plain values."""
        return {name: value for name, value in asdict(replace(self, sheets=[])).items() if name != "sheets"}


def audit(
    path: Path, *, data_dir: Path | None = None, clients: int = CLIENTS, steps: int = STEPS, starts: int = STARTS
) -> Audit:
    """Attack a run: nearness of synthetic images, deep leakage and membership inference, on some clients' samples.

    `steps` and `starts` are those of gradient matching.
    """
    result = _open(path, data_dir)
    look = _Look(result, _took_part(path, len(result.history)), clients)
    figures: dict[str, Any] = {}
    sheets: list[AttackImages] = []
    if look.sent:
        figures["copies"], sheet = look.copies()
        sheets += [sheet] if sheet else []
    if look.image and look.nets:
        figures["leakage"], sheet = look.leakage(steps, starts)
        sheets.append(sheet)
    figures["membership"] = {name: asdict(membership(*scores)) for name, scores in look.membership()}
    return Audit(
        result.method.name,
        result.data.name,
        len(result.history),
        settings_hash(result.settings, result.method),
        look.clients,
        figures,
        sheets,
        list(look.limits()),
    )


class _Look:
    """One run under attack."""

    def __init__(self, result: Result, took_part: list[int], clients: int) -> None:
        self.result = result
        self.image = len(result.data.shape) == 3 and not result.data.test.tokens
        self.nets = _nets(result)
        sent = result.method.condensed(result.state)
        if not self.nets and not sent:
            raise FewerError(
                f"{result.method.name} has no global model and its clients send no synthetic data: "
                "there is nothing that this audit attacks"
            )
        known = [client for client in sorted(took_part) if not sent or (client in sent and len(sent[client][1]))]
        if not known:
            raise FewerError("no client has taken part yet: there is nothing to audit")
        drawn = torch.randperm(len(known), generator=self.stream("parties"))[:clients]
        self.clients = sorted(known[place] for place in drawn.tolist())
        self.low, self.high = span_of(result.data.test)
        device = result.task.device
        self.sent: Sent = {
            client: (sent[client][0].clamp(self.low, self.high).to(device), sent[client][1].to(device))
            for client in self.clients
            if client in sent
        }
        """Synthetic images as anyone would look at them: cut off where pixels end."""

    def stream(self, purpose: str) -> torch.Generator:
        return stream(self.result.settings.seed, "audit", purpose)

    def real(self, client: int) -> tuple[Tensor, Tensor]:
        """All training samples of a client."""
        train = self.result.data.client(client).train
        return train.pick(torch.arange(len(train)))

    # --- synthetic images beside the nearest real ones ---

    def copies(self) -> tuple[dict[str, Any], AttackImages | None]:
        """How near synthetic images are to real ones, against how near real ones are to each other."""
        ratios: dict[int, list[float]] = {}
        of_members: list[bool] = []
        drawn: dict[int, Block] = {}
        closest: tuple[float, dict[str, int]] | None = None
        for client, (images, labels) in self.sent.items():
            x, y = self.real(client)
            ratios[client] = []
            columns: list[tuple[Tensor, Tensor, str]] = []
            for label in sorted(set(labels.tolist()) & set(y.tolist())):
                real, made = x[y == label], images[labels == label]
                usual = typical(real) or typical(x)  # of a class with one sample: as images of this client are apart
                if usual is None:
                    continue
                away, which = nearest(made, real)
                own = (away / usual).tolist()
                ratios[client] += own
                of_members += self.of_members(made, real, self.unseen(client, label))
                if closest is None or min(own) < closest[0]:
                    closest = min(own), {"client": client, "class": label, "samples": len(real)}
                worst = int(away.argmin())
                columns.append((made[worst], real[which[worst]], f"{own[worst]:.2f}"))
            if self.image and columns:
                shown = columns[: COLUMNS + 2]
                synthetic, originals = [made for made, _, _ in shown], [real for _, real, _ in shown]
                rows = {f"client {client}: D̂": torch.stack(synthetic), "nearest real": torch.stack(originals)}
                drawn[client] = Block(rows, [note for _, _, note in shown])
        every = sorted(ratio for own in ratios.values() for ratio in own)
        figures: dict[str, Any] = {"images": len(every)}
        if closest:
            figures["closest"] = closest[1]
            figures |= {"least": every[0], "median": statistics.median(every)}
            figures["near_copies"] = sum(ratio < COPY for ratio in every) / len(every)
            if of_members:
                figures["nearest_is_member"] = asdict(share(sum(of_members), len(of_members)))
            figures["by_client"] = {
                str(p): {"least": min(own), "median": statistics.median(own)} for p, own in ratios.items() if own
            }
        caption = (
            "Of each class the synthetic image that is nearest to a real one of its client, and that real one. Below: "
            "their distance against the typical distance between a real image of that class and the nearest other one. "
            "Clients with the nearest ones come first."
        )
        blocks = [drawn[client] for client in sorted(drawn, key=lambda each: min(ratios[each]))[:SHOWN]]
        sheet = AttackImages(
            "copies", "Synthetic images and the nearest real ones", caption, blocks, self.low, self.high
        )
        return figures, sheet if blocks else None

    def unseen(self, client: int, label: int) -> Tensor:
        """Test samples of a class: all there are, or the client's own where clients differ by nature."""
        natural = self.result.settings.partition == "natural"
        test = self.result.data.client(client).test if natural else self.result.data.test
        return test.pick(torch.nonzero(test.labels == label).squeeze(1))[0]

    def of_members(self, made: Tensor, real: Tensor, unseen: Tensor) -> list[bool]:
        """Whether the nearest to each image is one that it was made of, among these and as many that it was not."""
        count = min(len(real), len(unseen))
        if not count:
            return []
        draw = self.stream(f"nearest {len(real)}")
        some = [side[torch.randperm(len(side), generator=draw)[:count]] for side in (real, unseen)]
        which: list[bool] = (nearest(made, torch.cat(some))[1] < count).tolist()
        return which

    # --- deep leakage ---

    def leakage(self, steps: int, starts: int) -> tuple[dict[str, Any], AttackImages]:
        """Images restored from gradients: of synthetic images where there are any, or else of real ones."""
        client = max(self.clients, key=lambda each: len(set(self.real(each)[1].tolist())))
        x, y = self.real(client)
        order = torch.randperm(len(y), generator=self.stream("targets")).to(y.device)
        targets, originals, lookalikes, labels = [], [], [], []
        for label in sorted(set(y.tolist())):
            mine = order[y[order] == label]
            target = original = x[mine[0]]
            if self.sent:
                made = self.sent[client][0][self.sent[client][1] == label]
                if not len(made):
                    continue
                target, original = made[0], x[mine][int(nearest(made[:1], x[mine])[1])]
            others = torch.cat([x[mine], x[y != label][:1]])  # where the class has one sample, any other will do
            away = (others - original).flatten(1).norm(dim=1)
            away[away == 0] = torch.inf
            targets.append(target)
            originals.append(original)
            lookalikes.append(others[int(away.argmin())])
            labels.append(label)
            if len(labels) == COLUMNS:
                break
        target, original, alike = torch.stack(targets), torch.stack(originals), torch.stack(lookalikes)
        wanted = torch.tensor(labels, device=y.device)
        span = self.high - self.low

        def decibel(images: Tensor, real: Tensor) -> float:
            return float(psnr(images, real, span).mean())

        rows = {"nearest real" if self.sent else "original": original}
        if self.sent:
            rows["D̂"] = target
        attacks = []
        for name, net in self.nets.items():
            for together in (False, True):
                if together and (self.sent or name != "first"):
                    continue
                group = len(target) if together else 1
                batch = target.view(-1, group, *target.shape[1:]), wanted.view(-1, group)
                seen = gradients_of(net, *batch).detach()
                draw = self.stream(f"restoring {name} {group}")
                images, apart = restore(net, seen, batch[1], x, draw, steps=steps, starts=starts)
                images = images.flatten(0, 1)
                told = f"restored, {name} model" + (f", {group} at once" if together else "")
                rows[told] = images
                figures = {"model": name, "at_once": group, "psnr": decibel(images, original)}
                if self.sent:
                    figures["psnr_to_synthetic"] = decibel(images, target)
                attacks.append({**figures, "mismatch": float(apart.mean())})
        figures = {"client": client, "from": "synthetic" if self.sent else "real", "attacks": attacks}
        figures["psnr_of_lookalike"] = decibel(alike, original)
        if self.sent:
            figures["psnr_of_synthetic"] = decibel(target, original)
        what = "synthetic images" if self.sent else "training images, if its client sent it after one step"
        caption = (
            f"Deep leakage: images of client {client} restored from the gradient of {what}, under the first and the "
            "trained model. The attacker knows the label"
            + ("." if self.sent else "; at best, each image gave a gradient of its own.")
        )
        return figures, AttackImages(
            "leakage", "Deep leakage from gradients", caption, [Block(rows)], self.low, self.high
        )

    # --- membership ---

    def membership(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Scores of members and of others, attack by attack; as many of each class and client on both sides."""
        pairs = {client: pair for client in self.clients if (pair := self.pair(client))}
        if not pairs:
            return
        (x, y), (other, label) = (
            (
                torch.cat([pair[side][0] for pair in pairs.values()]),
                torch.cat([pair[side][1] for pair in pairs.values()]),
            )
            for side in (0, 1)
        )
        if len(y) < 2:
            return
        if net := self.nets.get("trained"):
            yield "loss", (-losses(net, x, y), -losses(net, other, label))
            if self.image:
                draw = self.stream("variants")
                yield "variants", (above_variants(net, x, y, draw), above_variants(net, other, label, draw))
        near = [self.nearness(client, pair) for client, pair in pairs.items() if client in self.sent]
        inside, outside = (torch.cat([one[side] for one in near]) if near else x.new_empty(0) for side in (0, 1))
        if len(inside) > 1:
            yield "distance", (inside, outside)

    def nearness(self, client: int, pair: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        """How near D̂ of its class comes to each sample, of the classes that the client condensed."""
        images, labels = self.sent[client]

        def near(x: Tensor, y: Tensor) -> Tensor:
            held = sorted(set(labels.tolist()) & set(y.tolist()))
            found = [-nearest(x[y == label], images[labels == label])[0] for label in held]
            return torch.cat(found) if found else x.new_empty(0)

        return [near(*side) for side in pair]

    def pair(self, client: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Training and test samples of a client, equally many of each class."""
        train, _, test = self.result.data.client(client)
        draw = self.stream(f"members {client}")
        inside, outside = (torch.randperm(len(part), generator=draw).to(part.y.device) for part in (train, test))
        mine, theirs = train.labels[inside], test.labels[outside]
        chosen: tuple[list[Tensor], list[Tensor]] = [], []
        for label in sorted(set(mine.tolist()) & set(theirs.tolist())):
            a, b = inside[mine == label], outside[theirs == label]
            count = min(len(a), len(b))
            chosen[0].append(a[:count])
            chosen[1].append(b[:count])
        if not chosen[0]:
            return None
        some = torch.randperm(sum(map(len, chosen[0])), generator=draw).to(train.y.device)[:SAMPLES]
        return train.pick(torch.cat(chosen[0])[some]), test.pick(torch.cat(chosen[1])[some])

    # --- what is left out ---

    def limits(self) -> Iterator[str]:
        """What does not apply, and why."""
        name = self.result.method.name
        if not self.sent:
            yield f"Clients of {name} send no synthetic data: its nearness to real samples is not looked at."
        if not self.nets:
            yield f"{name} has no global model: leakage from gradients and the loss of members are not looked at."
        elif not self.image:
            yield f"Samples of shape {self.result.data.shape} are no images: deep leakage is not tried."
        elif not self.sent:
            steps, batch = (getattr(self.result.method, each, None) for each in ("steps", "batch"))
            if steps and batch:
                yield (
                    f"Deep leakage is shown at its strongest, from the gradient of one step on one sample. Clients of "
                    f"this run sent what {steps} steps on {batch} samples each gave, which should tell less."
                )


def _open(path: Path, data_dir: Path | None) -> Result:
    """The run, on the very data that it was run on."""
    description = RunDirectory.open(path).description
    if "data" in description["own"]:
        raise RunError(f"{path} was run with data of your own: it cannot be audited from its directory alone")
    settings = {**description["settings"], **({"data_dir": data_dir} if data_dir else {})}
    data = load_data(parse_settings(settings))
    if data.fingerprint() != description["data"]["fingerprint"]:
        raise RunError(f"{data.name} is no longer what {path} was run on")
    return open_result(path, data=data)


def _took_part(path: Path, rounds: int) -> list[int]:
    """The clients that sent something in training, in the rounds that are over."""
    with (path / "ledger.csv").open(newline="") as file:
        return sorted(
            {
                int(line["client"])
                for line in csv.DictReader(file)
                if line["direction"] == "up"
                and not line["kind"].startswith(EVALUATION)
                and int(line["round"]) <= rounds
            }
        )


def _nets(result: Result) -> dict[str, nn.Module]:
    """The global model before the first round and now; none where a method has no global model."""
    weights = result.method.global_weights(result.state)
    if weights is None:
        return {}
    nets = {"first": result.task.net()}
    load_weights(nets["first"], result.task.initial(result.settings.seed))
    nets["trained"] = result.model.train()
    return nets
