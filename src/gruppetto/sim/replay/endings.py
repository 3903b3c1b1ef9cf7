"""Other people's words for how a rollout ended, and the words for what a trace does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gruppetto.sim.replay.trace import Ending, TraceRollout, seconds_untold

_WORDS = {
    Ending.STOP: "stop eos completed complete finished done ok success end_turn",
    Ending.LENGTH: "length limit truncated max_tokens max_length max_turns",
    Ending.ABORT: "abort aborted cancelled canceled timeout env_timeout infra_error error failed",
}
_ENDINGS = {word: ending for ending, words in _WORDS.items() for word in words.split()}

_INNER = "turns that are not the last of their rollout"


def ending_of(word: str | None) -> Ending | None:
    """What a framework's finish word means; None for a word not known here."""
    return None if word is None else _ENDINGS.get(word.lower())


def absent(rollouts: Sequence[TraceRollout]) -> list[str]:
    """The fields that some rollouts lack, in words. What comes after a rollout's last turn nobody needs to know."""
    observed = [t.observation_tokens for r in rollouts for t in (r.turns or ())[:-1]]
    words = [
        *_groups(rollouts),
        *_absence("turns (each rollout counts as one)", [r.turns for r in rollouts]),
        *_absence("observation tokens", observed, _INNER),
        *_tools(rollouts),
        *_absence("prompt tokens", [r.prompt_tokens for r in rollouts]),
        *_absence("rewards", [r.reward for r in rollouts]),
        *_absence("endings (whether a length was cut off)", [r.finish for r in rollouts]),
    ]
    unknown = sorted({r.finish for r in rollouts if r.finish is not None and r.ending is None})
    if unknown:
        words.append(f"what the endings {', '.join(map(repr, unknown))} mean (whether a length was cut off)")
    return words


def _groups(rollouts: Sequence[TraceRollout]) -> Iterator[str]:
    alone = sum(r.alone for r in rollouts)
    if alone == len(rollouts):
        yield "groups (each rollout stands alone, so nothing is known about siblings)"
    elif alone:
        yield f"groups, for {alone} of {len(rollouts)} rollouts (each of those stands alone)"
    if samples := sum(r.parts for r in rollouts if r.parts > 1):
        count = sum(r.parts > 1 for r in rollouts)
        yield (
            f"which tokens the samples of one rollout share ({samples} samples are {count} rollouts, each with the "
            "tokens of all of its samples)"
        )


def _tools(rollouts: Sequence[TraceRollout]) -> Iterator[str]:
    """By rollout where no turns are known, else by turn, but for those whose seconds are known as a sum."""
    if all(r.tool_s is None for r in rollouts):
        yield "tool seconds"
        return
    whole = sum(r.turns is None and r.tool_s is None for r in rollouts)
    if whole:
        yield f"tool seconds, for {whole} of {len(rollouts)} rollouts"
    told = [r for r in rollouts if r.turns and not seconds_untold(r.tool_s, r.turns_told())]
    yield from _absence("tool seconds", [t.tool_s for r in told for t in (r.turns or ())[:-1]], _INNER, all_of=False)


def _absence(name: str, values: Sequence[object], of: str = "rollouts", *, all_of: bool = True) -> Iterator[str]:
    """`all_of`: where all lack it, its name says so."""
    lacking = sum(1 for value in values if value is None)
    if lacking:
        yield name if all_of and lacking == len(values) else f"{name}, for {lacking} of {len(values)} {of}"
