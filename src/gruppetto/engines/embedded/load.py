"""Loading a model folder for the embedded engine, and refusing by name what the engine cannot run.

Promises: a sliding-window, linear-attention, state-space, encoder-decoder or multimodal model, or a context beyond the
model's own, is refused with `UserError` before any weight is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from gruppetto.errors import UserError
from gruppetto.model_folder import device_for, read_config, read_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(path: Path, *, dtype: str, device: str, context: int) -> Any:
    """The folder's causal LM in eval mode, without gradients. Raises `UserError` for what cannot be served."""
    if dtype not in _DTYPES:
        raise UserError(f"model.dtype = {dtype!r} is not known; write 'float32' or 'bfloat16'")
    place = device_for(device)
    config = read_config(path)
    refuse(config, context)
    model = read_model(path, _DTYPES[dtype], attn_implementation="sdpa")
    if getattr(model, "_is_stateful", False):
        raise UserError(_message(config, "keeps a recurrent state instead of a KV cache"))
    model.requires_grad_(False)
    return model.to(place).eval()


def refuse(config: Any, context: int) -> None:
    """Raises `UserError` when a model of this config cannot be served, from the config alone."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(_message(config, "is an encoder-decoder"))
    for part in ("vision_config", "audio_config", "text_config"):
        if getattr(config, part, None) is not None:
            raise UserError(_message(config, f"is multimodal ({part})"))
    for layer in DynamicCache(config=config).layers:
        if type(layer) is not DynamicLayer:
            raise UserError(
                _message(config, f"caches with {type(layer).__name__} (sliding window or linear attention)")
            )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise UserError(
            f"engine.context = {context} is beyond the model's max_position_embeddings = {longest}; "
            f"write engine.context = {longest} or less"
        )


def _message(config: Any, why: str) -> str:
    return (
        f"model type {config.model_type!r} {why}; the embedded engine serves full-attention decoder-only text models: "
        "choose one such as qwen3 or llama"
    )


def kv_shapes(config: Any) -> list[tuple[int, int]]:
    """(KV heads, head size) of every layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(heads, size)] * config.num_hidden_layers
