"""Other people's words for how a rollout ended, and the words for what a trace does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gruppetto.sim.replay.trace import Ending, TraceRollout

_WORDS = {
    Ending.STOP: "stop eos completed complete finished done ok success end_turn",
    Ending.LENGTH: "length limit truncated max_tokens max_length max_turns",
    Ending.ABORT: "abort aborted cancelled canceled timeout env_timeout infra_error error failed",
}
_ENDINGS = {word: ending for ending, words in _WORDS.items() for word in words.split()}


def ending_of(word: str | None) -> Ending | None:
    """What a framework's finish word means; None for a word not known here."""
    return None if word is None else _ENDINGS.get(word.lower())


def absent(rollouts: Sequence[TraceRollout]) -> list[str]:
    """The fields that some rollouts lack, in words."""
    several = [r for r in rollouts if r.turns is not None]
    fields: list[tuple[str, Sequence[object]]] = [
        ("turns (each rollout counts as one)", [r.turns for r in rollouts]),
        ("observation tokens", [_any(t.observation_tokens for t in r.turns or ()) for r in several]),
        ("tool seconds", [r.tool_s for r in rollouts]),
        ("prompt tokens", [r.prompt_tokens for r in rollouts]),
        ("rewards", [r.reward for r in rollouts]),
        ("endings (whether a length was cut off)", [r.finish for r in rollouts]),
    ]
    words = [_absence(name, values) for name, values in fields if any(value is None for value in values)]
    unknown = sorted({r.finish for r in rollouts if r.finish is not None and r.ending is None})
    if unknown:
        words.append(f"what the endings {', '.join(map(repr, unknown))} mean (whether a length was cut off)")
    return words


def _any(values: Iterable[object]) -> object:
    return next((value for value in values if value is not None), None)


def _absence(name: str, values: Sequence[object]) -> str:
    lacking = sum(1 for value in values if value is None)
    return name if lacking == len(values) else f"{name}, for {lacking} of {len(values)} rollouts"
