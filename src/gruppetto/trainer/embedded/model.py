"""The model that learns: loaded from a Hugging Face folder, run on packed rows, written back as such a folder.

Promises: master weights are float32; a folder is refused when it cannot be read whole, or when the packed forward does
not give the model's own log-probabilities (checked at load on short sequences, two of them with one prompt), so
that an architecture which does something unforeseen around attention or the head is named instead of trained wrongly; a
written folder is complete (config, safetensors, the tokenizer's files).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from gruppetto.errors import UserError
from gruppetto.model_folder import quiet, read_model
from gruppetto.trainer.embedded.logprobs import token_logprobs
from gruppetto.trainer.embedded.packing import ATTENTION, WORTH_SHARING, Piece, Row, cut, pack, segment_attention

AttentionInterface.register(ATTENTION, segment_attention)

_PROBE_PROMPT = WORTH_SHARING + 3
_PROBE_TOLERANCE = 1e-3
"""Nats; rounding in float32 stays under 1e-4, a forgotten soft-cap or scale is far above."""

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def load_model(path: str | Path, device: torch.device) -> Any:
    """The causal language model in `path`, float32, without dropout, on packed attention. Raises `UserError`."""
    model = read_model(Path(path), torch.float32).to(device).eval()
    _check_packing(model, path)
    return model


def write_folder(model: Any, source: str | Path, folder: Path) -> None:
    """Writes `model` as a Hugging Face folder; what else `source` holds (tokenizer, chat template) is copied along."""
    with quiet():
        model.save_pretrained(folder, safe_serialization=True)
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)


def hidden_states(model: Any, row: Row, dtype: torch.dtype) -> Tensor:
    """Last hidden states [S, H] of a packed row, matrix products in `dtype` (autocast below float32)."""
    autocast = dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(row.ids.device.type, dtype=dtype, enabled=autocast):
        output = model.base_model(
            input_ids=row.ids,
            position_ids=row.positions,
            use_cache=False,
            segment_lengths=row.lengths,
            segment_prefixes=row.prefixes,
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def row_logprobs(
    model: Any, row: Row, *, temperature: float, chunk: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) of the row's trained tokens, [n] each, in the row's order. `dtype` None = the weights' own."""
    head = model.get_output_embeddings()
    compute = dtype or head.weight.dtype
    hidden = hidden_states(model, row, compute).index_select(0, row.sources)
    return token_logprobs(hidden, head, row.targets, temperature=temperature, chunk=chunk, dtype=compute)


@torch.no_grad()
def _check_packing(model: Any, path: str | Path) -> None:
    """Compares a packed row of three sequences with the model's own forward; leaves the model on packed attention."""
    pieces = _probes(model.config.get_text_config().vocab_size)
    device = next(model.parameters()).device
    expected = torch.cat([_own_logprobs(model, piece, device) for piece in pieces])
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"model.path = '{path}': {type(model).__name__} has no attention hook; packed training needs one"
        )
    model.set_attn_implementation(ATTENTION)
    packed, _ = row_logprobs(model, pack(pieces, device), temperature=1.0, chunk=64)
    worst = (packed - expected).abs().max().item()
    if not worst <= _PROBE_TOLERANCE:
        raise UserError(
            f"model.path = '{path}': packed log-probabilities of {type(model).__name__} differ from its own by "
            f"{worst:.2g} nats, so it would be trained wrongly; use a full-attention architecture (Qwen3, Llama ...)"
        )


def _probes(vocabulary: int) -> list[Piece]:
    """A short sequence, and two that share a prompt."""
    ids = (np.arange(_PROBE_PROMPT + 9) * 7919 + 3) % vocabulary
    plain, prompt, first, second = ids[:6][::-1], ids[:-9], ids[-9:-6], ids[-6:]
    sequences = [(plain, 1), (np.append(prompt, first), 1), (np.append(prompt, second), prompt.size)]
    pieces = [cut(i, ids.tolist(), np.arange(ids.size) >= begin) for i, (ids, begin) in enumerate(sequences)]
    return [piece for piece in pieces if piece is not None]


def _own_logprobs(model: Any, piece: Piece, device: torch.device) -> Tensor:
    logits = model(input_ids=torch.from_numpy(piece.ids)[None].to(device), use_cache=False).logits[0].float()
    logits = logits[torch.from_numpy(piece.trained - 1).to(device)]
    targets = torch.from_numpy(piece.targets).to(device)
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    return logprobs
