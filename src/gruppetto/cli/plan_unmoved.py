"""Options that were given and change nothing: each in one line, with why.

Owns the comparison: the answer as asked beside the answer with that one option as it usually is. An option that moves
no second, layout, share or size is named; one that was given as it usually is, is not. Costs one more answer for each
option that is looked at, and nothing where none of them is given.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gruppetto.cli.plan_arguments import ask_of, efficiency_asked, workload_of
from gruppetto.cli.plan_numbers import NUMBERS, option
from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.plan import Plan, plan
from gruppetto.ledger.plan.sandboxes import account
from gruppetto.ledger.plan.workloads import KINDS

LOOKED_AT = (
    "cv", "icc", "runaways", "tool_sigma", "observation_tokens", "max_staleness", "serve_dtype", "kv_dtype", "slots",
    "micro_tokens", "sleep", "sync", "sandbox_seconds", "sandbox_cores", "sandbox_start", "wall", "images",
)  # fmt: skip
"""Of a whole plan. What is not here moves every plan (sizes, GPUs, stages of training), or pins what a plan chooses."""
OF_ONE_ACCOUNT = (
    *LOOKED_AT, "prompts", "group_size", "mean_tokens", "prompt_tokens", "turns", "tool_seconds", "depth", "reference",
    "critic", "no_old_logprobs", "judge", "serve", "train", "split", "density", "sandboxes", "image_size",
)  # fmt: skip
"""Of one account, which reads far less."""
_READ = {
    "kv": ("kv_dtype",),
    "sync": ("serve", "train", "split", "density", "serve_dtype", "sync"),
    "switch": ("serve", "train", "serve_dtype", "sleep"),
    "sandboxes": (),
}
"""What an account is about, so that it counts even where it is as it would be anyway."""
_CLOSE = 1e-4
"""Relative; less than that is how tables of lengths are sampled."""

Numbers = list[Any]


class _Without(NamedTuple):
    """An option that was given, and the arguments as they are without it."""

    name: str
    shown: str
    args: argparse.Namespace


def unmoved(args: argparse.Namespace, found: Plan) -> tuple[str, ...]:
    """Options of a plan that change nothing in it, one sentence each."""
    given, said = list(_given(args, LOOKED_AT)), list[str]()
    numbers = _of_plan(found) if given else []
    for one in given:
        try:
            ask = ask_of(one.args, workload_of(one.args))
            if ask != found.ask and not _same(numbers, _of_plan(plan(ask))):
                continue
        except UserError:
            continue  # without it there is no plan at all
        elsewhere = "; at the points of --sweep it may" if args.sweep else ""
        said.append(f"{one.shown} changes nothing here: {_why(one.name, args, found)}{elsewhere}.")
    return tuple(said)


def unread(args: argparse.Namespace, answer: Callable[[Ask, argparse.Namespace], Numbers]) -> tuple[str, ...]:
    """The same of `--only`, whose account `answer` makes of an ask: one sentence for all that it does not read."""
    names = [name for name in OF_ONE_ACCOUNT if name not in _READ[args.only]]
    given, said = list(_given(args, names)), list[str]()
    ask = ask_of(args, workload_of(args))
    numbers = answer(ask, args) if given else []
    for one in given:
        try:
            other = ask_of(one.args, workload_of(one.args))
            if other == ask or _same(numbers, answer(other, one.args)):
                said.append(one.shown)
        except UserError:
            continue
    return (f"--only {args.only} is the same without {', '.join(said)}.",) if said else ()


def _given(args: argparse.Namespace, names: Sequence[str]) -> Iterator[_Without]:
    """Each of these options that is not as it usually is, and each share of --efficiency that its set has otherwise."""
    for name in names:
        value = getattr(args, name)
        if value != _default(name, args) and value != _usual(name, args):
            shown = option(name) if value is True else f"{option(name)} {_shown(value)}"
            yield _Without(name, shown, _but(args, name, _default(name, args)))
    for place, text in enumerate(args.efficiency):
        field, equals, value = text.partition("=")
        left = [*args.efficiency[:place], *args.efficiency[place + 1 :]]
        if equals and float(value) != float(getattr(efficiency_asked(left, args.gpu), field)):
            yield _Without("efficiency", f"--efficiency {text}", _but(args, "efficiency", left))


def _but(args: argparse.Namespace, name: str, value: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), name: value})


def _default(name: str, args: argparse.Namespace) -> Any:
    """What the option is where it is left out."""
    value = args.usual(name)
    return NUMBERS[name].value(value, option(name)) if isinstance(value, str) and name in NUMBERS else value


def _usual(name: str, args: argparse.Namespace) -> Any:
    """What then stands for it: a kind of work has numbers of its own."""
    kind = KINDS.get(args.workload)
    return getattr(kind, {"tool_seconds": "tool_s"}.get(name, name), None) if kind else None


def _shown(value: Any) -> str:
    return f"{value:,.9g}" if isinstance(value, (int, float)) else str(value)


# -- what is compared --------------------------------------------------------------------------------------------------


def _of_plan(found: Plan) -> Numbers:
    """Every number of the answer: placements, stages, what moves, sandboxes."""
    made: Numbers = [found.recommendation.placement, sorted(found.refused), found.delta().payload.value]
    for one in found.placed.values():
        forecast, generate = one.forecast, one.generate
        made += [one.name, one.rollout.layout, one.rollout.count, one.trainer.layout, one.staleness.value]
        made += [one.step_s.value, one.ideal_s.value, one.utilization.value, one.sync.expected.value, one.lent_s]
        made += [figure.value for figure in forecast if isinstance(figure, Figure)]
        made += [generate.flops.value, generate.bytes.value, generate.gpu_s.value, generate.memory_bytes.value]
        made += [one.trainer.seconds]
        if (handed := one.switch) is not None:
            made += [handed.seconds.value, handed.engine_residue.value, handed.host_memory.value]
    sandboxes = account(found.ask, found.chosen) or {}
    return [*made, *sandboxes, *(figure.value for figure in sandboxes.values())]


def _same(ours: Numbers, others: Numbers) -> bool:
    return len(ours) == len(others) and all(map(_alike, ours, others))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_CLOSE)
    return bool(one == other)


# -- why ---------------------------------------------------------------------------------------------------------------


def _why(name: str, args: argparse.Namespace, found: Plan) -> str:
    """The reason as far as one is known."""
    ask = found.ask
    reasons = {
        "icc": _lengths, "cv": _lengths, "runaways": _lengths, "max_staleness": _overlap, "depth": _overlap,
        "tool_sigma": _tools, "micro_tokens": _micro, "slots": _slots, "sleep": _sleep,
    }  # fmt: skip
    if name in reasons and (said := reasons[name](ask, found)):
        return said
    if name == "efficiency":
        return "nothing in this plan is priced by it"
    if name in ("serve_dtype", "kv_dtype"):
        return "the numbers are those of the usual type"
    return "every number is the same without it"


def _lengths(ask: Ask, found: Plan) -> str:
    if ask.group_size == 1:
        return "a group of one has no siblings"
    return "all lengths are alike, so nothing spreads" if not ask.lengths.cv else ""


def _tools(ask: Ask, found: Plan) -> str:
    return "a tool call takes no time" if ask.tools is not None and not ask.tools.mean_s else ""


def _overlap(ask: Ask, found: Plan) -> str:
    if {"async", "elastic"} & set(found.placed):
        return ""
    return f"no batches overlap in {' and '.join(found.placed)}; write --compare async to have it count"


def _micro(ask: Ask, found: Plan) -> str:
    """A micro-batch holds the longest sequence whole, and costs seconds only where a pipeline waits for it."""
    if ask.micro_tokens <= ask.context:
        return (
            f"a micro-batch holds the longest rollout whole, prompt and observations with it, which is {ask.context:,} "
            "tokens; only more than that would count"
        )
    if all(one.trainer.layout.pp == 1 for one in found.placed.values()) and not ask.efficiency.micro_batch_s:
        return (
            "it takes memory of the trainer alone: its layouts fit, and none is a pipeline that micro-batches fill; "
            "seconds of each one are --efficiency micro_batch_s=0.05"
        )
    return "the trainer has the same layouts and as many micro-batches"


def _slots(ask: Ask, found: Plan) -> str:
    rows = max(
        math.ceil(one.schedule.depth * ask.rollouts.count / (one.rollout.count * one.rollout.layout.dp))
        for one in found.placed.values()
    )
    if rows <= min(ask.slots, 256):
        return f"a replica has at most {rows:,} rollouts at once"
    return "KV is full before the slots are"


def _sleep(ask: Ask, found: Plan) -> str:
    if not any(one.switch for one in found.placed.values()):
        return "no placement here hands memory over"
    return "it is SGLang's way to do what level2 does in vLLM, and takes as long" if ask.sleep == "release" else ""
