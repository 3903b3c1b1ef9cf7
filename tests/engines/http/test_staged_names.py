"""A folder for servers that read checkpoints has a checkpoint's names, however the trainer keeps its tensors."""

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from gruppetto.engines.http.names import checkpoint_names
from gruppetto.engines.http.staging import Staging
from gruppetto.errors import EngineError
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum

SMALL = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    """folder_of(family, **sizes) -> a model folder."""

    def make(family, **sizes):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SMALL, **sizes)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


def moved(folder):
    """The model as a trainer has it, with other values."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


async def staged(folder, tensors, root, version=1):
    staging = Staging(root, folder)
    await staging.begin(version, "e")
    for index, one in enumerate(tensors):
        await staging.add(version, Bucket(index=index, tensors=[one], checksum=checksum([one])), "e")
    return await staging.finish(version, len(tensors), "e")


async def test_experts_that_the_trainer_has_in_one_tensor_are_written_one_by_one(folder_of, tmp_path):
    folder = folder_of("Qwen3Moe", moe_intermediate_size=8, num_experts=4)
    model = moved(folder)
    tensors = list(model.state_dict().items())
    assert any(name.endswith("experts.gate_up_proj") for name, _ in tensors)
    written = await staged(folder, tensors, tmp_path / "staged")
    assert checkpoint_names(written) == checkpoint_names(folder)
    expert = "model.layers.1.mlp.experts.3.up_proj.weight"
    for file in written.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if expert in opened.keys():  # noqa: SIM118
                assert torch.equal(
                    opened.get_tensor(expert), model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][3, 8:]
                )
    read = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).state_dict()
    assert all(torch.equal(read[name], value) for name, value in tensors)


async def test_names_that_a_server_would_pass_over_are_refused_before_it_is_asked(folder_of, tmp_path):
    folder = folder_of("Mixtral", num_local_experts=4)
    with pytest.raises(EngineError, match=r"engine e: weights of version 1: .* names that the model's checkpoint does"):
        await staged(folder, list(moved(folder).state_dict().items()), tmp_path / "staged")
    assert not (tmp_path / "staged" / "version_1").exists()


async def test_a_tied_head_that_is_not_sent_and_a_checkpoint_without_the_prefix_pass(tmp_path):
    for names, sent in (
        (["model.embed_tokens.weight", "lm_head.weight"], ["model.embed_tokens.weight"]),
        (["embed_tokens.weight"], ["model.embed_tokens.weight", "lm_head.weight"]),
        (["a"], ["a", "mtp.head"]),
    ):
        folder = tmp_path / names[0]
        folder.mkdir()
        save_file({name: torch.ones(2) for name in names}, folder / "model.safetensors")
        assert await staged(folder, [(name, torch.zeros(2)) for name in sent], folder / "staged")


async def test_a_stack_that_the_checkpoint_has_too_stays_one(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({name: torch.ones(2, 3, 4)}, tmp_path / "model.safetensors")
    written = await staged(tmp_path, [(name, torch.zeros(2, 3, 4))], tmp_path / "staged")
    assert checkpoint_names(written) == {name}
