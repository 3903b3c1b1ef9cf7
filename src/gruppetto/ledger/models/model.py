"""A model as the ledger sees it: its tensors, and the blocks that say what a token costs.

Owns the arithmetic over counted tensors. Promises: parameter counts are exact (products of shapes); multi-token
prediction layers and vision parts are counted apart; what the config does not determine is a sentence in `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gruppetto.errors import UserError

Kind = Literal[
    "embedding", "head", "attention", "mlp", "expert", "shared_expert", "router", "norm", "state", "vision", "mtp",
    "buffer",
]  # fmt: skip
"""What a tensor belongs to. `state`: linear attention or Mamba; `buffer`: not a parameter, but it must be synced."""


_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "mxfp4": 0.5, "int4": 0.5}
LOW = ("fp8", "mxfp4", "int4")
"""Types of few bits, which only matrices of linear layers are stored in."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`count` tensors of one name pattern, shape and kind ("model.layers.*.self_attn.q_proj.weight")."""

    name: str
    shape: tuple[int, ...]
    count: int
    kind: Kind
    quantized: bool = False
    """Stored in the config's quantised type (the rest stays in 16 bits)."""
    matrix: bool = False
    """Of a linear layer that formats of 8 bits and fewer may store; embeddings, head, router and norms are none."""
    passes: int = 1
    """How often one token goes through it: more than once where layers share a block."""

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
    one layer: 2 x heads x (key dim + value dim). A `state` mixer has `step_flops` a token instead. Latent attention
    decodes in its absorbed form, against the latent itself: `decode_score_flops` = 2 x heads x (2 x kv_rank + rope dim)
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2); prefill and training expand the latent to heads and do not.
    """

    kind: Literal["full", "sliding", "latent", "state"]
    count: int
    kv_elements: int = 0
    """Kept for one token in one layer."""
    window: int = 0
    score_flops: float = 0.0
    decode_score_flops: float = 0.0
    """`score_flops` of a decode step; 0 = the same."""
    state_elements: int = 0
    """Kept for one sequence in one layer, recurrent state and convolution together."""
    conv_elements: int = 0
    """Of `state_elements`, those of the convolution."""
    step_flops: float = 0.0
    kv_heads: int = 0
    """Over how many tensor-parallel ranks KV can be divided; latent KV is kept whole on each (0)."""
    selected: int = 0
    """Keys that a query attends to at most, chosen by an indexer among all that are kept; 0 = all."""
    index_flops: float = 0.0
    """The indexer's cost of one query against one key, of one layer."""

    def keys(self, tokens: int, before: int = 0) -> int:
        """Query-key pairs of `tokens` causal tokens after `before` others, in one layer, self included."""
        limit = self.window or self.selected
        growing = tokens if not limit else min(tokens, max(0, limit - before))
        pairs = growing * before + growing * (growing + 1) // 2
        return pairs + (tokens - growing) * limit

    @property
    def decode_score(self) -> float:
        """FLOP of a decoded token's query against one key, of one layer."""
        return self.decode_score_flops or self.score_flops

    def flops(self, tokens: int, before: int = 0, *, decode: bool = False) -> float:
        """FLOP of mixing `tokens` causal tokens after `before` others, over all `count` layers; `decode`: one by one,
        in the form of a decode step."""
        if self.kind == "state":
            return self.count * self.step_flops * tokens
        every = tokens * before + tokens * (tokens + 1) // 2
        score = self.decode_score if decode else self.score_flops
        return self.count * (score * self.keys(tokens, before) + self.index_flops * every)


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
    """Type of the published weights: bf16, fp16, fp32, fp8, mxfp4, int4 (of the quantised ones, where some are)."""
    quantized_block: tuple[int, int] | None = None
    unknown: tuple[str, ...] = ()
    """What this config does not determine, one sentence each."""

    def count(self, kinds: Iterable[Kind]) -> int:
        """Elements of these kinds."""
        wanted = frozenset(kinds)
        return sum(tensor.elements for tensor in self.tensors if tensor.kind in wanted)

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def params(self) -> int:
        """All parameters, text and vision, as transformers counts them: without MTP layers and without buffers."""
        return sum(tensor.elements for tensor in self.tensors if tensor.kind not in ("mtp", "buffer"))

    @property
    def text_params(self) -> int:
        """`params` without the vision part: what an RL step on text trains and syncs."""
        return self.params - self.vision_params

    @property
    def vision_params(self) -> int:
        """Of the vision tower and its projection."""
        return self.count(("vision",))

    @property
    def mtp_params(self) -> int:
        """Of multi-token prediction layers, without the embedding and head that they share with the model."""
        return self.count(("mtp",))

    @property
    def buffer_elements(self) -> int:
        """Router biases that are buffers: not trained by gradient, but synced."""
        return self.count(("buffer",))

    @property
    def embed_params(self) -> int:
        """Of the input embedding, which is also the head where they are tied."""
        return self.count(("embedding",))

    @property
    def head_params(self) -> int:
        """Of the head, 0 where it is tied."""
        return self.count(("head",))

    @property
    def expert_params(self) -> int:
        """Of all routed experts."""
        return self.count(("expert",))

    @property
    def active_params(self) -> int:
        """`params` without the routed experts that a token does not meet, embeddings and vision included."""
        return self.params - self._idle(self.expert_params)

    @property
    def active_params_without_input_embedding(self) -> int:
        """`active_params` without the input embedding; a tied one counts, it is the head."""
        return self.active_params - (0 if self.tied else self.embed_params)

    @property
    def active_params_without_embeddings(self) -> int:
        """`active_params` without input embedding and head."""
        return self.active_params - self.embed_params - self.head_params

    def _idle(self, elements: int) -> int:
        """Of `elements` of routed experts, those that one token does not meet."""
        return elements * (self.experts - self.top_k) // self.experts if self.experts else 0

    # -- what a sequence keeps ----------------------------------------------------------------------------------------

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> float:
        """Bytes that every further context token adds for ever: full and latent attention. 2 = bf16, 1 = fp8 KV."""
        return element_bytes * sum(mixer.count * mixer.kv_elements for mixer in self.mixers if not mixer.window)

    def window_bytes(self, element_bytes: float = 2.0, context: int | None = None) -> float:
        """Bytes of one sequence in windows, all full, or as full as `context` tokens make them."""
        return element_bytes * sum(
            mixer.count * mixer.kv_elements * (mixer.window if context is None else min(mixer.window, context))
            for mixer in self.mixers
        )

    def state_bytes(self, element_bytes: float = 4.0, conv_bytes: float = 2.0) -> float:
        """Bytes of one sequence's recurrent states and convolutions. Engines keep the former in 32 bits (Nemotron-H's
        mamba_ssm_cache_dtype) unless told otherwise."""
        conv = sum(mixer.count * mixer.conv_elements for mixer in self.mixers)
        return element_bytes * (self.state_elements - conv) + conv_bytes * conv

    @property
    def state_elements(self) -> int:
        """Elements of one sequence's recurrent states and convolutions, over all layers."""
        return sum(mixer.count * mixer.state_elements for mixer in self.mixers)

    def sequence_bytes(self, context: int, element_bytes: float = 2.0) -> float:
        """Bytes that one sequence of `context` tokens keeps in all; states at `state_bytes`' own types."""
        growing = context * self.kv_bytes_per_token(element_bytes)
        return growing + self.window_bytes(element_bytes, context) + self.state_bytes()

    # -- FLOPs --------------------------------------------------------------------------------------------------------

    @property
    def matmul_params(self) -> int:
        """Text parameters that one token is multiplied with: active, head included, input embedding not."""
        total = self.embed_params if self.tied else 0
        for tensor in self.tensors:
            if tensor.kind not in ("embedding", "vision", "mtp", "buffer"):
                elements = tensor.elements * tensor.passes
                total += elements - self._idle(elements) if tensor.kind == "expert" else elements
        return total

    def matmul_flops(self, tokens: int) -> float:
        """FLOP of the weights for `tokens` tokens: 2 a parameter and token (Kaplan et al., arXiv 2001.08361)."""
        return 2.0 * self.matmul_params * tokens

    def mixing_flops(self, tokens: int, before: int = 0, *, decode: bool = False) -> float:
        """FLOP of attention scores and values and of state steps: `tokens` causal tokens after `before` others."""
        return sum(mixer.flops(tokens, before, decode=decode) for mixer in self.mixers)

    def forward_flops(self, tokens: int, before: int = 0) -> float:
        """FLOP of a causal forward of `tokens` new tokens after `before` cached ones, logits of every one included."""
        return self.matmul_flops(tokens) + self.mixing_flops(tokens, before)

    def decode_flops(self, context: int) -> float:
        """FLOP of one decoded token after `context` others, latent attention in its absorbed form."""
        return self.matmul_flops(1) + self.mixing_flops(1, context, decode=True)

    def attention_share(self, length: int) -> float:
        """Share of mixing in a forward of `length` tokens, 0..1."""
        total = self.forward_flops(length)
        return self.mixing_flops(length) / total if total else 0.0

    def train_flops(self, length: int, recompute: bool = False) -> float:
        """FLOP of forward and backward over one sequence of `length` tokens: 3 forwards, 4 with full recomputation."""
        return (4.0 if recompute else 3.0) * self.forward_flops(length)

    # -- bytes of weights ---------------------------------------------------------------------------------------------

    def weight_bytes(self, dtype: str = "bf16") -> float:
        """Bytes of `params` in a type: bf16, fp16, fp32, fp8, mxfp4, int4, or "stored", as published.

        fp8, mxfp4 and int4 hold the matrices of linear layers (1 or 0.5 byte an element), with a 32-bit scale a block
        of `quantized_block` or 128 x 128 (fp8), or 8 bits (mxfp4) or 16 bits (int4) for 32 elements; the rest takes 16
        bits. "stored" narrows only what the config does. Raises `UserError` for another type.
        """
        if dtype not in _BYTES and dtype != "stored":
            raise UserError(f"dtype = {dtype!r}: no type of weights; write one of {', '.join(_BYTES)} or stored")
        kind = self.stored if dtype == "stored" else dtype
        total = 0.0
        for tensor in self.tensors:
            if tensor.kind in ("mtp", "buffer"):
                continue
            narrow = tensor.quantized if dtype == "stored" else tensor.matrix
            total += tensor.elements * _BYTES["bf16"] if kind in LOW and not narrow else self._bytes(tensor, kind)
        return total

    def _bytes(self, tensor: Tensor, kind: str) -> float:
        """Bytes of `tensor`, all of it in `kind`, scales included."""
        total = tensor.elements * _BYTES[kind]
        if kind == "fp8":
            block = self.quantized_block or (128, 128)
            rows, columns = (-(-side // length) for side, length in zip(tensor.shape[-2:], block, strict=True))
            total += 4 * rows * columns * (tensor.elements // (tensor.shape[-2] * tensor.shape[-1]))
        elif kind in LOW:
            total += tensor.elements / 32 * (1 if kind == "mxfp4" else 2)
        return total
