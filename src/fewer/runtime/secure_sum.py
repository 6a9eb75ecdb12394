"""Secure sums: clients keep their answers, and the server learns only the sum of a field over many clients.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017 (their protocol with
dropouts and double masks; wire/masking.py has the arithmetic). After a question, a client stores its answer. A sum then
takes three steps. U₁ are the clients that answered, U₂ the ones that share keys, U₃ the ones that send masked values.

1. Share keys. Each client draws a private key for pairwise masks, and a seed for a mask that no other client has. It
   splits both into shares, and seals one share of each and its public key for every other client.
2. Send masked values. Each client gets what the others sealed for it. It sends its values times its weight, and the
   weight, plus its own mask, plus a mask for each peer in U₂. Pairwise masks cancel in the sum.
3. Send shares. Each client sends its shares of the own masks of U₃, and of the private keys of the others in U₂, which
   dropped out. With t shares of each, the server removes the masks that are left.

What protects a client from its server:

- Public keys come sealed from peers whose keys the client has pinned. The server cannot put its own in their place.
- A client never sends both shares of one peer, and t is a majority: no server gets both from honest clients.
- A client sums each field of an answer once. Sums over different sets of clients would reveal the difference.
- A sum has at least three clients that share keys.
- A client that sent its values takes no part in a sum without them.
- If clients share the noise of differential privacy, a client takes no part in a sum with weights, or of fewer clients
  than the shares that make up the noise. Asked again, it draws other noise.

A server that follows these steps, and looks at all that it gets, learns the sum only. The paper's extra round, in which
clients sign U₃, is left out. So a server that tells clients different things about who dropped out may learn the sum
of fewer clients.

Departures: keys are new in each sum, so they need no step of their own. The seed of the run is known to the server, so
secrets come from the operating system. They cancel, so the numbers of a run do not depend on them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fewer.errors import QuorumLost, RunInterrupted, SettingError
from fewer.runtime.keys import Keys
from fewer.runtime.store import Store
from fewer.wire import Refused, Schema, Shaped
from fewer.wire.masking import SHARE_BYTES, Ring, expand_mask, from_ring, join_secret, pair_mask, split_secret, to_ring
from fewer.wire.sealing import KEY_BYTES, Header, new_key, parse_sealed, public_key, seal, unseal

if TYPE_CHECKING:
    from fewer.runtime.clients import Answers, Clients

WITHHELD = "withheld"
"""The kind of a reply that says only that the client has stored its answer."""
SHARE_KEYS, SEND_MASKED, SEND_SHARES = (f"secure_sum/{step}" for step in ("share_keys", "send_masked", "send_shares"))
STEPS = (SHARE_KEYS, SEND_MASKED, SEND_SHARES)
"""The steps of a sum, which are questions to clients."""
ANSWER, STATE = "secure_answer", "secure_sum"
"""Names in a client's store: the answer, and the sum that it takes part in."""
MIN_CLIENTS = 3
"""The smallest number of clients that may share keys."""


def threshold(clients: int) -> int:
    """t, the number of clients that must send shares: a majority of the clients that were to share keys."""
    return clients // 2 + 1


def has_tensors(answer: Mapping[str, Any]) -> bool:
    """True if an answer has numbers that a secure sum hides: tensors that are not empty."""
    return any(len(value) if isinstance(value, Mapping) else isinstance(value, Tensor) for value in answer.values())


# --- a client -------------------------------------------------------------------------------------------------


def withhold(store: Store, answer: Mapping[str, Any], shares: int = 0) -> None:
    """Stores an answer for the sums of this round. If clients share noise, `shares` of them have all of it."""
    count = count_withheld(store) + 1
    content = {"round": store.round, "fields": dict(answer), "summed": [], "shares": shares, "count": count}
    store.put(ANSWER, content)


def count_withheld(store: Store) -> int:
    """The number of answers that the client has withheld in this round."""
    answer = store.get(ANSWER)
    return answer["count"] if answer is not None and answer["round"] == store.round else 0


@dataclass(frozen=True)
class SumMember:
    """One client in a secure sum. Its state is in its store."""

    client: int
    store: Store
    keys: Keys
    context: bytes
    """Identifies the run."""

    def answer(self, step: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Does one step. Raises Refused if the server asks for what it must not know."""
        steps: dict[str, Callable[..., dict[str, Any]]] = {
            SHARE_KEYS: self.share_keys,
            SEND_MASKED: self.send_masked,
            SEND_SHARES: self.send_shares,
        }
        try:
            return steps[step](**fields)
        except (TypeError, AttributeError, KeyError, RuntimeError, ValueError) as error:
            raise Refused(f"not a question of a secure sum: {type(error).__name__}") from error

    def share_keys(self, name: str, weight: str, number: int, peers: Tensor) -> dict[str, Any]:
        """Step 1. `weight` is the field that weights the client's values, or "" for equal weights."""
        clients: list[int] = peers.tolist()
        answer = self.store.get(ANSWER)
        if answer is None or answer["round"] != self.store.round or name not in answer["fields"]:
            raise Refused(f"no answer with '{name}' in round {self.store.round}")
        if name in answer["summed"]:
            raise Refused(f"'{name}' of round {self.store.round} has been summed already")
        if len({*clients}) < max(MIN_CLIENTS, len(clients)) or self.client not in clients:
            raise Refused(f"a secure sum needs {MIN_CLIENTS} different clients, got {clients}")
        if weight and answer["shares"]:
            raise Refused(f"a sum weighted by '{weight}', but shares of noise have equal weights")
        last = self.store.get(STATE)
        if last is not None and (last["round"], last["number"]) >= (self.store.round, number):
            raise Refused(f"a replayed question of a secure sum (round {self.store.round}, number {number})")
        self.store.put(ANSWER, {**answer, "summed": [*answer["summed"], name]})
        private, seed, count = new_key(), secrets.token_bytes(KEY_BYTES), len(clients)
        shares = [split_secret(secret, count, threshold(count)) for secret in (private, seed)]
        own_key, parcels, own_shares = self.keys.private(self.client), [], b""
        for peer, *both in zip(clients, *shares, strict=True):
            if peer == self.client:
                own_shares = b"".join(both)
                parcels.append(b"")
                continue
            header = Header(self.client, peer, SHARE_KEYS, self.store.round, number)
            parcel = public_key(private) + b"".join(both)
            parcels.append(seal(parcel, header, own_key, self.keys.public(self.client, peer), self.context))
        state = {"step": SHARE_KEYS, "name": name, "weight": weight, "number": number, "peers": clients}
        state["needed"] = max(threshold(count), 2, answer["shares"])
        state |= {"private": private.hex(), "seed": seed.hex(), "shares": {self.client: own_shares.hex()}}
        self.store.put(STATE, {"round": self.store.round, **state})
        return dict(zip(("sealed", "lengths"), pack_parcels(parcels), strict=True))

    def send_masked(self, sealed: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Step 2. `sealed` are the messages of the peers, in their order."""
        state = self._state(after=SHARE_KEYS)
        peers: list[int] = state["peers"]
        shares: dict[int, str] = dict(state["shares"])
        values = self._values(state["name"], state["weight"], len(peers))
        private, length = bytes.fromhex(state["private"]), len(values)
        masked = values + expand_mask(bytes.fromhex(state["seed"]), length)
        parcels = unpack_parcels(sealed, lengths)
        for peer, parcel in zip(peers, parcels, strict=True):
            if peer == self.client or not parcel:
                continue
            content = self._open(parcel, peer, state["number"])
            shares[peer] = content[KEY_BYTES:].hex()
            masked = masked + pair_mask(self.client, peer, private, content[:KEY_BYTES], length)
        if len(shares) < max(threshold(len(peers)), 2):
            raise Refused(f"only {len(shares)} of {len(peers)} clients shared keys")
        self.store.put(STATE, {**state, "step": SEND_MASKED, "shares": shares, "private": "", "seed": ""})
        return {"masked": torch.from_numpy(masked.view(np.int64)), "public": to_tensor(public_key(private))}

    def send_shares(self, survivors: Tensor) -> dict[str, Any]:
        """Step 3. `survivors` are U₃."""
        state = self._state(after=SEND_MASKED)
        alive: set[int] = set(survivors.tolist())
        shares = {int(peer): bytes.fromhex(both) for peer, both in state["shares"].items()}
        if not alive <= shares.keys() or len(alive) < state["needed"]:
            raise Refused(f"a secure sum of {len(alive)} clients, {state['needed']} needed")
        if self.client not in alive:
            raise Refused("a secure sum without the values that this client sent")
        self.store.put(STATE, {**state, "step": SEND_SHARES, "shares": {}})
        half = {True: slice(SHARE_BYTES, None), False: slice(SHARE_BYTES)}  # the seed's share, the key's share
        chosen = [shares[peer][half[peer in alive]] for peer in state["peers"] if peer in shares]
        return {"shares": torch.stack(list(map(to_tensor, chosen)))}

    def _state(self, after: str) -> dict[str, Any]:
        """The state of the current sum, if its last step was `after`. No step is done twice."""
        state: dict[str, Any] | None = self.store.get(STATE)
        if state is None or state["round"] != self.store.round or state["step"] != after:
            raise Refused("a step of a secure sum out of order")
        return state

    def _values(self, name: str, weight: str, clients: int) -> Ring:
        """The values times the weight, and the weight."""
        fields = self.store.get(ANSWER)["fields"]
        factor = float(fields[weight]) if weight else 1.0
        return to_ring(np.append(flatten(fields[name]) * factor, factor), clients)

    def _open(self, parcel: bytes, sender: int, number: int) -> bytes:
        """Opens what a peer sealed."""
        message = parse_sealed(parcel)
        if message.header != Header(sender, self.client, SHARE_KEYS, self.store.round, number):
            raise Refused(f"a sealed message with an unexpected header: {message.header}")
        keys = self.keys
        content = unseal(message, keys.private(self.client), keys.public(self.client, sender), self.context)
        if len(content) != KEY_BYTES + 2 * SHARE_BYTES:
            raise Refused(f"shares of client {sender} with another length")
        return content


# --- the server -----------------------------------------------------------------------------------------------


@dataclass
class SecureSum:
    """Sums of the answers that clients have stored."""

    clients: Clients
    cohort: Sequence[int]
    """U₁: the clients that have stored an answer."""
    asked: int
    """The number of clients that were asked."""
    returns: Schema
    at_least: int = 0
    """The number of clients that a sum must have. With fewer, the server takes no step that reveals it."""

    def mean(self, name: str, weight: str = "") -> dict[str, Tensor]:
        """Σ wᵢ · fieldᵢ / Σ wᵢ over the clients that take part to the end, within STEP of the exact mean."""
        return self.mean_and_weight(name, weight)[0]

    def mean_and_weight(self, name: str, weight: str = "") -> tuple[dict[str, Tensor], int]:
        """The mean, and Σ wᵢ: with equal weights, the number of clients. A single tensor has the name ""."""
        expected: Any = self.returns[name]
        if isinstance(expected, Shaped):
            lengths = [length for length in expected.shape if isinstance(length, int)]
            expected = {"": torch.zeros(lengths, dtype=expected.dtype)} if len(lengths) == len(expected.shape) else None
        form = {
            key: tensor
            for key, tensor in (expected.items() if isinstance(expected, Mapping) else ())
            if isinstance(tensor, Tensor)
        }
        if not isinstance(expected, Mapping) or len(form) < len(expected):
            raise SettingError(f"secure_sum does not cover this method: the form of '{name}' differs by client")
        if not form:  # clients keep their models
            return {}, 0
        if len(self.cohort) < MIN_CLIENTS:
            raise QuorumLost(
                f"round {self.clients.round}: {len(self.cohort)} clients answered, a secure sum needs {MIN_CLIENTS}"
            )
        try:
            total = from_ring(self._sum(name, weight, sum(tensor.numel() for tensor in form.values())))
            weights = float(total[-1])
            if not weights >= 1 or weights != round(weights):
                raise Refused("masks that do not cancel")
        except Refused as error:
            problem = f"a client took part in a secure sum with {error.reason}"
            raise RunInterrupted(f"round {self.clients.round}: {problem}") from error
        return unflatten(total[:-1] / weights, form), int(weights)

    def _sum(self, name: str, weight: str, length: int) -> Ring:
        """Σ wᵢ · fieldᵢ and Σ wᵢ, as integers of the ring."""
        order = list(self.cohort)
        sealed = self._share_keys(order, name, weight)
        masked, publics = self._collect_masked(order, sealed, length)
        senders = [client for client in order if client in sealed]
        shares = self._collect_shares(order, senders, list(masked))
        total = np.zeros(length + 1, np.uint64)
        for values in masked.values():
            total = total + values
        for client in senders:
            secret = join_secret(shares[client])
            if client in masked:
                total = total - expand_mask(secret, length + 1)
                continue
            for peer in masked:  # the client dropped out: its peers' masks are left
                total = total - pair_mask(peer, client, secret, publics[peer], length + 1)
        return total

    def _share_keys(self, order: list[int], name: str, weight: str) -> dict[int, list[bytes]]:
        """Step 1: what each client sealed for the others, in their order."""
        count = len(order)
        fields = {"name": name, "weight": weight, "number": self.clients.count_sum(), "peers": torch.tensor(order)}
        returns = {"sealed": Shaped((None,), torch.uint8), "lengths": Shaped((count,), torch.int64)}
        sealed = {}
        for answer in self._ask(order, SHARE_KEYS, returns, fields):
            try:
                sealed[answer.client] = unpack_parcels(answer["sealed"], answer["lengths"])
            except ValueError:
                continue  # as if it had not answered
        self._check_enough(sealed, count, "shared keys")
        return sealed

    def _collect_masked(
        self, order: list[int], sealed: Mapping[int, list[bytes]], length: int
    ) -> tuple[dict[int, Ring], dict[int, bytes]]:
        """Step 2: the masked values of each client, and the public key of its masks."""
        from fewer.runtime.clients import Each

        senders = [client for client in order if client in sealed]
        parcels = {
            client: pack_parcels([sealed[peer][order.index(client)] if peer in sealed else b"" for peer in order])
            for client in senders
        }
        fields = {
            name: Each({client: both[part] for client, both in parcels.items()})
            for part, name in enumerate(("sealed", "lengths"))
        }
        returns = {"masked": Shaped((length + 1,), torch.int64), "public": Shaped((KEY_BYTES,), torch.uint8)}
        answers = self._ask(senders, SEND_MASKED, returns, fields)
        self._check_enough(answers, len(order), "sent masked values")
        needed = max(self.clients.rules.min_answers(self.asked), self.at_least)
        if len(answers) < needed:
            raise QuorumLost(f"round {self.clients.round}: {len(answers)} of {self.asked} in a sum, {needed} needed")
        masked = {answer.client: answer["masked"].numpy().view(np.uint64) for answer in answers}
        return masked, {answer.client: answer["public"].numpy().tobytes() for answer in answers}

    def _collect_shares(
        self, order: list[int], senders: list[int], survivors: list[int]
    ) -> dict[int, dict[int, bytes]]:
        """Step 3: for each client in U₂, t shares of its mask or of its key, by position."""
        returns = {"shares": Shaped((len(senders), SHARE_BYTES), torch.uint8)}
        answers = self._ask(survivors, SEND_SHARES, returns, {"survivors": torch.tensor(survivors)})
        self._check_enough(answers, len(order), "sent shares")
        chosen = answers[: threshold(len(order))]
        return {
            client: {order.index(answer.client) + 1: answer["shares"][row].numpy().tobytes() for answer in chosen}
            for row, client in enumerate(senders)
        }

    def _ask(self, who: list[int], step: str, returns: Schema, fields: Mapping[str, Any]) -> Answers:
        def handler() -> None: ...

        handler.__name__ = step
        return self.clients.ask(who, handler, returns=returns, **fields)

    def _check_enough(self, part: Any, count: int, what: str) -> None:
        needed = threshold(count)
        if len(part) < needed:
            raise QuorumLost(f"round {self.clients.round}: {len(part)} of {count} clients {what}, {needed} needed")


# --- bytes and tensors ----------------------------------------------------------------------------------------


def flatten(value: Tensor | Mapping[str, Tensor]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All values of a dict of tensors as one array, by name."""
    tensors = [value] if isinstance(value, Tensor) else [value[name] for name in sorted(value)]
    return np.concatenate([tensor.detach().cpu().double().reshape(-1).numpy() for tensor in tensors])


def unflatten(values: np.ndarray[Any, np.dtype[np.float64]], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `flatten` made an array of, with the dtypes of `form`. Integers are rounded."""
    tensors, position = {}, 0
    for name in sorted(form):
        like = form[name]
        part = torch.from_numpy(values[position : position + like.numel()]).view(like.shape)
        tensors[name] = (part if like.dtype.is_floating_point else part.round()).to(like)
        position += like.numel()
    return {name: tensors[name] for name in form}


def to_tensor(content: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def pack_parcels(parcels: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """Byte strings as one tensor of bytes, and their lengths."""
    return to_tensor(b"".join(parcels)), torch.tensor([len(parcel) for parcel in parcels])


def unpack_parcels(content: Tensor, lengths: Tensor) -> list[bytes]:
    """The byte strings that `pack_parcels` packed. Raises ValueError if the lengths are wrong."""
    sizes: list[int] = lengths.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != len(content):
        raise ValueError("the lengths do not fit")
    return [part.numpy().tobytes() for part in torch.split(content, sizes)]
