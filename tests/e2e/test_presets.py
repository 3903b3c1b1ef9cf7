"""Every preset trains on the real stack, and the record shows that it did what it is for."""

from collections import Counter

import pytest

from e2e.conftest import events_of, metrics_of, rollouts_of, timeless

APART = "run.placement=disaggregated"
TWO = ("engine.count=2", "engine.slots=8")

PRESETS = {
    "sync": ("scheduler.type=sync",),
    "partial": ("scheduler.type=partial", "scheduler.depth=2"),
    "tail_batch": ("scheduler.type=tail_batch",),
    "frozen": ("scheduler.type=tail_batch", "scheduler.boundary=frozen", "scheduler.rounds=2"),
    "divided": (
        "scheduler.type=divided",
        "scheduler.chunk=4",
        "engine.count=2",
        "engine.slots=3",
        "engine.admit_batch=1",
    ),
    "async_bounded": ("scheduler.type=async_bounded", "scheduler.max_staleness=1", APART, "engine.slots=2"),
    "windowed": ("scheduler.type=windowed", APART, *TWO),
    "layered": ("scheduler.type=layered", "scheduler.chunk=4", "engine.slots=6"),
    "layered wait": (
        "scheduler.type=layered",
        "scheduler.chunk=4",
        "scheduler.max_staleness=1",
        "scheduler.depth=2",
        APART,
        *TWO,
    ),
    "layered mask": (
        "scheduler.type=layered",
        "scheduler.chunk=4",
        "scheduler.max_staleness=0",
        "scheduler.over_age=mask",
        "scheduler.depth=2",
        APART,
    ),
    "auto": ("scheduler.type=auto",),
}

DOES = {
    "sync": (),
    "partial": ("parks", "old tokens"),
    "tail_batch": ("deferred", "surplus"),
    "frozen": (),
    "divided": ("chunk ends", "yields", "moves"),
    "async_bounded": ("swaps", "old tokens"),
    "windowed": ("updates", "old tokens"),
    "layered": ("chunk ends", "yields", "streamed groups"),
    "layered wait": ("chunk ends", "streamed groups", "swaps", "old tokens"),
    "layered mask": ("chunk ends", "swaps", "masked tokens"),
    "auto": (),
}
"""What must be found in the record of each; of the rest of `SIGNS` nothing may be."""

ALLOWED = {
    "partial": {"swaps"},
    "divided": {"moves"},
    "windowed": {"moves", "parks"},
    "async_bounded": {"parks"},
    "layered": {"moves"},
    "layered wait": {"moves", "yields", "parks"},
    "layered mask": {"moves", "yields", "parks", "streamed groups", "old tokens"},
    "auto": {"chunk ends", "yields", "moves", "streamed groups"},
}
"""What may be there besides, as the race between engines and trainer has it."""


def signs(folder):
    """How often a scheduling policy did what only some of them do."""
    metrics, rows = metrics_of(folder), rollouts_of(folder)
    kinds = Counter(event["kind"] for event in events_of(folder))
    trained = [row for row in rows if row["fate"] == "trained"]
    return {
        "parks": sum(row["rollout/parks"] for row in metrics),
        "chunk ends": sum(row["rollout/chunk_ends"] for row in metrics),
        "moves": sum(row["rollout/moves"] for row in metrics),
        "streamed groups": sum(row["rollout/streamed_groups"] for row in metrics),
        "masked tokens": sum(row["tokens/batch_masked"] for row in metrics),
        "old tokens": sum(count for row in metrics for count in row["staleness/histogram"][1:]),
        "surplus": metrics[-1]["dropped/surplus"],
        "swaps": sum(len(row["segments"]) > 1 for row in trained),
        "yields": kinds["yield"],
        "deferred": kinds["defer"],
        "updates": kinds["update"],
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_and_does_what_it_is_for(train, overlapping, preset):
    code, folder = train(*PRESETS[preset], "run.steps=6", "run.deterministic=false")
    assert code == 0
    metrics = metrics_of(folder)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    found = {sign for sign, count in signs(folder).items() if count}
    assert found >= set(DOES[preset])
    assert found <= set(DOES[preset]) | ALLOWED.get(preset, set())
    pool = [event for event in events_of(folder) if event["kind"] == "notice" and "kv_pool" in event["reason"]]
    assert bool(pool) == (preset == "divided")
    trained = Counter(row["rollout"] for row in rollouts_of(folder) if row["fate"] == "trained")
    assert set(trained.values()) == {1}
    assert len(trained) == metrics[-1]["rollouts/trained"] == 6 * 12 * (2 if preset == "frozen" else 1)


@pytest.mark.parametrize("preset", ["sync", "divided", "layered", "async_bounded", "windowed", "layered wait"])
def test_no_trained_token_is_older_than_the_bound(train, preset):
    _, folder = train(*PRESETS[preset], "run.steps=5", "run.deterministic=false", 'scheduler.over_age="wait"')
    bound = 1 if APART in PRESETS[preset] else 0
    if preset != "async_bounded":  # bounds admissions, not ages
        assert max(row["staleness/max"] for row in metrics_of(folder)) <= bound


@pytest.mark.parametrize("preset", ["tail_batch", "frozen", "divided", "layered"])
def test_same_seed_same_metrics_for_those_that_take_turns(train, preset):
    options = (*PRESETS[preset], "run.deterministic=true")
    runs = [train(*options, f'run.name="{name}"')[1] for name in ("a", "b")]
    first, second = (timeless(metrics_of(folder)) for folder in runs)
    assert first == second
    ids = [[row["rollout"] for row in rollouts_of(folder)] for folder in runs]
    assert ids[0] == ids[1]


def test_every_rollout_of_a_window_has_one_version(train):
    _, folder = train(*PRESETS["windowed"], "run.steps=6", "run.deterministic=false")
    rows = [row for row in rollouts_of(folder) if row["fate"] == "trained"]
    assert {len(row["segments"]) for row in rows} == {1}
    assert len({row["segments"][0][0] for row in rows}) >= 3
    updates = [event for event in events_of(folder) if event["kind"] == "update"]
    assert {engine for event in updates for engine in event["engines"]} == {"embedded-0", "embedded-1"}


def test_a_window_is_evaluated_on_the_newest_weights(train, tmp_path):
    held_out = (f"data.eval_path={tmp_path / 'tasks.jsonl'}", "eval.tasks=8", "eval.every=2")
    code, folder = train(*PRESETS["windowed"], *held_out, "run.deterministic=false")
    assert code == 0
    assert [event["version"] for event in events_of(folder) if event["kind"] == "eval"] == [0, 2, 4]


def test_chunks_change_no_token_of_the_first_step(train):
    """A rollout's tokens depend on its seed, its prompt and the weights, not on where it was cut or what ran beside."""
    options = ("run.deterministic=true", "run.steps=1")
    _, whole = train(*PRESETS["sync"], *options, 'run.name="whole"')
    _, cut = train(*PRESETS["sync"], *options, "scheduler.chunk=3", "engine.slots=5", 'run.name="cut"')
    assert signs(cut)["chunk ends"] > 50
    texts = [
        {row["rollout"]: (row["response"], row["finish"]) for row in rollouts_of(folder)} for folder in (whole, cut)
    ]
    assert texts[0] == texts[1]
