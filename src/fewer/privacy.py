"""The privacy ledger: how much a run may reveal about one client, as (ε, δ) of differential privacy.

User level, central: McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR
2018. The server clips each client's change to length C, sums the changes with equal weights, adds Gaussian noise with
standard deviation z · C, and divides by the number of clients asked. Nothing else that single clients send is used.

Two sets of clients are neighbors if one client's data is replaced by any other data. The sum then changes by at most
2 C, so the accountant sees a noise multiplier of z / 2. A cohort is drawn without replacement, which the accountant
takes into account (Wang, Balle, Kasiviswanathan: Subsampled Rényi Differential Privacy, AISTATS 2019).

Adaptive clipping: Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS
2021, Algorithm 1, with their η_C = 0.2 and σ_b = (clients asked) / 20.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from fewer.errors import SettingError

CLIP_LR = 0.2
"""η_C: how fast adaptive clipping moves."""
COUNT_NOISE = 1 / 20
"""σ_b, the noise of the number of unclipped clients, relative to the number of clients asked."""
MAX_NOISE = 1e4
"""The largest noise multiplier that a target ε may need."""


@dataclass(frozen=True)
class PrivacySettings:
    """What `--dp` asks for."""

    clip: float = 1.0
    """C, the longest change of a client; with adaptive clipping, that of the first round."""
    noise: float | None = None
    """z, the standard deviation of the noise relative to C; None if it follows from `epsilon`."""
    epsilon: float | None = None
    """The ε that all rounds together may reach."""
    delta: float = 1e-5
    quantile: float | None = None
    """γ: adaptive clipping moves C toward this quantile of the lengths. None: C is constant."""

    @classmethod
    def parse(cls, text: str) -> PrivacySettings:
        """Reads [user:]name=value,… such as user:clip=1.0,noise=0.8 or epsilon=8."""
        level, colon, rest = text.partition(":")
        if colon and level != "user":
            raise SettingError(f"dp = {text}: unknown level '{level}' (allowed: user)")
        values: dict[str, float] = {}
        for part in (rest if colon else text).split(","):
            name, _, number = part.partition("=")
            if name not in cls.__dataclass_fields__:
                raise SettingError(f"dp = {text}: unknown '{name}' (allowed: {', '.join(cls.__dataclass_fields__)})")
            try:
                values[name] = float(number)
            except ValueError:
                raise SettingError(f"dp = {text}: {name} must be a number, got {number!r}") from None
        for name, value in values.items():
            limit = 1.0 if name in ("delta", "quantile") else math.inf
            if not 0 < value < limit:
                allowed = "> 0" if limit == math.inf else "between 0 and 1"
                raise SettingError(f"dp = {text}: {name} must be {allowed}, got {value:g}")
        if ("noise" in values) == ("epsilon" in values):
            raise SettingError(f"dp = {text}: pass either noise or epsilon")
        return cls(**values)


class Release(NamedTuple):
    """One noisy sum: the clients asked, the clients they were drawn from, and the noise multiplier z."""

    asked: int
    drawn_from: int
    noise: float


@dataclass
class PrivacyLedger:
    """The noise of a run, the clipping norm now, and all releases so far."""

    settings: PrivacySettings
    noise: float
    """z"""
    clip: float
    """C"""
    planned: tuple[int, int] | None = None
    """The cohort and the number of clients that the noise was chosen for, if a target ε chose it."""
    releases: Counter[Release] = field(default_factory=Counter)

    @classmethod
    def open(cls, settings: PrivacySettings, rounds: int, cohort: int, clients: int) -> PrivacyLedger:
        """The ledger of a new run. A target ε chooses the noise for one release in each of the rounds."""
        if settings.noise is not None:
            _import_accounting()
            return cls(settings, settings.noise, settings.clip)
        noise = choose_noise(settings.epsilon or 0.0, settings.delta, rounds, cohort, clients)
        return cls(settings, noise, settings.clip, (cohort, clients))

    @property
    def epsilon(self) -> float:
        """ε of all releases so far, at the δ of the settings."""
        return compute_epsilon(tuple(sorted(self.releases.items())), self.settings.delta)

    def noise_of_sum(self, asked: int) -> float:
        """The standard deviation of the noise of a sum of clipped changes.

        Adaptive clipping also releases the number of unclipped clients. Both together cost as much as noise z alone:
        z_Δ = (z⁻² − (2 σ_b)⁻²)^(−1/2).
        """
        if self.settings.quantile is None:
            return self.noise * self.clip
        left = self.noise**-2 - (2 * self.noise_of_count(asked)) ** -2
        if left <= 0:
            raise SettingError(
                f"dp: noise = {self.noise:g} is too much for adaptive clipping with {asked} clients "
                f"(allowed: less than {2 * self.noise_of_count(asked):g}, or no quantile)"
            )
        return self.clip / math.sqrt(left)

    def noise_of_count(self, asked: int) -> float:
        """σ_b, the standard deviation of the noise of the number of unclipped clients."""
        return COUNT_NOISE * asked

    def record(self, asked: int, drawn_from: int, round: int) -> None:
        """Records a release. Raises SettingError if there are more than the noise was chosen for."""
        self.releases[Release(asked, drawn_from, self.noise)] += 1
        if self.planned and (self.releases.total() > round or (asked, drawn_from) != self.planned):
            problem = (
                "this method releases several sums in a round, or asks a cohort that is not drawn from all clients"
            )
            raise SettingError(f"dp: {problem}: pass noise instead of epsilon")

    def move_clip(self, unclipped: float) -> None:
        """C ← C · exp(−η_C (b̃ − γ)), for the noisy fraction b̃ of clients whose change was not clipped."""
        assert self.settings.quantile is not None
        self.clip *= math.exp(-CLIP_LR * (unclipped - self.settings.quantile))

    def to_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {"noise": self.noise, "clip": self.clip, "releases": [[*key, n] for key, n in self.releases.items()]}

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores the ledger from `to_dict`."""
        self.noise, self.clip = content["noise"], content["clip"]
        rows = content["releases"]
        self.releases = Counter({Release(asked, clients, noise): count for asked, clients, noise, count in rows})


@lru_cache
def compute_epsilon(releases: tuple[tuple[Release, int], ...], delta: float) -> float:
    """ε of these releases at δ, for replacing one client, by Rényi differential privacy."""
    dp = _import_accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for release, count in releases:
        event = dp.GaussianDpEvent(release.noise / 2)  # the sensitivity is 2 C
        if release.asked < release.drawn_from:
            event = dp.SampledWithoutReplacementDpEvent(release.drawn_from, release.asked, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta)) if releases else 0.0


def choose_noise(epsilon: float, delta: float, rounds: int, cohort: int, clients: int) -> float:
    """The smallest noise multiplier, to 0.1 %, with which this many rounds cost at most ε."""

    def spent(noise: float) -> float:
        return compute_epsilon(((Release(cohort, clients, noise), rounds),), delta)

    low, high = 0.01, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise SettingError(f"dp: no noise below {MAX_NOISE:g} reaches epsilon = {epsilon:g} in {rounds} rounds")
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


def _import_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise SettingError("dp needs the accountant: pip install 'fewer[dp]'") from error
    return dp_accounting
