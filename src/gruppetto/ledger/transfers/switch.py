"""Memory hand-over where trainer and engines share GPUs: what leaves, by which route, in how long, and what stays.

    sleep        engine weights              KV pool     on wake
    keep         stay                        stays       nothing to do
    level1       copied to host memory       discarded   copied back (vLLM /sleep?level=1)
    level2       discarded                   discarded   come with the weight sync, or from disk (vLLM level 2)
    release      discarded, tag by tag       by its tag  come with the weight sync (SGLang release_memory_occupation)

CUDA graphs keep their virtual addresses in all of them and are not captured again, unless `recapture` says that an
engine drops them. Promises: `seconds` is the sum of the hand-overs; nothing is counted that moves with the weight sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.engines import gpu_weight_bytes
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.transfers.pieces import share_on_trainer
from gruppetto.ledger.units import show_seconds, show_size

Sleep = Literal["keep", "level1", "level2", "release"]
Owner = Literal["params", "grads", "optimizer"]
TAGS = ("kv_cache", "weights", "cuda_graph")
MOVES = ("to host", "from host", "from disk")
"""Routes on which bytes cross a link."""
OPTIMIZER_BYTES = 12.0
"""A parameter: fp32 master copy, two fp32 moments (ZeRO, arXiv:1910.02054, section 3.1)."""


class HandOver(NamedTuple):
    """One thing that leaves or comes back, on one GPU."""

    what: str
    when: Literal["to training", "to generation"]
    bytes: Figure
    route: Literal["to host", "from host", "from disk", "unmapped", "mapped", "freed", "captured"]
    seconds: Figure


class Switch(NamedTuple):
    """All hand-overs of one step: to training and back."""

    hand_overs: tuple[HandOver, ...]
    to_training: Figure
    to_generation: Figure
    seconds: Figure
    engine_residue: Figure
    """Bytes of each GPU that the sleeping engine keeps while the trainer works."""
    trainer_residue: Figure
    """Bytes of each GPU that the trainer keeps while engines work."""
    host_memory: Figure
    """Bytes of host memory on one node, at most at once."""

    @property
    def moved(self) -> float:
        """Bytes of one GPU that cross a link; pages that are mapped, unmapped or freed do not."""
        return sum(each.bytes.value for each in self.hand_overs if each.route in MOVES)

    def share_of(self, step_s: float) -> float:
        """Share of a step of so many seconds."""
        return self.seconds.value / step_s


def switch(
    model: Model,
    train: TrainLayout,
    serve: ServeLayout,
    gpu: GPU,
    *,
    sleep: Sleep = "level2",
    tags: Sequence[str] = TAGS,
    dtype: str = "bf16",
    kv_pool: float | None = None,
    offload: Sequence[Owner] = ("params", "grads", "optimizer"),
    destroy_groups: bool = True,
    grad_bytes: float = 2.0,
    reload: bool = False,
    recapture: bool = False,
    guests: Sequence[tuple[str, float, float]] = (),
    asleep: float | None = None,
    efficiency: Efficiency = DEFAULT,
) -> Switch:
    """The hand-overs between an engine in `serve` and a trainer in `train` on the same GPUs.

    `kv_pool`: bytes of a GPU (default: what weights leave). `tags`: what "release" gives back. `offload`: what the
    trainer moves to host memory while engines work; gradients are freed, not moved. `destroy_groups`: the trainer's
    process groups go with it. `reload`: level 2 weights from disk, not from the trainer. `guests`: models beside
    the policy, each with the bytes of a GPU that come to training and that go to generation. `asleep`: bytes
    that the engine's own account says stay with it (default: what is published). Raises `UserError` for words that are
    none of these.
    """
    _check(sleep, tags, offload)
    weights = gpu_weight_bytes(model, serve, dtype)
    pool = max(0.0, gpu.memory * efficiency.memory_fraction - weights) if kv_pool is None else kv_pool
    found = [
        *_engine(sleep, tags, weights, pool, gpu, reload, recapture, efficiency),
        *_trainer(model, train, gpu, offload, grad_bytes, efficiency),
        *_guests(guests, gpu, efficiency),
    ]
    if efficiency.switch_s and found:
        found += [_fixed("to training", efficiency), _fixed("to generation", efficiency)]
    away = [h for h in found if h.when == "to training"]
    back = [h for h in found if h.when == "to generation"]
    host = _host_bytes(found, gpu)
    return Switch(
        hand_overs=tuple(found),
        to_training=_sum(away, efficiency),
        to_generation=_sum(back, efficiency),
        seconds=_sum(found, efficiency),
        engine_residue=_engine_residue(sleep, tags, weights, pool, asleep, efficiency),
        trainer_residue=_trainer_residue(model, train, offload, grad_bytes, destroy_groups, efficiency),
        host_memory=Figure(host, "bytes", f"{gpu.gpus_per_node} GPUs x {show_size(host / gpu.gpus_per_node)}"),
    )


def _fixed(when: Literal["to training", "to generation"], efficiency: Efficiency) -> HandOver:
    """What a hand-over costs beside what moves."""
    nothing = Figure(0.0, "bytes", "nothing moves")
    seconds = Figure(efficiency.switch_s, "s", "barriers, allocators", efficiency.source("switch_s"))
    return HandOver(what="processes", when=when, bytes=nothing, route="freed", seconds=seconds)


def wake(
    model: Model,
    serve: ServeLayout,
    gpu: GPU,
    *,
    sleep: Sleep,
    dtype: str = "bf16",
    reload: bool = True,
    efficiency: Efficiency = DEFAULT,
) -> Figure:
    """Seconds until a sleeping engine is awake by itself: weights back from host memory (level 1) or disk (level 2)."""
    weights = gpu_weight_bytes(model, serve, dtype)
    found = _engine(sleep, TAGS, weights, 0.0, gpu, reload, False, efficiency)
    return _sum([h for h in found if h.when == "to generation"], efficiency)


def _check(sleep: str, tags: Sequence[str], offload: Sequence[str]) -> None:
    for name, values, known in (
        ("sleep", (sleep,), ("keep", "level1", "level2", "release")),
        ("tag", tags, TAGS),
        ("offload", offload, ("params", "grads", "optimizer")),
    ):
        for value in values:
            if value not in known:
                raise UserError(f"{name} = {value!r}: not known; write {', '.join(known)}")


def _engine(
    sleep: Sleep, tags: Sequence[str], weights: float, pool: float, gpu: GPU, reload: bool, recapture: bool,
    efficiency: Efficiency,
) -> list[HandOver]:  # fmt: skip
    """The engine's part: asleep before training, awake after it. One call maps or unmaps everything."""
    if sleep == "keep":
        return []
    found = []
    released = TAGS if sleep != "release" else tags
    if "kv_cache" in released:
        pages = Figure(pool, "bytes", "KV pool of a GPU, contents discarded")
        once = Figure(efficiency.remap_s, "s", "one call", efficiency.source("remap_s"))
        found.append(HandOver(what="KV pool", when="to training", bytes=pages, route="unmapped", seconds=once))
        found.append(HandOver(what="KV pool", when="to generation", bytes=pages, route="mapped", seconds=once))
    if "weights" in released:
        held = Figure(weights, "bytes", "weights of a GPU")
        if sleep == "level1":
            moved = _over_host("weights", weights, gpu, efficiency)
            found.append(_weights("to training", held, "to host", moved))
            found.append(_weights("to generation", held, "from host", moved))
        else:
            nothing = Figure(0.0, "s", "in the same call")
            found.append(_weights("to training", held, "unmapped", nothing))
            if reload:
                each = efficiency.disk_read
                text = f"{show_size(weights)} / {show_size(each)}/s"
                read = Figure(weights / each, "s", text, efficiency.source("disk_read"))
                found.append(_weights("to generation", held, "from disk", read))
            else:
                found.append(_weights("to generation", held, "mapped", Figure(0.0, "s", "contents: the weight sync")))
    if recapture:
        seconds = efficiency.graphs * efficiency.graph_s
        text = f"{efficiency.graphs} graphs x {show_seconds(efficiency.graph_s)}"
        graphs = Figure(efficiency.graph_bytes, "bytes", "captured graphs", efficiency.source("graph_bytes"))
        taken = Figure(seconds, "s", text, efficiency.source("graph_s"))
        found.append(HandOver(what="CUDA graphs", when="to generation", bytes=graphs, route="captured", seconds=taken))
    return found


def _weights(
    when: Literal["to training", "to generation"],
    held: Figure,
    route: Literal["to host", "from host", "from disk", "unmapped", "mapped"],
    seconds: Figure,
) -> HandOver:
    return HandOver(what="engine weights", when=when, bytes=held, route=route, seconds=seconds)


def trainer_bytes(model: Model, train: TrainLayout, grad_bytes: float = 2.0) -> dict[Owner, float]:
    """Bytes of one trainer rank by owner, spread evenly: 16-bit parameters, gradients, 12 bytes of optimizer."""
    params, experts = float(model.params), float(model.expert_params)
    dense_share, expert_share = (share_on_trainer(train, expert=expert) for expert in (False, True))
    held = (params - experts) * dense_share + experts * expert_share
    states = held if train.shard == "none" else params / train.gpus
    return {
        "params": 2.0 * held,
        "grads": grad_bytes * held,
        "optimizer": 0.0 if train.offload else OPTIMIZER_BYTES * states,
    }


def _trainer(
    model: Model, train: TrainLayout, gpu: GPU, offload: Sequence[Owner], grad_bytes: float, efficiency: Efficiency
) -> list[HandOver]:
    """The trainer's part: back onto the GPU before training, off it after."""
    found = []
    for owner, num_bytes in trainer_bytes(model, train, grad_bytes).items():
        if owner not in offload or num_bytes == 0:
            continue
        held = Figure(num_bytes, "bytes", f"{owner} of a rank, over {train.gpus} GPUs")
        if owner == "grads":
            freed = Figure(0.0, "s", "made anew by the backward pass")
            found.append(HandOver(what="trainer grads", when="to generation", bytes=held, route="freed", seconds=freed))
            continue
        moved, what = _over_host(owner, num_bytes, gpu, efficiency), f"trainer {owner}"
        found.append(HandOver(what=what, when="to training", bytes=held, route="from host", seconds=moved))
        found.append(HandOver(what=what, when="to generation", bytes=held, route="to host", seconds=moved))
    return found


def _guests(guests: Sequence[tuple[str, float, float]], gpu: GPU, efficiency: Efficiency) -> list[HandOver]:
    """Critic, reference, judge: they leave for the engines too. What is only read keeps its copy in host memory."""
    found = []
    for name, comes, goes in guests:
        moved = _over_host(name, comes, gpu, efficiency)
        held = Figure(comes, "bytes", f"{name}, of a GPU")
        found.append(HandOver(what=name, when="to training", bytes=held, route="from host", seconds=moved))
        if goes:
            held, moved = Figure(goes, "bytes", f"{name}, of a GPU"), _over_host(name, goes, gpu, efficiency)
            found.append(HandOver(what=name, when="to generation", bytes=held, route="to host", seconds=moved))
        else:
            freed = Figure(0.0, "s", "only read: its copy is in host memory")
            found.append(HandOver(what=name, when="to generation", bytes=held, route="freed", seconds=freed))
    return found


def _over_host(what: str, num_bytes: float, gpu: GPU, efficiency: Efficiency) -> Figure:
    speed = gpu.host_link * efficiency.host_link
    text = f"{what}: {show_size(num_bytes)} / ({show_size(gpu.host_link)}/s x {efficiency.host_link:.2g})"
    return Figure(num_bytes / speed, "s", text, efficiency.source("host_link"))


def _sum(found: Sequence[HandOver], efficiency: Efficiency) -> Figure:
    taken = [hand_over.seconds.value for hand_over in found if hand_over.seconds.value]
    return Figure(sum(taken), "s", " + ".join(map(show_seconds, taken)) or "nothing moves", efficiency.name)


def _host_bytes(found: Sequence[HandOver], gpu: GPU) -> float:
    """On a node: the engine's copy while training, or the trainer's while generating, whichever is more."""
    engine = sum(h.bytes.value for h in found if h.when == "to training" and h.route == "to host")
    trainer = sum(h.bytes.value for h in found if h.when == "to training" and h.route == "from host")
    return gpu.gpus_per_node * max(engine, trainer)


def _engine_residue(
    sleep: Sleep, tags: Sequence[str], weights: float, pool: float, asleep: float | None, efficiency: Efficiency
) -> Figure:
    stays, text = efficiency.residual_bytes if asleep is None else asleep, ["context, libraries, graphs"]
    released = {"keep": (), "release": tuple(tags)}.get(sleep, TAGS)
    for tag, num_bytes in (("weights", weights), ("kv_cache", pool)):
        if tag not in released:
            stays += num_bytes
            text.append(f"{tag} {show_size(num_bytes)}")
    if "cuda_graph" not in released:
        stays += efficiency.graph_bytes
        text.append(f"cuda_graph {show_size(efficiency.graph_bytes)}")
    return Figure(stays, "bytes", " + ".join(text), efficiency.source("residual_bytes") if asleep is None else "")


def _trainer_residue(
    model: Model,
    train: TrainLayout,
    offload: Sequence[Owner],
    grad_bytes: float,
    destroyed: bool,
    efficiency: Efficiency,
) -> Figure:
    stays, text = efficiency.trainer_residual_bytes, [f"context {show_size(efficiency.trainer_residual_bytes)}"]
    if not destroyed:
        stays += efficiency.process_groups_bytes
        text.append(f"process groups {show_size(efficiency.process_groups_bytes)}")
    for owner, num_bytes in trainer_bytes(model, train, grad_bytes).items():
        if owner not in offload:
            stays += num_bytes
            text.append(f"{owner} {show_size(num_bytes)}")
    return Figure(stays, "bytes", " + ".join(text), efficiency.source("trainer_residual_bytes"))
