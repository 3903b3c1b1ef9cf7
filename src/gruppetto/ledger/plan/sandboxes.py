"""What a batch asks of sandboxes, and what GPUs wait where there are fewer: the environment account of a plan."""

from __future__ import annotations

from gruppetto.errors import UserError
from gruppetto.ledger.environment import Environment
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.placements import Placed


def environment(ask: Ask, placed: Placed) -> Environment | None:
    """The environments of a batch; None where nothing is executed."""
    given, tools = ask.sandboxes, ask.tools
    if given is None:
        return None
    per_rollout = given.per_rollout or (tools.expected_calls(ask.lengths.mean) + 1 if tools else 1.0)
    execution_s = given.exec_s or (tools.mean_s if tools else 0.0)
    model_s = _model_s(ask, placed)
    return Environment(
        tasks=ask.groups,
        group_size=ask.group_size,
        turns=per_rollout,
        execution_s=execution_s,
        cores=given.cores,
        model_s=model_s,
        start_s=given.start_s,
        image_bytes=given.image_bytes,
        images=given.images or 1,
        hosts=given.hosts,
    )


def _model_s(ask: Ask, placed: Placed) -> float:
    """Seconds of a mean rollout in the model, at the mean number of rows."""
    prices, rows = placed.rollout.prices, max(1.0, placed.forecast.mean_rows.value)
    context = ask.rollouts.kv_steps / ask.rollouts.tokens
    return ask.lengths.mean * prices.step_s(int(rows), int(rows * context))


def account(ask: Ask, placed: Placed) -> dict[str, Figure] | None:
    """Executions, CPU-hours, sandboxes busy and live, images, and GPU-seconds that wait, by name."""
    found = environment(ask, placed)
    if found is None or ask.sandboxes is None:
        return None
    given = ask.sandboxes
    rollout_s = placed.forecast.rollout_s.value
    wall_s = given.wall_s or max(rollout_s, found.rollout_s().value)
    named = {"executions": found.executions(), "cpu_hours": found.cpu_hours(), "rollout_s": found.rollout_s()}
    named["busy"] = found.busy(wall_s)
    try:
        named["live"] = found.live(wall_s)
    except UserError:  # the model alone takes longer than the wall time: what executes can still be counted
        named["live"] = Figure(
            float(found.rollouts),
            "sandboxes",
            f"all {found.rollouts:,} rollouts: one takes longer than {wall_s:,.0f} s",
        )
    if given.image_bytes:
        named["image_bytes"] = found.image_traffic()
    if given.limit:
        named["gpu_idle_s"] = found.idle_gpu_s(given.limit, max(rollout_s, wall_s), placed.rollout.used)
    return named
