"""The privacy ledger: how much a run may reveal about one client, or about one record, as (ε, δ).

User level, central: McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR
2018. The server clips each client's change to length C, sums the changes with equal weights, adds Gaussian noise with
standard deviation z · C, and divides by the number of clients asked. Nothing else that single clients send is used.

Two sets of clients are neighbors if one client's data is replaced by any other data. The sum then changes by at most
2 C, so the accountant sees a noise multiplier of z / 2. A cohort is drawn without replacement, which the accountant
takes into account (Wang, Balle, Kasiviswanathan: Subsampled Rényi Differential Privacy, AISTATS 2019).

Adaptive clipping: Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS
2021, Algorithm 1, with their η_C = 0.2 and σ_b = (clients asked) / 20.

User level, distributed: each of m clients asked clips its own change and adds noise with standard deviation z · C / √m.
The server adds the shares of absent clients, so that the sum has the same noise as in the central case. In a secure sum
it must not know any noise: there, m is the fewest clients that the sum may have, and ε counts all shares in it.

Record level: Abadi et al.: Deep Learning with Differential Privacy, CCS 2016. Each client protects its own samples
before anything leaves it (`fewer.learning.protect`). Two data sets are neighbors if one record is blanked out: it adds
nothing to any sum. Numbers of samples are public. Clients have different records, so the ε of a record is that of its
client, and a run's ε is that of the client with the largest. Poisson sampling: Mironov, Talwar, Zhang: Rényi
Differential Privacy of the Sampled Gaussian Mechanism, 2019.

Without sampling, several Gaussian releases cost as much as one with noise multiplier (Σ z⁻²)^(−1/2). Its ε is exact:
Balle, Wang: Improving the Gaussian Mechanism for Differential Privacy, ICML 2018.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from fewer.errors import SettingError

CLIP_LR = 0.2
"""η_C: how fast adaptive clipping moves."""
COUNT_NOISE = 1 / 20
"""σ_b, the noise of the number of unclipped clients, relative to the number of clients asked."""
MAX_NOISE = 1e4
"""The largest noise multiplier that a target ε may need."""
ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256, 512)
"""Rényi orders at record level. Integers, because other orders are slow and may not converge at high sampling rates."""
NOISES = 1e-6, 1e6
"""The smallest and the largest noise multiplier that the accountant can compute with."""
RATE_STEP = 1.02
"""Sampling rates are rounded up to powers of this, so that many clients share one computation."""

Level = Literal["user", "record"]
FLAGS = ("distributed", "public_noise")
"""Options without a value."""

TOO_MANY = "releases more than epsilon was planned for, which is once for each client and round: pass noise instead"


class NotCovered(SettingError):
    """The method uses clients' data in a way that differential privacy does not cover."""


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
    distributed: bool = False
    """Each client adds its share of the noise of a sum, and the server sees only the sum."""
    public_noise: bool = False
    """Noise follows from the seed of the run, so that others can repeat it, and subtract it."""
    level: Level = "user"
    """What is protected: all data of a client, or one record."""

    @property
    def protects_at_clients(self) -> bool:
        """True if clients add noise before they send anything."""
        return self.level == "record" or self.distributed

    @classmethod
    def parse(cls, text: str) -> PrivacySettings:
        """Reads [level:]name=value,… such as user:clip=1.0,noise=0.8 or record:epsilon=8 or epsilon=8,distributed."""
        level, colon, rest = text.partition(":")
        if colon and level not in get_args(Level):
            raise SettingError(f"dp = {text}: unknown level '{level}' (allowed: {', '.join(get_args(Level))})")
        parts, values = (rest if colon else text).split(","), dict[str, Any]()
        flags = {name: name in parts for name in FLAGS}
        distributed, level = flags["distributed"], level if colon else "user"
        options = [name for name in cls.__dataclass_fields__ if name != "level"]
        for part in parts:
            if part in FLAGS:
                continue
            name, _, number = part.partition("=")
            if name in values:
                raise SettingError(f"dp = {text}: {name} is given twice")
            if name not in options or name in FLAGS:
                raise SettingError(f"dp = {text}: unknown '{name}' (allowed: {', '.join(options)})")
            try:
                values[name] = float(number)
            except ValueError:
                raise SettingError(f"dp = {text}: {name} must be a number, got {number!r}") from None
        for name, value in values.items():
            limit = 1.0 if name in ("delta", "quantile") else math.inf
            if not 0 < value < limit:
                allowed = "> 0" if limit == math.inf else "between 0 and 1"
                raise SettingError(f"dp = {text}: {name} must be {allowed}, got {value:g}")
        if not NOISES[0] <= values.get("noise", 1.0) <= NOISES[1]:
            allowed = f"between {NOISES[0]:g} and {NOISES[1]:g}"
            raise SettingError(f"dp = {text}: noise must be {allowed}, got {values['noise']:g}")
        if ("noise" in values) == ("epsilon" in values):
            raise SettingError(f"dp = {text}: pass either noise or epsilon")
        if "quantile" in values and (distributed or level != "user"):
            raise SettingError(f"dp = {text}: quantile needs noise that the server adds, at user level")
        return cls(**values, **flags, level=cast(Level, level))


class RecordRelease(NamedTuple):
    """One noisy sum over records of a client: the probability that a record takes part, and the noise multiplier z."""

    rate: float
    noise: float


@dataclass(frozen=True)
class Protection:
    """How clients protect what they send: each record, or their share of a distributed sum."""

    settings: PrivacySettings
    noise: float | None
    """z; None if a target ε chooses it for each client."""
    uses: int
    """How often a client answers at most, if a target ε chooses the noise."""

    def choose_noise(self, rate: float, steps: int) -> float:
        """z for this many releases in each answer, with a sampling rate."""
        if self.noise is not None:
            return self.noise
        target, delta = self.settings.epsilon or 0.0, self.settings.delta
        return choose_record_noise(target, delta, round_up_rate(rate), steps * self.uses)


class Release(NamedTuple):
    """Noisy sums over one cohort: the clients asked, the clients they were drawn from, and the noise multiplier z."""

    asked: int
    drawn_from: int
    noise: float
    sums: int = 1
    """Sums over the same draw: together they cost as much as one with noise z / √sums. Draws do not hide it twice."""


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
    records: dict[int, Counter[RecordRelease]] = field(default_factory=dict)
    """At record level: the releases of each client."""
    uses: int = 0
    """At record level with a target ε: how often a client answers at most."""
    repeats: int = 0
    """Sums that were released twice because the run was interrupted; if noise is distributed, rounds of such sums."""
    most_sums: int = 1
    """The largest number of sums in a round."""
    _latest: tuple[int, Release] | None = None
    """The round and the release of the latest sum over a cohort that was drawn."""
    _sums_of_round: tuple[int, int] = (0, 0)
    """A round, and the number of sums in it so far."""
    _answered: dict[int, int] = field(default_factory=dict)
    """The round in which each client released last, if a target ε chose the noise."""

    @classmethod
    def open(cls, settings: PrivacySettings, rounds: int, cohort: int, clients: int) -> PrivacyLedger:
        """The ledger of a new run. A target ε chooses the noise for one release in each of the rounds."""
        _import_accounting()
        if settings.level == "record":
            return cls(settings, settings.noise or 0.0, settings.clip, uses=count_uses(rounds, cohort, clients))
        if settings.noise is not None:
            return cls(settings, settings.noise, settings.clip)
        noise = choose_noise(settings.epsilon or 0.0, settings.delta, rounds, cohort, clients)
        return cls(settings, noise, settings.clip, (cohort, clients))

    @property
    def epsilon(self) -> float:
        """ε of all releases so far, at the δ of the settings. At record level, that of the client with the largest."""
        if self.settings.level == "record":
            spent = {tuple(sorted(self._repeat_records(releases).items())) for releases in self.records.values()}
            return max((compute_record_epsilon(releases, self.settings.delta) for releases in spent), default=0.0)
        return compute_epsilon(tuple(sorted(self._repeat_sums().items())), self.settings.delta)

    def _repeat_sums(self) -> Counter[Release]:
        """All releases, with the costliest ones repeated: over the same draw, with other noise."""
        releases = Counter(self.releases)
        repeats = self.repeats * (self.most_sums if self.settings.distributed else 1)
        for _ in range(repeats if releases else 0):
            costliest = max(releases, key=lambda release: release.sums / release.noise**2)
            releases = releases - Counter([costliest])
            releases[costliest._replace(sums=costliest.sums + 1)] += 1
        return releases

    def _repeat_records(self, releases: Counter[RecordRelease]) -> Counter[RecordRelease]:
        """All releases of a client, with the costliest one repeated."""
        costliest = min(releases, key=lambda release: release.noise, default=None)
        return releases + Counter({costliest: self.repeats}) if costliest and self.repeats else releases

    @property
    def protection(self) -> Protection | None:
        """What clients do; None if only the server adds noise."""
        if self.settings.level == "record":
            return Protection(self.settings, self.settings.noise, self.uses)
        return Protection(self.settings, self.noise, 0) if self.settings.distributed else None

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

    def record(self, asked: int, drawn_from: int, round: int, shares: float = 1.0) -> None:
        """Records a release. Raises SettingError if there are more than the noise was chosen for.

        `shares` is the variance of the noise that is there, relative to the one planned, if clients add their shares.
        """
        self._sums_of_round = round, self._sums_of_round[1] + 1 if self._sums_of_round[0] == round else 1
        self.most_sums = max(self.most_sums, self._sums_of_round[1])
        release = Release(asked, drawn_from, self.noise * math.sqrt(shares))
        if asked < drawn_from:
            if self._latest and self._latest[0] == round and self._latest[1][:2] == release[:2]:
                latest = self._latest[1]
                release = latest._replace(sums=latest.sums + 1, noise=min(latest.noise, release.noise))
                self.releases -= Counter([latest])
            self._latest = round, release
        self.releases[release] += 1
        if self.planned and (self.count_sums() > round or (asked, drawn_from) != self.planned):
            raise SettingError(
                "dp: this method releases several sums in a round, asks a cohort that is not drawn from all clients, "
                "or draws among clients that keep state: pass noise instead of epsilon, or ask all clients"
            )

    def count_sums(self) -> int:
        """The number of sums released so far."""
        return sum(release.sums * count for release, count in self.releases.items())

    def record_client(self, client: int, releases: Sequence[Sequence[float]], round: int = 0) -> None:
        """Records what a client released about its records, as (rate, noise, count).

        Raises SettingError if a target ε was planned for one answer of a client in a round, and this is the second.
        """
        if releases and round and self.settings.epsilon is not None:
            if self._answered.get(client) == round:
                raise SettingError(f"dp: this method {TOO_MANY}")
            self._answered[client] = round
        for rate, noise, count in releases:
            spent = self.records.setdefault(client, Counter())
            spent[RecordRelease(round_up_rate(rate), noise)] += int(count)

    def check_repeats(self, repeats: int) -> None:
        """Sets `repeats`. Raises SettingError if a target ε forbids any."""
        if repeats and self.settings.epsilon is not None:
            raise SettingError(
                f"dp: epsilon = {self.settings.epsilon:g} was not planned for an interrupted round, whose sums "
                "may be released twice: start a new run, or pass noise instead"
            )
        self.repeats = repeats

    def check_target(self) -> None:
        """Raises SettingError if the records of a client have cost more than the target ε."""
        if self.settings.epsilon is not None and self.epsilon > self.settings.epsilon:
            raise SettingError(f"dp: this method {TOO_MANY}")

    def move_clip(self, unclipped: float) -> None:
        """C ← C · exp(−η_C (b̃ − γ)), for the noisy fraction b̃ of clients whose change was not clipped."""
        assert self.settings.quantile is not None
        self.clip *= math.exp(-CLIP_LR * (unclipped - self.settings.quantile))

    def to_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        content = {"noise": self.noise, "clip": self.clip, "releases": [[*key, n] for key, n in self.releases.items()]}
        content |= {"most_sums": self.most_sums} if self.most_sums > 1 else {}
        content |= {"repeats": self.repeats} if self.repeats else {}
        rows = [[client, *key, n] for client, spent in self.records.items() for key, n in spent.items()]
        return {**content, "records": rows} if rows else content

    def restore(self, content: Mapping[str, Any]) -> None:
        """Restores the ledger from `to_dict`."""
        self.noise, self.clip = content["noise"], content["clip"]
        self.most_sums, self.repeats = content.get("most_sums", 1), content.get("repeats", 0)
        rows = content["releases"]
        self.releases = Counter({Release(*release): count for *release, count in rows})
        self.records = {}
        for client, *release in content.get("records", ()):
            self.record_client(client, [release])


@lru_cache
def compute_epsilon(releases: tuple[tuple[Release, int], ...], delta: float) -> float:
    """ε of these releases at δ, for replacing one client."""
    dp = _import_accounting()
    if all(release.asked >= release.drawn_from for release, _ in releases):  # the sensitivity is 2 C
        return compute_gaussian_epsilon(
            [(release.noise / 2, count * release.sums) for release, count in releases], delta
        )
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for release, count in releases:
        event = dp.GaussianDpEvent(release.noise / 2 / math.sqrt(release.sums))
        if release.asked < release.drawn_from:
            event = dp.SampledWithoutReplacementDpEvent(release.drawn_from, release.asked, event)
        accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def compute_gaussian_epsilon(releases: Iterable[tuple[float, int]], delta: float) -> float:
    """ε at δ of Gaussian releases without sampling, each with a noise multiplier and a count."""
    dp = _import_accounting()
    information = sum(count / noise**2 for noise, count in releases)
    return float(dp.get_epsilon_gaussian(information**-0.5, delta)) if information else 0.0


def choose_noise(epsilon: float, delta: float, rounds: int, cohort: int, clients: int) -> float:
    """The smallest noise multiplier, to 0.1 %, with which this many rounds cost at most ε."""

    def spent(noise: float) -> float:
        return compute_epsilon(((Release(cohort, clients, noise), rounds),), delta)

    return search_noise(spent, epsilon, f"{rounds} rounds")


def search_noise(spent: Callable[[float], float], epsilon: float, releases: str) -> float:
    """The smallest noise multiplier, to 0.1 %, with which at most ε is spent."""
    low, high = 0.01, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise SettingError(f"dp: no noise below {MAX_NOISE:g} reaches epsilon = {epsilon:g} in {releases}")
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high


# --- records ----------------------------------------------------------------------------------------------------


def count_uses(rounds: int, cohort: int, clients: int) -> int:
    """How often a client is asked at most, with few exceptions: three standard deviations above the mean."""
    mean = rounds * cohort / clients
    return rounds if cohort >= clients else min(rounds, math.ceil(mean + 3 * math.sqrt(mean)))


def round_up_rate(rate: float) -> float:
    """The next power of `RATE_STEP`, at most 1."""
    return min(1.0, RATE_STEP ** math.ceil(math.log(rate) / math.log(RATE_STEP) - 1e-9))


def compute_record_epsilon(releases: tuple[tuple[RecordRelease, int], ...], delta: float) -> float:
    """ε of these releases of one client at δ, for blanking out one record."""
    if all(release.rate == 1 for release, _ in releases):
        return compute_gaussian_epsilon([(release.noise, count) for release, count in releases], delta)
    from dp_accounting import rdp

    spent = sum((count * compute_curve(*release) for release, count in releases), np.zeros(len(ORDERS)))
    return float(rdp.compute_epsilon(ORDERS, spent, delta)[0])


@lru_cache(maxsize=4096)
def compute_curve(rate: float, noise: float) -> np.ndarray:
    """The Rényi divergence of one Gaussian sum over a Poisson sample of records, by order."""
    dp = _import_accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(ORDERS)
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)))
    return np.asarray(accountant.rdp)


@lru_cache
def choose_record_noise(epsilon: float, delta: float, rate: float, count: int) -> float:
    """The smallest noise multiplier, to 0.1 %, with which this many releases of a client cost at most ε."""

    def spent(noise: float) -> float:
        return compute_record_epsilon(((RecordRelease(rate, noise), count),), delta)

    return search_noise(spent, epsilon, f"{count} releases")


def _import_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise SettingError("dp needs the accountant: pip install 'fewer[dp]'") from error
    return dp_accounting
