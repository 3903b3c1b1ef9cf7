"""Weight syncs: published seconds with one efficiency set a source, bytes by rank, buckets, HybridFlow's formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger.hand_models import DEEPSEEK_V3, LLAMA_8B, QWEN3_4B, QWEN3_30B, QWEN3_235B, QWEN25_7B, QWEN25_32B, QWEN25_72B

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.machines.cluster import Cluster
from gruppetto.ledger.machines.efficiency import DEFAULT, SETS
from gruppetto.ledger.machines.gpus import GPU, GPUS
from gruppetto.ledger.machines.storage import model_bytes
from gruppetto.ledger.transfers.adapters import adapters
from gruppetto.ledger.transfers.delta import break_even_density, delta, payload_bytes
from gruppetto.ledger.transfers.pieces import Piece, buckets, pieces
from gruppetto.ledger.transfers.sync import sync
from gruppetto.ledger.transfers.transition import redundant_bytes, transition_bytes

H100 = GPUS["H100"]
T, S = TrainLayout, ServeLayout


def _within(seconds, low, high, share=0.30):
    assert low * (1 - share) <= seconds <= high * (1 + share)


@pytest.mark.parametrize(
    ("model", "train", "serve", "engines", "dtype", "low", "high"),
    [
        (QWEN3_4B, T(dp=8), S(tp=8), 1, "bf16", 0.21, 0.34),
        (QWEN3_30B, T(pp=2, dp=8, ep=8), S(tp=8), 2, "bf16", 0.74, 1.00),
        (QWEN3_30B, T(dp=16, ep=8), S(tp=2), 8, "fp8", 2.90, 4.00),
        (DEEPSEEK_V3, T(pp=16, dp=16, ep=16), S(tp=32), 8, "bf16", 2.39, 2.83),
    ],
)
def test_nemo_rl_shard_to_shard_reshard(model, train, serve, engines, dtype, low, high):
    """NeMo-RL docs, nccl-reshard-refit.md, "Expected Performance", H100: within 30 %."""
    account = sync(model, train, serve, H100, engines=engines, dtype=dtype, efficiency=SETS["nemo-rl"])
    _within(account.expected.value, low, high)
    assert account.bound.value < low


@pytest.mark.parametrize(
    ("how", "low", "high"), [("reshard", 9.25, 10.92), ("broadcast", 14.21, 15.52), ("gather", 36.8, 36.8)]
)
def test_nemo_rl_checkpoint_engine_on_288_gpus(how, low, high):
    """NeMo-RL docs, checkpoint-engine-refit.md: NIXL with destination-local experts, NCCL, NIXL with whole experts."""
    account = sync(
        DEEPSEEK_V3, T(pp=16, dp=16, ep=16), S(tp=32), H100, how=how, efficiency=SETS["nemo-rl-checkpoint-engine"]
    )
    _within(account.expected.value, low, high)
    if how == "reshard":  # "each vLLM rank loaded 45,395 destination-local tensors, totaling 69.95 GiB"
        assert account.received.value == pytest.approx(69.95 * 2**30, rel=0.05)
        assert account.tensors.value == pytest.approx(45_395, rel=0.01)


def test_verl_checkpoint_engine():
    """verl/checkpoint_engine/README.md: Qwen3-30B-A3B, FSDP on 2 ranks, 30 receivers, 4 x 8 H100: 7 s."""
    account = sync(
        QWEN3_30B, T(dp=2), S(tp=1), H100, engines=30, how="broadcast", efficiency=SETS["verl-checkpoint-engine"]
    )
    _within(account.expected.value, 7, 7, 0.15)


@pytest.mark.parametrize(
    ("model", "train", "engines", "seconds"),
    [(QWEN3_30B, T(dp=16, ep=8), 2, 4.38), (QWEN3_235B, T(dp=64, ep=8), 8, 23.70)],
)
def test_verl_fully_async_with_its_checkpoint_engine(model, train, engines, seconds):
    """verl docs, advance/fully_async.md, H20, engine GPUs = trainer GPUs. (Its 0.02 s for 7B is no transfer.)"""
    account = sync(
        model, train, S(tp=8), GPUS["H20"], engines=engines, how="broadcast", efficiency=SETS["verl-fully-async"]
    )
    _within(account.expected.value, seconds, seconds)


VERL_DELTA = [
    (QWEN25_7B, T(dp=8), S(tp=1), 8, True, 0.02, (5.5, 6.0), (3.9, 4.9)),
    (QWEN25_32B, T(dp=16), S(tp=2), 8, True, 0.02, (17.7, 18.1), (11.2, 11.9)),
    (QWEN25_32B, T(dp=16), S(tp=2), 8, False, 0.02, (14.2, 14.2), (6.2, 6.2)),
    (QWEN25_72B, T(dp=32), S(tp=8), 4, False, 0.02, (28.5, 29.1), (12.0, 13.0)),
    (QWEN3_30B, T(dp=8, ep=8), S(tp=1), 8, True, 0.0005, (32.2, 32.2), (7.1, 7.1)),
    (QWEN3_235B, T(dp=64, ep=8), S(tp=16), 1, True, 0.00035, (246, 266), (11.4, 14.9)),
]
"""verl docs, advance/delta_weight_sync.md. Density: 1 to 3 % of dense models, 0.02 to 0.05 % of the 235B (the 30B's is
not given: the upper end of it)."""


@pytest.mark.parametrize(("model", "train", "serve", "engines", "in_host", "density", "nccl", "sharded"), VERL_DELTA)
def test_verl_full_broadcast_and_delta(model, train, serve, engines, in_host, density, nccl, sharded):
    make = {"params_in_host": in_host, "efficiency": SETS["verl-delta"]}
    full = sync(model, train, serve, H100, engines=engines, how="broadcast", **make)
    small = delta(model, train, full, density=density, **make)
    _within(full.expected.value, *nccl)
    _within(small.expected.value, *sharded)
    assert small.saved.value > 0


@given(
    st.sampled_from([LLAMA_8B, QWEN3_30B, DEEPSEEK_V3]), st.sampled_from(["reshard", "broadcast", "gather"]),
    st.sampled_from(["ipc", "node", "network", "disk"]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 16]),
    st.sampled_from(["bf16", "fp8"]), st.sampled_from(["before", "after"]), st.sampled_from([1, 4]),
)  # fmt: skip
def test_parts_sum_and_nothing_beats_the_bound(model, how, route, tp, dp, dtype, quantize, engines):
    make = {"how": how, "route": route, "dtype": dtype, "quantize": quantize, "engines": engines}
    account = sync(model, T(tp=tp, dp=dp), S(tp=8), H100, **make)
    assert account.expected.value == pytest.approx(sum(part.value for part in account.parts))
    assert account.bound.value <= account.expected.value
    assert all(part.value > 0 and part.source for part in account.parts)
    assert account.needed.value <= account.total.value
    faster = GPU(**{name: getattr(H100, name) for name in H100.__slots__} | {"network": 100e9, "peer_link": 900e9})
    assert sync(model, T(tp=tp, dp=dp), S(tp=8), faster, **make).expected.value <= account.expected.value


def test_671b_to_fp8_engines_elsewhere():
    """Trained TP4 PP2 EP8, served TP8 EP4 in FP8 on other nodes: the mapping, and what quantising saves."""
    train, serve = T(tp=4, pp=2, ep=8, dp=16), S(tp=8, ep=4)
    account = sync(DEEPSEEK_V3, train, serve, GPUS["H200"], dtype="fp8", engines=4)
    assert [step.name for step in account.steps] == [
        "unshard", "join tp", "join ep", "stages", "names", "quantise", "split", "load",
    ]  # fmt: skip
    assert account.total.value == pytest.approx(model_bytes(DEEPSEEK_V3, "fp8"))
    assert account.needed.value > account.total.value / 8
    late = sync(DEEPSEEK_V3, train, serve, GPUS["H200"], dtype="fp8", engines=4, quantize="after")
    assert late.total.value == pytest.approx(2 * account.total.value, rel=0.01)
    assert late.expected.value > account.expected.value
    whole = sync(DEEPSEEK_V3, train, serve, GPUS["H200"], dtype="fp8", engines=4, how="broadcast")
    assert account.bound.value < sync(DEEPSEEK_V3, train, serve, GPUS["H200"], how="gather").bound.value
    assert whole.steps[1].moved.value > 0 == account.steps[1].moved.value


def test_a_sender_gathers_its_stage_in_16_bits_less_what_it_holds():
    """Quantising comes after joining, copies of data parallelism hold the same, each stage has a sender of its own."""
    whole = model_bytes(QWEN25_32B, "bf16")
    for dtype in ("bf16", "fp8"):
        account = sync(QWEN25_32B, T(tp=4, pp=2, dp=4, shard="optimizer"), S(tp=4), H100, how="broadcast", dtype=dtype)
        assert account.gathered.value == pytest.approx(whole / 2 - whole / 8)
    sharded = sync(QWEN25_32B, T(dp=8), S(tp=4), H100, how="broadcast")
    assert sharded.gathered.value == pytest.approx(whole * 7 / 8)
    assert sync(QWEN25_32B, T(shard="none"), S(), H100, how="gather").gathered.value == 0
    assert sync(QWEN25_32B, T(dp=8), S(), H100, how="reshard").gathered.value == 0
    experts = sync(QWEN3_30B, T(tp=2, pp=2, ep=4, dp=2, shard="optimizer"), S(), H100, how="broadcast")
    whole, routed = model_bytes(QWEN3_30B, "bf16"), 2.0 * QWEN3_30B.expert_params
    assert experts.gathered.value == pytest.approx(whole / 2 - (whole - routed) / 4 - routed / 8)


def test_stages_join_their_tensors_side_by_side_at_a_rate_that_is_shown_as_a_range():
    one = sync(QWEN25_32B, T(dp=16), S(tp=4), H100, how="broadcast")
    two = sync(QWEN25_32B, T(pp=2, dp=8, shard="optimizer"), S(tp=4), H100, how="broadcast")
    joined = model_bytes(QWEN25_32B, "bf16") / DEFAULT.gather
    assert one.joined_s == pytest.approx(joined)
    assert one.expected.value - two.expected.value == pytest.approx(joined / 2)
    low, high = one.between
    assert low == pytest.approx(one.expected.value - joined * (1 - 20 / 60))
    assert high == pytest.approx(one.expected.value + joined * (20 / 5 - 1))
    known = sync(QWEN25_32B, T(dp=16), S(tp=4), H100, how="broadcast", efficiency=SETS["verl-delta"])
    assert known.between == (known.expected.value, known.expected.value)


def test_colocated_engines_get_what_their_rank_lacks():
    account = sync(QWEN25_32B, T(dp=8), S(tp=4), H100, engines=2, route="ipc")
    whole = model_bytes(QWEN25_32B, "bf16")
    assert account.link.name == "nvlink"
    assert account.received.value == pytest.approx(whole / 4 - whole / 8, rel=0.001)
    naive = sync(QWEN25_32B, T(dp=8), S(tp=4), H100, engines=2, route="ipc", how="gather")
    assert naive.received.value == pytest.approx(whole * 7 / 8)


def test_attention_replicas_repeat_dense_weights_and_share_experts():
    plain = sync(DEEPSEEK_V3, T(dp=8), S(tp=8), H100)
    spread = sync(DEEPSEEK_V3, T(dp=8), S(tp=1, dp=8, ep=8), H100)
    experts = 2.0 * DEEPSEEK_V3.expert_params
    assert spread.needed.value == pytest.approx(experts / 8 + spread.total.value - experts)
    assert plain.needed.value < spread.needed.value


def test_what_a_trainer_rank_holds_already_need_not_come():
    """Megatron's TP4 EP8 without sharding over data parallelism: dense parts over tp, experts over ep."""
    held = sync(QWEN3_30B, T(tp=4, dp=2, ep=8, shard="optimizer"), S(tp=8), H100, route="ipc")
    experts = 2.0 * QWEN3_30B.expert_params
    assert held.needed.value - held.received.value == pytest.approx(
        min(held.needed.value, (held.total.value - experts) / 4 + experts / 8), rel=1e-6
    )
    context = sync(QWEN25_32B, T(tp=4, cp=2, shard="none"), S(tp=2), H100, route="ipc")
    assert context.received.value == pytest.approx(context.needed.value - context.total.value / 4)


def test_one_link_between_two_sites_bounds_all():
    near = sync(QWEN25_32B, T(dp=8), S(tp=4), H100)
    far = sync(QWEN25_32B, T(dp=8), S(tp=4), H100, shared_link=1.25e9)
    assert far.bound.value == pytest.approx(model_bytes(QWEN25_32B, "bf16") / 1.25e9)
    assert far.expected.value == pytest.approx(near.expected.value + far.bound.value)
    assert near.share_of(near.expected.value) == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"engines": 0}, "engines = 0"),
        ({"serve": S(tp=4, ep=4)}, "has no experts"),
        ({"route": "pigeon"}, "route = 'pigeon'"),
        ({"how": "carry"}, "how = 'carry'"),
        ({"bucket_bytes": 0}, "bucket size = 0"),
        ({"dtype": "fp7"}, "dtype = 'fp7'"),
    ],
)
def test_syncs_that_cannot_be_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        sync(LLAMA_8B, T(dp=8), **({"serve": S(tp=4), "gpu": H100} | make))
    with pytest.raises(UserError, match="ep = 3 does not divide"):
        sync(QWEN3_30B, T(dp=8), S(tp=4, ep=3), H100)


# -- pieces and buckets ------------------------------------------------------------------------------------------------


def test_pieces_sum_to_the_model_and_latent_projections_stay_together():
    found = pieces(DEEPSEEK_V3, "bf16", S(tp=8))
    assert sum(piece.total for piece in found) == pytest.approx(model_bytes(DEEPSEEK_V3, "bf16"))
    joined = [piece for piece in found if piece.name.endswith("q_a_proj.weight")]
    assert joined[0].tensors == 2
    assert joined[0].unit_bytes == 2 * (1536 + 576) * 7168
    assert joined[0].on_rank == 1.0
    assert not any("kv_a_proj" in piece.name for piece in found)


@given(
    st.lists(st.tuples(st.floats(1, 1e6), st.integers(1, 50)), min_size=1, max_size=6), st.floats(1, 5e6)
)  # fmt: skip
def test_buckets_are_what_packing_one_by_one_gives(units, size):
    found = [Piece(str(i), "mlp", unit, count, 1) for i, (unit, count) in enumerate(units)]
    count, filled, largest = 0, None, 0.0
    for piece in found:
        for _ in range(piece.count):
            if filled is None or filled + piece.unit_bytes > size * (1 + 1e-12):
                count, filled = count + 1, 0.0
            filled += piece.unit_bytes
            largest = max(largest, filled)
    packed = buckets(found, size)
    assert abs(packed.count - count) <= 1  # a bucket that fills exactly, up to rounding
    assert packed.largest <= max(size * (1 + 1e-9), max(unit for unit, _ in units))
    assert packed.largest == pytest.approx(largest) or packed.count != count


# -- HybridFlow --------------------------------------------------------------------------------------------------------


def test_hybridflow_transition_is_exact():
    assert transition_bytes(140e9, tp=8, pp=1, serve_tp=2).value == pytest.approx((8 - 2) / (2 * 8) * 140e9)
    assert transition_bytes(140e9, tp=8, serve_tp=8).value == 0
    assert transition_bytes(140e9, tp=4, pp=2, serve_tp=2, method="hybridflow-v").value == pytest.approx(7 / 8 * 140e9)
    chat = transition_bytes(140e9, tp=4, pp=2, dp=2, serve_tp=2, method="deepspeed-chat")
    assert chat.value == pytest.approx(15 / 16 * 140e9)
    assert redundant_bytes(140e9, tp=8).value == 0
    assert redundant_bytes(140e9, tp=8, method="hybridflow-v").value == 140e9 / 8
    with pytest.raises(UserError, match="use a divisor such as 2"):
        transition_bytes(1e9, tp=8, serve_tp=3)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]))
def test_hybridflow_never_moves_more_than_an_all_gather(tp, pp, serve_tp):
    if (tp * pp) % serve_tp:
        return
    moved = transition_bytes(1.0, tp=tp, pp=pp, serve_tp=serve_tp).value
    assert 0 <= moved <= transition_bytes(1.0, tp=tp, pp=pp, serve_tp=serve_tp, method="hybridflow-v").value


# -- delta and adapters ------------------------------------------------------------------------------------------------


def test_break_even_densities_are_the_known_ones():
    assert break_even_density("int32") == pytest.approx(1 / 3)
    assert break_even_density("gap16") == pytest.approx(1 / 2, rel=1e-3)
    assert break_even_density("bitmap") == pytest.approx(15 / 16)


@given(st.floats(0, 1), st.sampled_from(["int32", "gap16", "bitmap", "best"]), st.sampled_from([1.0, 2.0]))
def test_a_payload_is_never_above_a_full_one(density, encoding, value_bytes):
    full = sync(LLAMA_8B, T(dp=8), S(tp=4), H100)
    account = delta(LLAMA_8B, T(dp=8), full, density=density, encoding=encoding, value_bytes=value_bytes)
    elements = sum(t.elements for t in LLAMA_8B.tensors)
    assert account.payload.value <= elements * value_bytes * (1 + 1e-9)
    if encoding != "best" and density < break_even_density(encoding, value_bytes) - 1e-6:
        assert account.encoding == encoding
    assert account.expected.value == pytest.approx(sum(part.value for part in account.parts))


@given(st.floats(1e-5, 0.3))
def test_the_break_even_in_seconds_parts_gain_from_loss(density):
    full = sync(QWEN25_32B, T(dp=16), S(tp=2), H100, engines=8, how="broadcast", efficiency=SETS["verl-delta"])
    account = delta(QWEN25_32B, T(dp=16), full, density=density, efficiency=SETS["verl-delta"])
    if account.encoding == "int32" and abs(density / account.break_even_seconds.value - 1) > 1e-6:
        assert (account.saved.value > 0) == (density < account.break_even_seconds.value)


def test_a_delta_of_one_percent():
    full = sync(QWEN25_7B, T(dp=8), S(tp=1), H100)
    account = delta(QWEN25_7B, T(dp=8), full, density=0.01)
    assert account.payload.value == pytest.approx(7.615e9 * 0.01 * 6, rel=0.001)
    assert account.share.value == pytest.approx(0.03, rel=0.001)
    assert payload_bytes(1000, 0.5, "bitmap") == 125 + 1000
    with pytest.raises(UserError, match="density = 2"):
        delta(QWEN25_7B, T(dp=8), full, density=2)


def test_adapters_count_rank_times_in_and_out():
    account = adapters(LLAMA_8B, rank=16, targets=("q_proj", "v_proj"))
    assert account.params.value == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    assert account.params.value == 6_815_744  # PEFT prints the same for Llama-3-8B
    assert account.matrices == 64
    everything = adapters(LLAMA_8B, rank=16)
    assert everything.params.value == 41_943_040
    assert everything.bytes.value == 2 * 41_943_040
    link = Cluster(gpu=H100, gpus=16).across()
    assert adapters(LLAMA_8B, link=link).expected.value < 1.1 * DEFAULT.sync_s
    experts = adapters(QWEN3_30B, rank=8, targets="experts")
    assert experts.matrices == 48 * 128 * 3
    with pytest.raises(UserError, match="all-linear or"):
        adapters(LLAMA_8B, targets="query")
    with pytest.raises(UserError, match="lora rank = 0"):
        adapters(LLAMA_8B, rank=0)
