"""Generator fits: whether the workload generator, given a trace's spread, draws lengths and tools with its quantiles.

Owns the inputs and rows of the trace records. Where a record gives medians and spreads they are taken from it;
predicted are the other quantiles, means, the correlation inside groups and what probes recall.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from gruppetto.ledger.reproduce.study import Input, Study, fit, points, relative
from gruppetto.rng import stream
from gruppetto.sim.workload import TraceWorkload, Workload, measure

SEED, GROUPS, GROUP = 11, 3_000, 8
POLYTRACE = "PolyTrace @4246156f, statistics of ours"

_LAW = "one lognormal and runaways to the cap: the generator has no third component between them"


def _drawn(load: Workload | TraceWorkload, groups: int = GROUPS, members: int = GROUP) -> list[list[int]]:
    return [[load.length(SEED, g, m, g) for m in range(members)] for g in range(groups)]


def _quantiles(values: Sequence[float], **at: float) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {name: float(np.quantile(array, q)) for name, q in at.items()} | {"mean": float(array.mean())}


# -- Qwen2.5-32B under DAPO: siblings hardly alike --------------------------------------------------------------------

DAPO_ICC, DAPO_SIGMA, DAPO_RUNAWAYS, DAPO_CAP = 0.06, 0.62, 0.002, 10_112

DAPO_INPUTS = (
    Input("median, ICC, cap", f"465 tokens, {DAPO_ICC}, {DAPO_CAP}", "the record"),
    Input(
        "sigma", f"{DAPO_SIGMA}", "of the body", "3 of 8 rows (p75, p90, mean); the record's 0.92 counts the tails in"
    ),
    Input("runaways", f"{DAPO_RUNAWAYS:.1%}, any prompt", "chosen: the mean above the body's", "1 of 8 rows (mean)"),
)


@cache
def _dapo_groups() -> list[list[int]]:
    return _drawn(Workload.from_median(465, DAPO_SIGMA, DAPO_ICC, DAPO_CAP, q0=DAPO_RUNAWAYS))


def _dapo() -> Mapping[str, float]:
    groups = _dapo_groups()
    pooled = [length for group in groups for length in group]
    found = _quantiles(pooled, p75=0.75, p90=0.9, p99=0.99)
    return found | {
        "cv": float(np.std(pooled)) / found["mean"],
        "ICC of log-length": measure(groups, DAPO_CAP).icc,
        "top fifth of prompts found by 1 probe": recall(groups, 1),
        "top fifth of prompts found by 4 probes": recall(groups, 4),
    }


def recall(groups: Sequence[Sequence[int]], probes: int, prompts: int = 96) -> float:
    """Of the fifth of a step's prompts with the longest longest member, the share that is in the fifth that the longest
    of the first `probes` members points to."""
    found = total = 0
    for first in range(0, len(groups) - prompts + 1, prompts):
        step = groups[first : first + prompts]
        top = max(1, prompts // 5)
        truly = sorted(range(prompts), key=lambda i: -max(step[i]))[:top]
        guessed = sorted(range(prompts), key=lambda i: -max(step[i][:probes]))[:top]
        found += len(set(truly) & set(guessed))
        total += top
    return found / total


DAPO = Study(
    id="polytrace-dapo32b",
    source=POLYTRACE,
    setting="Qwen2.5-32B, DAPO, 96 x 8",
    inputs=DAPO_INPUTS,
    predict=_dapo,
    tolerance="quantiles +-10 %, ICC +-0.05; recall +-0.10 (none is given)",
    rows=(
        fit(relative("p75", 698, 0.10, _LAW)),
        fit(relative("p90", 1_041, 0.10, _LAW)),
        relative("p99", 2_711, 0.10, _LAW),
        fit(relative("mean", 581, 0.10, _LAW)),
        relative("cv", 0.93, 0.10, _LAW),
        points("ICC of log-length", 0.06, 0.05),
        points("top fifth of prompts found by 1 probe", 0.31, 0.10),
        points("top fifth of prompts found by 4 probes", 0.63, 0.10),
    ),
    says="Fitted: sigma and runaways, to 3 rows. Predicted: the other five.",
)

# -- DeepCoder-14B: siblings alike ------------------------------------------------------------------------------------

CODER_MEDIAN, CODER_BETWEEN, CODER_WITHIN, CODER_CAP = 9_964, 0.77, 0.23, 16_384

CODER_INPUTS = (
    Input(
        "median, spreads, cap",
        f"{CODER_MEDIAN}, {CODER_BETWEEN} between, {CODER_WITHIN} within, {CODER_CAP}",
        "the record",
    ),
)


def _coder() -> Mapping[str, float]:
    groups = _drawn(Workload(mu=math.log(CODER_MEDIAN), s_b=CODER_BETWEEN, s_w=CODER_WITHIN, cap=CODER_CAP))
    pooled = [length for group in groups for length in group]
    return _quantiles(pooled, p75=0.75) | {
        "share at the cap": sum(length >= CODER_CAP for length in pooled) / len(pooled),
        "ICC of log-length": measure(groups, CODER_CAP).icc,
    }


CODER = Study(
    id="polytrace-deepcoder14b",
    source=POLYTRACE,
    setting="DeepCoder-14B, cap 16k, 16 x 8",
    inputs=CODER_INPUTS,
    predict=_coder,
    tolerance="quantiles +-10 %, ICC +-0.05; share at the cap +-0.10 (none is given)",
    rows=(
        relative("p75", 14_300, 0.10, "the lengths are skewed to the left in their logarithm; a lognormal is not"),
        relative("mean", 9_382, 0.10),
        points("share at the cap", 0.15, 0.10, "as for p75"),
        points("ICC of log-length", 0.92, 0.05, "estimated below the cap, which cuts what differs between prompts"),
    ),
    says="Given: median and spreads. Predicted: all rows.",
)

# -- Intern-S1: a mixture ---------------------------------------------------------------------------------------------

MATH_MIXTURE = ((0.359, 4_959, 2_192), (0.074, 12_720, 6_067), (0.373, 9_175, 3_416), (0.194, 17_655, 5_267))

INTERN_INPUTS = (Input("mixture of normals (weight, mean, sd), not below 1", f"{MATH_MIXTURE}", "the record"),)


def _intern() -> Mapping[str, float]:
    draw = stream(SEED, "intern")
    weights = [weight for weight, _, _ in MATH_MIXTURE]
    lengths = [[max(1, round(draw.gauss(*draw.choices(MATH_MIXTURE, weights)[0][1:])))] for _ in range(20_000)]
    load = TraceWorkload.from_lengths(lengths)
    pooled = [length for group in _drawn(load, 20_000, 1) for length in group]
    return {
        "mean length, mathematics": sum(pooled) / len(pooled),
    }


INTERN = Study(
    id="polytrace-interns1",
    source=POLYTRACE,
    setting="Intern-S1's production mixture, as a bootstrapped workload",
    inputs=INTERN_INPUTS,
    predict=_intern,
    tolerance="mean +-2 %",
    rows=(relative("mean length, mathematics", 9_575, 0.02),),
    says="Given: the mixture. Predicted: that drawing from it keeps the published mean.",
)

# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(median_s: float, sigma: float) -> list[float]:
    load = Workload.from_median(8_000, 0.0, 0.0, 8_000, turn_tokens=100, tool_median_s=median_s, tool_sigma=sigma)
    return [turn.tool_s for g in range(300) for turn in load.turns(SEED, g, 0, g)[:-1]]


SEARCH_SIGMA = math.log(1.13 / 0.161) / 1.2816

SEARCH_INPUTS = (
    Input(
        "tool seconds",
        f"lognormal, median 0.161 s, sigma {SEARCH_SIGMA:.2f}",
        "the record's median; sigma from its p90",
        "1 of 3 rows (p90)",
    ),
)


def _search() -> Mapping[str, float]:
    return {f"tool seconds, {k}": v for k, v in _quantiles(_tools(0.161, SEARCH_SIGMA), p90=0.9, p99=0.99).items()}


SEARCH = Study(
    id="polytrace-search-r1",
    source=POLYTRACE,
    setting="Search-R1, Qwen2.5-7B, tool latency",
    inputs=SEARCH_INPUTS,
    predict=_search,
    tolerance="tool quantiles +-10 %",
    rows=(
        fit(relative("tool seconds, p90", 1.13, 0.10)),
        relative("tool seconds, p99", 2.69, 0.10, "a search has an upper end that a lognormal has not"),
        relative("tool seconds, mean", 0.396, 0.10, "the same"),
    ),
    says="Fitted: sigma, to p90. Predicted: p99 and mean.",
)

CALLS_CV = 0.6
AGENT_SIGMA = math.log(9.28 / 0.035) / 1.2816

AGENT_INPUTS = (
    Input("calls", f"lognormal, mean 58.8, CV {CALLS_CV}", "the record"),
    Input(
        "tool seconds",
        f"lognormal, median 0.035 s, sigma {AGENT_SIGMA:.2f}",
        "the record's median; sigma from its p90",
        "1 of 5 rows (p90)",
    ),
)


def _agent() -> Mapping[str, float]:
    load = Workload.from_mean_cv(58.8, CALLS_CV, 0.0, 400, turn_tokens=1)
    calls = [len(load.turns(SEED, g, 0, g)) for g in range(GROUPS)]
    tools = _quantiles(_tools(0.035, AGENT_SIGMA), p90=0.9, p99=0.99)
    shown = {f"calls, {name}": value for name, value in _quantiles(calls, p50=0.5, p99=0.99).items()}
    return shown | {f"tool seconds, {name}": value for name, value in tools.items()}


AGENT = Study(
    id="agent-env-trace",
    source="AgentCgroup tool_calls.json, statistics of ours",
    setting="SWE-rebench agents, 113 runs",
    inputs=AGENT_INPUTS,
    predict=_agent,
    tolerance="quantiles +-25 %",
    rows=(
        relative("calls, p50", 52, 0.25),
        relative("calls, p99", 178, 0.25),
        fit(relative("tool seconds, p90", 9.28, 0.25)),
        relative("tool seconds, p99", 19.2, 0.25, "reads and builds are two kinds of call; one lognormal is neither"),
        relative("tool seconds, mean", 3.01, 0.25, "the same"),
    ),
    says="Fitted: sigma of tool times, to p90. Predicted: the other four.",
)

STUDIES = (DAPO, CODER, INTERN, SEARCH, AGENT)
