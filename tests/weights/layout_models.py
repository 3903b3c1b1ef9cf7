"""Small models as their tensors: dense, grouped, mixture of experts, latent attention."""

from __future__ import annotations

import numpy as np

from gruppetto.weights.layouts.maps import numpy_dtype
from gruppetto.weights.layouts.spec import Spec


def model(
    *,
    layers=2,
    hidden=4,
    queries=4,
    groups=2,
    dim=2,
    inner=8,
    vocab=13,
    bias=False,
    qk_norm=False,
    tied=False,
    gated=False,
    experts=0,
    expert_inner=8,
    first_dense=0,
    shared=None,
    router_bias=False,
    mixtral=False,
    latent=False,
    q_rank=None,
    predictors=0,
    dtype="bfloat16",
):
    """Hugging Face specs, in a checkpoint's order."""
    found = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(layers + predictors):
        p = f"model.layers.{layer}."
        if layer >= layers:
            found += [(p + "embed_tokens.weight", (vocab, hidden)), (p + "enorm.weight", (hidden,))]
            found += [(p + "hnorm.weight", (hidden,)), (p + "eh_proj.weight", (hidden, 2 * hidden))]
            found += [(p + "shared_head.norm.weight", (hidden,)), (p + "shared_head.head.weight", (vocab, hidden))]
        found += _attention(p, hidden, queries, groups, dim, bias, qk_norm, gated, latent, q_rank)
        found += [(p + "input_layernorm.weight", (hidden,)), (p + "post_attention_layernorm.weight", (hidden,))]
        if experts and layer >= first_dense:
            found += _experts(p, hidden, experts, expert_inner, shared, router_bias, mixtral)
        else:
            found += _mlp(p + "mlp.", hidden, inner)
    found.append(("model.norm.weight", (hidden,)))
    if not tied:
        found.append(("lm_head.weight", (vocab, hidden)))
    return [Spec(name, shape, dtype) for name, shape in found]


def _attention(p, hidden, queries, groups, dim, bias, qk_norm, gated, latent, q_rank):
    a = p + "self_attn."
    if latent:
        rank, rope, nope, value = 6, 2, dim, dim
        rows = queries * (nope + rope)
        found = [(a + "kv_a_proj_with_mqa.weight", (rank + rope, hidden)), (a + "kv_a_layernorm.weight", (rank,))]
        found += [(a + "kv_b_proj.weight", (queries * (nope + value), rank))]
        if q_rank:
            found += [(a + "q_a_proj.weight", (q_rank, hidden)), (a + "q_a_layernorm.weight", (q_rank,))]
            found += [(a + "q_b_proj.weight", (rows, q_rank))]
        else:
            found += [(a + "q_proj.weight", (rows, hidden))]
        return [*found, (a + "o_proj.weight", (hidden, queries * value))]
    rows = {"q": queries * dim * (2 if gated else 1), "k": groups * dim, "v": groups * dim}
    found = []
    for kind, size in rows.items():
        found.append((f"{a}{kind}_proj.weight", (size, hidden)))
        if bias:
            found.append((f"{a}{kind}_proj.bias", (size,)))
    found.append((a + "o_proj.weight", (hidden, queries * dim)))
    if bias:
        found.append((a + "o_proj.bias", (hidden,)))
    if qk_norm:
        found += [(a + "q_norm.weight", (dim,)), (a + "k_norm.weight", (dim,))]
    return found


def _mlp(p, hidden, inner, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return [(f"{p}{gate}.weight", (inner, hidden)), (f"{p}{up}.weight", (inner, hidden))] + [
        (f"{p}{down}.weight", (hidden, inner))
    ]


def _experts(p, hidden, experts, inner, shared, router_bias, mixtral):
    m = p + ("block_sparse_moe." if mixtral else "mlp.")
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = [(m + "gate.weight", (experts, hidden))]
    if router_bias:
        found.append((m + "gate.e_score_correction_bias", (experts,)))
    for expert in range(experts):
        found += _mlp(f"{m}experts.{expert}.", hidden, inner, names)
    if shared:
        found += _mlp(f"{m}{shared}.", hidden, inner)
    if shared == "shared_expert":
        found.append((m + "shared_expert_gate.weight", (1, hidden)))
    return found


def values(specs, seed=0):
    """Any bit pattern, NaN and -0.0 included. Names of one tensor (a tied head, a prediction layer's) are equal."""
    rng = np.random.default_rng(seed)
    found = {}
    for spec in specs:
        dtype = numpy_dtype(spec.dtype)
        raw = rng.integers(0, 256, spec.elements * dtype.itemsize, dtype=np.uint8)
        found[spec.name] = raw.view(dtype).reshape(spec.shape)
    for name in found:
        if ".embed_tokens." in name and name != "model.embed_tokens.weight":
            found[name] = found["model.embed_tokens.weight"].copy()
        if name.endswith("shared_head.head.weight"):
            found[name] = found.get("lm_head.weight", found["model.embed_tokens.weight"]).copy()
    return found


def equal(one, other):
    """Bit for bit, every name."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
