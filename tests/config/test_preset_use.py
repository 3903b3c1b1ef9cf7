"""Settings of [scheduler] that change nothing, or do not go together: refused in one line, and its advice can be
followed; what the project writes or suggests by itself is never refused."""

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gruppetto.cli import config as config_page
from gruppetto.cli import replay
from gruppetto.config.loader import Loaded, load, recipes
from gruppetto.config.preflight import refuse_scheduler
from gruppetto.config.preset_use import scheduler_problems
from gruppetto.config.schema import Config
from gruppetto.presets import in_force
from gruppetto.record.explain import advice
from gruppetto.record.explain.advice import Measured
from gruppetto.record.explain.policy import Policy
from gruppetto.record.explain.replays import ENTRIES
from gruppetto.sim.compare import entries, overrides
from gruppetto.sim.replay.again import AS_RUN, ORACLE
from gruppetto.sim.simulate import simulate

ROOT = Path(__file__).parents[2]
FRESH = "where a batch's rollouts are all that is live (depth 1), so that none gets old; "
DEEPER = FRESH + "write scheduler.depth = 1.25, or leave it out"
TAIL = (
    "with scheduler.type = 'tail_batch', whose batches are made under the newest weights, so that none gets old; "
    "leave it out"
)
UNBOUNDED = "write scheduler.max_staleness = 1 as well, or leave it out"
COUNTED = (
    "with scheduler.type = 'async_bounded', which counts admissions (max_staleness = k stands for depth = k + 1) and "
    'lets tokens get older; write scheduler.over_age = "mask" to bound ages, or leave it out'
)
APART = "run.placement=disaggregated"


def refused(*given):
    """The lines about these settings, `key=value` of [scheduler] or, with a dot, of another table."""
    written = [setting if "." in setting.partition("=")[0] else f"scheduler.{setting}" for setting in given]
    return list(scheduler_problems(load([], written).config))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ("type=partial", "over_age=mask"),
            'over_age = "mask" has no use without scheduler.max_staleness, so that no token is too old: it masks '
            f"nothing; {UNBOUNDED}",
        ),
        (
            ("type=partial", "over_age=drop"),
            'over_age = "drop" has no use without scheduler.max_staleness, so that no token is too old: it drops '
            f"nothing; {UNBOUNDED}",
        ),
        (("type=tail_batch", "over_age=mask"), f'over_age = "mask" has no use {TAIL}'),
        (("type=tail_batch", "over_age=drop"), f'over_age = "drop" has no use {TAIL}'),
        (("type=tail_batch", "max_staleness=3"), f"max_staleness = 3 has no use {TAIL}"),
        (("type=tail_batch", "max_parked_steps=2"), f"max_parked_steps = 2 has no use {TAIL}"),
        (("type=tail_batch", "boundary=frozen", "max_staleness=2"), f"max_staleness = 2 has no use {TAIL}"),
        (("type=sync", "max_staleness=3"), f"max_staleness = 3 has no use {DEEPER}"),
        (("type=divided", "max_staleness=2"), f"max_staleness = 2 has no use {DEEPER}"),
        (("type=sync", "max_parked_steps=1"), f"max_parked_steps = 1 has no use {FRESH}leave it out"),
        (("type=partial", "depth=1", "max_staleness=0", "over_age=mask"), f'over_age = "mask" has no use {DEEPER}'),
        (("type=layered", "over_age=mask"), f'over_age = "mask" has no use {DEEPER}'),
        (("type=layered", "over_age=mask", APART), f'over_age = "mask" has no use {DEEPER}'),
        (("type=layered", "over_age=drop", APART), f'over_age = "drop" has no use {DEEPER}'),
        (
            ("type=async_bounded", "max_staleness=0", "depth=2", APART),
            f"max_staleness = 0 has no use beside scheduler.depth = 2 {COUNTED}",
        ),
        (
            ("type=async_bounded", "max_staleness=8", "depth=2", APART),
            f"max_staleness = 8 has no use beside scheduler.depth = 2 {COUNTED}",
        ),
        (
            ("type=tail_batch", "boundary=frozen", "unfinished=drop"),
            "unfinished: unfinished = 'drop' has nothing to drop with boundary = 'frozen', which keeps every rollout; "
            "write unfinished = 'wait'",
        ),
        (
            ("type=tail_batch", "unfinished=keep"),
            "unfinished: short and long rounds put off what is unfinished, and unfinished = 'keep' keeps it; "
            "write unfinished = 'drop'",
        ),
        (
            ("type=tail_batch", "unfinished=wait"),
            "unfinished: short and long rounds put off what is unfinished, and unfinished = 'wait' keeps it; "
            "write unfinished = 'drop'",
        ),
        (
            ("type=tail_batch", "over_prompts=1"),
            "over_prompts: over_prompts = 1 and over_members = 1 launch nothing beyond the batch, so that no round is "
            "short; write over_prompts = 1.25 or over_members = 1.25",
        ),
        (
            ("type=windowed", "over_age=mask", APART),
            "over_age: over_age = 'mask' with versions = 'own' would lose whole rollouts, each of which is of one "
            "version: they are awaited; write over_age = 'wait'",
        ),
        (
            ("type=auto", "max_waste=0"),
            "max_waste = 0 rules out what masks or censors, and a limit on forecasts cannot promise that; "
            "write scheduler.allow_mask = false",
        ),
        (
            ("type=auto", "max_waste=0", "allow_censoring=true"),
            "max_waste = 0 rules out what masks or censors, and a limit on forecasts cannot promise that; "
            "write scheduler.allow_mask = false and scheduler.allow_censoring = false",
        ),
    ],
)
def test_one_line_says_what_to_write_instead(given, line):
    assert refused(*given) == [f"scheduler.{line}"]


@pytest.mark.parametrize(
    "given",
    [
        ("type=partial",),
        ("type=partial", "over_age=mask", "max_staleness=1"),
        ("type=partial", "max_parked_steps=2"),
        ("type=partial", "depth=1", "max_staleness=1"),  # a bound that it does not have otherwise
        ("type=tail_batch", "over_age=wait", "max_staleness=0"),  # the preset's own, written out
        ("type=tail_batch", "over_prompts=1", "over_members=1.25"),
        ("type=sync", "max_staleness=0"),
        ("type=sync", "max_staleness=1", "depth=2"),
        ("type=layered", "max_staleness=4"),
        ("type=layered", "max_staleness=1", "depth=1"),  # another order than with 0
        ("type=layered", "over_age=mask", "depth=1.25", APART),
        ("type=async_bounded", "max_staleness=2", APART),
        ("type=async_bounded", "max_staleness=2", "depth=3", APART),
        ("type=async_bounded", "max_staleness=0", "depth=2", "over_age=mask", APART),
        ("type=auto", "max_waste=0", "allow_mask=false"),
    ],
)
def test_what_says_something_is_taken(given):
    assert refused(*given) == []


@pytest.mark.parametrize("setting", ["over_age=mask", "over_age=drop", "max_parked_steps=1", "max_staleness=3"])
@pytest.mark.parametrize("base", [("type=sync",), ("type=divided", APART), ("type=tail_batch", APART)])
def test_what_is_refused_changes_nothing(tmp_path, base, setting):
    """The same steps to the second, whatever the trainer and the publish take."""
    assert refused(*base, setting)
    shape = ["rollout.prompts_per_step=4", "rollout.group_size=2", "engine.count=2", "run.steps=4"]
    priced = ["sim.train_step_s=100.0", "sim.publish_s=30.0", f"run.dir={tmp_path}"]
    rows = []
    for name, more in (("without", ()), ("with", (setting,))):
        written = [s if s.startswith("run.") else f"scheduler.{s}" for s in (*base, *more)]
        rows.append(steps_of(load(["sim/family-a"], [*shape, *priced, *written, f"run.name={name}"])))
    assert rows[0] == rows[1]


def steps_of(loaded):
    """What each step of a simulation trained on, when, and how old it was."""
    simulate(loaded)
    folder = Path(loaded.config.run.dir) / loaded.config.run.name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("time/step_s", "rollouts/trained", "rollouts/started", "dropped/surplus", "tokens/batch_trained")
    return [[row[name] for name in (*names, "staleness/max")] for row in rows]


def test_members_alone_may_be_launched_in_excess(tmp_path):
    shape = ["rollout.prompts_per_step=8", "rollout.group_size=4", "engine.count=4", "run.steps=6", "run.name=members"]
    members = ["scheduler.type=tail_batch", "scheduler.over_prompts=1", "scheduler.over_members=1.25"]
    loaded = load(["sim/family-a"], [*shape, *members, f"run.dir={tmp_path}"])
    refuse_scheduler(loaded.config)
    for step, (_, trained, started, surplus, _, staleness) in enumerate(steps_of(loaded), 1):
        assert (trained, started, surplus, staleness) == (8 * 4 * step, 8 * 5 * step, 8 * step, 0)


# -- advice can be followed -------------------------------------------------------------------------------------------

VALUES = {
    "scheduler.type": [
        "sync", "partial", "tail_batch", "tail_batch", "divided", "async_bounded", "windowed", "layered", "auto",
    ],
    "run.placement": ["colocated", "disaggregated"],
    "scheduler.depth": [1.0, 1.25, 2.0, 3.5],
    "scheduler.max_staleness": [0, 1, 3, 8],
    "scheduler.over_age": ["wait", "mask", "drop"],
    "scheduler.unfinished": ["wait", "keep", "drop"],
    "scheduler.order": ["fifo", "probe_then_longest"],
    "scheduler.chunk": [64],
    "scheduler.versions": ["own", "newest"],
    "scheduler.defer_steps": [3],
    "scheduler.over_prompts": [1.0, 1.5],
    "scheduler.over_members": [1.0, 1.25],
    "scheduler.boundary": ["each_round", "frozen"],
    "scheduler.rounds": [2],
    "scheduler.max_parked_steps": [1, 4],
    "scheduler.max_waste": [0, 0.2],
    "scheduler.allow_mask": [True, False],
    "scheduler.allow_censoring": [True, False],
}  # fmt: skip
DRAWN = st.dictionaries(st.sampled_from([*VALUES]), st.integers(0, 8), max_size=6).map(
    lambda drawn: {key: VALUES[key][place % len(VALUES[key])] for key, place in drawn.items()}
)


def config_of(written):
    tables = {"scheduler": {}, "run": {}}
    for key, value in written.items():
        table, _, name = key.partition(".")
        tables[table][name] = value
    return Config.model_validate(tables)


def lines_of(written):
    return list(scheduler_problems(config_of(written)))


def ways(line):
    """What its advice says to write, one way after the other: values by their keys, None = left out."""
    said = line.rpartition("; ")[2]
    for way in re.split(r",? or ", re.sub(r" \(.*\)$", "", said)):
        found = dict(re.findall(r"([a-z_.]+) = ([^\s,]+)", way))
        if found:
            yield {key if "." in key else f"scheduler.{key}": _read(value) for key, value in found.items()}
        elif way == "leave it out":
            yield {re.match(r"scheduler\.[a-z_]+", line).group(): None}


def _read(value):
    text = value.strip("'\"")
    if text in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text]
    return float(text) if re.fullmatch(r"[\d.]+", text) else text


def following(written, way):
    changed = {key: int(v) if v == int(v) else v for key, v in way.items() if isinstance(v, float)}
    return {key: value for key, value in (written | way | changed).items() if value is not None}


@settings(max_examples=400)
@given(DRAWN)
def test_whoever_does_as_a_line_says_does_not_read_it_again(written):
    for line in lines_of(written):
        found = list(ways(line))
        assert found, line
        for way in found:
            assert line not in lines_of(following(written, way)), (written, way)


@settings(max_examples=200)
@given(DRAWN)
def test_doing_so_again_and_again_ends_in_a_run(written):
    start, read = dict(written), Counter()
    for _ in range(12):
        if not (lines := lines_of(written)):
            return
        found = [*ways(lines[0])]
        written = following(written, found[read[lines[0]] % len(found)])  # who meets it again takes the other way
        read[lines[0]] += 1
    raise AssertionError(f"{start} ends nowhere: {written}, {lines}")


def meant_by(written):
    """What `gruppetto config` prints beside these settings."""
    return config_page._of_the_preset(Loaded(config_of(written), {}, ""))


@settings(max_examples=200)
@given(DRAWN)
@example({"scheduler.type": "partial", "scheduler.depth": 1.0, "scheduler.max_staleness": 1})
@example({"scheduler.type": "layered", "scheduler.depth": 1.0, "scheduler.max_staleness": 1})
def test_what_config_prints_can_be_written_out(written):
    if not lines_of(written):
        assert lines_of(written | meant_by(written)) == []


def test_config_prints_what_a_preset_means():
    beside = {"run.placement": "disaggregated"}
    assert meant_by({"scheduler.type": "windowed", **beside})["scheduler.max_staleness"] == 1
    assert meant_by({"scheduler.type": "partial", "scheduler.max_staleness": 1})["scheduler.over_age"] == "mask"
    assert meant_by({"scheduler.type": "layered"})["scheduler.order"] == "probe_then_longest"
    assert meant_by({"scheduler.type": "auto"}) == {}


# -- what the project writes or suggests by itself ---------------------------------------------------------------------


def test_no_recipe_is_refused():
    for name in recipes():
        refuse_scheduler(load([name]).config)


def compared_in_docs():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = " ".join(" ".join(page.read_text("utf-8").split()) for page in pages)
    found = re.findall(r"gruppetto (?:simulate|replay) [^`]{0,80}?--compare ([\w:=.,\"-]+)", text)
    return [*found, replay.COMPARE, *ENTRIES]


def test_no_entry_of_the_docs_is_refused():
    found = [entry for compare in compared_in_docs() for entry in entries(compare) if entry not in (ORACLE, AS_RUN)]
    assert len(set(found)) >= 10
    for entry in dict.fromkeys(found):
        refuse_scheduler(load(["sim/reasoning-32k"], overrides(entry)).config)


BASES = [
    {"type": "sync"},
    {"type": "partial"},
    {"type": "partial", "max_staleness": 1, "over_age": "drop"},
    {"type": "layered", "max_staleness": 1},
    {"type": "layered", "max_staleness": 1, "over_age": "mask", "depth": 2.0},
    {"type": "layered", "max_staleness": 1, "over_age": "drop"},
    {"type": "async_bounded", "max_staleness": 1},
    {"type": "async_bounded", "max_staleness": 1, "over_age": "mask"},
    {"type": "divided"},
]


@pytest.mark.parametrize("base", BASES, ids=lambda base: " ".join(map(str, base.values())))
def test_no_advice_is_refused(base):
    config = {"scheduler": base, "run": {"placement": "disaggregated"}}
    policy, advised = Policy.of(config, in_force), 0
    for rho, icc, cause, masked in product(
        (0.3, 0.6, 3.0, 15.0), (0.05, 0.3, 0.9), ("tail", "tool", "trainer"), (0, 0.3)
    ):
        measured = Measured(
            rho=rho, icc=icc, excess=0.3, masked=masked, censored=True, p99_ratio=0.2, shares={cause: 0.3}
        )
        for entry in advice.advise(measured, config, policy):
            if entry.lines[:1] == ("[scheduler]",):
                given = {f"scheduler.{k}": _read(v) for k, _, v in (line.partition(" = ") for line in entry.lines[1:])}
                written = {f"scheduler.{k}": v for k, v in base.items()} | {"run.placement": "disaggregated"}
                assert lines_of(following(written, given)) == []
                advised += 1
    assert advised
