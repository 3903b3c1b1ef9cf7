"""Settings that no simulated run takes notice of: those of the model, the data and the machines that it does without.

A file may have them, for a recipe is there to be trained with too; one on the command line is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping

from gruppetto.config.loader import COMMAND_LINE, Loaded
from gruppetto.config.toml import value_text
from gruppetto.errors import UserError

UNREAD: Mapping[str, str] = {
    "model": "there is no model",
    "data": "prompts are those of sim.workload and sim.tasks",
    "weights": "a publish takes sim.publish_s",
    "eval": "nothing is evaluated",
    "checkpoint": "nothing is saved",
    "run.threads": "it takes one thread",
    **dict.fromkeys(
        ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.stop", "rollout.stop_ids"),
        "nothing is sampled",
    ),
    **dict.fromkeys(
        (
            "engine.type", "engine.urls", "engine.python", "engine.command", "engine.start_s", "engine.restarts",
            "engine.stream", "engine.prefill_chunk", "engine.kv_on_swap", "engine.args", "engine.admit_batch",
        ),
        "its engines are those of [sim]",
    ),
    **dict.fromkeys(
        ("reward.type", "reward.path", "reward.pattern", "reward.processes"),
        "rewards are those of sim.pass_rate, after sim.score_s",
    ),
    **dict.fromkeys(
        (
            "train.type", "train.lr", "train.warmup_steps", "train.schedule", "train.weight_decay", "train.betas",
            "train.grad_clip", "train.micro_tokens", "train.logprob_chunk", "train.on_nan", "train.loss",
        ),
        "its trainer takes sim.train_step_s and sim.train_token_s",
    ),
    **dict.fromkeys(("log.screen", "log.sinks"), "its run folder and the table are all that it writes"),
}  # fmt: skip
"""Table or setting: why it says nothing."""


def why_unread(key: str) -> str | None:
    """Why this setting (a dotted key) says nothing in a simulation; None where it does."""
    parts = key.split(".")
    return next((UNREAD[name] for n in range(1, len(parts) + 1) if (name := ".".join(parts[:n])) in UNREAD), None)


def refuse_unread(loaded: Loaded) -> None:
    """Raises `UserError` with one line for each setting of the command line that nothing would take notice of."""
    values = loaded.values()
    told = [key for key, origin in loaded.origins.items() if origin == COMMAND_LINE]
    lines = [
        f"{key} = {value_text(values[key])} ({COMMAND_LINE}) has no use in a simulation: {why}; leave it out"
        for key in told
        if (why := why_unread(key)) is not None
    ]
    if lines:
        raise UserError("\n".join(lines))
