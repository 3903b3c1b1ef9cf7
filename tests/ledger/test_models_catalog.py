"""Models by name and by path: published counts, names as people write them, and files that are none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gruppetto.errors import UserError
from gruppetto.ledger.models.catalog import model_of, names

# Parameter counts of the safetensors files, as the models' pages on the Hugging Face Hub show them (billions).
PUBLISHED = {
    "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.62, "Qwen2.5-14B": 14.8, "Qwen2.5-32B": 32.8,
    "Qwen2.5-72B": 72.7, "Qwen3-4B": 4.02, "Qwen3-14B": 14.8, "Qwen3-Coder-480B-A35B": 480, "Llama-2-7b": 6.74,
    "Llama-2-13b": 13.0, "Llama-2-70b": 69.0, "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "Llama-3.3-70B": 70.6,
    "Mistral-7B-v0.3": 7.25, "Mixtral-8x22B-v0.1": 141, "Mistral-Nemo-2407": 12.2, "Mistral-Small-24B-2501": 23.6,
    "DeepSeek-V2-Lite": 15.7, "DeepSeek-R1-Distill-Qwen-1.5B": 1.78, "Moonlight-16B-A3B": 16.0, "Kimi-K2": 1026,
    "GLM-4-9B-0414": 9.40, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-1b": 1.00,
    "gemma-3-4b": 4.30, "gemma-3-12b": 12.2, "gemma-3-27b": 27.4, "phi-4": 14.7, "Phi-4-mini": 3.84,
    "SmolLM2-135M": 0.135, "SmolLM2-360M": 0.362, "SmolLM2-1.7B": 1.71, "SmolLM3-3B": 3.08, "OLMo-2-1124-7B": 7.30,
    "OLMo-2-1124-13B": 13.7, "OLMo-2-0325-32B": 32.2, "Nemotron-H-8B": 8.10, "Jamba-v0.1": 51.6, "gpt2": 0.124,
    "MiniMax-M2": 229,
}  # fmt: skip
ACTIVE = {
    "Qwen3-Next-80B-A3B": 3, "Qwen3-Coder-480B-A35B": 35, "Kimi-K2": 32, "Moonlight-16B-A3B": 2.9, "GLM-4.5-Air": 12,
    "Mixtral-8x22B-v0.1": 39, "MiniMax-M2": 10, "DeepSeek-V2-Lite": 2.4,
}  # fmt: skip
"""What the makers call active, in billions; they differ in whether embeddings count."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_counts_are_the_published_ones(name):
    assert model_of(name).params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_counts_are_what_the_makers_say(name):
    model = model_of(name)
    low, high = model.active_params_without_embeddings / 1e9, model.active_params / 1e9
    assert low - 0.5 <= ACTIVE[name] <= high + 0.5


@pytest.mark.parametrize("name", names())
def test_every_entry_is_counted(name):
    model = model_of(name)
    assert model.params > 1e8
    assert model.context >= 1024
    assert not any("not known here" in sentence or "unknown" in sentence for sentence in model.unknown)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("qwen3-8b-base", "Qwen3-8B"),
        ("llama-3.1-70b", "Llama-3.1-70B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Llama-3-8B", "Meta-Llama-3-8B"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("DeepSeek-R1-0528", "DeepSeek-R1"),
        ("gemma-3-12b-it", "gemma-3-12b"),
        ("Kimi-K2-Instruct", "Kimi-K2"),
        ("Qwen/Qwen3-32B-FP8", "Qwen3-32B-FP8"),
    ],
)
def test_names_as_people_write_them(written, name):
    assert model_of(written).name == name


def test_an_fp8_name_is_the_same_model_in_blocks():
    model = model_of("Qwen3-32B-FP8")
    assert (model.params, model.stored) == (model_of("Qwen3-32B").params, "fp8")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match=r"'Qwen3-9B' is not in the catalog; did you mean Qwen3-8B"):
        model_of("Qwen3-9B")
    with pytest.raises(UserError, match=r"write the path of its config\.json"):
        model_of("zzzzzz")


def test_a_folder_and_a_file_are_read(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    text = '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
    text += '"intermediate_size": 128, "vocab_size": 100, "time_step_limit": [0.0, Infinity]}'
    (folder / "config.json").write_text(text)
    assert model_of(str(folder)).name == "my-model"
    assert model_of(str(folder / "config.json")) == model_of(str(folder))
    (tmp_path / "other.json").write_text("\ufeff" + text, encoding="utf-8")
    assert model_of(str(tmp_path / "other.json")).name == "other"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"null", b"[" * 100_000, b'{"a": 1}'])
def test_a_file_that_is_no_config_is_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        model_of(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["", "  ", "a\0b", "x" * 5000, "./nothing.json", "~nobody/config.json", "."])
def test_a_source_that_is_nothing_is_one_line(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        model_of(source)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_counting_a_model_imports_nothing_heavy():
    code = (
        "import sys, json; from gruppetto.ledger.models.catalog import model_of; model_of('Kimi-K2');"
        "print(json.dumps([name for name in ('numpy', 'torch', 'pydantic', 'transformers') if name in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []
