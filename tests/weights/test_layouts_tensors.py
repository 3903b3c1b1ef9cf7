"""Real modules: every tensor that has to travel is found, named and mapped; FSDP2's own shards are our boxes."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from weights.layout_models import equal, model

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts import experts, fsdp, megatron, vllm
from gruppetto.weights.layouts.maps import check, collect, fill, zeros
from gruppetto.weights.layouts.megatron import MegatronLayout
from gruppetto.weights.layouts.names import accept, part_of, read_decoder, stripped, tied, unmapped
from gruppetto.weights.layouts.spec import Spec
from gruppetto.weights.layouts.tensors import as_bits, cuts_of, missed_by_parameters, named_state, specs_of
from gruppetto.weights.layouts.vllm import VllmLayout

SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
MOE = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "moe_intermediate_size": 8, "num_key_value_heads": 4, "head_dim": 2,
}  # fmt: skip

FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": MOE,
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": MLA,
    "mistral": {},
}


def built(family):
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_go_to_trainers_and_engines_and_back(family):
    module = built(family)
    named = named_state(module)
    split = experts.split_map(specs_of(named))
    arrays = zeros(split.targets)
    fill(split, {name: as_bits(tensor) for name, tensor in named}, arrays)
    specs = list(split.targets.values())
    assert unmapped(specs) == []
    for maps in (
        megatron.all_maps(specs, MegatronLayout(tp=2, pp=2), 4),
        vllm.all_maps(specs, VllmLayout(tp=2), 4),
        fsdp.all_maps(specs, 3),
    ):
        check(maps)
        held = {rank: zeros(layout.targets) for rank, layout in maps.items()}
        for rank, layout in maps.items():
            fill(layout, arrays, held[rank])
        back = zeros(split.targets)
        collect(maps, held, back)
        assert equal(back, arrays)


def test_the_names_are_those_of_the_checkpoint(tmp_path):
    from safetensors import safe_open

    for family in ("qwen3_moe", "deepseek_v3", "qwen3"):
        module = built(family)
        module.save_pretrained(tmp_path / family)
        with safe_open(tmp_path / family / "model.safetensors", "pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        split = experts.split_map(specs_of(named_state(module)))
        assert {name: spec.shape for name, spec in split.targets.items()} == saved


def test_a_routers_bias_is_a_buffer_and_travels_and_rotary_caches_do_not():
    module = built("deepseek_v3")
    missed = missed_by_parameters(module)
    assert missed == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    names = [name for name, _ in named_state(module)]
    assert not any("inv_freq" in name for name in names)


def test_a_tied_head_comes_once():
    names = [name for name, _ in named_state(built("qwen3"))]
    assert "lm_head.weight" not in names
    assert names.count("model.embed_tokens.weight") == 1


def test_wrappers_leave_names_and_adapters_stay_out():
    assert stripped("_fsdp_wrapped_module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight") == (
        "model.layers.0.mlp.up_proj.weight"
    )
    assert stripped("module.module.model.norm.weight") == "model.norm.weight"
    assert stripped("base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight") == (
        "model.layers.1.self_attn.q_proj.weight"
    )
    module = torch.nn.Module()
    module.q = torch.nn.Module()
    module.q.base_layer = torch.nn.Linear(2, 2, bias=False)
    module.q.lora_A = torch.nn.Linear(2, 1, bias=False)
    assert [name for name, _ in named_state(module)] == ["q.weight"]
    module.q.weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match=r"two tensors of the model are called q\.weight"):
        named_state(module)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, False),
        ({}, False),
    ],
)
def test_the_tie_flag_may_be_nested(config, wanted):
    assert tied(config) is wanted


def test_names_without_a_rule_are_listed_before_anything_is_sent():
    strange = [Spec("mtp.layers.0.fc.weight", (4, 4), "bfloat16"), Spec("visual.patch.weight", (4,), "bfloat16")]
    specs = model() + strange
    assert unmapped(specs) == [spec.name for spec in strange]
    with pytest.raises(UserError, match=r"2 weights have no rule .* mtp\.layers\.0\.fc\.weight"):
        accept(specs, "error")
    with pytest.raises(UserError, match="1 multi-token prediction layers have no rule"):
        accept(specs[:-1], "error")
    for maps in (
        megatron.all_maps(specs, MegatronLayout(), 2, unmapped="leave_out"),
        vllm.all_maps(specs, VllmLayout(), 2, unmapped="leave_out"),
    ):
        check(maps)
        assert next(iter(maps.values())).left_out == {spec.name for spec in strange}


def test_a_model_with_holes_is_refused():
    with pytest.raises(UserError, match="no layer 0 but a layer 1"):
        read_decoder([spec for spec in model() if ".layers.0." not in spec.name])
    with pytest.raises(UserError, match="layer 1 has 2 experts where others have 3"):
        read_decoder([spec for spec in model(experts=3) if "layers.1.mlp.experts.1." not in spec.name])
    assert part_of("model.layers.3.block_sparse_moe.experts.7.w2.weight").module == "mlp.experts.down_proj"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.float8_e4m3fn, torch.int64])
def test_bits_are_a_view_with_the_tensors_shape(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    bits = as_bits(tensor)
    assert bits.shape == (2, 3)
    assert bits.tobytes() == bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert np.array_equal(as_bits(tensor.t().contiguous().t()), bits)
    assert as_bits(torch.tensor(1.0)).shape == ()
    if dtype != torch.bool:
        tensor.view(torch.uint8)[0, 0] = 7
        assert bits.view(np.uint8)[0, 0] == 7


def test_a_partial_sum_is_no_weight_and_a_plain_tensor_has_no_mesh():
    assert cuts_of(torch.zeros(2)) == ((), (), ())
    from torch.distributed.tensor import Partial

    from gruppetto.weights.layouts.tensors import _cut

    with pytest.raises(RunError, match="placed as"):
        _cut(Partial())


RANK = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from gruppetto.weights.layouts import fsdp
from gruppetto.weights.layouts.spec import slices
from gruppetto.weights.layouts.tensors import cuts_of, local_of, named_state, spec_of

dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=4)
for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    whole = {name: tensor.clone() for name, tensor in named_state(module)}
    fully_shard(module, mesh=mesh)
    for name, tensor in named_state(module):
        sizes, place, cuts = cuts_of(tensor)
        assert sizes == tuple(mesh.shape), sizes
        layout = fsdp.rank_map([spec_of(name, tensor)], sizes, place, cuts)
        local = local_of(tensor)
        assert tuple(local.shape) == layout.targets[name].shape, (name, local.shape)
        for piece in layout.pieces:
            assert torch.equal(local[slices(piece.target_box)], whole[name][slices(piece.source_box)]), name
dist.destroy_process_group()
print("same")
"""


@pytest.mark.slow
def test_fsdp2s_own_shards_are_our_boxes(tmp_path):
    """Four gloo processes: uneven rows, ranks without any, and HSDP."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(4)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=110)
            assert out.strip() == "same", err[-2000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
