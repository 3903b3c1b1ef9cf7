"""A model as the ledger sees it: its tensors, and the blocks that say what a token costs.

Owns the arithmetic over counted tensors. Promises: parameter counts are exact (products of shapes); multi-token
prediction layers and vision parts are counted apart; what the config does not determine is a sentence in `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "embedding", "head", "attention", "mlp", "expert", "shared_expert", "router", "norm", "state", "vision", "mtp",
    "buffer",
]  # fmt: skip
"""What a tensor belongs to. `state`: linear attention or Mamba; `buffer`: not a parameter, but it must be synced."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`count` tensors of one name pattern, shape and kind ("model.layers.*.self_attn.q_proj.weight")."""

    name: str
    shape: tuple[int, ...]
    count: int
    kind: Kind
    quantized: bool = False
    """Stored in the config's quantised type (the rest stays in 16 bits)."""

    @property
    def elements(self) -> int:
        """Of all `count` together."""
        total = self.count
        for side in self.shape:
            total *= side
        return total


@dataclass(frozen=True, slots=True)
class Mixer:
    """What mixes tokens in `count` layers, and what a sequence must keep for it.

    kind        growing elements a token       capped at `window` tokens     state elements a sequence
    full        2 x kv_heads x head_dim        -                             -
    sliding     -                              the same, in the window       -
    latent      kv_rank + rope dim (MLA)       -                             -
    state       -                              -                             SSM or linear attention, convolution

    `score_flops` is the attention's own cost of one query against one key, 2 FLOP a multiply-add, over all heads and of
    one layer: 2 x heads x (key dim + value dim). A `state` mixer has `step_flops` a token instead.
    """

    kind: Literal["full", "sliding", "latent", "state"]
    count: int
    kv_elements: int = 0
    """Kept for one token in one layer."""
    window: int = 0
    score_flops: float = 0.0
    state_elements: int = 0
    """Kept for one sequence in one layer, recurrent state and convolution together."""
    step_flops: float = 0.0
    kv_heads: int = 0
    """Over how many tensor-parallel ranks KV can be divided; latent KV is kept whole on each (0)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A counted model. Counts are of the text model unless named otherwise; active = what one token computes with."""

    name: str
    family: str
    """The config's model_type."""
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    context: int
    """Longest context of the config; 0 where it states none."""
    tensors: tuple[Tensor, ...]
    mixers: tuple[Mixer, ...]
    experts: int = 0
    top_k: int = 0
    stored: str = "bf16"
    """Type of the published weights: bf16, fp16, fp32, fp8, mxfp4, int4."""
    quantized_block: tuple[int, int] | None = None
    unknown: tuple[str, ...] = ()
    """What this config does not determine, one sentence each."""

    def count(self, kinds: Iterable[Kind]) -> int:
        """Elements of these kinds."""
        wanted = frozenset(kinds)
        return sum(tensor.elements for tensor in self.tensors if tensor.kind in wanted)
