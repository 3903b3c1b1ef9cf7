"""A placement as a run.toml: the sizes and choices for `train`, and the engine's and trainer's prices for `simulate`.

Promise: simulated, the config is the run that the plan forecast: same lengths, prices, sizes and scheduling.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.lengths import LognormalLengths
from gruppetto.ledger.plan.placements import Placed
from gruppetto.ledger.plan.plan import Plan

STEPS = 20
SLACK = 8
"""Times the longest rollout alone takes after which one counts as lost."""

EVEN = 64
"""Slots above which their number is rounded up to a multiple of 8."""

_HEAD = re.compile(r"# [a-z]+: [0-9.,]+ s a step expected \(")
Tables = dict[str, dict[str, Any]]


_STUB = """
# simulate needs neither a model nor data; train needs both:
{model}[data]
# path = "tasks.jsonl"  # {{"prompt": ..., "answer": ...}} a line
# [reward]
# type = "numeric"  # exact, numeric, regex, math, reasoning_gym, function
"""


def run_toml(plan: Plan, placed: Placed, *, workload: str = "", model_path: str = "", command: str = "") -> str:
    """The text of a run.toml. `workload`: a value of sim.workload that draws the asked lengths, where one does."""
    return _text_of(plan, placed, tables(plan, placed, workload=workload, model_path=model_path), command, model_path)


def trainable_toml(plan: Plan, placed: Placed, *, workload: str = "", model_path: str = "", command: str = "") -> str:
    """The same within the positions of the model, as `train` wants it: what is longer ends there.

    Raises `UserError` where the positions leave no room for the mean response.
    """
    found = tables(plan, placed, workload=workload, model_path=model_path)
    notes, ask, room = [], plan.ask, plan.ask.model.context
    if 0 < room < found["engine"]["context"]:
        _fit(plan, found, room)
        notes.append(
            f"{ask.model.name} has positions for {room:,} tokens and the longest rollout has {ask.context:,}: "
            "rollouts end there, in train and in simulate, and the forecast is of whole ones"
        )
    if not placed.rollout.prices.kv_capacity:
        notes.append(
            "the KV of a rollout ends at its window: engine.slots stay within what the memory takes, and "
            "sim.kv_tokens = 0 sets no limit in tokens beside them"
        )
    if ask.tools is not None:
        notes.append("tools are simulate's and the forecast's; train runs single turns")
    return _text_of(plan, placed, found, command, model_path, notes)


def _fit(plan: Plan, found: Tables, room: int) -> None:
    """Puts context and responses within so many positions."""
    ask, lengths = plan.ask, plan.ask.lengths
    left = room - ask.prompt_tokens
    most = lengths.cap if left >= lengths.cap else left
    reachable = most > lengths.mean
    if reachable and "sim.lengths" in found and isinstance(lengths, LognormalLengths) and most < lengths.cap:
        reachable = LognormalLengths.means(lengths.sigma, lengths.icc, most, q0=lengths.q0)[1] >= lengths.mean
    if not reachable:
        raise UserError(
            f"--write: {ask.model.name} has positions for {room:,} tokens, of which a prompt takes "
            f"{ask.prompt_tokens:,} and the mean response {lengths.mean:,.0f}: train would refuse the run; write "
            "smaller --prompt-tokens and --mean-tokens, or another model"
        )
    found["rollout"]["max_tokens"], found["engine"]["context"] = most, room


def is_written(text: str) -> bool:
    """Whether a file begins as those that are written here."""
    return any(_HEAD.match(line) for line in text.splitlines()[:2])


def _text_of(
    plan: Plan, placed: Placed, found: Tables, command: str, model_path: str, notes: Sequence[str] = ()
) -> str:
    head = [f"# {placed.name}: {placed.step_s.value:,.1f} s a step expected ({placed.step_s.formula})"]
    if command:
        head.insert(0, f"# {command}")
    head += [f"# {note}" for note in notes]
    model = "" if model_path else '# [model]\n# path = "path/to/hf-folder"\n'
    return "\n".join([*map(_comment, head), *_lines(found)]) + "\n" + _STUB.format(model=model + "# ")


def _comment(line: str) -> str:
    """On one line whatever a path or a name has in it."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line)


def tables(plan: Plan, placed: Placed, *, workload: str = "", model_path: str = "") -> Tables:
    """The same as plain data, table by table."""
    ask = plan.ask
    context = ask.context + 1
    slow_s = SLACK * placed.forecast.critical_s.value + placed.step_s.value
    found: Tables = {
        "run": {
            "name": f"{_slug(ask.model.name)}-{placed.name}",
            "steps": STEPS,
            "placement": "colocated" if placed.colocated else "disaggregated",
        }
    }
    if model_path:
        found["model"] = {"path": model_path, "dtype": "bfloat16"}
    found |= {
        "rollout": {
            "prompts_per_step": ask.groups,
            "group_size": ask.group_size,
            "max_tokens": ask.lengths.cap,
            "timeout_s": float(max(600, math.ceil(slow_s))),
        },
        "scheduler": _scheduler(placed),
        "engine": {"count": placed.rollout.count, "slots": _slots(plan, placed), "context": context},
        "sim": _prices(placed) | {"workload": workload or "lengths"},
    }
    if not workload:
        found["sim.lengths"] = _lengths(plan)
    return found


def _slots(plan: Plan, placed: Placed) -> int:
    """Of an engine: its part of the rollouts that are there at once, where it would take more."""
    share = math.ceil(placed.schedule.depth * plan.ask.rollouts.count / placed.rollout.count)
    if share > EVEN:
        share = math.ceil(share / 8) * 8
    return min(placed.rollout.prices.slots, share)


def _slug(name: str) -> str:
    """A model's name as a run's: letters, digits, dots and dashes."""
    return re.sub("[^A-Za-z0-9_.]+", "-", name).strip("-.") or "plan"


def _scheduler(placed: Placed) -> dict[str, Any]:
    schedule = placed.schedule
    found: dict[str, Any] = {"type": "layered"}
    if schedule.max_staleness:
        found |= {"max_staleness": schedule.max_staleness, "depth": float(schedule.depth)}
    return found


def _prices(placed: Placed) -> dict[str, Any]:
    model, tokens = placed.rollout.prices, placed.trained_tokens
    return {
        "decode_base_s": model.base_s,
        "decode_weights_s": model.weights_s,
        **_experts(model),
        "decode_kv_s": model.kv_token_s,
        "decode_compute_s": model.compute_row_s,
        "decode_row_s": model.row_s,
        "prefill_token_s": model.prefill_token_s,
        "kv_tokens": model.kv_capacity,
        "train_token_s": placed.trainer.seconds / tokens,
        "publish_s": placed.sync.expected.value,
        "switch_s": placed.switch.seconds.value if placed.colocated and placed.switch else 0.0,
    }


def _experts(model: EngineModel) -> dict[str, Any]:
    """What a mixture's experts cost to read; nothing where there are none."""
    if not model.experts_s:
        return {}
    return {"decode_experts_s": model.experts_s, "decode_expert_share": model.expert_share}


def _lengths(plan: Plan) -> dict[str, Any]:
    ask, lengths = plan.ask, plan.ask.lengths
    assert isinstance(lengths, LognormalLengths)  # recorded ones have a name
    spread = lengths.s_b**2 + lengths.s_w**2
    found: dict[str, Any] = {
        "mean_tokens": lengths.mean,
        "cv": math.sqrt(math.expm1(spread)),
        "icc": lengths.icc,
        "runaway_share": lengths.q0,
        "prompt_tokens": max(1, ask.prompt_tokens),
    }
    if ask.tools is not None:
        found |= {
            "turn_tokens": ask.tools.turn_tokens,
            "observation_tokens": ask.tools.observation_tokens,
            "tool_median_s": ask.tools.median_s,
            "tool_sigma": ask.tools.sigma,
        }
    return found


def _lines(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for table, values in found.items():
        yield ""
        yield f"[{table}]"
        for key, value in values.items():
            yield f"{key} = {_text(value)}"


def _text(value: Any) -> str:
    """A number or a string as TOML; 7 digits say enough of a price."""
    if isinstance(value, float):
        short = f"{value:.7g}"
        return short if any(mark in short for mark in ".en") else f"{short}.0"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML has no room for
    return str(value).lower()
