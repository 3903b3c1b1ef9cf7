"""The sections of an explanation, each a JSON-able mapping with figures and `says`: the same in sentences.

Pure functions of metrics lines and a step's timeline. Promises: shares and sums are over exactly the steps that are
explained; a figure that the record lacks is None or left out and no sentence is made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gruppetto.record.explain.engines import kv_limited
from gruppetto.record.explain.means import Row, decided, having, mean, mean_of_tokens, of_batch, total, trained
from gruppetto.record.explain.policy import UNKNOWN, Policy
from gruppetto.record.explain.read import Event, step_words
from gruppetto.record.explain.trainer import Trainer

MEANING = {
    "decode": "slots that made tokens",
    "prefill": "prompts and resumed contexts read in",
    "tail": "empty slots while the last rollouts ran and nothing was left that might start",
    "tool": "empty slots of rollouts that were in a tool call",
    "reward": "nothing ran: the last rewards were awaited",
    "sync": "new weights on their way to the engines",
    "switch": "memory changing hands between engines and trainer",
    "trainer": "the engines waited for the trainer",
    "kv_full": "free slots that could not be used because KV was full",
    "queue": "something was there to run and the engine was not decoding it",
    "eval": "held-out tasks were answered",
    "lost": "tokens thrown away, and engines that had died",
}

NAMED = 3
"""Errors that are named, the most frequent ones."""

LONG_SHARE = 0.8
"""Share of what the longest answers are due, below which it is said."""

WORTH = 0.03
"""Excess from which on there is something to win: what is less is noise (our scheduling study)."""

FIFO_EXCESS = (
    (0.08, 0.05),
    (0.16, 0.10),
    (0.33, 0.19),
    (0.65, 0.38),
    (1.3, 0.50),
    (2.5, 0.19),
    (5.0, 0.06),
    (10.0, 0.03),
)
"""rho: excess over the bound of an on-policy run in launch order (our scheduling study, section 6)."""


def engine_seconds(rows: Sequence[Row], config: Row) -> dict[str, Any]:
    """Every engine-second by cause, the largest first."""
    rows = having(rows, "engine_s/total")
    whole = total(rows, "engine_s/total")
    if not whole:
        return {"total_s": None, "causes": [], "says": []}
    seconds_of = {cause: total(rows, f"engine_s/{cause}") or 0.0 for cause in MEANING}
    if not kv_limited(config):  # then slots were free and their engine could not take what was queued
        seconds_of["queue"] += seconds_of.pop("kv_full")
    found = list(seconds_of.items())
    causes = [
        {"cause": cause, "seconds": seconds, "share": seconds / whole, "meaning": MEANING[cause]}
        for cause, seconds in sorted(found, key=lambda item: -item[1])
        if seconds
    ]
    idle = [entry for entry in causes if entry["cause"] not in ("decode", "prefill")]
    decode, prefill = (seconds_of[cause] / whole for cause in ("decode", "prefill"))
    says = [f"Of {whole:,.1f} engine-seconds {decode:.0%} went into decoding and {prefill:.0%} into prefill."]
    if idle:
        says.append(f"The largest other part is {idle[0]['cause']}, {idle[0]['share']:.0%}: {idle[0]['meaning']}.")
    says += _too_few(config)
    return {"total_s": whole, "causes": causes, "says": says}


def _too_few(config: Row) -> Iterable[str]:
    """Slots that a batch cannot fill are empty whatever the schedule."""
    engine, rollout = config.get("engine", {}), config.get("rollout", {})
    slots = engine.get("slots", 0) * engine.get("count", 1)
    batch = rollout.get("prompts_per_step", 0) * rollout.get("group_size", 0)
    if 0 < batch < slots:
        yield (
            f"A batch has {batch:,} rollouts and the engines {slots:,} slots: at least {1 - batch / slots:.0%} of the "
            "slots stay empty while one batch runs at a time."
        )


def publishes(events: Iterable[Event], steps: Collection[int]) -> dict[str, Any]:
    """Where deltas are asked for: how often engines got them, and why they got all of the weights instead."""
    kinds, whys, newest = Counter[str](), Counter[str](), dict[str, str]()
    for event in events:
        if event.kind != "published" or event.version not in steps:
            continue
        kinds.update(kind for kind in (event.kinds or {}).values() if kind != "had it")
        for why in (event.why_full or {}).values():
            word, _, figures = why.partition(": ")
            whys[word] += 1
            newest[word] = figures
    found = [{"why": word, "times": times, "newest": newest[word]} for word, times in whys.most_common()]
    says = []
    if kinds.total():
        says = [
            f"{kinds['delta']:,} of {kinds.total():,} updates of engines were deltas, {kinds['full']:,} were whole."
        ]
    for word, times in whys.most_common():
        often = "once" if times == 1 else f"{times:,} times"
        says.append(f"Whole {often}: {word}{f' ({newest[word]})' if newest[word] else ''}.")
    return {"delta": kinds["delta"], "full": kinds["full"], "reasons": found, "says": says}


def bound(rows: Sequence[Row], policy: Policy = UNKNOWN, trainer: Trainer | None = None) -> dict[str, Any]:
    """Makespan against the least it could have been, and whether a scheduling policy could win."""
    bounded, makespan, least = _against(rows, "schedule/makespan_s", "schedule/bound_s")
    windowed, window_makespan, window = _against(rows, "schedule/makespan_s", "schedule/window_bound_s")
    known = having(rows, "perf/rho", "schedule/critical_path_s", "schedule/area_s")
    critical, area = total(known, "schedule/critical_path_s"), total(known, "schedule/area_s")
    found = {
        "makespan_s": makespan if bounded else total(rows, "schedule/makespan_s"),
        "bound_s": least,
        "excess": _excess(makespan, least),
        "critical_path_s": total(rows, "schedule/critical_path_s"),
        "area_s": total(rows, "schedule/area_s"),
        "window_makespan_s": window_makespan,
        "window_bound_s": window,
        "window_excess": _excess(window_makespan, window),
        "rho": critical / area if critical and area else mean(rows, "schedule/rho"),
        "icc": mean(rows, "schedule/icc"),
        "rates_error": rows[-1].get("perf/rates_error"),
    }
    words = [
        *_excess_words(found, bounded, rows),
        *(_window_words(found, windowed, rows) if policy.allows_staleness else ()),
        *_rho_words(found, policy, trainer),
        *_icc_words(found["icc"]),
    ]
    return found | {"says": words}


def _against(rows: Sequence[Row], took: str, least: str) -> tuple[list[Row], float | None, float | None]:
    """The steps that have both, and both sums over exactly these."""
    both = having(rows, took, least)
    return both, total(both, took), total(both, least)


def _excess(took: float | None, least: float | None) -> float | None:
    return took / least - 1 if took and least else None


def _excess_words(found: Mapping[str, Any], bounded: Sequence[Row], rows: Sequence[Row]) -> Iterable[str]:
    if found["excess"] is not None:
        yield (
            f"Generation{_which(bounded, rows)} took {found['makespan_s']:,.2f} s; no strictly on-policy schedule of "
            f"these rollouts takes less than {found['bound_s']:,.2f} s: excess {found['excess']:+z.0%}."
        )
    else:
        counted, steps, least = _against(rows, "schedule/decode_steps", "schedule/bound_steps")
        if steps and least:
            yield (
                f"{steps:,.0f} decode steps{_which(counted, rows)}, {steps / least - 1:+z.0%} over the least that any "
                "schedule needs."
            )
    if found["rates_error"] and found["rates_error"] > 0.15:
        yield f"The engines' speed was fitted with an error of {found['rates_error']:.0%}: the bound is as uncertain."


def _window_words(found: Mapping[str, Any], windowed: Sequence[Row], rows: Sequence[Row]) -> Iterable[str]:
    """The figure that a run with staleness is set against; the first steps have none."""
    if found["window_excess"] is None:
        return
    fewer = [] if len(windowed) == len(rows) else [row["step"] for row in windowed]
    over = f" ({step_words(fewer)}, which took {found['window_makespan_s']:,.2f} s)" if fewer else ""
    yield (
        f"With staleness allowed, {found['window_bound_s']:,.2f} s is what to compare with{over}: window excess "
        f"{found['window_excess']:+z.0%}, a heuristic and no bound."
    )


def _which(part: Sequence[Row], rows: Sequence[Row]) -> str:
    """Which steps a sum is over, where it is not over all of them."""
    return "" if len(part) == len(rows) else f" in {step_words(row['step'] for row in part)}"


def _rho_words(found: Mapping[str, Any], policy: Policy, trainer: Trainer | None) -> Iterable[str]:
    """What rho says of the choices that could win; beside a trainer that binds, none can."""
    rho, excess = found["rho"], found["excess"]
    if rho is None:
        return
    binds = trainer is not None and trainer.binds
    if rho > 2:
        yield f"rho is {rho:.1f}: the slowest rollout alone takes that many times what all work takes at full speed."
        if not binds:
            yield "No order of the queue helps (0 to 3 %); staleness, masking or shorter answers do."
    elif rho < 0.15:
        yield f"rho is {rho:.2f}: throughput binds, not the tail; a scheduling policy can win little."
    else:
        yield f"rho is {rho:.2f}: the tail is as long as {rho:.0%} of all work at full speed."
        if policy.on_policy and not binds and (excess is None or excess >= WORTH):
            yield (
                f"In our study launch order was {fifo_excess(rho):.0%} above the bound here; one step of staleness "
                "removes most of that."
            )
    if binds:
        yield "Neither another order nor more staleness makes steps shorter while the trainer is the bottleneck."


def _icc_words(icc: float | None) -> Iterable[str]:
    if icc is None:
        return
    if icc < 0.2:
        yield f"ICC is {icc:.2f}: a prompt says little about how long its answers are; prediction wins nothing."
    elif icc < 0.6:
        yield f"ICC is {icc:.2f}: siblings are alike; a finished one tells something about the others."
    else:
        yield f"ICC is {icc:.2f}: lengths are a matter of the prompt; they are known from the second epoch on."


def fifo_excess(rho: float) -> float:
    """Excess over the bound of launch order at this rho, between the study's points."""
    points = FIFO_EXCESS
    if rho <= points[0][0]:
        return points[0][1] * rho / points[0][0]
    for (low, a), (high, b) in pairwise(points):
        if rho <= high:
            return a + (b - a) * (rho - low) / (high - low)
    return points[-1][1]


def bias(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Whether long answers were censored, by what the policy says of itself and by what is measured; `row` has that of
    the run so far, `rows` are the steps that are explained."""
    names = ("length_ks", "ks_allowance", "length_ratio", "p99_ratio", "censors")
    found: dict[str, Any] = {name: row.get(f"bias/{name}") for name in names}
    found["censored"] = _censored(found)
    found["through_step"] = row["step"]
    found["masked_by_position"] = _masked_by_position(rows)
    return found | {"says": list(_bias_words(found, so_far([row["step"] for row in rows])))}


def so_far(steps: Sequence[int]) -> str:
    """Which steps the length bias is of, where it is of more than those that are explained."""
    return "" if steps[0] == 1 else f" so far (steps 1 to {steps[-1]})"


def _censored(found: Mapping[str, Any]) -> bool:
    """By the policy's own account, or by more than chance and unfinished groups explain; of an older record, which does
    not say what they do, by the share of the longest alone."""
    ks, allowed = found["length_ks"], found["ks_allowance"]
    if found["censors"]:
        return True
    return ks > allowed if ks is not None and allowed is not None else (found["p99_ratio"] or 1.0) < LONG_SHARE


def _masked_by_position(rows: Sequence[Row]) -> list[float] | None:
    """Share of the tokens in each tenth of their rollout that were masked."""
    whole = [row for row in rows if row.get("masked/by_position")]
    tenths = range(len(whole[0]["masked/by_position"]) if whole else 0)
    found = [
        mean_of_tokens([{**row, "tenth": row["masked/by_position"][tenth]} for row in whole], "tenth", of_batch)
        for tenth in tenths
    ]
    known = [share for share in found if share is not None]
    return known if known and len(known) == len(found) else None


def _bias_words(found: Mapping[str, Any], over: str) -> Iterable[str]:
    if found["censors"]:
        yield "The scheduling policy censors, by its own account: what is trained on depends on how long answers are."
    ks, allowed = found["length_ks"], found["ks_allowance"]
    if ks is not None and allowed is not None:
        more = "more than" if ks > allowed else "within"
        most = ", the most there can be: too few answers to tell" if allowed >= 1 else ""
        yield (
            f"Lengths trained on{over} against those of all rollouts: KS distance {ks:.3f}, {more} what chance and "
            f"unfinished groups explain ({min(1.0, allowed):.3f}{most})."
        )
    if found["p99_ratio"] is not None and found["p99_ratio"] < LONG_SHARE:
        why = "censored" if found["censored"] else "no sign of censoring, as the distance is explained"
        yield f"The longest 1 % of answers are trained on{over} at {found['p99_ratio']:.2f} of their share: {why}."
    positions = found["masked_by_position"]
    if positions and max(positions) > 0:
        yield (f"Masked tokens: {positions[0]:.0%} of the first tenth of the answers, {positions[-1]:.0%} of the last.")


def dropped(rows: Sequence[Row], before: Row, errors: Counter[str]) -> dict[str, Any]:
    """Rollouts given up in these steps, by reason, with the most frequent of their `errors`."""
    found = {}
    for kind, prefix in (("rollouts", "dropped/"), ("tokens", "tokens/dropped/")):
        counts = {
            name.removeprefix(prefix): value - before.get(name, 0)
            for name, value in rows[-1].items()
            if name.startswith(prefix)
        }
        found[kind] = {reason: count for reason, count in counts.items() if count}
    names = ("share", "dropped_share", "masked_share")
    shares = {name: mean_of_tokens(rows, f"waste/{name}", decided) for name in names}
    return found | {
        "errors": errors.most_common(NAMED),
        "waste": shares,
        "says": list(_dropped_words(found, errors, shares)),
    }


def _dropped_words(found: Row, errors: Counter[str], waste: Mapping[str, float | None]) -> Iterable[str]:
    if found["rollouts"]:
        parts = ", ".join(f"{count:,} {reason}" for reason, count in found["rollouts"].items())
        yield f"Rollouts given up: {parts} ({sum(found['tokens'].values()):,} tokens)."
    for error, count in errors.most_common(NAMED):
        yield f"{count:,} failed with: {error}"
    if len(errors) > NAMED:
        others = errors.most_common()[NAMED:]
        yield f"{sum(count for _, count in others):,} failed with {len(others)} other error{'s'[: len(others) > 1]}"
    if waste["share"]:
        yield (
            f"{waste['share']:.0%} of the tokens were generated and not trained on ({waste['dropped_share'] or 0:.0%} "
            f"dropped, {waste['masked_share'] or 0:.0%} masked)."
        )


def staleness(rows: Sequence[Row]) -> dict[str, Any]:
    """How old trained tokens were, in versions."""
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(dict(enumerate(row.get("staleness/histogram") or ())))
    histogram = [counts[age] for age in range(max(counts, default=-1) + 1)]
    oldest = max((row["staleness/max"] for row in rows if row.get("staleness/max") is not None), default=None)
    average = mean_of_tokens(rows, "staleness/mean", trained)
    found: dict[str, Any] = {"max": oldest, "mean": average, "histogram": histogram}
    if oldest is None:
        return found | {"says": []}
    if oldest == 0:
        return found | {"says": ["Every trained token was made by the weights it was trained at (strictly on-policy)."]}
    whole = sum(histogram)
    fresh = f", {histogram[0] / whole:.0%} of them 0" if whole else ""
    ages = f"{oldest} version{'' if oldest == 1 else 's'} old"
    ages += "" if average is None else f", {average:.2f} on average"
    return found | {"says": [f"Trained tokens were up to {ages}{fresh}."]}
