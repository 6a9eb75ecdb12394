"""Who won, at what cost and why: a few sentences, from figures alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fewer.experiments.targets import best, reach
from fewer.methods.new_clients import worst_tenth
from fewer.report.figures import Interval, by_client, curve, interval
from fewer.report.run_reader import Run, RunGroup
from fewer.runs.statistics import amount

NAMED = 3
"""At most so many that cannot be told from the first are named."""


def verdict(groups: Sequence[RunGroup]) -> list[str]:
    """The first sentence says who won, or why nobody did; the others what it cost and what speaks for it."""
    done = _done(groups)
    if not done:
        return ["No run has come to its end yet: these are the figures so far."]
    if len(groups) == 1:
        return [_alone(done[0]), *_why(done[0]), *_personal(done[0])]
    if reason := _apart(groups):
        return [reason]
    if len(done) == 1:
        return [f"Only {done[0].label} has come to its end: {_alone(done[0])}"]
    ranked = _ranked(done)
    first, second = ranked[:2]
    sentences = [_won(ranked), _cost(first, second), *_early(ranked), *_target(first, second), *_worst(first, second)]
    sentences += _why(first)
    sentences += [text for group in (first, second) for text in _personal(group)]
    if len(done) < len(groups):
        sentences.append("Runs that have not come to their end are left out of this.")
    return sentences


def winner(groups: Sequence[RunGroup]) -> RunGroup | None:
    """Who is surely ahead of all others; None where nobody is, or where they cannot be compared."""
    done = _done(groups)
    if len(done) < 2 or _apart(groups):
        return None
    first, *others = _ranked(done)
    seeds = paired(groups)
    return first if all(_behind(group, first, seeds) for group in others) else None


def paired(groups: Sequence[RunGroup]) -> bool:
    """Whether those that are compared have several seeds, and the same: then what differs is judged seed by seed.

    The same seed means the same division of the data, whose luck is in both of two figures and not in their difference.
    """
    done = _done(groups)
    seeds = {tuple((run.seed, run.data_seed) for run in group.runs) for group in done}
    if len(seeds) != 1 or len(done[0].runs) < 2 or any(group.units for group in done):
        return False
    return all(run.accuracy is not None for group in done for run in group.runs)


def _done(groups: Sequence[RunGroup]) -> list[RunGroup]:
    return [group for group in groups if group.finished and group.accuracy]


def _apart(groups: Sequence[RunGroup]) -> str:
    """Why these cannot be compared; empty if they can."""
    if len({str(group.runs[0].division) for group in groups}) > 1:
        return "These runs are not of one task, so there is no winner among them. What differs is named below."
    if len({_judging(group) for group in groups}) > 1:
        return "These methods are not judged alike (on new clients, groups, tasks, or on all), so none is the winner."
    return ""


def _ranked(groups: Sequence[RunGroup]) -> list[RunGroup]:
    return sorted(groups, key=lambda group: -_known(group).mean)


def _behind(group: RunGroup, first: RunGroup, seeds: bool) -> bool:
    """Whether this one is surely worse."""
    return _ahead(_ends(first), _ends(group)) if seeds else _below(_known(group), _known(first))


def _ends(group: RunGroup) -> list[float]:
    return [run.accuracy for run in group.runs if run.accuracy is not None]


def _lead(one: Sequence[float], other: Sequence[float]) -> Interval:
    """By how much the first is ahead, seed by seed."""
    return interval([mine - theirs for mine, theirs in zip(one, other, strict=True)])


def _ahead(one: Sequence[float], other: Sequence[float]) -> bool:
    lead = _lead(one, other)
    return lead.half is not None and lead.mean > lead.half


def _below(one: Interval, other: Interval) -> bool:
    """Whether the 95 % intervals are known and do not meet."""
    return one.half is not None and other.half is not None and one.mean + one.half < other.mean - other.half


def _won(ranked: Sequence[RunGroup]) -> str:
    first, second, *_ = ranked
    if any(_known(group).half is None for group in ranked):
        return (
            f"{first.label} has the highest accuracy, {_told(first)}, before {second.label} with {_told(second)}; "
            "but a single seed cannot tell merit from chance (--seeds 3 can)."
        )
    seeds = paired(ranked)
    close = [group for group in ranked[1:] if not _behind(group, first, seeds)]
    if not close:
        return (
            f"{first.label} won: {_told(first)} accuracy, before {second.label} with {_told(second)} ({first.over}). "
            f"{_how(ranked, seeds)}"
        )
    rest = "" if len(close) == len(ranked) - 1 else " All others are behind."
    names = ", ".join(f"{group.label} {_told(group)}" for group in close[:NAMED])
    names += f" and {len(close) - NAMED} more" if len(close) > NAMED else ""
    doubt = "seed by seed (95 % interval) it is not surely ahead of" if seeds else "its 95 % interval overlaps with"
    return (
        f"No clear winner: {first.label} has the highest mean, {_told(first)}, but {doubt} {names} "
        f"({first.over}).{rest}"
    )


def _how(ranked: Sequence[RunGroup], seeds: bool) -> str:
    """By what the first is surely ahead."""
    first, second, *more = ranked
    text = "Its 95 % interval does not meet that of any other"
    if seeds:
        lead = _lead(_ends(first), _ends(second))
        text = f"Seed by seed it is {100 * lead.mean:.1f} ± {100 * (lead.half or 0):.1f} points ahead of {second.label}"
        text += ", and surely ahead of all others" if more else ""
    return f"{text} ({len(ranked) - 1} comparisons, each at 95 % by itself)." if more else f"{text}."


def _cost(first: RunGroup, second: RunGroup) -> str:
    return f"Cost: {first.label} {_price(first)}; {second.label} {_price(second)}."


def _price(group: RunGroup) -> str:
    up, down = group.megabytes
    sent = f"sent {_megabytes(up)} up and {_megabytes(down)} down"
    return f"{sent} in {group.rounds} rounds and {group.mean('seconds'):,.0f} s"


def _early(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Who was surely ahead in the first round in which all were evaluated, if there were more."""
    curves = {g.label: {p.round: p.accuracy for p in curve([run.history for run in g.runs])} for g in groups}
    common = sorted(set.intersection(*(set(points) for points in curves.values())))
    if len(common) < 2:
        return
    ranked = sorted(((points[common[0]], label) for label, points in curves.items()), key=lambda one: -one[0].mean)
    (first, one), *others = ranked
    seeds = paired(groups)
    then = {g.label: [_at(run, common[0]) for run in g.runs] for g in groups}
    if all(_ahead(then[one], then[label]) if seeds else _below(other, first) for other, label in others):
        second, other = others[0]
        yield f"Soonest: after round {common[0]}, {one} had {_text(first)}, the next, {other}, {_text(second)}."


def _at(run: Run, number: int) -> float:
    return next(float(line["accuracy"]) for line in run.history if line["round"] == number)


def _worst(first: RunGroup, second: RunGroup) -> Iterator[str]:
    """Whom it helps: the clients that fare worst."""
    values = [by_client([run.history for run in group.runs]) for group in (first, second)]
    if all(values):
        mine, theirs = (100 * worst_tenth(each) for each in values)
        yield f"Its worst tenth of clients has {mine:.1f} %, that of {second.label} {theirs:.1f} %."


def _target(first: RunGroup, second: RunGroup) -> Iterator[str]:
    """How soon the first was where the second came to at best."""
    mine, theirs = ([run.history for run in group.runs] for group in (first, second))
    target = best(theirs)
    here, there = reach(mine, target), reach(theirs, target)
    if here.round is not None and there.round is not None and here.mb is not None and there.mb is not None:
        yield (
            f"The best of {second.label}, {100 * target:.1f} %, {first.label} reached in round {here.round} with "
            f"{_megabytes(here.mb)} sent in all; {second.label} in round {there.round} with {_megabytes(there.mb)}."
        )


def _why(group: RunGroup) -> Iterator[str]:
    """What the method does, in its own words."""
    if doc := (((kind := group.runs[0].kind) and kind.__doc__) or "").strip().splitlines():
        first = doc[0].split()[0]
        plain = first.lower() if first[1:].islower() else first  # FedAvg is a name
        yield f"What {group.name} does: {plain}{doc[0][len(first) :]}"


def _personal(group: RunGroup) -> Iterator[str]:
    """How models that belong to one client fare with the samples of all."""
    if any("global" in run.history[-1] for run in group.runs) and group.global_accuracy:
        yield (
            f"Of {group.label} each client has a model of its own: on samples of all clients these are right on "
            f"{100 * group.global_accuracy.mean:.1f} %."
        )


def _alone(group: RunGroup) -> str:
    return f"{group.label} reaches {_told(group)} accuracy ({group.over}). It {_price(group)}."


def _judging(group: RunGroup) -> tuple[bool, ...]:
    last = group.runs[0].history[-1]
    return tuple(name in last for name in ("fairness", "groups", "tasks"))


def _known(group: RunGroup) -> Interval:
    found = group.accuracy
    assert found
    return found


def _told(group: RunGroup) -> str:
    return _text(_known(group))


def _text(value: Interval) -> str:
    mean, half = value
    return f"{100 * mean:.1f} %" if half is None else f"{100 * mean:.1f} ± {100 * half:.1f} %"


def _megabytes(count: float) -> str:
    return f"{amount(count)} MB"
