"""Lengths of published systems and data sets as named workloads, with what each source states and what is chosen.

    gruppetto simulate sim/reasoning-32k sim.workload=rollpacker-32k

A name stands for the lengths alone; engines, batch and group size are the recipe's. `gruppetto reproduce` holds what
they give against the published figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gruppetto.sim.workload.generator import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A workload, its source, and what of it the source does not state."""

    workload: Workload
    source: str
    stated: str
    chosen: str


def _rollpacker(cap: int) -> Published:
    return Published(
        workload=Workload.from_median(
            615, sigma=0.92, icc=0.24, cap=cap, runaway_prompts=0.2, runaway_rate=(0.1, 0.2), prompt_tokens=512
        ),
        source="RollPacker, NSDI'26 (2509.21009), Fig 2",
        stated="75 % below 755 to 1,100 tokens by task, longest at the cap",
        chosen="sigma, ICC and the clusters of runaways, fitted to its Fig 11 in our scheduling study",
    )


def _seer(mean: int, cap: int) -> Published:
    return Published(
        workload=Workload.from_mean_cv(mean, 1.0, 0.86, cap, prompt_tokens=1024),
        source="Seer (2511.14617), Table 3 and Fig 4",
        stated=f"mean {mean:,} tokens, cap {cap:,}, siblings of about one length",
        chosen="a coefficient of variation of 1 and an ICC of .86",
    )


PUBLISHED: Mapping[str, Published] = {
    "rollpacker-8k": _rollpacker(8_192),
    "rollpacker-16k": _rollpacker(16_384),
    "rollpacker-32k": _rollpacker(32_768),
    "seer-moonlight": _seer(22_386, 65_536),
    "seer-vl72b": _seer(7_615, 40_960),
    "seer-k2": _seer(38_959, 98_304),
    "april-4b": Published(
        workload=Workload.from_mean(5_600, 0.7, 0.5, 8_192, prompt_tokens=256),
        source="APRIL (2509.18521) and slime's recipes for Qwen3-4B",
        stated="cap 8,192 tokens",
        chosen="mean 5,600 (the middle of three fits in our scheduling study), sigma .7, ICC .5",
    ),
    "dapo-32b": Published(
        workload=Workload(mu=6.142, s_b=0.19, s_w=0.6, cap=16_384, q0=0.0005, prompt_tokens=256),
        source="PolyTrace (2509.25279), verl DAPO on Qwen2.5-32B",
        stated="mean 581, p50 465, p99 2,711, longest 10,112 tokens; ICC of the log-lengths .06",
        chosen="the body's spread, .63, from p50, p75 and p90; a rare runaway for what lies beyond p99",
    ),
    "deepcoder-14b": Published(
        workload=Workload(mu=9.21, s_b=0.77, s_w=0.23, cap=16_384, prompt_tokens=512),
        source="PolyTrace (2509.25279), rLLM DeepCoder-14B",
        stated="p50 9,964, 15 % at the cap of 16,384 tokens; deviations of ln L .77 between, .23 within prompts",
        chosen="nothing; a lognormal has more at the cap than the record",
    ),
    "search-r1": Published(
        workload=Workload.from_mean(
            204,
            sigma=0.6,
            icc=0.3,
            cap=77 * 14,
            turn_tokens=77,
            observation_tokens=344,
            tool_median_s=0.161,
            tool_sigma=1.3,
            prompt_tokens=256,
        ),
        source="PolyTrace (2509.25279), Search-R1 on Qwen2.5-7B",
        stated="2.63 turns and 204 tokens a trajectory, 1.65 tool calls (at most 14) of median .161 s and mean .396 s, "
        "567 tool tokens",
        chosen="sigma .6 and ICC .3 of the number of turns",
    ),
}
"""By name."""
