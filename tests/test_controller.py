"""The controller over simulated stages on virtual time: what it does when a part fails at the worst moment."""

import asyncio
import json

import pytest
from controlled import STREAMED, WINDOWED, Run

from gruppetto.clock import now, run_virtual
from gruppetto.controller import Interrupted
from gruppetto.errors import RunError
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.sim.stages import SimChannel, SimTrainer
from gruppetto.types import FinishReason, Score, Task


def test_an_engine_that_dies_while_training_is_out_and_the_run_goes_on(tmp_path):
    class Killing(SimTrainer):
        async def optim_step(self):
            if self.version == 2:
                run.engines[0].kill("power cut")
            return await super().optim_step()

    async def main():
        nonlocal run
        run = Run(tmp_path, trainer=Killing(), eval_every=1)
        await run.controller.run()

    run = None
    run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2, 3, 4, 5, 6]
    assert [event["engine"] for event in run.kinds("error")] == ["e0"]
    assert [event["version"] for event in run.kinds("eval")] == [0, 1, 2, 3, 4, 5, 6]
    assert all(event["failed"] == 0 for event in run.kinds("eval"))


@pytest.mark.parametrize(("at", "colocated"), [("pause", True), ("pause", False), ("begin_update", True)])
def test_an_engine_that_answers_nothing_at_a_publish_is_out_and_the_others_go_on(tmp_path, at, colocated):
    async def main():
        nonlocal run
        run = Run(tmp_path, timeout_s=100.0, stall_s=200.0, colocated=colocated)
        answered = getattr(run.engines[0], at)

        async def hanging(argument):
            if run.controller.version == 2:
                run.engines[0].hang()
            await answered(argument)

        setattr(run.engines[0], at, hanging)
        await run.controller.run()

    run = None
    run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2, 3, 4, 5, 6]
    (event,) = run.kinds("error")
    assert event["engine"] == "e0"
    assert "did not answer the pause for new weights in 30 s" in event["reason"]


def test_a_publish_that_hangs_though_all_engines_answer_ends_the_run(tmp_path):
    async def main():
        nonlocal run
        run = Run(tmp_path, stall_s=100.0)
        run.controller.stages.channel = SimChannel(1000.0)
        with pytest.raises(RunError, match="publish of version 1: not answered within 100 s by e0, e1"):
            await run.controller.run()

    run = None
    run_virtual(main())
    assert run.kinds("error") == []


def test_an_engine_that_dies_in_an_evaluation_loses_no_answer(tmp_path):
    async def main():
        run = Run(tmp_path)
        asyncio.get_running_loop().call_later(2.5, run.engines[0].kill, "power cut")
        await run.controller.run()
        return run

    run = run_virtual(main())
    assert run.kinds("eval")[0]["failed"] == 0
    assert len(run.record.steps) == 6


def test_without_an_engine_the_publish_ends_the_run_with_a_checkpoint(tmp_path):
    class Killing(SimTrainer):
        async def optim_step(self):
            if self.version == 2:
                run.engines[0].kill("power cut")
            return await super().optim_step()

    async def main():
        nonlocal run
        run = Run(tmp_path, engines=1, trainer=Killing())
        await run.controller.run()

    run = None
    with pytest.raises(RunError, match="no engine is left to take weights version 3"):
        run_virtual(main())
    assert run.checkpoints.complete()[0].name == "step_3"
    assert len(run.record.steps) == 3


@pytest.mark.parametrize("verb", ["forward_backward", "optim_step"])
def test_any_failure_of_the_trainer_gives_the_batch_back_and_saves(tmp_path, verb):
    class Failing(SimTrainer):
        async def forward_backward(self, samples, *, share=1.0):
            if verb == "forward_backward" and self.version == 2:
                raise RuntimeError("out of memory")

        async def optim_step(self):
            if verb == "optim_step" and self.version == 2:
                raise RuntimeError("out of memory")
            return await super().optim_step()

    async def main():
        nonlocal run
        run = Run(tmp_path, trainer=Failing())
        await run.controller.run()

    run = None
    with pytest.raises(RuntimeError, match="out of memory"):
        run_virtual(main())
    assert run.checkpoints.complete()[0].name == "step_2"
    assert run.saved()["scheduler"]["pool"]["census"]["trained"] == 2 * 9
    assert len(run.saved()["scheduler"]["pool"]["ready"]) >= 3


def test_an_interruption_does_not_wait_for_the_reward(tmp_path):
    async def main():
        run = Run(tmp_path, score_s=3600.0)
        run.controller.stages.evaluator = None
        loop = asyncio.get_running_loop()
        loop.call_later(50.0, run.controller.interrupt)
        with pytest.raises(Interrupted):
            await run.controller.run()
        return run, now()

    run, ended = run_virtual(main())
    assert ended < 52
    states = [m["state"] for g in run.saved()["scheduler"]["pool"]["groups"] for m in g["members"]]
    assert "finished" in states

    async def resumed():
        again = Run(tmp_path, score_s=1.0)
        await again.controller.restore(run.saved())
        await again.controller.run()
        return again

    again = run_virtual(resumed())
    assert len(again.record.steps) == 6
    assert again.loop.pool.census.dropped == {}


def test_scores_taken_back_before_they_began_are_not_open(tmp_path):
    async def main():
        run = Run(tmp_path, score_s=3600.0)
        task = Task(id="t", prompt_ids=range(4))
        entry = RolloutEntry("g0.0", GroupEntry(0, task, 1, 0), 0, finish=FinishReason.STOP)
        run.loop.calls.score(entry, task)
        await run.loop.calls.cancel_scores()  # in the same turn: the score's task has not begun
        return run.loop.calls.outstanding

    assert run_virtual(main()) == 0


def test_an_interrupted_evaluation_does_not_cost_the_step_its_record(tmp_path):
    async def main():
        run = Run(tmp_path, eval_every=1)
        original = run.controller.stages.evaluator.run

        async def slow(version, engines):
            if version == 2:
                run.controller.interrupt()
                await asyncio.sleep(1000)
            return await original(version, engines)

        run.controller.stages.evaluator.run = slow
        with pytest.raises(Interrupted):
            await run.controller.run()
        return run

    run = run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2]
    assert run.checkpoints.complete()[0].name == "step_2"
    assert run.saved()["evaluated_at"] == 1


def test_groups_dropped_before_the_end_are_in_the_rollouts(tmp_path):
    async def main():
        nonlocal run
        run = Run(
            tmp_path,
            score_of=lambda r: Score(reward=None, error="raised KeyError: 'answer'"),
        )
        run.controller.stages.evaluator = None
        await run.controller.run()

    run = None
    with pytest.raises(RunError, match=r"groups in a row failed.*last reason: raised KeyError: 'answer'"):
        run_virtual(main())
    assert len(run.record.rows) >= 8 * 3
    assert [e["reason"] for e in run.kinds("notice")] == ["a rollout failed: raised KeyError: 'answer'"]
    assert {row["error"] for row in run.record.rows} == {"raised KeyError: 'answer'"}


def test_an_evaluation_in_which_nothing_was_scored_is_not_zero(tmp_path):
    async def main():
        run = Run(tmp_path, score_of=lambda r: Score(reward=None, error="verifier is down"))
        return await run.controller.stages.evaluator.run(0, run.engines)

    result = run_virtual(main())
    assert (result.accuracy, result.failed) == (None, 6)


def test_what_is_saved_is_json(tmp_path):
    async def main():
        run = Run(tmp_path)
        await run.controller.run()
        return run

    run = run_virtual(main())
    assert json.loads(json.dumps(run.saved())) == run.saved()


def test_an_evaluation_is_in_no_figure_of_the_step_but_its_own(tmp_path):
    def steps(name, **choices):
        async def main():
            run = Run(tmp_path / name, policy=Composed("sync"), **choices)
            if not choices:
                run.controller.stages.evaluator = None
            await run.controller.run()
            return run.record.steps

        return run_virtual(main())

    plain, evaluated = steps("plain"), steps("evaluated", eval_every=1)
    assert [row["engine_s/eval"] for row in evaluated] == [2 * row["time/eval_s"] for row in evaluated]  # two engines
    for before, after in zip(plain, evaluated, strict=True):
        differ = {name for name in before if after[name] != before[name]}
        assert differ <= {
            "engine_s/eval",
            "engine_s/total",
            "perf/prefill_tokens",
        }  # prompts may be in the prefix cache
        assert after["engine_s/eval"] > 0 == before["engine_s/eval"]
        assert after["engine_s/total"] == before["engine_s/total"] + after["engine_s/eval"]


def test_weights_brought_for_an_evaluation_are_sync(tmp_path):
    async def main():
        run = Run(tmp_path, policy=WINDOWED, colocated=False, eval_every=1)
        await run.controller.run()
        return run.record.steps

    steps = run_virtual(main())
    assert {row["engine_s/sync"] for row in steps} == {2.0}  # of two engines, while one of them takes the weights
    for row in steps:
        assert row["engine_s/sync"] + row["engine_s/eval"] == pytest.approx(2 * row["time/eval_s"], abs=1e-5)


def test_a_trainer_that_begins_before_the_last_part_pays_for_the_idle_machines_that_it_takes(tmp_path):
    async def main():
        run, times = Run(tmp_path, policy=STREAMED), []

        async def handover():
            times.append(now() - run.loop.started_at)
            await asyncio.sleep(2.0)

        run.controller.stages.handover = handover
        await run.controller.run()
        return run, times

    run, times = run_virtual(main())
    begun = [event["t"] for event in run.kinds("train_begin")]
    steps = [[event for event in run.kinds("train_begin") if event["step"] == step] for step in range(1, 7)]
    streamed = [parts for parts in steps if len(parts) > 1]
    assert streamed
    for parts in steps:  # the way to the trainer, of those that are idle and of the rest; and the way back
        first, last = parts[0]["t"], parts[-1]["t"]
        assert any(at == pytest.approx(first - 2) for at in times)
        assert any(at == pytest.approx(last - 2) for at in times)
    assert len(times) == 2 * len(steps) + len(streamed) < len(begun) + len(steps) + 1
    assert {row["time/switch_s"] for row in run.record.steps} == {4.0, 6.0}
    assert {row["engine_s/switch"] for row in run.record.steps} == {8.0}  # two engines: those that decode go on
