"""Scenarios that hypothesis draws: every preset, any mixture of the four choices that makes sense, fleets, mishaps."""

import math
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st
from scheduler.scenario import Fault, Kill, Scenario

from gruppetto.config.schema import SchedulerSection
from gruppetto.presets import compose
from gruppetto.scheduler.policies.composed import Composed, problems
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.order import ORDERS
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous, Frozen, ShortLong

WORK = 40
"""Groups live at a time and steps are kept to so much, so that a run takes some 30 ms."""
CHUNK = {"chunk": 9}
DISAGGREGATED_ONLY = ("async_bounded", "windowed")
SECTIONS = {
    "sync": {},
    "partial": {"depth": 2.0},
    "partial, masked": {"depth": 1.5, "max_staleness": 1},
    "partial, age limit": {"depth": 2.0, "max_parked_steps": 2},
    "tail_batch": {"over_prompts": 1.5, "over_members": 1.3, "defer_steps": 3},
    "tail_batch, frozen": {"boundary": "frozen", "rounds": 2},
    "divided": CHUNK,
    "async_bounded": {"max_staleness": 1},
    "async_bounded, drop": {"max_staleness": 1, "over_age": "drop"},
    "async_bounded, mask": {"max_staleness": 1, "over_age": "mask"},
    "windowed": {"max_staleness": 2},
    "windowed, 3": {"max_staleness": 3},
    **{f"layered, {k}": {"max_staleness": k, **CHUNK} for k in range(5)},
    **{f"layered, {k} mask": {"max_staleness": k, "over_age": "mask", **CHUNK} for k in range(5)},
    "layered, 2 drop": {"max_staleness": 2, "over_age": "drop", **CHUNK},
    "layered, no stream": {"max_staleness": 1, "stream": False, "depth": 2.0, **CHUNK},
    "layered, deep": {"max_staleness": 4, "depth": 5.0, **CHUNK},
    "layered, deferral": {"defer_steps": 3, **CHUNK},
}
"""Name to what is set beside the type (the name's first word)."""


def preset(name):
    """The preset as a config would have it."""
    kind = name.split(",")[0]
    return compose(SchedulerSection(type=kind, **SECTIONS[name]))


def presets(colocated):
    names = [name for name in SECTIONS if not (colocated and name.startswith(DISAGGREGATED_ONLY))]
    return st.sampled_from([preset(name) for name in names])


ROUNDS = ("continuous", "continuous", "continuous", "continuous", "short and long", "frozen")


@st.composite
def mixtures(draw, colocated):
    """Any mixture of the choices that `problems` lets pass."""
    k = draw(st.one_of(st.integers(0, 4), st.integers(5, 12), st.none()))
    over_age = draw(st.sampled_from(["wait", "wait", "mask", "drop"]))
    rounds, unfinished = _rounds(draw, k, over_age)
    own = not colocated and k is not None and over_age == "wait" and draw(st.integers(0, 5)) == 0
    policy = Composed(
        "mixture",
        rounds=rounds,
        order=draw(st.sampled_from(list(ORDERS.values())))(),
        placing=Placing(
            chunk=None if own else draw(st.sampled_from([None, None, 1, 4, 30])),
            limit=draw(st.booleans()),
            count_kv=draw(st.booleans()),
            hold=draw(st.booleans()),
            kv_pool=draw(st.booleans()),
            own_version=own,
        ),
        unfinished=unfinished,
        freshness=Freshness(k, over_age),
        stream=draw(st.booleans()),
        finish_first=draw(st.booleans()),
        max_parked_steps=draw(st.sampled_from([None, None, None, 1, 5])),
    )
    assume(not list(problems(policy, colocated=colocated)))
    return policy


def _rounds(draw, k, over_age):
    kind = draw(st.sampled_from(ROUNDS))
    if kind == "short and long":
        members = draw(st.sampled_from([1.0, 1.3, 2.0]))
        return ShortLong(draw(st.floats(1.05, 2)), members, draw(st.integers(1, 6))), "drop"
    if kind == "frozen":
        return Frozen(draw(st.integers(1, 3)), draw(st.floats(1, 2))), draw(st.sampled_from(["wait", "keep"]))
    unfinished = draw(st.sampled_from(["keep", "keep", "keep", "wait", "drop"]))
    bound = k + 1.0 if k is not None and over_age == "wait" else 4.0
    if unfinished == "drop":
        depth = draw(st.floats(1.05, 4.0))
    elif unfinished == "wait" or bound == 1.0:
        depth = 1.0
    else:
        depth = draw(st.one_of(st.just(bound), st.floats(1.05, bound)))
    return Continuous(depth, draw(st.sampled_from([None, None, 1, 4]))), unfinished


FAULTS = st.builds(
    Fault, engine=st.integers(0, 3), at_s=st.floats(1, 300), kind=st.sampled_from(["dead", "mute", "slow"])
)
KILLS = st.builds(
    Kill, step=st.integers(0, 7), after_s=st.floats(0, 80), how=st.sampled_from(["kill", "interrupt", "pause"])
)
SHAPE = {
    "batch_groups": st.integers(1, 8),
    "group_size": st.integers(2, 4),
    "engines": st.integers(1, 4),
    "slots": st.integers(1, 12),
    "engine_queue": st.integers(0, 2),
    "row_s": st.sampled_from([0.0, 0.0, 0.05]),
    "tight_kv": st.booleans(),
    "sigma": st.sampled_from([0.3, 1.0, 2.0]),
    "alike": st.sampled_from([0.0, 0.9]),
    "max_tokens": st.sampled_from([40, 150, 300]),
    "prompts": st.sampled_from([(8,), (8, 90, 99), (8, 100), (8, 150)]),
    "context": st.sampled_from([100, 400]),
    "tasks": st.sampled_from([1 << 30, 5]),
    "turns": st.sampled_from([0, 0, 3]),
    "tool_s": st.sampled_from([0.0, 5.0]),
    "reward_s": st.sampled_from([0.0, 3.0, 40.0]),
    "train_s": st.sampled_from([0.0, 20.0]),
    "publish_s": st.sampled_from([0.0, 3.0]),
    "kv_kept": st.booleans(),
    "abort_s": st.sampled_from([(0.0, 0.0), (0.0, 0.3), (2.0, 0.0)]),
    "kills": st.lists(KILLS, max_size=2).map(tuple),
    "give_back": st.frozensets(st.integers(0, 7), max_size=2),
    "save_every": st.sampled_from([1, 3, 100]),
    "limit": st.one_of(st.none(), st.none(), st.integers(0, 30)),
    "steps": st.sampled_from([3, 6, 14]),
    "seed": st.integers(0, 1 << 16),
    "laid_out": st.sampled_from([False, False, False, True]),
}
MISHAPS = {
    "tool_fails": st.sampled_from([0.0, 0.1]),
    "reward_fails": st.sampled_from([0.0, 0.1, 0.5]),
    "same_reward": st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    "drop_zero_variance": st.booleans(),
    "when_starved_train": st.booleans(),
    "timeout_s": st.sampled_from([15.0, 60.0, 5000.0]),
    "faults": st.lists(FAULTS, max_size=4).map(tuple),
}


@st.composite
def scenarios(draw, policies=None, **mishaps):
    """`policies`: from a placement to a strategy of scheduling policies."""
    colocated = draw(st.booleans())
    of = policies or draw(st.sampled_from([mixtures, mixtures, presets]))
    chosen = draw(of(colocated))
    scenario = draw(st.builds(Scenario, policy=st.just(chosen), colocated=st.just(colocated), **SHAPE, **mishaps))
    depth = max(chosen.rounds.depth, getattr(chosen.rounds, "over_prompts", 1.0))
    most = max(1, math.floor(WORK / depth / (scenario.steps**0.5)))
    tokens = scenario.max_tokens if (chosen.placing.chunk or 30) > 3 else 40
    return replace(scenario, batch_groups=min(most, scenario.batch_groups), max_tokens=tokens)


@st.composite
def changes(draw, **mishaps):
    """Scenarios in which other scheduling policies are followed later on, as `auto` and a resumed run may do."""
    scenario = draw(scenarios(**mishaps))
    of = draw(st.sampled_from([mixtures, presets]))
    policies = draw(st.lists(of(scenario.colocated), min_size=1, max_size=3))
    versions = sorted(draw(st.integers(1, 8)) for _ in policies)
    every = [scenario.policy, *policies]
    throws = {isinstance(policy.rounds, ShortLong) for policy in every if policy.unfinished == "drop"}
    assume(len(throws) < 2)  # the account of tasks could not tell who has thrown a group away
    return replace(scenario, then=tuple(zip(versions, policies, strict=True)), laid_out=True)
