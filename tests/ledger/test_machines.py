"""GPUs, clusters and efficiency sets: names, files, refusals, ring bounds, a source for each constant."""

import json
from dataclasses import fields

import pytest

from gruppetto.errors import UserError
from gruppetto.ledger.machines.cluster import Cluster
from gruppetto.ledger.machines.efficiency import DEFAULT, SETS, SOURCES, Efficiency, efficiency_of
from gruppetto.ledger.machines.gpus import GPUS, gpu_of
from gruppetto.ledger.machines.training import forward_seconds, train_seconds
from gruppetto.ledger.models.catalog import model_of


@pytest.mark.parametrize(
    ("name", "found"),
    [("h100", "H100"), ("NVIDIA H100 SXM", "H100"), ("A100-80GB", "A100"), ("a100-40gb", "A100-40GB"),
     ("mi300x", "MI300X"), ("GB200 NVL72", "GB200"), ("RTX 4090", "RTX4090"), ("L40S", "L40S")],
)  # fmt: skip
def test_names_are_found_in_any_spelling(name, found):
    assert gpu_of(name).name == found


def test_all_names_find_themselves_and_have_a_source():
    for name, gpu in GPUS.items():
        assert gpu_of(name) is gpu
        assert gpu.source
        assert gpu.bf16_flops <= gpu.fp8_flops or not gpu.fp8_flops


@pytest.mark.parametrize(("name", "hint"), [("h1000", "H100"), ("b20", "B200"), ("tpu", "H100")])
def test_an_unknown_name_gets_the_nearest(name, hint):
    with pytest.raises(UserError, match=hint) as raised:
        gpu_of(name)
    assert "\n" not in str(raised.value)


def test_a_file_of_figures_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[gpu]\nname = "Mine"\nbf16_flops = 100e12\nbandwidth = 1e12\nmemory = 48e9\ngpus_per_node = 4\n')
    mine = gpu_of(str(path))
    assert (mine.name, mine.gpus_per_node, mine.peer_link) == ("Mine", 4, 0.0)
    other = tmp_path / "cpu.json"
    other.write_text(json.dumps({"name": "CPU", "bf16_flops": 2e11, "bandwidth": 2e10, "memory": 1.6e10}))
    assert gpu_of(str(other)).bandwidth == 2e10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nbf16_flops = 989\nbandwidth = 1e12\nmemory = 8e10', "bf16_flops = 989"),
        ('name = "x"\nbandwidth = 1e12\nmemory = 8e10', "bf16_flops missing"),
        ('name = "x"\nbf16_flops = 1e14\nbandwith = 1e12\nmemory = 8e10', "did you mean bandwidth"),
        ('name = "x"\nbf16_flops = 1e14\nbandwidth = "fast"\nmemory = 8e10', "bandwidth = 'fast'"),
        ('name = "x"\nbf16_flops = 1e14\nbandwidth = 1e12\nmemory = true', "memory = True"),
        ('name = "x"\nbf16_flops = 1e14\nbandwidth = 1e12\nmemory = 8e10\ngpus_per_node = 0', "gpus_per_node = 0"),
        ('name = "x"\nbf16_flops = 1e14\nbandwidth = 1e12\nmemory = 8e10\ngpus_per_node = 2.5', "whole number"),
        ("name = 3\nbf16_flops = 1e14\nbandwidth = 1e12\nmemory = 8e10", "are texts"),
        ('name = "x"\nbf16_flops = nan\nbandwidth = 1e12\nmemory = 8e10', "bf16_flops = nan"),
        ("gpu = 3", "no table"),
        ("not toml", "not valid TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, text, message):
    path = tmp_path / "gpu.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        gpu_of(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        gpu_of(str(tmp_path / "none.toml"))


# -- clusters ----------------------------------------------------------------------------------------------------------


def test_the_link_is_nvlink_inside_a_node_and_network_across():
    cluster = Cluster(gpu=GPUS["H100"], gpus=64)
    assert cluster.nodes == 8
    assert (cluster.inside().name, cluster.inside().bytes_s) == ("nvlink", 450e9)
    assert (cluster.across().name, cluster.across().bytes_s) == ("network", 50e9)
    assert Cluster(gpu=GPUS["L40S"], gpus=8).inside().name == "pcie"


# -- efficiency --------------------------------------------------------------------------------------------------------


def test_each_constant_has_a_source_in_each_set():
    constants = {f.name for f in fields(Efficiency)} - {"name", "origin", "own"}
    assert constants == set(SOURCES)
    for one in SETS.values():
        for name in constants:
            assert one.source(name)
            assert (getattr(one, name) != getattr(DEFAULT, name)) <= (name in one.own)


def test_what_a_set_changes_names_its_own_source():
    assert "NeMo-RL" in SETS["nemo-rl"].source("network")
    assert SETS["nemo-rl"].source("decode_bandwidth") == DEFAULT.source("decode_bandwidth")
    assert "given" in DEFAULT.but(train=0.5).source("train")


def test_sets_by_name_and_refusals():
    assert efficiency_of("trtllm") is SETS["trtllm"]
    with pytest.raises(UserError, match="did you mean trtllm"):
        efficiency_of("trtlm")
    with pytest.raises(UserError, match="train = 40"):
        DEFAULT.but(train=40)
    with pytest.raises(UserError, match="did you mean prefill"):
        DEFAULT.but(prefil=0.4)
    with pytest.raises(UserError, match="delta = 0"):
        DEFAULT.but(delta=0)
    with pytest.raises(UserError, match="step_s = -1"):
        DEFAULT.but(step_s=-1)


# -- training ----------------------------------------------------------------------------------------------------------


PRIME_RL = [
    ("Qwen3-4B", "H100", 16384, "full", 26030),
    ("Qwen3-4B", "H100", 65536, "full", 28970),
    ("Qwen3-4B", "H100", 16384, "lora", 48720),
    ("Qwen3-4B", "H100", 65536, "lora", 32800),
    ("Qwen3-30B-A3B", "H200", 65536, "full", 12750),
    ("Qwen3-30B-A3B", "H100", 16384, "full", 6110),
    ("Qwen3-30B-A3B", "H100", 16384, "lora", 33100),
    ("Qwen3-30B-A3B", "H100", 65536, "lora", 23390),
    ("GLM-4.5-Air", "H200", 16384, "lora", 16690),
    ("GLM-4.5-Air", "H200", 65536, "lora", 9760),
]
"""prime-rl benchmarks/results/BENCHMARKS.md, 8 GPUs, FlashAttention 3: model, GPU, length, kind, tokens/s.
GLM-4.5-Air stands for INTELLECT-3, which is trained from it."""


@pytest.mark.parametrize(("name", "gpu", "length", "kind", "tokens_s"), PRIME_RL)
def test_one_set_serves_short_and_long_sequences(name, gpu, length, kind, tokens_s):
    """One micro-batch a GPU, within 15 %. LoRA has no gradients of the weights (4 FLOP a parameter, not 6) and no
    optimizer state to speak of."""
    model = model_of(name)
    matrices = (6 if kind == "full" else 4) * model.matmul_params * length
    flops = 8 * (matrices + 3 * model.mixing_flops(length))
    state = 16 * model.params if kind == "full" else 0.0
    experts = model.experts > 0
    seconds = train_seconds(flops, GPUS[gpu], 8, experts=experts, host_state=state, efficiency=SETS["prime-rl"])
    assert 8 * length / seconds.value == pytest.approx(tokens_s, rel=0.15)


def test_training_is_three_times_a_forward_at_one_mfu():
    forward = forward_seconds(1e18, GPUS["H100"], 8, efficiency=DEFAULT.but(forward=0.4))
    assert train_seconds(3e18, GPUS["H100"], 8).value == pytest.approx(3 * forward.value)
