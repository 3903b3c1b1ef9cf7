"""The scheduling study's families as named workloads, and who sets each number.

A family is a workload and the size of the run it stands for. What the study states is taken as stated; where it is
silent the value is in `chosen`, with the reason, and the tests draw from it to see that the stated figures come out.

    family  stated: cap    mean    ICC   runaways                               rho    N    G
    A               32k    1.05k   .05   independent                            41     128  8
    B               8k     2.6k    low   none                                   .49    512  16
    C               41k    7.7k    .86   none                                   .49    256  16
    D               32k    2.4k    .86   none (long prompts)                    15.5   128  8
    E               80 turns of 250 tokens, mean 17; 600 observation tokens;    2.0    128  8
                    tools median .4 s, sigma 1.7, .2 % of calls 120-600 s
    R               as A   as A    .24   20 % of prompts, rate .1-.2            9      128  8
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from gruppetto.errors import UserError
from gruppetto.sim.workload.generator import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A workload of the study and the run it belongs to."""

    name: str
    workload: Workload
    prompts_per_step: int
    group_size: int
    engines: int
    model: str
    """Parameters and tensor-parallel size of one engine, as the study names them."""
    rho: float
    """The study's critical path over area on that hardware."""
    chosen: Mapping[str, str]
    """Parameter -> value and why, where the study states none."""


_CAP_32K = "cap = 32,768: the study says 32k"
_PROMPT = "prompt_tokens = 512: the study gives none; short beside the responses, as in its mathematics tasks"

_A = Workload.from_mean(1050, sigma=0.9, icc=0.05, cap=32_768, q0=0.004)

_FAMILIES = (
    Family(
        name="A",
        workload=_A,
        prompts_per_step=128,
        group_size=8,
        engines=32,
        model="32B TP2",
        rho=41,
        chosen={
            "cap": _CAP_32K,
            "sigma": "0.9, with q0: the published lengths of RollPacker at 32k have median about 600 and 75 % below "
            "1,100 tokens; with mean 1,050 the median comes out at 615",
            "q0": "0.004: 0.4 % of samples at the cap, so that 98 % of steps last as long as the cap (bound 552 s)",
            "prompt_tokens": _PROMPT,
        },
    ),
    Family(
        name="B",
        workload=Workload.from_mean(2600, sigma=0.85, icc=0.05, cap=8192),
        prompts_per_step=512,
        group_size=16,
        engines=16,
        model="7B",
        rho=0.49,
        chosen={
            "cap": "8,192: the study says 8k",
            "sigma": "0.85: what the study uses in its sensitivity runs; 4 % of samples reach the cap by themselves",
            "icc": "0.05: the study says low, and .05 for its other low family",
            "q0": "0: none is named, and at 4 % of samples at the cap none is needed",
            "prompt_tokens": _PROMPT,
        },
    ),
    Family(
        name="C",
        workload=Workload.from_mean_cv(7700, cv=1.0, icc=0.86, cap=40_960),
        prompts_per_step=256,
        group_size=16,
        engines=8,
        model="72B TP8",
        rho=0.49,
        chosen={
            "cap": "40,960: the study says 41k, and this is Seer's published maximum for its 72B run of mean 7,615",
            "cv": "1: the lengths that published run is fitted with",
            "q0": "0: none is named, and 0.8 % of samples reach the cap by themselves",
            "prompt_tokens": _PROMPT,
        },
    ),
    Family(
        name="D",
        workload=Workload.from_mean(2400, sigma=1.08, icc=0.86, cap=32_768),
        prompts_per_step=128,
        group_size=8,
        engines=32,
        model="32B TP2",
        rho=15.5,
        chosen={
            "cap": _CAP_32K,
            "sigma": "1.08: the longest of a step is then .87 of the cap on average, as its bound (486 s) is of the "
            "bound of a step that always holds a runaway (557 s, family R)",
            "q0": "0: long prompts are the tail, runaways are not named",
            "prompt_tokens": _PROMPT,
        },
    ),
    Family(
        name="E",
        workload=Workload.from_mean(
            17 * 250,
            sigma=0.5,
            icc=0.5,
            cap=80 * 250,
            turn_tokens=250,
            observation_tokens=600,
            tool_median_s=0.4,
            tool_sigma=1.7,
            stuck_share=0.002,
            stuck_s=(120.0, 600.0),
        ),
        prompts_per_step=128,
        group_size=8,
        engines=16,
        model="32B TP2",
        rho=2.0,
        chosen={
            "sigma": "0.5 (of ln turns): tokens at the pace of family A's bound plus tool time then make a longest "
            "rollout of about 895 s a step, as the bound (893 s); 0.7 would make it 1,040 s",
            "icc": "0.5: the middle; none is stated",
            "prompt_tokens": _PROMPT,
        },
    ),
    Family(
        name="R",
        workload=Workload.from_median(
            math.exp(_A.mu),
            sigma=0.92,
            icc=0.24,
            cap=32_768,
            runaway_prompts=0.2,
            runaway_rate=(0.1, 0.2),
        ),
        prompts_per_step=128,
        group_size=8,
        engines=32,
        model="32B TP2",
        rho=9,
        chosen={
            "cap": _CAP_32K,
            "median": "family A's: the study says as A",
            "sigma": "0.92, with the ICC of .24: what it gives for the run that R resembles (RollPacker); the mean "
            "comes out at 1,890, while trained tokens/s x seconds a step of its table give 1,990 on two seeds",
            "prompt_tokens": _PROMPT,
        },
    ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}
"""The families by name."""


def family(name: str) -> Family:
    """The family of that name. Raises `UserError` for one there is not."""
    found = FAMILIES.get(name)
    if found is None:
        near = get_close_matches(name.upper(), FAMILIES, n=1, cutoff=0.0)
        raise UserError(f"there is no workload family {name!r}; write {near[0]} (there are {', '.join(FAMILIES)})")
    return found
