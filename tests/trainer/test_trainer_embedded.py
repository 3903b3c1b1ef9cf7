"""The embedded trainer: gradients against plain formulas, and their independence of cut, order and packing."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer.held import held_in_its_first_micro_batch  # noqa: E402
from trainer.sample_maker import make_sample  # noqa: E402

from gruppetto.errors import RunError, UserError  # noqa: E402
from gruppetto.types import TokenUse  # noqa: E402

AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


async def gradient(trainer, *calls):
    """The unnormalised sums after these forward_backward calls, one flat vector."""
    for call in calls:
        await trainer.forward_backward(call)
    return torch.cat([p.grad.flatten() for p in trainer._model.parameters()])


async def weights(trainer):
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.export()])


def plain_batch_loss(model, reference, samples, loss, temperature=1.0):
    """The batch's loss, one sequence at a time by the model's own forward and indexing by hand."""
    per_sample, tokens = [], 0
    for sample in samples:
        ids = torch.tensor(sample.token_ids)
        terms = []
        for own in (model, reference):
            logits = own(input_ids=ids[None], use_cache=False, segment_lengths=(len(ids),)).logits[0] / temperature
            terms.append(logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0])
        total = 0.0
        for t, use in enumerate(sample.use):
            if use == TokenUse.TRAINED:
                ratio = (terms[0][t - 1] - sample.logprobs[t]).exp()
                a = sample.advantage
                total = total + torch.max(-a * ratio, -a * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high))
                x = terms[0][t - 1] - terms[1][t - 1].detach()
                total = total + loss.kl_coef * ((-x).exp() + x - 1)
                tokens += 1
        trained = sample.use.count(TokenUse.TRAINED)
        per_sample.append(total / trained if loss.aggregation == "seq_mean_token_mean" else total)
    if loss.aggregation == "seq_mean_token_sum_norm":
        return sum(per_sample) / len(samples) / 32
    return sum(per_sample) / (tokens if loss.aggregation == "token_mean" else len(samples))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
async def test_gradient_equals_the_plain_formula(trainer_for, samples, aggregation):
    loss = {"aggregation": aggregation, "kl_coef": 0.1, "clip_high": 0.28}
    async with trainer_for(loss=loss, double=True, temperature=0.7, grad_clip=1e9) as trainer:
        model = trainer._model
        with torch.no_grad():
            for parameter in trainer._reference.parameters():
                parameter.mul_(1.1)
        expected = plain_batch_loss(model, trainer._reference, samples, trainer._train.loss, temperature=0.7)
        count = (
            95 if aggregation == "token_mean" else len(samples)
        )  # the norms compute in float32: same scale, same bits
        plain = torch.cat([g.flatten() for g in torch.autograd.grad(expected * count, list(model.parameters()))])
        found = await gradient(trainer, samples)
        metrics = await trainer.optim_step()
        assert torch.allclose(found, plain, rtol=0, atol=1e-12 * plain.abs().max().item())
        assert metrics["loss/policy"] + 0.1 * metrics["loss/kl"] == pytest.approx(expected.item(), abs=1e-12)
        assert metrics["optim/grad_norm"] == pytest.approx(plain.norm().item() / count, rel=1e-12)
        assert metrics["train/tokens"] == 95


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
async def test_cut_order_and_packing_do_not_change_the_gradient(trainer_for, samples, aggregation, kl_coef):
    loss = {"aggregation": aggregation, "kl_coef": kl_coef}
    found = []
    for micro_tokens, chunk, calls in [
        (4096, 256, [samples]),
        (1, 1, [[sample] for sample in reversed(samples)]),
        (24, 5, [samples[5:], samples[:5]]),
    ]:
        async with trainer_for(loss=loss, double=True, micro_tokens=micro_tokens, logprob_chunk=chunk) as trainer:
            sums = await gradient(trainer, *calls)
            found.append((sums, await trainer.optim_step(), await weights(trainer)))
    for sums, metrics, after in found[1:]:
        assert torch.allclose(sums, found[0][0], rtol=0, atol=1e-12 * found[0][0].abs().max().item())
        assert metrics == pytest.approx(found[0][1], rel=1e-11, abs=1e-13)
        assert torch.allclose(after, found[0][2], rtol=0, atol=1e-9)


async def test_tokens_not_trained_on_do_not_matter(trainer_for):
    """What follows the last trained token, and a sample that is masked whole, change nothing in the sums."""
    plain = make_sample(3)
    cut = replace(plain, use=plain.use[:8] + type(plain.use)("B", [TokenUse.STALE] * (len(plain.use) - 8)))
    other = replace(cut, token_ids=cut.token_ids[:8] + type(cut.token_ids)("i", [1] * (len(cut.use) - 8)))
    masked = make_sample(4, response=5, stale=5)
    async with trainer_for(double=True) as trainer:
        first = await gradient(trainer, [cut])
        await trainer.optim_step()
    async with trainer_for(double=True) as trainer:
        second = await gradient(trainer, [other, masked])
        metrics = await trainer.optim_step()
    assert torch.equal(first, second)
    assert metrics["train/samples"] == 2
    assert metrics["train/processed_tokens"] == 7


async def test_a_masked_token_with_an_absurd_logprob_has_no_gradient(trainer_for):
    fine = make_sample(3, stale=2)
    mad = replace(fine, logprobs=type(fine.logprobs)("f", fine.logprobs))
    mad.logprobs[4], mad.logprobs[5] = -1e30, math.nan
    found = []
    for sample in (fine, mad):
        async with trainer_for(double=True) as trainer:
            found.append(await gradient(trainer, [sample]))
    assert torch.isfinite(found[1]).all()
    assert torch.equal(*found)


async def test_missing_engine_logprobs_are_counted(trainer_for):
    logprobs = [-3.0, math.nan, -math.inf, -3.0]
    async with trainer_for() as trainer:
        await trainer.forward_backward([make_sample(1, response=4, logprobs=logprobs)])
        metrics = await trainer.optim_step()
    assert metrics["train/unscored_tokens"] == 2
    assert {"mismatch_kl/mean", "is_ratio/mean", "loss/policy"} <= set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())


async def rescored(trainer, sample):
    """The sample with engine logprobs equal to the trainer's own."""
    ids = torch.tensor(sample.token_ids)
    with torch.no_grad():
        logits = trainer._model(input_ids=ids[None], use_cache=False, segment_lengths=(len(ids),)).logits[0]
    own = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0].tolist()
    return replace(sample, logprobs=type(sample.logprobs)("f", [0.0, *own]))


async def test_mismatch_is_measured_on_fresh_tokens_only(trainer_for):
    async with trainer_for() as trainer:
        trainer.version = 3
        fresh = await rescored(trainer, make_sample(1, version=3))
        off_by = replace(fresh, logprobs=type(fresh.logprobs)("f", [v - 0.1 for v in fresh.logprobs]))
        stale = make_sample(2, version=2)
        await trainer.forward_backward([fresh, stale])
        exact = await trainer.optim_step()
        trainer.version = 3
        await trainer.forward_backward([stale])
        nothing_fresh = await trainer.optim_step()
    async with trainer_for() as trainer:
        trainer.version = 3
        await trainer.forward_backward([off_by])
        shifted = await trainer.optim_step()
    assert exact["logprob_diff/max"] < 1e-5
    assert 0 <= exact["mismatch_kl/mean"] < 1e-10
    assert exact["is_ratio/max"] > 1.01
    assert shifted["logprob_diff/max"] == pytest.approx(0.1, abs=1e-5)
    assert shifted["mismatch_kl/mean"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert shifted["is_ratio/mean"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert "mismatch_kl/mean" not in nothing_fresh


async def test_probability_moves_towards_advantaged_tokens(trainer_for):
    good, bad = make_sample(1, advantage=1.0), make_sample(2, advantage=-1.0)
    async with trainer_for(lr=3e-3) as trainer:
        before = [np.mean((await rescored(trainer, s)).logprobs[4:]) for s in (good, bad)]
        for version in range(10):
            fresh = [replace(await rescored(trainer, s), versions=s.versions) for s in (good, bad)]
            await trainer.forward_backward(fresh)
            metrics = await trainer.optim_step()
            assert metrics["clip_fraction"] == 0.0
            assert trainer.version == version + 1
        after = [np.mean((await rescored(trainer, s)).logprobs[4:]) for s in (good, bad)]
    assert after[0] > before[0] + 0.2
    assert after[1] < before[1] - 0.2


async def test_samples_without_gradient_move_nothing_and_are_measured(trainer_for):
    async with trainer_for() as trainer:
        before = await weights(trainer)
        await trainer.forward_backward([make_sample(1, advantage=0.0)])
        metrics = await trainer.optim_step()
        assert torch.equal(before, await weights(trainer))
    assert metrics["optim/grad_norm"] == 0.0
    assert metrics["train/tokens"] == 9
    assert metrics["entropy/mean"] > 0


async def test_same_calls_give_bitwise_the_same_weights(trainer_for, samples):
    found = []
    for _ in range(2):
        async with trainer_for() as trainer:
            for _ in range(3):
                await trainer.forward_backward(samples)
                metrics = await trainer.optim_step()
            found.append((await weights(trainer), metrics))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


async def test_bfloat16_runs_on_float32_master_weights(trainer_for, samples):
    async with trainer_for(dtype="bfloat16") as narrow, trainer_for() as wide:
        sums = [await gradient(trainer, samples) for trainer in (narrow, wide)]
        metrics = await narrow.optim_step()
        assert all(tensor.dtype == torch.float32 for _, tensor in narrow.export())
    assert torch.nn.functional.cosine_similarity(*sums, dim=0) > 0.99
    assert not torch.equal(*sums)
    assert math.isfinite(metrics["loss/policy"])


async def test_clipping_bounds_the_norm_of_the_normalised_gradient(trainer_for, samples):
    async with trainer_for(grad_clip=0.01) as trainer:
        await trainer.forward_backward(samples)
        taken = []
        trainer._optimizer.register_step_pre_hook(
            lambda *_: taken.append(torch.cat([p.grad.flatten() for p in trainer._model.parameters()]).norm().item())
        )
        metrics = await trainer.optim_step()
    assert metrics["optim/grad_norm"] > 0.1
    assert taken == [pytest.approx(0.01, rel=1e-3)]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize("what", ["loss", "gradient"])
async def test_what_is_not_finite_never_reaches_the_weights(trainer_for, samples, on_nan, what):
    async with trainer_for(on_nan=on_nan) as trainer:
        before = await weights(trainer)
        await trainer.forward_backward(samples)
        if what == "loss":
            await trainer.forward_backward([make_sample(99, advantage=math.inf)])
        elif what == "gradient":
            next(trainer._model.parameters()).grad[0, 0] = math.inf
        if on_nan == "stop":
            expected = {"loss": "rollout g0.99", "gradient": "embed_tokens.weight"}
            with pytest.raises(RunError, match=expected[what]):
                await trainer.optim_step()
            assert trainer.version == 0
        else:
            assert (await trainer.optim_step())["optim/skipped"] == 1.0
            assert trainer.version == 1
        assert torch.equal(before, await weights(trainer))
        await trainer.forward_backward(samples)
        assert (await trainer.optim_step())["optim/skipped"] == 0.0
        assert torch.isfinite(await weights(trainer)).all()


async def test_a_batch_without_a_trained_token_is_consumed_and_changes_nothing(trainer_for):
    async with trainer_for(on_nan="stop") as trainer:
        before = await weights(trainer)
        await trainer.forward_backward([make_sample(7, response=3, stale=3)])
        assert (await trainer.optim_step())["optim/skipped"] == 1.0
        assert trainer.version == 1
        assert torch.equal(before, await weights(trainer))


async def test_export_names_tied_weights_once_and_are_detached(trainer_for):
    async with trainer_for() as trainer:
        exported = dict(trainer.export())
        assert "lm_head.weight" not in exported
        assert set(exported) | {"lm_head.weight"} == set(trainer._model.state_dict())
        assert not any(tensor.requires_grad for tensor in exported.values())


async def test_torch_work_leaves_the_event_loop_free(trainer_for, samples):
    """Each forward waits for the loop to turn."""
    async with trainer_for(micro_tokens=8) as trainer:
        threads, turn = set(), threading.Semaphore(0)

        def forward(*_):
            threads.add(threading.current_thread().name)
            assert turn.acquire(timeout=20), "the loop stands still"

        trainer._model.register_forward_pre_hook(forward)
        trainer._model.model.register_forward_pre_hook(forward)
        running = asyncio.ensure_future(trainer.forward_backward(samples * 4))
        while not running.done():
            turn.release()
            await asyncio.sleep(0)
        await running
    assert threads == {"trainer"}


async def test_close_stops_between_micro_batches_and_may_be_repeated(trainer_for, samples):
    async with trainer_for(micro_tokens=8) as trainer:
        begun, hold = held_in_its_first_micro_batch(trainer)
        running = asyncio.ensure_future(trainer.forward_backward(samples * 200))
        await asyncio.to_thread(begun.wait, 60)
        closing = asyncio.ensure_future(trainer.close())
        await asyncio.sleep(0)
        hold.set()
        await closing
        with pytest.raises(RunError, match="closed"):
            await running
        await trainer.close()
        with pytest.raises(RunError, match="closed"):
            await trainer.forward_backward(samples)


async def test_a_sample_that_trains_on_its_first_token_is_refused_by_name(trainer_for):
    sample = make_sample(5, prompt=0)
    async with trainer_for() as trainer:
        with pytest.raises(RunError, match=r"g0\.5.*first token"):
            await trainer.forward_backward([sample])


async def test_bad_model_folders_get_one_line(trainer_for, model_folder, tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        async with trainer_for(path=tmp_path):
            pass
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    with pytest.raises(UserError, match=r"lacks 1 weights.*model\.norm\.weight"):
        async with trainer_for(path=tmp_path):
            pass
