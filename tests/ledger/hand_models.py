"""Small counted models by hand, with the shapes of published ones: for tests that do not read configs."""

from gruppetto.ledger.models.model import Mixer, Model, Tensor


def dense(name="llama-8b", *, layers=32, hidden=4096, heads=32, kv=8, dim=128, mlp=14336, vocab=128256, tied=False):
    """A Llama-like model: grouped-query attention, SwiGLU."""
    tensors = (
        _around(layers, hidden, vocab, tied)
        + _attention(layers, hidden, heads, kv, dim)
        + (
            Tensor("model.layers.*.mlp.gate_proj.weight", (mlp, hidden), layers, "mlp", True, True),
            Tensor("model.layers.*.mlp.up_proj.weight", (mlp, hidden), layers, "mlp", True, True),
            Tensor("model.layers.*.mlp.down_proj.weight", (hidden, mlp), layers, "mlp", True, True),
        )
    )
    return _model(name, tensors, layers, hidden, heads, kv, dim, vocab, tied)


def experts(name="qwen3-30b", *, layers=48, hidden=2048, heads=32, kv=4, dim=128, wide=768, n=128, k=8, vocab=151936):
    """A mixture of experts with a router in each layer."""
    count = layers * n
    tensors = (
        _around(layers, hidden, vocab, False)
        + _attention(layers, hidden, heads, kv, dim)
        + (
            Tensor("model.layers.*.mlp.gate.weight", (n, hidden), layers, "router"),
            Tensor("model.layers.*.mlp.experts.*.gate_proj.weight", (wide, hidden), count, "expert", True, True),
            Tensor("model.layers.*.mlp.experts.*.up_proj.weight", (wide, hidden), count, "expert", True, True),
            Tensor("model.layers.*.mlp.experts.*.down_proj.weight", (hidden, wide), count, "expert", True, True),
        )
    )
    return _model(name, tensors, layers, hidden, heads, kv, dim, vocab, False, n, k)


def deepseek_v3():
    """DeepSeek-V3: latent attention, 3 dense layers, 58 of 256 experts and one shared."""
    layers, hidden, heads, moe = 61, 7168, 128, 58
    attention = (
        ("q_a_proj", (1536, hidden)),
        ("q_b_proj", (heads * 192, 1536)),
        ("kv_a_proj_with_mqa", (576, hidden)),
        ("kv_b_proj", (heads * 256, 512)),
        ("o_proj", (hidden, heads * 128)),
    )
    tensors = [*_around(layers, hidden, 129280, False)]
    for part, shape in attention:
        tensors.append(Tensor(f"model.layers.*.self_attn.{part}.weight", shape, layers, "attention", True, True))
    for part, shape in (("gate_proj", (18432, hidden)), ("up_proj", (18432, hidden)), ("down_proj", (hidden, 18432))):
        tensors.append(Tensor(f"model.layers.*.mlp.{part}.weight", shape, 3, "mlp", True, True))
    for part, shape in (("gate_proj", (2048, hidden)), ("up_proj", (2048, hidden)), ("down_proj", (hidden, 2048))):
        tensors.append(Tensor(f"model.layers.*.mlp.experts.*.{part}.weight", shape, moe * 256, "expert", True, True))
        tensors.append(
            Tensor(f"model.layers.*.mlp.shared_experts.{part}.weight", shape, moe, "shared_expert", True, True)
        )
    tensors.append(Tensor("model.layers.*.mlp.gate.weight", (256, hidden), moe, "router"))
    tensors.append(Tensor("model.layers.*.mlp.gate.e_score_correction_bias", (256,), moe, "buffer"))
    mixer = Mixer("latent", layers, kv_elements=576, score_flops=2.0 * heads * (576 + 512))
    return Model(
        name="deepseek-v3",
        family="deepseek_v3",
        hidden=hidden,
        layers=layers,
        vocab=129280,
        heads=heads,
        kv_heads=heads,
        head_dim=192,
        tied=False,
        context=163840,
        tensors=tuple(tensors),
        mixers=(mixer,),
        experts=256,
        top_k=8,
        quantized_block=(128, 128),
    )


def _around(layers, hidden, vocab, tied):
    head = () if tied else (Tensor("lm_head.weight", (vocab, hidden), 1, "head"),)
    return (
        Tensor("model.embed_tokens.weight", (vocab, hidden), 1, "embedding"),
        Tensor("model.layers.*.input_layernorm.weight", (hidden,), layers, "norm"),
        Tensor("model.layers.*.post_attention_layernorm.weight", (hidden,), layers, "norm"),
        Tensor("model.norm.weight", (hidden,), 1, "norm"),
        *head,
    )


def _attention(layers, hidden, heads, kv, dim):
    return (
        Tensor("model.layers.*.self_attn.q_proj.weight", (heads * dim, hidden), layers, "attention", True, True),
        Tensor("model.layers.*.self_attn.k_proj.weight", (kv * dim, hidden), layers, "attention", True, True),
        Tensor("model.layers.*.self_attn.v_proj.weight", (kv * dim, hidden), layers, "attention", True, True),
        Tensor("model.layers.*.self_attn.o_proj.weight", (hidden, heads * dim), layers, "attention", True, True),
    )


def _model(name, tensors, layers, hidden, heads, kv, dim, vocab, tied, n=0, k=0):
    mixer = Mixer("full", layers, kv_elements=2 * kv * dim, score_flops=4.0 * heads * dim, kv_heads=kv)
    return Model(
        name=name,
        family="llama",
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        tied=tied,
        context=131072,
        tensors=tensors,
        mixers=(mixer,),
        experts=n,
        top_k=k,
    )


LLAMA_8B = dense()
QWEN25_7B = dense("qwen2.5-7b", layers=28, hidden=3584, heads=28, kv=4, mlp=18944, vocab=152064)
QWEN3_4B = dense("qwen3-4b", layers=36, hidden=2560, heads=32, kv=8, mlp=9728, vocab=151936, tied=True)
QWEN25_32B = dense("qwen2.5-32b", layers=64, hidden=5120, heads=40, kv=8, mlp=27648, vocab=152064)
QWEN25_72B = dense("qwen2.5-72b", layers=80, hidden=8192, heads=64, kv=8, mlp=29568, vocab=152064)
LLAMA_70B = dense("llama-70b", layers=80, hidden=8192, heads=64, kv=8, mlp=28672, vocab=128256)
QWEN3_30B = experts()
QWEN3_235B = experts("qwen3-235b", layers=94, hidden=4096, heads=64, kv=4, wide=1536, n=128, k=8)
DEEPSEEK_V3 = deepseek_v3()
