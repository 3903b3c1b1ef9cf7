"""A model folder that cannot be loaded is the user's: one line, the same whoever reads it."""

import json
import shutil

import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch

from gruppetto.config.schema import ModelSection, TrainSection
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.errors import UserError
from gruppetto.model_folder import device_for, read_model
from gruppetto.trainer.embedded import EmbeddedTrainer


def _cut(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _change_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def _drop_norm(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"cannot be loaded: OSError"),
    "cut weights": (_cut, r"cannot be loaded: SafetensorError"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), r"cannot be loaded: "),
    "a weight less": (_drop_norm, r"lacks 1 weights, the first is model\.norm\.weight"),
    "other shapes": (_change_config(intermediate_size=24), r"cannot be loaded: "),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"cannot be loaded: "),
    "unknown architecture": (_change_config(model_type="perceptron"), r"cannot be loaded: ValueError"),
}


@pytest.fixture(params=BROKEN)
def broken(request, tiny_model, tmp_path):
    """(folder, message) of a copy of the tiny model that something happened to."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    damage, message = BROKEN[request.param]
    damage(folder)
    return folder, rf"^model folder {folder} {message}.*; write model\.path = [^\n]*$"


async def test_engine_and_trainer_refuse_a_broken_folder_in_the_same_words(broken):
    folder, message = broken
    engine = EmbeddedEngine("e", folder, device="cpu", slots=2, context=64)
    settings = {"model": ModelSection(device="cpu"), "train": TrainSection()}
    trainer = EmbeddedTrainer(folder, **settings, max_tokens=8, temperature=1.0, total_steps=1, seed=0)
    said = []
    for stage in (engine, trainer):
        with pytest.raises(UserError, match=message) as refused:
            await stage.start()
        said.append(str(refused.value))
        await stage.close()
    assert said[0] == said[1]


def test_a_whole_folder_is_read_in_the_type_asked_for(tiny_model):
    model = read_model(tiny_model, torch.bfloat16, attn_implementation="sdpa")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_devices():
    assert device_for("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"model\.device = 'abacus' cannot be used .*; write 'auto' or 'cpu'"):
        device_for("abacus")
