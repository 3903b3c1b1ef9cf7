"""Kinds of work by name, for who has no figures of their own yet: typical sizes, each with where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Kind(NamedTuple):
    """Sizes that are taken where the user states none. Tokens; `cv` of the lengths before the cut."""

    mean_tokens: int
    max_tokens: int
    cv: float
    icc: float
    prompt_tokens: int
    turns: float = 1.0
    observation_tokens: int = 0
    tool_s: float = 0.0
    tool_sigma: float = 0.0
    source: str = ""


KINDS: Mapping[str, Kind] = {
    "chat": Kind(
        mean_tokens=600,
        max_tokens=4096,
        cv=0.9,
        icc=0.3,
        prompt_tokens=512,
        source="DAPO with Qwen2.5-32B as recorded by PolyTrace (mean 581, CV .93); cap and ICC chosen",
    ),
    "reasoning": Kind(
        mean_tokens=8192,
        max_tokens=32_768,
        cv=1.0,
        icc=0.5,
        prompt_tokens=512,
        source="Seer (arXiv:2511.14617): means of 7.6k to 39k, CV about 1; ICC the middle of .05 to .92 as recorded",
    ),
    "agent": Kind(
        mean_tokens=5000,
        max_tokens=32_768,
        cv=0.7,
        icc=0.5,
        prompt_tokens=2048,
        turns=20.0,
        observation_tokens=600,
        tool_s=5.0,
        tool_sigma=1.7,
        source="turns and tool times between AgentCgroup's SWE-rebench runs (59 calls, mean 3 s, CV 2.8) and search-R1",
    ),
}
