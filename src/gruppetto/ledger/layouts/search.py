"""All layouts of a trainer or an engine over so many GPUs: those that fit, best first, and why each other one is out.

Promises: every layout tried is a candidate (fits, with its memory by owner and a score) or a rejection with one reason;
where none fits `best` raises a `UserError` with the nearest thing that works. 1,024 GPUs take well under 50 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import OVERHEADS, Overheads, TrainWork, host_bytes, train_bytes
from gruppetto.ledger.layouts.rules import FP8_BLOCK, Objection, degrees, serve_objection, train_objection
from gruppetto.ledger.layouts.serving import SERVE_OVERHEADS, ServeOverheads, kv_share, serve_bytes, served
from gruppetto.ledger.layouts.shares import Shares, shares_of
from gruppetto.ledger.layouts.throughput import ServeWork, serve_score
from gruppetto.ledger.layouts.traffic import Links, compute_s, train_score
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.units import show_size, show_tokens

Layout = TypeVar("Layout", TrainLayout, ServeLayout)
EQUAL_TRAIN, EQUAL_SERVE = 0.01, 0.05
"""Layouts that differ by less count as equal, and the simpler one goes first: trainers by this share of the computing,
engines by this share of the best score (of small engines more can fail, and lengths spread better over them)."""
HOST_USABLE = 0.8
MOST_GPUS = 1 << 16
"""Where the search for a number of GPUs that works gives up."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Layout]):
    """A layout that fits. `parts`: bytes on the fullest GPU by owner (KV is what is left, and not among them)."""

    layout: Layout
    parts: dict[str, float]
    capacity: float
    score: float
    """Lower is better. Trainer: seconds a step beside computing. Engine: GPU-seconds a token."""
    reason: str
    """What the score is made of."""

    @property
    def headroom(self) -> float:
        """Bytes left on the fullest GPU; of an engine, its KV pool."""
        return self.capacity - sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Rejection(Generic[Layout]):
    """A layout that is out, and why. `kind` groups reasons; `lacking` is bytes missing, 0 where memory is not it."""

    layout: Layout
    kind: str
    reason: str
    lacking: float = 0.0


@dataclass(frozen=True, slots=True)
class Search(Generic[Layout]):
    """What was tried: candidates, best first, and rejections. `nearest` says what works where nothing fits."""

    candidates: tuple[Candidate[Layout], ...]
    rejected: tuple[Rejection[Layout], ...]
    nearest: str = ""

    @property
    def best(self) -> Candidate[Layout]:
        """The candidate with the lowest score. Raises `UserError` where nothing fits."""
        if not self.candidates:
            raise UserError(self.nearest)
        return self.candidates[0]

    def grouped(self) -> tuple[tuple[str, int, str], ...]:
        """(kind, how many layouts, the reason of one of them), most frequent first. Of memory, the closest miss."""
        found: dict[str, list[Rejection[Layout]]] = {}
        for rejection in self.rejected:
            found.setdefault(rejection.kind, []).append(rejection)
        rows = [(kind, len(out), min(out, key=lambda each: each.lacking).reason) for kind, out in found.items()]
        return tuple(sorted(rows, key=lambda row: -row[1]))


# -- trainer -----------------------------------------------------------------------------------------------------------


def train_layouts(
    model: Model,
    gpu: GPU,
    gpus: int,
    work: TrainWork,
    *,
    links: Links | None = None,
    over: Overheads = OVERHEADS,
    offload: bool = False,
    reserved: float = 0.0,
) -> Search[TrainLayout]:
    """Layouts of `gpus` GPUs that train `model`: TP, PP, CP, EP, and DP for the rest.

    `reserved`: bytes on each GPU that something else keeps (an engine that sleeps). `offload`: optimizer state in host
    memory. Raises `UserError` for less than one GPU.
    """
    if gpus < 1:
        raise UserError(f"gpus = {gpus}: a trainer needs at least one; write gpus = 1 or more")
    shares, links = shares_of(model), links or Links.of(gpu)
    search = _train_search(shares, gpu, gpus, work, links, over, offload, reserved)
    if search.candidates:
        return search

    def tried(count: int, offload: bool) -> bool:
        more = replace(work, sequences=max(work.sequences, count) if work.sequences else 0)
        return bool(_train_search(shares, gpu, count, more, links, over, offload, reserved).candidates)

    return replace(search, nearest=_train_nearest(shares, gpu, gpus, search, tried, offload))


def _train_search(
    shares: Shares,
    gpu: GPU,
    gpus: int,
    work: TrainWork,
    links: Links,
    over: Overheads,
    offload: bool,
    reserved: float,
) -> Search[TrainLayout]:
    capacity = gpu.memory * over.usable - reserved
    found: list[Candidate[TrainLayout]] = []
    out: list[Rejection[TrainLayout]] = []
    for layout in _train_tries(shares, gpus, links.gpus_per_node, work, offload):
        objection = train_objection(shares, layout, gpus, links.gpus_per_node, work.sequences)
        if objection is not None:
            out.append(Rejection(layout, *objection))
            continue
        parts, stage = train_bytes(shares, layout, work, over)
        objection = _too_large(parts, capacity) or _host(shares, layout, work, gpu, links)
        if objection is not None:
            out.append(Rejection(layout, *objection, max(0.0, sum(parts.values()) - capacity)))
            continue
        score, reason = train_score(shares, layout, work, gpu, links, stage)
        found.append(Candidate(layout, parts, capacity, score, reason))
    margin = EQUAL_TRAIN * compute_s(shares, gpus, work.tokens, gpu.bf16_flops)
    return Search(_ranked(found, margin, _train_order), tuple(out))


def _train_order(candidate: Candidate[TrainLayout]) -> tuple[float, ...]:
    """Among equals the fewest ranks that one model is cut into, then the most room."""
    layout = candidate.layout
    return layout.tp * layout.pp * layout.cp, layout.ep, -candidate.headroom


def _ranked(
    found: list[Candidate[Layout]], margin: float, order: Callable[[Candidate[Layout]], tuple[float, ...]]
) -> tuple[Candidate[Layout], ...]:
    """By score, but those within `margin` of the best count as equal to it and go by `order`."""
    if not found:
        return ()
    least = min(each.score for each in found) + margin
    return tuple(sorted(found, key=lambda each: (max(each.score, least), order(each))))


def _host(shares: Shares, layout: TrainLayout, work: TrainWork, gpu: GPU, links: Links) -> Objection | None:
    """What is offloaded must find room in the node."""
    away = host_bytes(shares, layout, work) * min(layout.gpus, links.gpus_per_node)
    if away <= gpu.host_memory * HOST_USABLE:
        return None
    return "host memory", f"{show_size(away)} of optimizer state do not fit a node's {show_size(gpu.host_memory)}"


def _train_tries(shares: Shares, gpus: int, node: int, work: TrainWork, offload: bool) -> Iterator[TrainLayout]:
    """Sizes worth a look: TP to twice a node, PP to the first power of two beyond the layers, CP to the GPUs."""
    tps = degrees(gpus, min(gpus, 2 * node))
    pps = [size for size in degrees(gpus, min(gpus, 2 * shares.layers)) if size <= 64 or size > shares.layers]
    cps = [size for size in degrees(gpus, min(gpus, 32)) if size & (size - 1) == 0 and size <= _most_cp(work)]
    eps = degrees(gpus, min(gpus, shares.experts)) if shares.experts else (1,)
    eps = tuple(size for size in eps if size & (size - 1) == 0 or shares.experts % size == 0)
    for tp in tps:
        for pp in pps:
            for cp in cps:
                cut = tp * pp * cp
                if cut > gpus:
                    continue
                dp = max(1, gpus // cut)
                for ep in eps:
                    yield TrainLayout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, shard="optimizer", offload=offload)
                    if pp == 1:
                        yield TrainLayout(tp=tp, cp=cp, ep=ep, dp=dp, shard="full", offload=offload)


def _most_cp(work: TrainWork) -> int:
    """Context parallelism leaves each rank 1,024 tokens of a micro-batch at least."""
    return max(1, work.micro_batch // 1024)


def _too_large(parts: dict[str, float], capacity: float) -> Objection | None:
    total = sum(parts.values())
    if total <= capacity:
        return None
    owner = max(parts, key=lambda name: parts[name])
    lacking = show_size(total - capacity)
    return "memory", f"{lacking} too much for {show_size(capacity)}; largest: {owner} {show_size(parts[owner])}"


def _train_nearest(
    shares: Shares,
    gpu: GPU,
    gpus: int,
    search: Search[TrainLayout],
    tried: Callable[[int, bool], bool],
    offload: bool,
) -> str:
    """What is closest to `gpus` GPUs that works."""
    ways = []
    if not offload and tried(gpus, True):
        ways.append("offload the optimizer state to host memory")
    if more := _least(gpus, lambda count: tried(count, offload)):
        ways.append(f"use {more} GPUs")
    return _cannot(f"{shares.name} cannot be trained on {gpus} x {gpu.name}", search, ways)


def _least(gpus: int, works: Callable[[int], bool]) -> int:
    """The least power of two, or three times one, above `gpus` that works, 0 where none does."""
    powers = [1 << power for power in range(MOST_GPUS.bit_length())]
    counts = sorted({*powers, *(3 * power for power in powers)})
    return next((count for count in counts if gpus < count <= MOST_GPUS and works(count)), 0)


def _cannot(what: str, search: Search[Layout], ways: list[str]) -> str:
    closest = [row for row in search.rejected if row.lacking] or list(search.rejected)
    why = min(closest, key=lambda row: row.lacking).reason if closest else "no layout has this many GPUs"
    return f"{what}: at best {why}; {' or '.join(ways) or 'use GPUs with more memory or shorter sequences'}"


# -- engines -----------------------------------------------------------------------------------------------------------


def serve_layouts(
    model: Model,
    gpu: GPU,
    gpus: int,
    work: ServeWork,
    *,
    dtype: str = "bf16",
    kv_bytes: float = 2.0,
    links: Links | None = None,
    over: ServeOverheads = SERVE_OVERHEADS,
    mtp: bool = False,
) -> Search[ServeLayout]:
    """Layouts of one engine, of which `gpus` GPUs hold several: TP, EP and attention replicas (DP).

    Raises `UserError` for less than one GPU or an unknown `dtype`.
    """
    if gpus < 1:
        raise UserError(f"gpus = {gpus}: an engine needs at least one; write gpus = 1 or more")
    links = links or Links.of(gpu)
    search = _serve_search(model, gpu, gpus, work, dtype, kv_bytes, links, over, mtp)
    if search.candidates:
        return search

    def tried(count: int, dtype: str) -> bool:
        return bool(_serve_search(model, gpu, count, work, dtype, kv_bytes, links, over, mtp).candidates)

    ways = []
    if dtype in ("bf16", "fp16", "fp32", "stored") and gpu.fp8_flops and tried(gpus, "fp8"):
        ways.append("serve it in fp8")
    if more := _least(gpus, lambda count: tried(count, dtype)):
        ways.append(f"use {more} GPUs")
    what = f"{model.name} in {dtype} cannot be served on {gpus} x {gpu.name}"
    return replace(search, nearest=_cannot(what, search, ways))


def _serve_search(
    model: Model,
    gpu: GPU,
    gpus: int,
    work: ServeWork,
    dtype: str,
    kv_bytes: float,
    links: Links,
    over: ServeOverheads,
    mtp: bool,
) -> Search[ServeLayout]:
    shares, block = served(model, dtype), _block(model, dtype)
    counts = shares_of(model)
    found: list[Candidate[ServeLayout]] = []
    out: list[Rejection[ServeLayout]] = []
    capacity = gpu.memory * over.fraction
    kv = {tp: kv_share(model, tp, kv_bytes) for tp in degrees(gpus, min(gpus, 2 * links.gpus_per_node))}
    for layout in _serve_tries(model, gpus, links.gpus_per_node):
        objection = serve_objection(shares, layout, gpus, links.gpus_per_node, block)
        if objection is not None:
            out.append(Rejection(layout, *objection))
            continue
        parts = serve_bytes(shares, layout, over, mtp)
        objection, share = _too_large(parts, capacity), kv[layout.tp]
        pool, longest = capacity - sum(parts.values()), share.sequence(work.longest)
        if objection is None and pool < longest:
            objection = (
                "kv",
                f"{show_size(pool)} for KV do not take one sequence of {show_tokens(work.longest)} tokens, "
                f"{show_size(longest)}",
            )
        if objection is not None:
            out.append(Rejection(layout, *objection, max(0.0, longest - pool)))
            continue
        score, reason = serve_score(counts, layout, work, gpu, links, share, pool, parts["weights"], gpus)
        found.append(Candidate(layout, parts, capacity, score, reason))
    margin = EQUAL_SERVE * min((each.score for each in found), default=0.0)
    return Search(_ranked(found, margin, _serve_order), tuple(out))


def _block(model: Model, dtype: str) -> int:
    """Side of a block with one scale, which a slice of a matrix must be a multiple of; 0 where there are none."""
    kind = model.stored if dtype == "stored" else dtype
    if kind != "fp8":
        return 0
    return max(model.quantized_block) if model.quantized_block else FP8_BLOCK


def _serve_order(candidate: Candidate[ServeLayout]) -> tuple[float, ...]:
    """Among equals the smallest engine, then the one with the fewest kinds of groups."""
    layout = candidate.layout
    return layout.gpus, layout.dp, layout.ep


def _serve_tries(model: Model, gpus: int, node: int) -> Iterator[ServeLayout]:
    """TP to twice a node; attention replicas and EP where there are experts or KV that tp cannot divide."""
    replicas = bool(model.experts) or any(mixer.kind == "latent" for mixer in model.mixers)
    dps = [size for size in degrees(gpus, min(gpus, 64)) if size & (size - 1) == 0] if replicas else [1]
    for tp in degrees(gpus, min(gpus, 2 * node)):
        for dp in dps:
            if tp * dp > gpus:
                continue
            eps = degrees(tp * dp, tp * dp) if model.experts else (1,)
            for ep in eps:
                yield ServeLayout(tp=tp, dp=dp, ep=ep)
