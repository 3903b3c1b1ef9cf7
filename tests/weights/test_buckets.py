"""Buckets that keep together what loads together, and faults of an engine's weights called by their names."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.layout_models import equal, model, values

from gruppetto.errors import RunError, UserError
from gruppetto.weights.buckets import ALIGN, Arrivals, checked, make_manifest, plan_buckets, views
from gruppetto.weights.delta.digest import digest
from gruppetto.weights.faults import Found, faults
from gruppetto.weights.layouts import vllm
from gruppetto.weights.layouts.groups import groups_of
from gruppetto.weights.layouts.maps import by_name, collect, fill, zeros
from gruppetto.weights.layouts.spec import Spec
from gruppetto.weights.layouts.vllm import VllmLayout

KINDS = [
    {"bias": True},
    {"experts": 3, "shared": "shared_expert", "tied": True},
    {"experts": 2, "latent": True, "q_rank": 3, "predictors": 1},
    {"latent": True},
    {"experts": 2, "mixtral": True},
]


def with_scales(specs, block=4):
    """Every matrix of a layer in FP8, with its scale behind it."""
    found = []
    for spec in specs:
        if len(spec.shape) == 2 and ".layers." in spec.name and "mlp.gate." not in spec.name:
            found.append(Spec(spec.name, spec.shape, "float8_e4m3fn"))
            found.append(Spec(spec.name + "_scale_inv", tuple(-(-n // block) for n in spec.shape), "float32"))
        else:
            found.append(spec)
    return found


@given(st.sampled_from(KINDS), st.booleans(), st.integers(ALIGN, 20_000))
@settings(max_examples=80, deadline=None)
def test_buckets_hold_everything_once_aligned_and_never_split_a_group(kind, scaled, limit):
    specs = with_scales(model(**kind)) if scaled else model(**kind)
    plans = plan_buckets(specs, limit)
    at = {slot.spec.name: plan.index for plan in plans for slot in plan.slots}
    assert sorted(at) == sorted(spec.name for spec in specs)
    assert [plan.index for plan in plans] == list(range(len(plans)))
    groups = groups_of(specs)
    for group in groups:
        assert len({at[name] for name in group}) == 1
    alone = {name: group for group in groups for name in group}
    for plan in plans:
        end = 0
        for slot in plan.slots:
            assert slot.offset % ALIGN == 0
            assert slot.offset >= end
            end = slot.offset + slot.spec.num_bytes
        assert end <= plan.num_bytes
        if plan.num_bytes > limit:
            first = plan.slots[0].spec.name
            assert {slot.spec.name for slot in plan.slots} == set(alone.get(first, (first,)))
    again = plan_buckets(reversed(list(reversed(specs))), limit)
    assert again == plans


def test_what_loads_together():
    specs = with_scales(model(experts=2, layers=1, bias=True))
    groups = {frozenset(name.removeprefix("model.layers.0.") for name in group) for group in groups_of(specs)}
    a = "self_attn."
    kinds = ("weight", "weight_scale_inv", "bias")
    assert frozenset(f"{a}{p}_proj.{k}" for p in "qkv" for k in kinds) in groups
    e = "mlp.experts.1."
    assert frozenset(f"{e}{p}_proj.{k}" for p in ("gate", "up") for k in kinds[:2]) in groups
    assert frozenset({e + "down_proj.weight", e + "down_proj.weight_scale_inv"}) in groups
    latent = groups_of(model(layers=1, latent=True, q_rank=3))
    pair = {f"model.layers.0.{a}{p}.weight" for p in ("q_a_proj", "kv_a_proj_with_mqa")}
    assert pair in [set(group) for group in latent]


def test_an_adapter_is_one_group():
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    specs = [Spec(f"{stem}{half}.weight", (2, 2), "float32") for half in "AB"]
    assert groups_of(specs) == [tuple(spec.name for spec in specs)]


@pytest.mark.parametrize(
    ("lost", "line"),
    [("mlp.up_proj", "has gate_proj but no up_proj"), ("self_attn.q_proj", "has k_proj, v_proj but no q_proj")],
)
def test_half_a_pair_is_refused(lost, line):
    specs = [spec for spec in model() if spec.name != f"model.layers.0.{lost}.weight"]
    with pytest.raises(UserError, match=line):
        plan_buckets(specs, 4096)


def test_declared_groups_are_whole_and_apart():
    specs = [Spec(name, (100,), "uint8") for name in "abc"]
    assert [[slot.spec.name for slot in p.slots] for p in plan_buckets(specs, ALIGN, [("a", "c")])] == [
        ["a", "c"],
        ["b"],
    ]
    with pytest.raises(UserError, match="a has to arrive together with x"):
        plan_buckets(specs, ALIGN, [("a", "x")])
    with pytest.raises(UserError, match="a is in two groups"):
        plan_buckets(specs, ALIGN, [("a", "b"), ("a", "c")])
    with pytest.raises(UserError, match="a bucket of 10 bytes"):
        plan_buckets(specs, 10)


class Engine:
    """Two vLLM ranks that take buckets through their maps and can be read back under Hugging Face names."""

    def __init__(self, specs, tied=False):
        self.specs = by_name(specs)
        self.maps = vllm.all_maps(specs, VllmLayout(tp=2), 2, head_is_tied=tied or None)
        self.held = {rank: zeros(layout.targets) for rank, layout in self.maps.items()}

    def load(self, plan, buffer):
        here = views(plan, buffer)
        for rank, layout in self.maps.items():
            for piece in layout.pieces:
                if piece.source in here:
                    part = type(layout)(layout.sources, layout.targets, (piece,))
                    fill(part, here, self.held[rank])

    def read(self):
        back = zeros(self.specs)
        collect(self.maps, self.held, back)
        return back

    def found(self):
        return {name: Found(self.specs[name], digest(array)) for name, array in self.read().items()}


def publish(version, weights, engine, specs, limit=4096, skip=()):
    plans = plan_buckets(specs, limit)
    manifest = make_manifest(version, plans, {name: digest(array) for name, array in weights.items()})
    arrivals = Arrivals(manifest)
    for plan in plans:
        if plan.index in skip:
            continue
        buffer = np.zeros(plan.num_bytes, np.uint8)
        for name, place in views(plan, buffer).items():
            place[...] = weights[name]
        engine.load(plan, buffer)
        arrivals.add(version, plan.index)
    return manifest, arrivals


@pytest.mark.parametrize("limit", [ALIGN, 1000, 1 << 20])
def test_the_engine_holds_the_same_bits_for_every_bucket_size(limit):
    specs = model(experts=2, bias=True)
    weights, engine = values(specs), Engine(specs)
    manifest, arrivals = publish(1, weights, engine, specs, limit)
    arrivals.complete()
    assert equal(engine.read(), weights)
    assert faults(manifest, engine.found()) == []


def two_versions(specs, tied=False, **second):
    engine = Engine(specs, tied)
    before, _ = publish(1, values(specs, 1), engine, specs)
    manifest, arrivals = publish(2, values(specs, 2), engine, specs, **second)
    return engine, manifest, before, arrivals


def test_a_skipped_bucket_is_named_by_both_sides():
    specs = model(layers=6, experts=2)
    engine, manifest, before, arrivals = two_versions(specs, skip=(1,))
    lost = [name for name, row in manifest.rows.items() if row.bucket == 1]
    with pytest.raises(RunError, match=f"bucket 1 of {manifest.num_buckets} did not arrive; .* {lost[0]}"):
        arrivals.complete()
    (fault,) = faults(manifest, engine.found(), before)
    assert fault.kind == "missing_bucket"
    assert set(fault.names) == set(lost)
    assert "bucket 1 of version 2 was skipped" in fault.line


def rank_slices(engine, name):
    """Where a rank holds the rows of a source: (array, slices)."""
    return [
        (engine.held[rank][piece.target], tuple(slice(*side) for side in piece.target_box))
        for rank, layout in engine.maps.items()
        for piece in layout.pieces
        if piece.source == name
    ]


@pytest.mark.parametrize(
    "pair",
    [
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
    ],
)
def test_swapped_halves_of_a_fused_tensor_are_named(pair):
    engine, manifest, before, _ = two_versions(model())
    for (array, one), (_, other) in zip(*(rank_slices(engine, name) for name in pair), strict=True):
        array[one], array[other] = array[other].copy(), array[one].copy()
    (fault,) = faults(manifest, engine.found(), before)
    assert (fault.kind, set(fault.names)) == ("swapped", set(pair))


def test_a_stale_scale_is_named():
    specs = [Spec("w.weight", (4, 4), "float8_e4m3fn"), Spec("w.weight_scale_inv", (1, 1), "float32")]
    old, new = values(specs, 1), values(specs, 2)
    plans = plan_buckets(specs, 4096)
    before, manifest = (
        make_manifest(version, plans, {name: digest(array) for name, array in held.items()})
        for version, held in ((1, old), (2, new))
    )
    engine = {"w.weight": new["w.weight"], "w.weight_scale_inv": old["w.weight_scale_inv"]}
    found = {spec.name: Found(spec, digest(engine[spec.name])) for spec in specs}
    (fault,) = faults(manifest, found, before)
    assert (fault.kind, fault.names) == ("stale", ("w.weight_scale_inv",))
    assert fault.line == "w.weight_scale_inv is still of version 1 where 2 was sent: a stale scale"


@pytest.mark.parametrize("behind", ["lm_head.weight", "model.embed_tokens.weight"])
def test_an_untied_head_is_named(behind):
    specs = model(tied=True)
    engine, manifest, before, _ = two_versions(specs)
    found = engine.found()
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    assert faults(manifest, found, before, tied=True) == []
    stale = before.rows["model.embed_tokens.weight"]
    found[behind] = Found(stale.spec, stale.digest)
    (fault,) = faults(manifest, found, before, tied=True)
    assert (fault.kind, fault.names) == ("untied", (behind,))


def test_missing_unexpected_misshapen_and_changed_tensors_are_named():
    engine, manifest, before, _ = two_versions(model())
    found = engine.found()
    del found["model.norm.weight"]
    found["model.layers.0.mlp.gate.e_score_correction_bias"] = Found(Spec("b", (4,), "float32"), 1)
    head = found["lm_head.weight"]
    found["lm_head.weight"] = Found(Spec(head.spec.name, head.spec.shape, "float32"), head.digest)
    down = found["model.layers.0.mlp.down_proj.weight"]
    found["model.layers.0.mlp.down_proj.weight"] = Found(down.spec, down.digest ^ 1)
    assert {fault.kind: fault.names for fault in faults(manifest, found, before)} == {
        "missing": ("model.norm.weight",),
        "unexpected": ("model.layers.0.mlp.gate.e_score_correction_bias",),
        "shape": ("lm_head.weight",),
        "changed": ("model.layers.0.mlp.down_proj.weight",),
    }


def test_arrivals_refuse_what_does_not_belong():
    plans = plan_buckets([Spec("a", (4,), "uint8")], ALIGN)
    arrivals = Arrivals(make_manifest(3, plans, {"a": 1}))
    with pytest.raises(RunError, match="is of version 2, but version 3 is loading"):
        arrivals.add(2, 0)
    with pytest.raises(RunError, match="bucket 1 is none of the 1"):
        arrivals.add(3, 1)
    arrivals.add(3, 0)
    with pytest.raises(RunError, match="came twice"):
        arrivals.add(3, 0)
    arrivals.complete()


def test_a_changed_manifest_is_refused():
    manifest = make_manifest(3, plan_buckets([Spec("a", (4,), "uint8")], ALIGN), {"a": 1})
    assert checked(manifest) is manifest
    row = manifest.rows["a"]
    other = type(manifest)(3, 1, {"a": type(row)(row.spec, row.bucket, row.offset, 2)}, manifest.checksum)
    with pytest.raises(RunError, match="was changed on its way"):
        Arrivals(other)


def test_a_bucket_takes_strided_tensors_and_needs_room():
    spec = Spec("a", (3, 7), "float32")
    (plan,) = plan_buckets([spec], ALIGN)
    base = np.arange(24, dtype=np.float32).reshape(3, 8)
    buffer = np.zeros(plan.num_bytes, np.uint8)
    views(plan, buffer)["a"][...] = base[:, :7]
    assert np.array_equal(views(plan, buffer)["a"], base[:, :7])
    views(plan, buffer)["a"][...] = np.asfortranarray(base[:, :7])
    assert np.array_equal(views(plan, buffer)["a"], base[:, :7])
    with pytest.raises(RunError, match="has 256 bytes, the buffer 84"):
        views(plan, buffer[:84])


def test_plans_maps_and_deltas_need_no_torch():
    parts = ("buckets", "faults", "delta.snapshot", "delta.held", "delta.across", "layouts.megatron", "layouts.vllm",
             "layouts.fsdp", "layouts.moves", "layouts.experts", "layouts.fp8", "layouts.lora")  # fmt: skip
    lines = [f"import gruppetto.weights.{part}" for part in parts] + ["import sys", "print('torch' in sys.modules)"]
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
