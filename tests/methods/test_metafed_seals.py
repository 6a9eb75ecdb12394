"""Sealed messages in a ring: the relay can neither read, change, repeat nor inject one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fewer
from fewer import MetaFed
from fewer.methods import Client
from fewer.models import Weights
from fewer.runtime.handlers import FETCH_OUTGOING, Call, Hop
from fewer.runtime.keys import PinnedKeys
from fewer.wire import encode, pack
from tests.helpers import Interrupt
from tests.methods.metafed_harness import (
    CLASSES,
    COUNT,
    DATA,
    HIDDEN,
    SEED,
    SMALL,
    RingHarness,
    all_sevens,
    linear,
    make_harness,
)


def sealed_ring(tmp_path: Path) -> tuple[RingHarness, Call, bytes]:
    """A ring after one round, and a call with a sealed message that its receiver has not opened yet."""
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    harness.clients.round = 2
    fetch = Call(1, FETCH_OUTGOING, 2, hop=Hop(2, "accumulate", 5, True))
    blob = harness.clients.handlers.answer(fetch, b"").blob
    return harness, Call(2, "accumulate", 2, hop=Hop(1, "accumulate", 5, True)), blob


def test_a_sealed_message_is_accepted_once(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    answer = harness.clients.handlers.answer
    assert answer(delivery, blob).failure is None
    replay = answer(delivery, blob)
    assert replay.failure == "refused" and "replayed sealed message (round 2, number 5)" in replay.detail
    old_message = answer(
        Call(1, FETCH_OUTGOING, 1, hop=Hop(2, "accumulate", 9, True)), b""
    ).blob  # from an earlier round
    replay = answer(Call(2, "accumulate", 1, hop=Hop(1, "accumulate", 9, True)), old_message)
    assert replay.failure == "refused" and "replayed sealed message (round 1, number 9)" in replay.detail


def test_a_message_of_another_run_is_refused(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    other_run = replace(harness.clients.handlers, run_id=b"another run")
    reply = other_run.answer(delivery, blob)
    assert reply.failure == "refused" and "the seal is broken" in reply.detail
    fetch = Call(1, FETCH_OUTGOING, 2, hop=Hop(2, "accumulate", 5, True))
    assert other_run.answer(delivery, other_run.answer(fetch, b"").blob).failure is None


def test_the_relay_can_neither_request_nor_inject_a_model(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    before, answer = harness.federation_state(2), harness.clients.handlers.answer
    assert delivery.hop
    for name in ("accumulate", "personalize"):
        reply = answer(Call(2, name, 2), encode(name, {}))
        assert reply.failure == "refused" and "is not an @on_client handler" in reply.detail
        assert not reply.blob
        injected = encode(name, {"model": all_sevens(linear()), "net": ""})
        reply = answer(Call(2, name, 2, hop=Hop(None, name, 6, True)), injected)
        assert reply.failure == "refused" and reply.detail == "a message without a sender"
    assert answer(Call(2, "warm_up", 2, hop=delivery.hop), blob).failure == "refused"
    assert answer(Call(2, FETCH_OUTGOING, 2), b"").failure == "refused"
    assert pack(harness.federation_state(2)) == pack(before)


def test_the_relay_cannot_override_sealed_fields(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    assert harness.clients.handlers.answer(replace(delivery, item={"net": 5}), blob).failure is None


def test_only_the_owner_can_read_private_keys(tmp_path: Path) -> None:
    harness = make_harness(MetaFed(**SMALL), linear(), tmp_path)
    harness.rounds(1)
    PinnedKeys(tmp_path).create()
    keys = [*tmp_path.glob("*/*/key"), tmp_path / "seal.key"]
    assert len(keys) == COUNT + 1 and not any(path.stat().st_mode & 0o077 for path in keys)
    assert not list(tmp_path.rglob("*.part"))


def test_a_message_with_any_changed_byte_is_refused(tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    for position in [*range(60), *range(60, len(blob), 41), len(blob) - 1]:
        changed = bytearray(blob)
        changed[position] ^= 1
        assert harness.clients.handlers.answer(delivery, bytes(changed)).failure == "refused", position
    for cut in (0, 3, 8, 100, len(blob) - 1):
        assert harness.clients.handlers.answer(delivery, blob[:cut]).failure == "refused"
    assert harness.clients.handlers.answer(delivery, blob).failure is None


@pytest.mark.parametrize(
    "change", [{"client": 3}, {"handler": "personalize"}, {"peer": 0}, {"number": 6}, {"round": 3}]
)
def test_a_message_is_valid_for_one_receiver_handler_and_hop(change: dict[str, Any], tmp_path: Path) -> None:
    harness, delivery, blob = sealed_ring(tmp_path)
    assert delivery.hop
    hop = replace(delivery.hop, **{name: change[name] for name in ("peer", "number") if name in change})
    call_ = replace(delivery, hop=hop, **{name: change[name] for name in change if name not in ("peer", "number")})
    reply = harness.clients.handlers.answer(call_, blob)
    assert reply.failure == "refused" and "a sealed message with an unexpected header" in reply.detail


class SecretSender(MetaFed):
    """Federation 0 sends a secret. A file stores it reversed, so no other process holds the secret itself."""

    file: str = ""

    def outgoing_message(self, client: Client, model: Weights) -> dict[str, Any]:
        if client.id == 0 and client.round == 1:
            secret = torch.randint(1, 120, (16,), dtype=torch.uint8)
            Path(self.file).write_bytes(bytes(secret.tolist())[::-1])
            model = {**model, "head.weight": secret.view(torch.float32).view(CLASSES, HIDDEN).clone()}
        return super().outgoing_message(client, model)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sealed", [True, False])
def test_the_relay_holds_only_ciphertext(sealed: bool, tmp_path: Path) -> None:
    """Searches the relay's memory and files for a model that it forwarded."""
    out = tmp_path / "run"
    method = SecretSender(file=str(tmp_path / "mark"), sealed=sealed, distill_threshold=0.0, **SMALL)
    leaks: list[Any] = []

    class SearchForSecret(Interrupt):
        def on_answer(self, run: fewer.Run, answered: int, asked: int) -> None:
            if run.round == 1 and answered == 3 and Path(method.file).exists():
                reversed_secret = Path(method.file).read_bytes()
                relay_files = [path for path in out.rglob("*") if path.is_file() and "clients" not in path.parts]
                assert any("hops" in path.parts for path in relay_files)
                leaks.extend(path for path in relay_files if reversed_secret in path.read_bytes()[::-1])
                leaks.extend(["memory"] if in_memory(reversed_secret) else [])

    settings: dict[str, Any] = {"seed": SEED, "runtime": "pool", "workers": 1}
    fewer.run(method, DATA, model=linear(), out=out, callbacks=[SearchForSecret(99)], **settings)
    assert bool(leaks) is not sealed  # without the seal, the search must find the secret
    reversed_secret = Path(method.file).read_bytes()
    outgoing = list(out.glob("clients/*/*/ring_outgoing*"))
    assert outgoing and reversed_secret


def in_memory(reversed_bytes: bytes) -> bool:
    """True if the memory of this process contains these bytes in reverse order."""
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", 0) as memory:
        for line in maps:
            span, permissions = line.split()[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if permissions[:2] != "rw" or high - low > 1 << 28:
                continue
            try:
                memory.seek(low)
                if reversed_bytes in memory.read(high - low)[::-1]:
                    return True
            except (OSError, OverflowError, ValueError):
                continue
    return False
