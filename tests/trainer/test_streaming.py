"""A batch fed in parts: the same gradient, one optimizer step, and nothing left behind when it is given up."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trainer.held import held_in_its_first_micro_batch  # noqa: E402
from trainer.sample_maker import make_sample  # noqa: E402

from gruppetto.errors import RunError  # noqa: E402

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


def batch():
    made = [make_sample(i, prompt=3 + i % 4, response=2 + (i * 5) % 17, group=i // 3) for i in range(9)]
    return [*made, make_sample(20, response=12, stale=5), make_sample(21, advantage=0.0), make_sample(22, stale=9)]


async def state(trainer):
    """Weights and the optimizer's moments, as they are now."""
    held = trainer._optimizer.state_dict()["state"]
    moments = [value.clone() for entry in held.values() for value in entry.values() if torch.is_tensor(value)]
    return [tensor.clone() for _, tensor in trainer.export()] + moments


def bitwise(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


async def gradient_in_parts(trainer, cuts, samples):
    """The unnormalised sums of a batch cut at these places, then dropped."""
    edges = [0, *sorted(set(cuts)), len(samples)]
    for begin, end in itertools.pairwise(edges):
        await trainer.forward_backward(samples[begin:end], share=0.5)
    found = torch.cat([p.grad.flatten().clone() for p in trainer._model.parameters()])
    totals = trainer._totals
    await trainer.drop_gradients()
    return found, totals


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_parts_give_the_gradient_of_the_whole(trainer_for, aggregation):
    samples = batch()
    with asyncio.Runner() as runner:
        opened = trainer_for(loss={"aggregation": aggregation, "kl_coef": 0.05}, double=True)
        trainer = runner.run(opened.__aenter__())
        whole, _ = runner.run(gradient_in_parts(trainer, [], samples))

        @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(cuts=st.lists(st.integers(1, len(samples) - 1), max_size=6), order=st.permutations(range(len(samples))))
        def compare(cuts, order):
            parts, totals = runner.run(gradient_in_parts(trainer, cuts, [samples[i] for i in order]))
            assert torch.allclose(parts, whole, rtol=0, atol=1e-12 * whole.abs().max().item())
            assert totals.samples == len(samples)

        compare()
        runner.run(opened.__aexit__(None, None, None))


async def test_parts_make_one_optimizer_step(trainer_for):
    samples = batch()
    found = []
    for parts in ([samples], [samples[:1], samples[1:7], samples[7:]]):
        async with trainer_for(double=True) as trainer:
            for part in parts:
                before = await state(trainer)
                await trainer.forward_backward(part, share=0.5)
                assert bitwise(before, await state(trainer))
            metrics = await trainer.optim_step()
            assert trainer.version == 1
            assert {int(entry["step"]) for entry in trainer._optimizer.state_dict()["state"].values()} == {1}
            found.append((metrics, await state(trainer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-11, abs=1e-13)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)


async def test_a_batch_given_up_after_its_first_part_leaves_no_trace(trainer_for):
    samples = batch()
    ends = []
    for stray in (False, True):
        async with trainer_for() as trainer:
            await trainer.forward_backward(samples[:4])
            await trainer.optim_step()
            before = await state(trainer)
            if stray:
                await trainer.forward_backward(samples[4:9])
                await trainer.drop_gradients()
                assert bitwise(before, await state(trainer))
                assert trainer.version == 1
            await trainer.forward_backward(samples[2:])
            ends.append((await trainer.optim_step(), await state(trainer)))
    assert ends[0][0] == ends[1][0]
    assert bitwise(ends[0][1], ends[1][1])


async def test_a_part_that_is_cancelled_drops_those_before_it(trainer_for):
    samples = batch()
    async with trainer_for(micro_tokens=1) as trainer:
        before = await state(trainer)
        await trainer.forward_backward(samples[:3])
        begun, hold = held_in_its_first_micro_batch(trainer)
        part = asyncio.ensure_future(trainer.forward_backward(samples * 20))
        await asyncio.to_thread(begun.wait, 60)
        part.cancel()
        with pytest.raises(asyncio.CancelledError):
            await part
        hold.set()
        await trainer.drop_gradients()
        assert trainer._totals.samples == 0
        assert all(p.grad is None for p in trainer._model.parameters())
        assert bitwise(before, await state(trainer))


async def test_a_part_that_fails_leaves_the_earlier_ones_to_be_dropped(trainer_for):
    samples = batch()
    bad = make_sample(30, prompt=0)
    async with trainer_for() as trainer:
        await trainer.forward_backward(samples[:3])
        with pytest.raises(RunError, match="first"):
            await trainer.forward_backward([bad])
        await trainer.drop_gradients()
        metrics = await trainer.optim_step()
        assert metrics["optim/skipped"] == 1
