"""Memory hand-over: vLLM's published wake times, a colocated 32B, what stays, sums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.hand_models import LLAMA_8B, QWEN3_235B, QWEN25_32B, dense

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.machines.efficiency import SETS
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.transfers.switch import switch, trainer_bytes, wake

QWEN3_06B = dense("qwen3-0.6b", layers=28, hidden=1024, heads=16, kv=8, mlp=3072, vocab=151936, tied=True)
PHI3_VISION = dense("phi-3-vision", layers=32, hidden=3072, heads=32, kv=32, dim=96, mlp=8192, vocab=32064)
T, S, H100 = TrainLayout, ServeLayout, GPUS["H100"]


@pytest.mark.parametrize(
    ("model", "serve", "dtype", "sleep", "low", "high"),
    [
        (QWEN3_06B, S(), "bf16", "level1", 0.26, 0.26),
        (PHI3_VISION, S(), "bf16", "level1", 0.82, 0.82),
        (QWEN3_235B, S(tp=4), "fp8", "level1", 3, 6),
        (QWEN3_06B, S(), "bf16", "level2", 0.85, 0.85),
        (PHI3_VISION, S(), "bf16", "level2", 2.58, 2.58),
    ],
)
def test_vllm_wakes_in_the_published_time(model, serve, dtype, sleep, low, high):
    """vLLM blog, sleep mode, 2025-10-26 (A100): within a factor of 2, one set for all."""
    seconds = wake(model, serve, GPUS["A100"], sleep=sleep, dtype=dtype, efficiency=SETS["vllm-sleep"])
    assert low / 2 <= seconds.value <= high * 2


def test_32b_on_eight_colocated_gpus():
    account = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, sleep="level1")
    moved = {(h.what, h.when): h for h in account.hand_overs}
    assert moved["engine weights", "to training"].bytes.value == pytest.approx(65.53e9 / 4, rel=0.001)
    assert moved["engine weights", "to training"].route == "to host"
    assert moved["trainer optimizer", "to generation"].bytes.value == pytest.approx(32.76e9 * 12 / 8, rel=0.001)
    assert moved["trainer grads", "to generation"].seconds.value == 0
    assert account.seconds.value == pytest.approx(sum(h.seconds.value for h in account.hand_overs))
    assert account.seconds.value == pytest.approx(account.to_training.value + account.to_generation.value)
    assert 0.01 < account.share_of(300) < 0.05
    assert account.host_memory.value < H100.host_memory


def test_levels_differ_in_what_moves():
    keep, one, two = (switch(QWEN25_32B, T(dp=8), S(tp=4), H100, sleep=s) for s in ("keep", "level1", "level2"))
    assert two.seconds.value < one.seconds.value
    assert keep.engine_residue.value > 60e9 > two.engine_residue.value
    disk = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, sleep="level2", reload=True)
    assert disk.seconds.value > two.seconds.value
    again = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, recapture=True)
    assert again.to_generation.value == pytest.approx(two.to_generation.value + 35 * 0.3)


def test_experts_lie_over_ep_where_nothing_is_sharded_over_data_parallelism():
    held = trainer_bytes(QWEN3_235B, T(tp=4, pp=2, dp=4, ep=8, shard="optimizer"))
    experts = QWEN3_235B.expert_params
    assert held["params"] == pytest.approx(2 * ((QWEN3_235B.params - experts) / 8 + experts / 16))
    assert held["optimizer"] == pytest.approx(12 * QWEN3_235B.params / 32)


def test_a_switch_may_cost_more_than_what_moves():
    bare = switch(QWEN25_32B, T(dp=8), S(tp=4), H100)
    verl = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, efficiency=SETS["verl"])
    assert verl.seconds.value == pytest.approx(bare.seconds.value + 10)


def test_tags_release_what_they_name():
    kv = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, sleep="release", tags=("kv_cache",))
    every = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, sleep="release")
    assert kv.engine_residue.value - every.engine_residue.value == pytest.approx(65.53e9 / 4 + 2e9, rel=0.001)
    assert {h.what for h in kv.hand_overs} - {h.what for h in every.hand_overs} == set()


def test_residues_are_what_slime_found():
    """slime v0.1.0: 15 to 18 GB beside the engine with Megatron's process groups, 3 to 5 GB without."""
    with_groups = switch(LLAMA_8B, T(dp=8), S(), H100, destroy_groups=False)
    without = switch(LLAMA_8B, T(dp=8), S(), H100)
    assert 12e9 <= with_groups.trainer_residue.value <= 18e9
    assert 3e9 <= without.trainer_residue.value <= 5e9
    kept = switch(LLAMA_8B, T(dp=8), S(), H100, offload=("optimizer",))
    assert kept.trainer_residue.value > without.trainer_residue.value


def test_an_optimizer_that_lives_in_host_memory_does_not_move():
    assert trainer_bytes(LLAMA_8B, T(dp=8, offload=True))["optimizer"] == 0
    total = sum(trainer_bytes(LLAMA_8B, T(dp=8)).values())
    assert total == pytest.approx(16 * 8_030_261_248 / 8)
    assert trainer_bytes(LLAMA_8B, T(tp=2, dp=4, shard="optimizer"))["params"] == pytest.approx(8_030_261_248)


@given(
    st.sampled_from(["keep", "level1", "level2", "release"]), st.sampled_from(["H100", "A100", "GB200"]),
    st.sampled_from([1, 2, 4]), st.sets(st.sampled_from(["params", "grads", "optimizer"])),
)  # fmt: skip
def test_parts_sum_and_a_faster_host_link_is_never_slower(sleep, name, tp, offload):
    gpu = GPUS[name]
    account = switch(LLAMA_8B, T(dp=8), S(tp=tp), gpu, sleep=sleep, offload=tuple(offload))
    assert account.seconds.value == pytest.approx(sum(h.seconds.value for h in account.hand_overs))
    faster = type(gpu)(**{f: getattr(gpu, f) for f in gpu.__slots__} | {"host_link": 2 * gpu.host_link})
    assert switch(LLAMA_8B, T(dp=8), S(tp=tp), faster, sleep=sleep, offload=tuple(offload)).seconds.value <= (
        account.seconds.value
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [({"sleep": "level3"}, "sleep = 'level3'"), ({"tags": ("kv",)}, "tag = 'kv'"), ({"offload": ("all",)}, "offload")],
)
def test_unknown_words_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        switch(LLAMA_8B, T(dp=8), S(), H100, **make)


def test_models_beside_the_policy_leave_for_the_engines_too():
    """A critic's 16 bytes a parameter go and come; a reference is only read, so it only comes."""
    bare = switch(QWEN25_32B, T(dp=8), S(tp=4), H100)
    full = switch(QWEN25_32B, T(dp=8), S(tp=4), H100, guests=[("critic", 64e9, 64e9), ("reference", 8e9, 0.0)])
    speed = H100.host_link * SETS["default"].host_link
    assert full.seconds.value - bare.seconds.value == pytest.approx((64e9 + 64e9 + 8e9) / speed)
    assert full.to_training.value - bare.to_training.value == pytest.approx((64e9 + 8e9) / speed)
    assert full.host_memory.value - bare.host_memory.value == pytest.approx(8 * (64e9 + 8e9))
    assert switch(QWEN25_32B, T(dp=8), S(tp=4), H100, asleep=3e9).engine_residue.value == 3e9
