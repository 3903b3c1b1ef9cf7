"""What stands at the top of the page: the recommendation in words, why, and the numbers that the plan is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gruppetto.ledger.page import tables
from gruppetto.ledger.page.markup import escaped, tag
from gruppetto.ledger.page.numbers import count, lasting, number, plain, real, share
from gruppetto.ledger.units import show_size, show_tokens


def part_of(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping inside a plan; empty where the plan has none."""
    found = plan.get(name)
    return found if isinstance(found, Mapping) else {}


def headline(plan: Mapping[str, Any]) -> str:
    """What to run, how the GPUs are split, how long a step takes, and how well it uses them."""
    advice, places = part_of(plan, "recommendation"), part_of(plan, "placements")
    name = str(advice.get("placement") or next(iter(places), ""))
    if not name:
        return "A plan without a placement"
    chosen = part_of(places, name)
    rollout, train = (real(advice.get(key) or chosen.get(key)) for key in ("rollout_gpus", "train_gpus"))
    said, gpus = f"Run it {name}", real(part_of(plan, "machine").get("gpus"))
    if name != "colocated" and rollout and train:
        said += f", {rollout:,.0f} GPUs generating and {train:,.0f} training"
    elif gpus:
        said += f" on all {gpus:,.0f} GPUs" if gpus > 1 else " on one GPU"
    longest = max((real(one.get("step_s")) or 0.0 for one in places.values()), default=0.0)
    facts = []
    if (step := real(chosen.get("step_s"))) is not None:
        facts.append(f"a step takes {lasting(step, longest)}")
    if (use := real(chosen.get("utilization"))) is not None:
        top = real(chosen.get("ceiling"))
        facts.append(f"utilisation is {share(use)}" + (f" (its ceiling {share(top)})" if top is not None else ""))
    return said + (f": {', '.join(facts)}." if facts else ".")


def opening(plan: Mapping[str, Any]) -> str:
    """The headline, the reasons, six numbers and the command."""
    flips = [flip.get("says") for flip in plan.get("flips") or () if isinstance(flip, Mapping)]
    reasons = [part_of(plan, "recommendation").get("reason"), *flips]
    said = "".join(tag("p", escaped(reason)) for reason in reasons if reason)
    return tag("header", tag("h1", escaped(headline(plan))), said, _cards(plan), _command(plan))


def _cards(plan: Mapping[str, Any]) -> str:
    model, work, kv, machine = (part_of(plan, name) for name in ("model", "workload", "kv", "machine"))
    waves = _shown(kv.get("waves"), lambda n: f"{n:.3g} wave{'s' if n != 1 else ''}")
    shown = (
        ("model", model.get("name"), _shown(model.get("params"), lambda n: f"{count(n).split(' (')[0]} parameters")),
        ("machine", f"{plain(machine.get('gpus'))} × {machine['gpu']}" if machine.get("gpu") else "", ""),
        ("rollouts of a step", _shown(work.get("rollouts"), number), _prompts(plan)),
        ("tokens of a step", _shown(work.get("tokens"), show_tokens), _each(work)),
        ("KV of all rollouts", _shown(kv.get("bytes_all"), show_size), waves),
        ("longest response", _shown(work.get("longest"), show_tokens), "tokens, as expected"),
    )
    cards = []
    for name, value, note in shown:
        below = tag("small", escaped(note)) if note else ""
        card = tag("div", tag("dt", escaped(name)), tag("dd", escaped(value), below), class_="card")
        cards += [card] if value else []
    return tag("dl", *cards, class_="cards") if cards else ""


def _shown(value: object, show: Callable[[float], str]) -> str:
    known = real(value)
    return show(known) if known is not None else ""


def _prompts(plan: Mapping[str, Any]) -> str:
    prompts, size = (real(part_of(plan, "ask").get(key)) for key in ("prompts", "group_size"))
    return f"{number(prompts)} prompts × {number(size)}" if prompts and size else ""


def _each(work: Mapping[str, Any]) -> str:
    mean, cv = real(work.get("mean_tokens")), real(work.get("cv"))
    return f"mean {show_tokens(mean)}" + (f", CV {cv:.3g}" if cv is not None else "") if mean is not None else ""


def _command(plan: Mapping[str, Any]) -> str:
    ask = part_of(plan, "ask")
    command = tag("pre", tag("code", escaped(ask["command"]))) if ask.get("command") else ""
    rest = tables.facts(ask, but=("command",))
    return command + (tag("details", tag("summary", "What was asked"), rest) if rest else "")
