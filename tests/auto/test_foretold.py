"""What a forecast knows of prompts to come: as much as the run does, no more, and nothing where none comes back."""

import math
from statistics import correlation, fmean

import pytest
from controlled import Run

from gruppetto.auto.foretold import Foreknown, Foretold, foreknown
from gruppetto.scheduler.beliefs.history import PromptHistory
from gruppetto.scheduler.pool_state import Deferred
from gruppetto.sim.workload import Workload
from gruppetto.types import FinishReason, Task

CAP, SIZE, SEED = 4000, 8, 5
PROMPTS = 512
LAUNCHES = range(1000)


def workload(icc, **more):
    return Workload.from_median(200, sigma=1.0, icc=icc, cap=CAP, **more)


def group(load, prompt, epoch):
    return [load.length(SEED, epoch * 10_000 + prompt, member, prompt) for member in range(SIZE)]


def history_of(load, epochs=2):
    """As a run has it after so many epochs of the same prompts."""
    history = PromptHistory(CAP)
    for epoch in range(epochs):
        for prompt in range(PROMPTS):
            lengths = group(load, prompt, epoch)
            history.record(f"t{prompt}", lengths, [length >= CAP for length in lengths])
    return history


def foretold(load, share=1.0, deferred=(), seed=SEED, past=None):
    """With the past of one workload, of prompts that make the lengths of another, by default the same."""
    history = history_of(past or load)
    known = Foreknown(history.pasts(), history.threshold(5), share, deferred)
    return Foretold(known, lambda launch: group(load, 20_000 + launch, 0), seed), history


def predicted(told, launches=LAUNCHES):
    return [told.predicted_max(f"sim:{launch}") for launch in launches]


def longest(load):
    return [max(group(load, 20_000 + launch, 0)) for launch in LAUNCHES]


@pytest.mark.parametrize("icc", [0.9, 0.5, 0.1])
def test_predictions_hold_as_well_as_the_runs_own(icc):
    """`ln L` of a prompt's next group against what its past predicts: of launches, and of the next epoch of the run."""
    load = workload(icc)
    told, history = foretold(load)
    then = [told.past(f"sim:{launch}").log_mean for launch in LAUNCHES]
    now = [fmean(map(math.log, group(load, 20_000 + launch, 0))) for launch in LAUNCHES]
    assert correlation(then, now) == pytest.approx(history.reliability, abs=0.06)
    real = [history.predicted_max(f"t{prompt}") for prompt in range(PROMPTS)]
    came = [max(group(load, prompt, 2)) for prompt in range(PROMPTS)]
    logs = [
        correlation(*(list(map(math.log, one)) for one in pair))
        for pair in ((real, came), (predicted(told), longest(load)))
    ]
    assert logs[1] == pytest.approx(logs[0], abs=0.12)
    assert told.error == history.error


def test_one_prompt_in_five_is_predicted_to_be_long():
    told, history = foretold(workload(0.8))
    limit = told.threshold(5)
    assert limit == history.threshold(5)
    assert fmean(found > limit for found in predicted(told)) == pytest.approx(0.2, abs=0.04)


def test_lengths_that_have_grown_leave_as_many_long():
    """Past and present are compared with others of their own time."""
    told, _ = foretold(workload(0.8), past=Workload.from_median(100, sigma=1.0, icc=0.8, cap=CAP))
    limit = told.threshold(5)
    assert fmean(found > limit for found in predicted(told)) == pytest.approx(0.2, abs=0.04)


def test_prompts_prone_to_the_cap_were_so_before():
    load = workload(0.3, runaway_prompts=0.2, runaway_rate=(0.5, 0.5))
    told, _ = foretold(load)
    hit = [sum(length >= CAP for length in group(load, 20_000 + launch, 0)) for launch in LAUNCHES]
    then = [told.past(f"sim:{launch}").capped for launch in LAUNCHES]
    assert correlation(hit, then) > 0.6
    assert fmean(then) == pytest.approx(fmean(hit), rel=0.15)
    alone = workload(0.3, q0=0.1)
    told, _ = foretold(alone)
    hit = [sum(length >= CAP for length in group(alone, 20_000 + launch, 0)) for launch in LAUNCHES]
    assert abs(correlation(hit, [told.past(f"sim:{launch}").capped for launch in LAUNCHES])) < 0.15


def test_only_the_share_that_comes_back_has_a_past():
    told, _ = foretold(workload(0.8), share=0.3)
    seen = [told.evidence(f"sim:{launch}") is not None for launch in LAUNCHES]
    assert fmean(seen) == pytest.approx(0.3, abs=0.05)
    assert seen == [found is not None for found in predicted(told)]


def test_a_past_depends_on_the_seed_and_the_launch_alone():
    load = workload(0.8)
    first, again, other = (foretold(load, seed=seed)[0] for seed in (SEED, SEED, SEED + 1))
    assert predicted(first) == list(reversed(predicted(again, reversed(LAUNCHES))))
    assert predicted(first) != predicted(other)


def test_tasks_put_off_are_played_by_launches_predicted_as_long():
    told, history = foretold(workload(0.9))
    limit = history.threshold(5)
    deferred = [(version, limit * (1.05 + version / 10)) for version in (7, 3, 5)]
    found = list(told.launches_like(deferred))
    assert [since for _, since in found] == [3, 5, 7]
    assert len({launch for launch, _ in found}) == 3
    assert all(launch < 0 for launch, _ in found)
    for (launch, _), (_, wanted) in zip(found, sorted(deferred), strict=True):
        assert told.predicted_max(f"late:{launch}") == pytest.approx(wanted, rel=0.3)
    exactly = told.predicted_max("late:-3")
    assert list(told.launches_like([(1, exactly)])) == [(-3, 1)]
    assert list(told.launches_like(())) == []


def test_a_smaller_run_has_fewer_put_off():
    pasts = history_of(workload(0.8)).pasts()
    for count in range(12):
        known = Foreknown(pasts, 100.0, 1.0, tuple((i, 1.0) for i in range(count)))
        assert len(known.thinned(4).deferred) == count // 4  # as of all that are put off
    assert [since for since, _ in known.thinned(4).deferred] == [3, 7]


# -- what the run knows ------------------------------------------------------------------------------------------------


def run_of(tmp_path, tasks, groups):
    """A loop that has learned so many groups, of so many prompts in turn (0 = all are new)."""
    run = Run(tmp_path, batch_groups=8, group_size=SIZE, max_tokens=CAP)
    load = workload(0.8)
    for launch in range(groups):
        key = launch % tasks if tasks else launch
        pool = run.loop.pool
        entry = pool.launch(Task(id=f"t{key}", prompt_ids=range(4)))
        for member, tokens in zip(entry.members, group(load, key, launch), strict=True):
            member.tokens, member.finish = tokens, FinishReason.STOP
        run.loop.memory.add(entry)
    return run.loop


def test_a_run_whose_prompts_never_come_back_knows_nothing(tmp_path):
    assert foreknown(run_of(tmp_path, 0, 64)) is None
    assert foreknown(run_of(tmp_path, 64, 64)) is None  # the first epoch


def test_a_run_in_its_second_epoch_knows_the_share_that_comes_back_and_what_is_put_off(tmp_path):
    loop = run_of(tmp_path, 32, 44)
    for key, since in ((3, 4), (99, 5)):
        loop.pool.deferred.append(Deferred(Task(id=f"t{key}", prompt_ids=range(4)), since))
    known = foreknown(loop)
    assert known.share == 1.0
    assert known.threshold == loop.memory.defer_above
    assert known.pasts.reliability == loop.memory.history.reliability > 0.3
    assert known.deferred == ((4, loop.memory.history.predicted_max("t3")),)
    assert foreknown(run_of(tmp_path, 32, 36)) is None  # too few have come back to tell
    half = run_of(tmp_path, 32, 44)
    half.memory._met.extend([False] * 4)
    assert foreknown(half).share == 0.5


def test_a_history_is_told_in_a_few_numbers():
    assert history_of(workload(0.8), epochs=1).pasts() is None
    history = history_of(workload(0.3, runaway_prompts=0.2, runaway_rate=(0.5, 1.0)))
    pasts = history.pasts()
    every = [history.past(f"t{prompt}") for prompt in range(PROMPTS)]
    means = sorted(past.log_mean for past in every if past.capped < past.members)
    assert len(means) < PROMPTS
    assert (pasts.log_means[0], pasts.log_means[64], pasts.log_means[-1]) == (
        means[0], means[(len(means) - 1) // 2], means[-1],
    )  # fmt: skip
    assert len(pasts.log_means) == 129
    assert [pasts.expected_max(past) for past in every] == [
        history.predicted_max(f"t{prompt}") for prompt in range(PROMPTS)
    ]
