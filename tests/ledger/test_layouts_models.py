"""Models built by hand for the tests of layouts, and that they have the sizes of the models they are named for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gruppetto.ledger.models.model import Mixer, Model, Tensor


def dense(
    name: str = "8B",
    *,
    hidden: int = 4096,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    inner: int = 14336,
    vocab: int = 128256,
    tied: bool = False,
) -> Model:
    """A dense model with grouped heads and a gated MLP. Defaults: Llama-3-8B."""
    tensors = [
        Tensor("model.embed_tokens.weight", (vocab, hidden), 1, "embedding"),
        *_attention(hidden, layers, heads, kv_heads, head_dim),
        Tensor("model.layers.*.mlp.gate_proj.weight", (inner, hidden), layers, "mlp"),
        Tensor("model.layers.*.mlp.up_proj.weight", (inner, hidden), layers, "mlp"),
        Tensor("model.layers.*.mlp.down_proj.weight", (hidden, inner), layers, "mlp"),
        *_norms(hidden, layers),
    ]
    if not tied:
        tensors.append(Tensor("lm_head.weight", (vocab, hidden), 1, "head"))
    mixer = Mixer("full", layers, kv_elements=2 * kv_heads * head_dim, kv_heads=kv_heads)
    return Model(
        name=name, family="llama", hidden=hidden, layers=layers, vocab=vocab, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, tied=tied, context=8192, tensors=_matrices(tensors), mixers=(mixer,),
    )  # fmt: skip


def dense_32b() -> Model:
    """Qwen3-32B."""
    return dense("32B", hidden=5120, layers=64, heads=64, inner=25600, vocab=151936)


def moe_30b() -> Model:
    """Qwen3-30B-A3B."""
    hidden, layers, experts, inner = 2048, 48, 128, 768
    base = dense("30B-A3B", hidden=hidden, layers=layers, heads=32, kv_heads=4, inner=inner, vocab=151936)
    kept = [tensor for tensor in base.tensors if tensor.kind != "mlp"]
    return _with_experts(base, kept, hidden, layers, experts, 8, inner, dense_layers=0)


def mla_671b() -> Model:
    """DeepSeek-V3 without its multi-token prediction layer."""
    hidden, layers, heads, inner, vocab = 7168, 61, 128, 18432, 129280
    prefix = "model.layers.*.self_attn."
    tensors = [
        Tensor("model.embed_tokens.weight", (vocab, hidden), 1, "embedding"),
        Tensor("lm_head.weight", (vocab, hidden), 1, "head"),
        Tensor(prefix + "q_a_proj.weight", (1536, hidden), layers, "attention"),
        Tensor(prefix + "q_b_proj.weight", (heads * 192, 1536), layers, "attention"),
        Tensor(prefix + "kv_a_proj_with_mqa.weight", (576, hidden), layers, "attention"),
        Tensor(prefix + "kv_b_proj.weight", (heads * 256, 512), layers, "attention"),
        Tensor(prefix + "o_proj.weight", (hidden, heads * 128), layers, "attention"),
        Tensor("model.layers.*.mlp.gate_proj.weight", (inner, hidden), 3, "mlp"),
        Tensor("model.layers.*.mlp.up_proj.weight", (inner, hidden), 3, "mlp"),
        Tensor("model.layers.*.mlp.down_proj.weight", (hidden, inner), 3, "mlp"),
        *_norms(hidden, layers),
    ]
    base = Model(
        name="671B", family="deepseek_v3", hidden=hidden, layers=layers, vocab=vocab, heads=heads, kv_heads=heads,
        head_dim=192, tied=False, context=163840, tensors=(), mixers=(Mixer("latent", layers, kv_elements=576),),
    )  # fmt: skip
    shared = [
        Tensor(f"model.layers.*.mlp.shared_experts.{part}_proj.weight", shape, layers - 3, "shared_expert")
        for part, shape in (("gate", (2048, hidden)), ("up", (2048, hidden)), ("down", (hidden, 2048)))
    ]
    return _with_experts(base, tensors + shared, hidden, layers, 256, 8, 2048, dense_layers=3)


def hybrid() -> Model:
    """Three layers with a recurrent state to one with full attention, two of four layers with a window."""
    base = dense("hybrid", hidden=1024, layers=8, heads=8, kv_heads=2, inner=2816, vocab=32000, tied=True)
    state = Tensor("model.layers.*.linear_attn.in_proj.weight", (4096, 1024), 4, "state")
    mixers = (
        Mixer("full", 2, kv_elements=512, kv_heads=2),
        Mixer("sliding", 2, kv_elements=512, kv_heads=2, window=1024),
        Mixer("state", 4, state_elements=65536),
    )
    return Model(
        name="hybrid", family="hybrid", hidden=1024, layers=8, vocab=32000, heads=8, kv_heads=2, head_dim=128,
        tied=True, context=8192, tensors=_matrices([*base.tensors, state]), mixers=mixers,
    )  # fmt: skip


def _with_experts(
    base: Model,
    tensors: list[Tensor],
    hidden: int,
    layers: int,
    experts: int,
    top_k: int,
    inner: int,
    dense_layers: int,
) -> Model:
    sparse = layers - dense_layers
    prefix = "model.layers.*.mlp."
    added = [
        Tensor(prefix + "gate.weight", (experts, hidden), sparse, "router"),
        Tensor(prefix + "experts.*.gate_proj.weight", (inner, hidden), sparse * experts, "expert"),
        Tensor(prefix + "experts.*.up_proj.weight", (inner, hidden), sparse * experts, "expert"),
        Tensor(prefix + "experts.*.down_proj.weight", (hidden, inner), sparse * experts, "expert"),
    ]
    return Model(
        name=base.name, family=base.family, hidden=hidden, layers=layers, vocab=base.vocab, heads=base.heads,
        kv_heads=base.kv_heads, head_dim=base.head_dim, tied=base.tied, context=base.context,
        tensors=_matrices(tensors + added), mixers=base.mixers, experts=experts, top_k=top_k,
    )  # fmt: skip


def _matrices(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Marked as what formats of few bits may store."""
    kinds = ("attention", "mlp", "expert", "shared_expert", "state")
    return tuple(replace(t, matrix=t.kind in kinds and len(t.shape) > 1) for t in tensors)


def _attention(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    prefix = "model.layers.*.self_attn."
    rows = (("q", heads), ("k", kv_heads), ("v", kv_heads))
    into = [Tensor(f"{prefix}{part}_proj.weight", (n * head_dim, hidden), layers, "attention") for part, n in rows]
    return [*into, Tensor(prefix + "o_proj.weight", (hidden, heads * head_dim), layers, "attention")]


def _norms(hidden: int, layers: int) -> list[Tensor]:
    return [
        Tensor("model.layers.*.input_layernorm.weight", (hidden,), layers, "norm"),
        Tensor("model.layers.*.post_attention_layernorm.weight", (hidden,), layers, "norm"),
        Tensor("model.norm.weight", (hidden,), 1, "norm"),
    ]


@pytest.mark.parametrize(
    ("model", "billions"), [(dense(), 8.03), (dense_32b(), 32.76), (moe_30b(), 30.53), (mla_671b(), 671.0)]
)
def test_the_models_of_these_tests_have_the_published_sizes(model: Model, billions: float) -> None:
    total = sum(tensor.elements for tensor in model.tensors)
    assert total / 1e9 == pytest.approx(billions, rel=1e-3)
