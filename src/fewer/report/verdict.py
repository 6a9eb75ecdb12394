"""The verdict of a report: who won, at what cost and why, in a few sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fewer.experiments.targets import best_value, cost_to_reach
from fewer.methods.new_clients import worst_tenth
from fewer.report.groups import RunGroup, find_method
from fewer.report.metrics import client_values
from fewer.runs.figures import describe_baseline
from fewer.runs.metric import PrimaryMetric
from fewer.statistics import Interval, format_number, interval

MAX_NAMED = 3
"""Maximum number of close competitors that are named."""


def verdict(groups: Sequence[RunGroup]) -> list[str]:
    """Sentences: first the winner, or why there is no winner; then cost, early lead, worst clients and methods."""
    done = _finished(groups)
    if not done:
        return ["No run has finished yet; these are the results so far."]
    if len(groups) == 1:
        (group,) = done
        baseline = describe_baseline(group.last_metrics, group.metric)
        sentences = [_describe_result(group), baseline, *_describe_method(group), *_describe_personal_models(group)]
        return [sentence for sentence in sentences if sentence]
    if reason := _why_not_comparable(groups):
        return [reason]
    if len(done) == 1:
        return [f"Only {done[0].label} has finished: {_describe_result(done[0])}"]
    ranked = _rank(done)
    first, second = ranked[:2]
    sentences = [
        _describe_winner(ranked),
        f"Cost: {first.label} {_describe_cost(first)}; {second.label} {_describe_cost(second)}.",
        *(
            f"{group.label}: {text}"
            for group in ranked
            if (text := describe_baseline(group.last_metrics, group.metric))
        ),
        *_describe_early_lead(ranked),
        *_describe_target(first, second),
        *_describe_worst_clients(first, second),
        *_describe_method(first),
        *_describe_personal_models(first),
        *_describe_personal_models(second),
    ]
    if len(done) < len(groups):
        sentences.append("Unfinished runs are left out.")
    return sentences


def winner(groups: Sequence[RunGroup]) -> RunGroup | None:
    """The group that is significantly ahead of all others; None if no group is, or they are not comparable."""
    done = _finished(groups)
    if len(done) < 2 or _why_not_comparable(groups):
        return None
    first, *others = _rank(done)
    by_seed = is_paired(groups)
    return first if all(_is_ahead(first, group, by_seed) for group in others) else None


def is_paired(groups: Sequence[RunGroup]) -> bool:
    """True if all finished groups have the same seeds, at least two: then they are compared seed by seed.

    Runs with the same seed share the partition. An easy partition changes both results, but not their difference.
    """
    done = _finished(groups)
    seeds = {tuple((run.seed, run.data_seed) for run in group.runs) for group in done}
    if len(seeds) != 1 or len(done[0].runs) < 2 or any(group.units for group in done):
        return False
    return all(run.value is not None for group in done for run in group.runs)


def _finished(groups: Sequence[RunGroup]) -> list[RunGroup]:
    return [group for group in groups if group.finished and group.value]


def _why_not_comparable(groups: Sequence[RunGroup]) -> str:
    """Why the groups cannot be compared; empty if they can."""
    if len({str(group.runs[0].data_settings) for group in groups}) > 1:
        return "These runs have different tasks, so there is no winner. The differences are listed below."
    if len({group.metric for group in groups}) > 1:
        return "These runs are measured by different metrics, so there is no winner."
    kinds = {tuple(name in group.runs[0].history[-1] for name in ("fairness", "groups", "tasks")) for group in groups}
    if len(kinds) > 1:
        evaluations = "on all clients, new clients, groups or tasks"
        return f"These methods are evaluated differently ({evaluations}), so there is no winner."
    return ""


def _rank(groups: Sequence[RunGroup]) -> list[RunGroup]:
    return sorted(groups, key=lambda group: -group.metric.rank(_value(group).mean))


def _is_ahead(first: RunGroup, second: RunGroup, by_seed: bool, number: int | None = None) -> bool:
    """True if the first group is significantly better, after this round or at the end."""
    if by_seed:
        lead = _paired_lead(first, second, number)
        return lead.half is not None and lead.mean > lead.half
    better, worse, rank = _value(first, number), _value(second, number), first.metric.rank
    if better.half is None or worse.half is None:
        return False
    return rank(worse.mean) + worse.half < rank(better.mean) - better.half


def _paired_lead(first: RunGroup, second: RunGroup, number: int | None = None) -> Interval:
    """Lead of the first over the second, paired by seed."""
    rank = first.metric.rank
    pairs = zip(_values(first, number), _values(second, number), strict=True)
    return interval([rank(a) - rank(b) for a, b in pairs])


def _list_names(names: Sequence[str]) -> str:
    """The first names, and how many follow."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _describe_winner(ranked: Sequence[RunGroup]) -> str:
    first, second, *_ = ranked
    metric = first.metric
    if any(_value(group).half is None for group in ranked):
        return (
            f"{first.label} has the {metric.best} {metric.name}, {_format_value(first)}, ahead of {second.label} with "
            f"{_format_value(second)}. With a single seed this may be chance; use --seeds 3."
        )
    by_seed = is_paired(ranked)
    close = [group for group in ranked[1:] if not _is_ahead(first, group, by_seed)]
    if not close:
        return (
            f"{first.label} wins: {_format_value(first)} {metric.name}, ahead of {second.label} with "
            f"{_format_value(second)} ({first.averaged_over}). {_describe_lead(ranked, by_seed)}"
        )
    behind = [group.label for group in ranked[1:] if group not in close]
    rest = f" It is significantly ahead of {_list_names(behind)}." if behind else ""
    names = _list_names([f"{group.label} {_format_value(group)}" for group in close])
    doubt = f"paired by seed its lead over {names} is not significant" if by_seed else f"its interval overlaps {names}"
    return (
        f"No clear winner: {first.label} has the {metric.best} mean, {_format_value(first)}, but {doubt} "
        f"(95 %, {first.averaged_over}).{rest}"
    )


def _describe_lead(ranked: Sequence[RunGroup], by_seed: bool) -> str:
    """How clearly the first is ahead."""
    first, second, *more = ranked
    text = "Its 95 % interval overlaps no other"
    if by_seed:
        lead = first.metric.format_interval(_paired_lead(first, second), 1)
        text = f"Paired by seed, it leads {second.label} by {lead}{' points' if first.metric.percent else ''}"
        text += " and all others significantly" if more else ""
    comparisons = f" ({len(ranked) - 1} comparisons, each at 95 %, without correction)" if more else ""
    return f"{text}{comparisons}."


def _describe_cost(group: RunGroup) -> str:
    sent = "sent {} up and {} down".format(*map(_format_megabytes, group.megabytes))
    return f"{sent} in {group.rounds} rounds and took {group.last_mean('seconds'):,.0f} s"


def _describe_early_lead(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Who was significantly ahead in the first round in which all were evaluated, if there were more rounds."""
    metric = groups[0].metric
    histories = [run.history for group in groups for run in group.runs]
    evaluated = ({int(entry["round"]) for entry in history if metric.name in entry} for history in histories)
    start, *later = sorted(set.intersection(*evaluated)) or [0]
    if not later:
        return
    first, *others = sorted(groups, key=lambda group: -metric.rank(_value(group, start).mean))
    by_seed = is_paired(groups)
    if all(_is_ahead(first, group, by_seed, start) for group in others):
        yield (
            f"Early lead: after round {start}, {first.label} had {_format_value(first, start)}, ahead of "
            f"{others[0].label} with {_format_value(others[0], start)}."
        )


def _describe_worst_clients(first: RunGroup, second: RunGroup) -> Iterator[str]:
    """How well the worst tenth of clients does."""
    metric = first.metric
    by_group = [client_values([run.history for run in group.runs], metric) for group in (first, second)]
    if all(by_group):
        tenths = [Interval(worst_tenth(values, metric.higher_is_better), None) for values in by_group]
        worst, other = (_format_interval(tenth, metric) for tenth in tenths)
        yield f"Its worst tenth of clients reaches {worst}, compared with {other} for {second.label}."


def _describe_target(first: RunGroup, second: RunGroup) -> Iterator[str]:
    """When the first reached the best value of the second."""
    metric = first.metric
    histories, others = ([run.history for run in group.runs] for group in (first, second))
    target = best_value(others, metric)
    cost, other = cost_to_reach(histories, target, metric), cost_to_reach(others, target, metric)
    if cost.round is not None and other.round is not None and cost.mb is not None and other.mb is not None:
        yield (
            f"{first.label} reached the best {metric.name} of {second.label}, "
            f"{_format_interval(Interval(target, None), metric)}, in round {cost.round} after "
            f"{_format_megabytes(cost.mb)}; {second.label} did in round {other.round} after "
            f"{_format_megabytes(other.mb)}."
        )


def _describe_method(group: RunGroup) -> Iterator[str]:
    """First line of the method's docstring."""
    method = find_method(group.runs[0])
    if lines := ((method and method.__doc__) or "").strip().splitlines():
        yield f"About {group.method_name}: {lines[0]}"


def _describe_personal_models(group: RunGroup) -> Iterator[str]:
    """How personal models do on the test samples of all clients, and on clients that never trained."""
    name = f"global_{group.metric.name}"
    if any(name in run.history[-1] for run in group.runs) and group.global_value:
        average = _format_interval(Interval(group.global_value.mean, None), group.metric)
        yield f"{group.label} trains one model per client; on everyone's test data they average {average}."
    joined = [run.history[-1].get(f"unseen_clients_{group.metric.name}") for run in group.runs]
    if values := [value for value in joined if value is not None]:
        yield f"Clients that never trained reach {_format_interval(interval(values), group.metric)} after they joined."


def _describe_result(group: RunGroup) -> str:
    result = f"{_format_value(group)} {group.metric.name} ({group.averaged_over})"
    return f"{group.label} reaches {result}. It {_describe_cost(group)}."


def _values(group: RunGroup, number: int | None) -> list[float]:
    """The primary metric of each run after this round, or the last one."""
    if number is None:
        return [run.value for run in group.runs if run.value is not None]
    name = group.metric.name
    return [entry[name] for run in group.runs for entry in run.history if entry["round"] == number]


def _value(group: RunGroup, number: int | None = None) -> Interval:
    value = group.value if number is None else interval(_values(group, number))
    assert value
    return value


def _format_value(group: RunGroup, number: int | None = None) -> str:
    return _format_interval(_value(group, number), group.metric)


def _format_interval(value: Interval, metric: PrimaryMetric) -> str:
    return metric.format_interval(value, 1) + metric.unit


def _format_megabytes(count: float) -> str:
    return f"{format_number(count)} MB"
