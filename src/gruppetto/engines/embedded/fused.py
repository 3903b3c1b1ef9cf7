"""A lean forward for Llama-shaped models (llama, qwen2, qwen3): one matmul for q, k, v and one for gate, up.

It halves the cost of a decode step of a small model, where dispatch is what costs. Promises: it shares the weights'
memory with the Hugging Face module (the module's parameters become slices of the joined ones), and it is used only
after its logits agreed with the module's own forward on this machine (`forward_for`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gruppetto.engines.embedded.cache import SlotKV
from gruppetto.engines.embedded.depth import parts
from gruppetto.engines.embedded.forward import Forward, chunk_mask, decode_mask

_FAMILIES = ("llama", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries [N, heads, size], new keys and values [N, 2 x kv heads, size]) -> [N, heads x size]."""


@dataclass(slots=True)
class _Layer:
    """One block's tensors, joined where the module has several."""

    block: Any
    qkv: Tensor
    qkv_bias: Tensor | None
    gate_up: Tensor
    qk_norm: Tensor | None


def supports(config: Any) -> bool:
    """Whether a model of this config has the shape that this forward computes."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        config.model_type in _FAMILIES
        and rope in _ROPES
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
    )


class FusedForward(Forward):
    """See the module's docstring. Raises nothing of its own: `supports` was asked before."""

    name = "fused"

    def __init__(self, model: Any, kv: SlotKV) -> None:
        self._base, self._head, self._kv = model.base_model, model.lm_head, kv
        attention = self._base.layers[0].self_attn
        self._size, self._scale = attention.head_dim, attention.scaling
        self._kv_heads = attention.k_proj.out_features // self._size
        self._heads = attention.q_proj.out_features // self._size
        self._width = model.config.intermediate_size
        self._rows = torch.arange(kv.rows, device=model.device)
        self.by_depth = model.device.type == "cpu"
        self._cos, self._sin = self._rotary(kv.capacity)
        self._layers: list[_Layer] = []
        self.rebind()

    def _rotary(self, capacity: int) -> tuple[Tensor, Tensor]:
        """Tables [capacity, 1, size]; the sine carries the sign of the half that is swapped in."""
        places = torch.arange(capacity, device=self._rows.device)[None]
        cos, sin = self._base.rotary_emb(self._base.embed_tokens.weight[:1], places)
        sign = torch.ones_like(sin)
        sign[..., : self._size // 2] = -1
        return cos[0][:, None].clone(), (sin * sign)[0][:, None].clone()

    @torch.no_grad()
    def rebind(self) -> None:
        """Joins the matrices (once for each storage), and derives what is not a view of a parameter."""
        self._layers = [self._join(block) for block in self._base.layers]

    def _join(self, block: Any) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [p.bias for p in projections]
        norm = None
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm.weight, attention.k_norm.weight
            norm = torch.cat([q.expand(self._heads, -1), k.expand(self._kv_heads, -1)])
        return _Layer(
            block=block,
            qkv=_joined([p.weight for p in projections]),
            qkv_bias=None if biases[0] is None else _joined(biases),
            gate_up=_joined([mlp.gate_proj.weight, mlp.up_proj.weight]),
            qk_norm=norm,
        )

    def prefill(self, ids: Tensor, rows: Tensor, start: int) -> None:
        n, length = ids.shape
        end = start + length
        mask = chunk_mask(start, length, self._cos.dtype, ids.device) if start else None
        heads = self._kv_heads

        def attend(index: int, q: Tensor, new: Tensor) -> Tensor:
            kv, seen = self._kv.layers[index], new.view(n, length, 2 * heads, -1).transpose(1, 2)
            kv[rows, :, start:end] = seen
            if start:
                seen = kv[rows, :, :end]
            out = F.scaled_dot_product_attention(
                q.view(n, length, self._heads, -1).transpose(1, 2),
                seen[:, :heads].repeat_interleave(self._heads // heads, 1),
                seen[:, heads:].repeat_interleave(self._heads // heads, 1),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
            )
            return out.transpose(1, 2).reshape(n * length, -1)

        self._run(ids.reshape(-1), torch.arange(start, end, device=ids.device).repeat(n), attend)

    def prefill_by_token(self, ids: Tensor, slot: int, start: int) -> None:
        end = start + len(ids)
        positions = torch.arange(start, end, device=ids.device)
        mask = decode_mask(positions, end, self._cos.dtype)

        def attend(index: int, q: Tensor, new: Tensor) -> Tensor:
            mine = self._kv.layers[index][slot]
            mine[:, start:end] = new.transpose(0, 1)
            return self._attention(q, mine[None, :, :end].expand(len(q), -1, -1, -1), mask)

        self._run(ids, positions, attend)

    def decode(self, ids: Tensor, positions: Tensor, span: int) -> Tensor:
        rows = self._rows[: len(ids)]
        cut = parts(positions.numpy()) if self.by_depth else [(0, len(ids), span)]
        masks = [decode_mask(positions[a:b], columns, self._cos.dtype) for a, b, columns in cut]

        def attend(index: int, q: Tensor, new: Tensor) -> Tensor:
            kv = self._kv.layers[index]
            kv[rows, :, positions] = new
            seen = [
                self._attention(q[a:b], kv[a:b, :, :columns], mask)
                for (a, b, columns), mask in zip(cut, masks, strict=True)
            ]
            return seen[0] if len(seen) == 1 else torch.cat(seen)

        return F.linear(self._run(ids, positions, attend), self._head.weight, self._head.bias)

    def _attention(self, q: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
        """One query a row; the query heads of one KV head are the rows of its small matmul."""
        keys, values = kv[:, : self._kv_heads], kv[:, self._kv_heads :]
        packed = q.reshape(len(q), self._kv_heads, -1, self._size)
        return F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=self._scale).flatten(1)

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """All blocks over N tokens, each at its own position -> normed hidden states [N, hidden]."""
        x = self._base.embed_tokens.weight[ids]
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            x = self._block(index, layer, x, cos, sin, attend)
        return _norm(x, self._base.norm)

    def _block(self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        attention, turned = layer.block.self_attn, self._heads + self._kv_heads
        qkv = F.linear(_norm(x, layer.block.input_layernorm), layer.qkv, layer.qkv_bias).view(len(x), -1, self._size)
        qk = qkv[:, :turned]
        if layer.qk_norm is not None:
            qk = layer.qk_norm * _unit(qk, attention.q_norm.variance_epsilon)
        qk = qk * cos + torch.roll(qk, self._size // 2, -1) * sin
        new = torch.cat([qk[:, self._heads :], qkv[:, turned:]], 1)
        x = x + F.linear(attend(index, qk[:, : self._heads], new), attention.o_proj.weight, attention.o_proj.bias)
        gate_up = F.linear(_norm(x, layer.block.post_attention_layernorm), layer.gate_up)
        inner = F.silu(gate_up[:, : self._width]) * gate_up[:, self._width :]
        return x + F.linear(inner, layer.block.mlp.down_proj.weight)


def _norm(x: Tensor, module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight * _unit(x, module.variance_epsilon)


def _unit(x: Tensor, epsilon: float) -> Tensor:
    """RMS-normalised over the last dimension, computed in float32 as the modules do."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _joined(parts: list[Any]) -> Tensor:
    """The parameters row by row in one tensor, of which they become slices; nothing moves when they already are."""
    if not _adjacent(parts):
        whole, at = torch.cat([p.data for p in parts]), 0
        for p in parts:
            p.data = whole[at : at + len(p)]
            at += len(p)
    first: Tensor = parts[0].data
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _adjacent(parts: list[Any]) -> bool:
    return all(
        b.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        and b.data_ptr() == a.data_ptr() + a.numel() * a.element_size()
        for a, b in pairwise(parts)
    )
