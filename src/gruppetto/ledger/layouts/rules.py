"""Why a layout cannot be: one reason each, the first that applies. Memory comes after all of these."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.shares import Shares

Sentence = str | Callable[[], str]
"""A sentence, or what makes it: of thousands that a search could say a reader sees a few."""
Objection = tuple[str, Sentence]
"""(kind, sentence); the kind groups what is said of many layouts."""
FP8_BLOCK = 128


def said(sentence: Sentence) -> str:
    """The sentence itself."""
    return sentence if isinstance(sentence, str) else sentence()


@lru_cache(maxsize=1024)
def degrees(gpus: int, most: int) -> tuple[int, ...]:
    """Sizes to try for one dimension: powers of two, and what divides the GPUs, up to `most`."""
    powers = {1 << power for power in range(max(1, most).bit_length()) if 1 << power <= most}
    return tuple(sorted(powers | {size for size in range(1, min(gpus, most) + 1) if gpus % size == 0}))


def train_objection(
    shares: Shares, layout: TrainLayout, gpus: int, gpus_per_node: int, sequences: int = 0
) -> Objection | None:
    """Why ranks cannot be laid out so; None where they can."""
    tp, pp, cp, ep = layout.tp, layout.pp, layout.cp, layout.ep
    if gpus % (tp * pp * cp):
        return "gpus", f"{gpus} GPUs are not a multiple of tp x pp x cp = {tp * pp * cp}"
    if found := _tensor(shares, tp, gpus_per_node):
        return found
    if tp > 1 and shares.kv_heads and shares.kv_heads % tp:
        return "kv heads", f"{shares.kv_heads} KV heads are not divisible by tp = {tp}"
    if pp > shares.layers:
        return "layers", f"pp = {pp} has more stages than the model has layers ({shares.layers})"
    if found := _experts(shares, ep):
        return found
    if (tp * cp * layout.dp) % ep:
        return "ep ranks", f"the {tp * cp * layout.dp} ranks of a stage are not a multiple of ep = {ep}"
    if sequences and layout.dp > sequences:
        return "sequences", f"dp = {layout.dp} has more replicas than a batch has sequences ({sequences})"
    return None


def not_whole(layout: ServeLayout, gpus: int) -> Objection:
    """Why so many GPUs are not whole engines."""
    return "gpus", f"{gpus} GPUs are not a multiple of an engine's tp x dp = {layout.gpus}"


def serve_objection(
    shares: Shares, layout: ServeLayout, gpus: int, gpus_per_node: int, block: int = 0
) -> Objection | None:
    """Why an engine cannot be laid out so; None where it can. `block`: side of a block with one scale (FP8)."""
    tp, ep = layout.tp, layout.ep
    if gpus % layout.gpus:
        return not_whole(layout, gpus)
    if found := _tensor(shares, tp, gpus_per_node):
        return found
    if shares.kv_heads and shares.kv_heads % tp and tp % shares.kv_heads:
        return "kv heads", f"{shares.kv_heads} KV heads and tp = {tp}: neither divides the other"
    if found := _experts(shares, ep):
        return found
    if layout.gpus % ep:
        return "ep ranks", f"an engine's {layout.gpus} GPUs are not a multiple of ep = {ep}"
    return _slices(shares, layout.gpus // ep, block)


def _tensor(shares: Shares, tp: int, gpus_per_node: int) -> Objection | None:
    if tp > gpus_per_node:
        return "node", f"tp = {tp} is beyond a node of {gpus_per_node} GPUs"
    if shares.heads % tp:
        return "heads", f"{shares.heads} heads are not divisible by tp = {tp}"
    if shares.hidden % tp or shares.mlp_width % tp:
        side = shares.hidden if shares.hidden % tp else shares.mlp_width
        return "width", f"a layer's width of {side:,} is not divisible by tp = {tp}"
    return None


def _experts(shares: Shares, ep: int) -> Objection | None:
    if ep > 1 and not shares.experts:
        return "experts", f"ep = {ep} without experts"
    if ep > 1 and shares.experts % ep:
        return "experts", f"{shares.experts} experts are not divisible by ep = {ep}"
    return None


def _slices(shares: Shares, over: int, block: int) -> Objection | None:
    """Experts that are cut into slices, one a rank."""
    width = shares.expert_width
    if not width or over == 1:
        return None
    if width % over:
        return "expert width", f"experts {width:,} wide are not divisible by {over} ranks"
    if block and (width // over) % block:
        return (
            "blocks",
            f"experts {width:,} wide over {over} ranks are {width // over}, no multiple of a block's {block}",
        )
    return None
