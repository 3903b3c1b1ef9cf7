"""The account of one full weight sync: steps, bytes by rank, buckets, memory, the least it can take and what it will.

Three ways to send, from the best to the simplest:

    reshard    each engine GPU gets exactly its part from the trainer ranks that hold it (NeMo-RL, DORA)
    broadcast  whole tensors are gathered on a sender and broadcast to all engine GPUs (verl, slime, OpenRLHF)
    gather     each engine GPU fetches the whole model over its own link, and keeps its part (ring of point-to-point)

and four routes: ipc (engines on the trainer's GPUs), node (other GPUs of the same node), network, disk.

Promises: `expected` is the sum of `parts`, none of which is negative; `bound` counts data-sheet link time only and is
never above what the parts that move bytes take. Published runs overlap the parts little, hence a sum.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.machines.cluster import Cluster, Link
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.machines.storage import FLOATS, model_bytes, real_type
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.transfers.mapping import Step, mapping_steps
from gruppetto.ledger.transfers.pieces import Piece, buckets, pieces, share_on_trainer
from gruppetto.ledger.units import show_seconds, show_size

How = Literal["reshard", "broadcast", "gather"]
Route = Literal["ipc", "node", "network", "disk"]
BUCKET_BYTES = 1 << 30
"""vLLM's packed buffer: 1 GiB (slime 512 MiB, verl 2 GiB)."""
JOINED = DEFAULT.gather
JOINED_RATES = (60e9, 5e9)
"""Bytes/s at which published exporters make whole tensors of shards, the fastest and the slowest (verl, NeMo-RL)."""
_BULK = ("mlp", "expert")


class Sync(NamedTuple):
    """One weight sync. Bytes are of the fullest rank, unless said."""

    how: How
    route: Route
    link: Link
    steps: tuple[Step, ...]
    total: Figure
    """Bytes of the whole model as it travels."""
    needed: Figure
    """Bytes that one engine GPU keeps."""
    received: Figure
    """Bytes that one engine GPU gets over `link`."""
    sent: Figure
    """Bytes that one sending trainer rank puts on `link`, engines passing on among themselves."""
    gathered: Figure
    """Bytes, in 16 bits, that one sender receives from others before anything is sent; each stage has a sender."""
    tensors: Figure
    buckets: Figure
    sender_memory: Figure
    """Extra bytes on a sending rank at the peak."""
    receiver_memory: Figure
    bound: Figure
    parts: tuple[Figure, ...]
    """Seconds, by what they go to."""
    expected: Figure
    joined_s: float = 0.0
    """Seconds of `expected` in which whole tensors are made of shards, where their rate is assumed; else 0."""

    @property
    def between(self) -> tuple[float, float]:
        """Seconds with the fastest and the slowest rate that published exporters join tensors at; `expected` twice
        where the rate is a source's own."""
        fast, slow = (self.expected.value + self.joined_s * (JOINED / rate - 1) for rate in JOINED_RATES)
        return fast, slow

    def share_of(self, step_s: float) -> float:
        """Share of a step of so many seconds."""
        return self.expected.value / step_s


class _Bytes(NamedTuple):
    """Numbers that bound and parts are made of."""

    total: float
    needed: float
    received: float
    sent: float
    gathered: float
    dense16: float
    """Of one stage's whole tensors in 16 bits, experts aside: what its sender joins."""
    experts16: float
    own: float
    """What a trainer rank holds, 16 bits."""
    tensors: int


def sync(
    model: Model,
    train: TrainLayout,
    serve: ServeLayout,
    gpu: GPU,
    *,
    how: How = "reshard",
    route: Route = "network",
    dtype: str = "bf16",
    quantize: Literal["before", "after"] = "before",
    engines: int = 1,
    bucket_bytes: float = BUCKET_BYTES,
    shared_link: float = 0.0,
    params_in_host: bool = False,
    mtp: bool = False,
    efficiency: Efficiency = DEFAULT,
) -> Sync:
    """The account of one sync of `model` to `engines` engines that hold it in `dtype`.

    `quantize`: where 16 bits become `dtype`, before the wire or behind it. `shared_link`: bytes/s of one link that all
    of it crosses once (two sites). `params_in_host`: the trainer's parameters lie in host memory. Raises `UserError`
    for layouts that cannot be.
    """
    _check(model, serve, engines, route, how)
    wire = dtype if quantize == "before" else "bf16"
    sent = pieces(model, wire, serve, mtp=mtp)
    size = _sizes(model, train, serve, sent, how, route, efficiency)
    cluster = Cluster(gpu=gpu, gpus=train.gpus if route == "ipc" else train.gpus + engines * serve.gpus)
    link = _link(cluster, how, route, engines * serve.gpus)
    parts = _parts(model, size, link, cluster, train, serve, how, route, dtype, quantize, params_in_host, efficiency)
    if shared_link:
        text = f"one link between sites: {show_size(size.total)} / {show_size(shared_link)}/s"
        parts = (*parts, Figure(size.total / shared_link, "s", text, "given"))
    packed = buckets(sent, bucket_bytes)
    unit = max(piece.unit_bytes for piece in sent)
    seconds = sum(part.value for part in parts)
    return Sync(
        how=how,
        route=route,
        link=link,
        steps=mapping_steps(model, train, serve, sent, dtype=dtype, wire=wire, gathers=how != "reshard"),
        total=Figure(size.total, "bytes", f"{model.name} in {wire}, buffers and scales with it"),
        needed=Figure(
            size.needed, "bytes", f"over tp = {serve.tp}, experts over {serve.gpus} GPUs; norms whole on each"
        ),
        received=_received(size, how, route, efficiency),
        sent=_sent(size, how, train),
        gathered=Figure(size.gathered, "bytes", _gathered_text(size, how, train)),
        tensors=Figure(size.tensors, "tensors", "tensors of the checkpoint, scales with them"),
        buckets=Figure(packed.count, "buckets", f"{show_size(size.total)} in buckets of {show_size(bucket_bytes)}"),
        sender_memory=_sender_memory(how, size, packed.largest, unit),
        receiver_memory=Figure(2 * packed.largest, "bytes", f"2 buckets of up to {show_size(packed.largest)}"),
        bound=_bound(size, link, cluster, how, route, shared_link),
        parts=parts,
        expected=Figure(seconds, "s", " + ".join(show_seconds(part.value) for part in parts), efficiency.name),
        joined_s=_joined_s(size, how, efficiency),
    )


def _check(model: Model, serve: ServeLayout, engines: int, route: str, how: str) -> None:
    if engines < 1:
        raise UserError(f"engines = {engines}: a sync needs an engine to go to; write engines = 1 or more")
    if serve.ep > 1 and not model.experts:
        raise UserError(f"ep = {serve.ep}: {model.name} has no experts; write ep = 1")
    if serve.gpus % serve.ep:
        raise UserError(f"ep = {serve.ep} does not divide the engine's {serve.gpus} GPUs; use a divisor of them")
    for name, value, known in (("route", route, get_args(Route)), ("how", how, get_args(How))):
        if value not in known:
            raise UserError(f"{name} = {value!r}: not known; write {', '.join(known)}")


def _sizes(
    model: Model, train: TrainLayout, serve: ServeLayout, sent: tuple[Piece, ...], how: How, route: Route,
    efficiency: Efficiency,
) -> _Bytes:  # fmt: skip
    total = sum(piece.total for piece in sent)
    experts = sum(piece.total for piece in sent if piece.kind == "expert")
    needed = sum(piece.total * piece.on_rank for piece in sent)
    received = total
    if how == "reshard":
        received = needed
        if efficiency.misc_broadcast:
            received = sum(p.total * (p.on_rank if p.kind in _BULK else 1.0) for p in sent)
    dense_share, expert_share = (share_on_trainer(train, expert=expert) for expert in (False, True))
    if route == "ipc":
        received = max(0.0, received - (total - experts) * dense_share - experts * expert_share)
    routed = 2.0 * model.expert_params
    own = (model_bytes(model, "bf16") - routed) * dense_share + routed * expert_share
    stage = model_bytes(model, "bf16") / train.pp
    gathered = 0.0 if how == "reshard" else max(0.0, stage - own)
    return _Bytes(
        total=total,
        needed=needed,
        received=received,
        sent=total / train.gpus if how == "reshard" else total,
        gathered=gathered,
        dense16=stage - routed / train.pp,
        experts16=routed / train.pp,
        own=own,
        tensors=sum(piece.count * piece.tensors for piece in sent),
    )


def _link(cluster: Cluster, how: How, route: Route, receivers: int) -> Link:
    """The link that bounds the transfer: a broadcast enters a node once, over all of its adapters."""
    if route == "disk":
        return Link("disk", cluster.gpu.network * cluster.gpu.gpus_per_node, cluster.gpu.source)
    if route == "node" or (route == "ipc" and cluster.gpus <= cluster.gpu.gpus_per_node):
        return cluster.inside()
    if how == "broadcast" or route == "ipc":
        per_node = min(cluster.gpu.gpus_per_node, cluster.gpus if route == "ipc" else receivers)
        shared = min(cluster.inside().bytes_s, cluster.gpu.network * per_node)
        return Link("network", shared, cluster.gpu.source)
    return cluster.across()


def _bound(size: _Bytes, link: Link, cluster: Cluster, how: How, route: Route, shared_link: float) -> Figure:
    """The least seconds: the fuller side of the link, and the copy into place where trainer and engine share a GPU."""
    moved = size.received if route in ("ipc", "disk") else max(size.received, size.sent)
    if how == "reshard" and route != "ipc":
        moved = max(size.needed, size.sent)
    seconds = moved / link.bytes_s
    text = f"{show_size(moved)} / {show_size(link.bytes_s)}/s ({link.name})"
    if route == "ipc":
        seconds += 2 * size.needed / cluster.gpu.bandwidth
        text += f" + 2 x {show_size(size.needed)} / {show_size(cluster.gpu.bandwidth)}/s"
    if shared_link and size.total / shared_link > seconds:
        seconds, text = (
            size.total / shared_link,
            f"{show_size(size.total)} / {show_size(shared_link)}/s (between sites)",
        )
    return Figure(seconds, "s", text, link.source)


def _parts(
    model: Model, size: _Bytes, link: Link, cluster: Cluster, train: TrainLayout, serve: ServeLayout, how: How,
    route: Route, dtype: str, quantize: str, params_in_host: bool, efficiency: Efficiency,
) -> tuple[Figure, ...]:  # fmt: skip
    """Seconds by what they go to; each at least 0, parts of no length left out."""
    found = [Figure(efficiency.sync_s, "s", "pause, metadata, post-load, resume", efficiency.source("sync_s"))]
    if efficiency.tensor_s:
        text = f"{size.tensors:,} tensors x {show_seconds(efficiency.tensor_s)}"
        found.append(Figure(size.tensors * efficiency.tensor_s, "s", text, efficiency.source("tensor_s")))
    if params_in_host:
        found.append(_at("shard from host memory", size.own, efficiency, "offloaded"))
    if how != "reshard":
        found.append(_at("whole tensors made of shards", size.dense16, efficiency, "gather"))
        found.append(_at("whole experts made of shards", size.experts16, efficiency, "gather_experts"))
    if real_type(model, dtype) not in FLOATS:
        here = model_bytes(model, "bf16") / train.gpus if quantize == "before" else size.needed
        found.append(_at(f"quantised {quantize} sending", here, efficiency, "quantize"))
        found.append(_at("quantised weights installed", size.needed, efficiency, "load_quantized"))
    if route == "disk":
        nodes = max(1, train.gpus // cluster.gpu.gpus_per_node)
        found.append(_at(f"written by {nodes} nodes", size.total / nodes, efficiency, "disk_write"))
        found.append(_at("read by each engine node", size.total, efficiency, "disk_read"))
    else:
        found.append(_wire(size, link, how, route, efficiency))
    if route == "ipc":
        copied = 2 * size.needed / cluster.gpu.bandwidth
        text = f"copied in place: 2 x {show_size(size.needed)} / {show_size(cluster.gpu.bandwidth)}/s"
        found.append(Figure(copied, "s", text, cluster.gpu.source))
    return tuple(part for part in found if part.value > 0)


def _at(what: str, num_bytes: float, efficiency: Efficiency, rate: str) -> Figure:
    """Seconds of bytes at one of the efficiency's rates."""
    speed = getattr(efficiency, rate)
    return Figure(
        num_bytes / speed, "s", f"{what}: {show_size(num_bytes)} / {show_size(speed)}/s", efficiency.source(rate)
    )


def _wire(size: _Bytes, link: Link, how: How, route: Route, efficiency: Efficiency) -> Figure:
    name = {"nvlink": "nvlink", "pcie": "host_link"}.get(link.name, "network")
    share = getattr(efficiency, name)
    moved = size.received if route == "ipc" else max(size.received, size.sent)
    text = f"{how}: {show_size(moved)} / ({show_size(link.bytes_s)}/s x {share:.2g}, {link.name})"
    return Figure(moved / (link.bytes_s * share), "s", text, efficiency.source(name))


def _received(size: _Bytes, how: How, route: Route, efficiency: Efficiency) -> Figure:
    if how != "reshard":
        text = "the whole model" + (", less what the rank holds" if route == "ipc" else "")
    else:
        text = "what it keeps" + ("; all but MLP and experts whole" if efficiency.misc_broadcast else "")
    return Figure(size.received, "bytes", text)


def _sent(size: _Bytes, how: How, train: TrainLayout) -> Figure:
    if how != "reshard":
        return Figure(size.sent, "bytes", f"{show_size(size.total)} from one sender")
    return Figure(size.sent, "bytes", f"{show_size(size.total)} / {train.gpus} trainer GPUs, each part once")


def _gathered_text(size: _Bytes, how: How, train: TrainLayout) -> str:
    if how == "reshard":
        return "nothing: sent from the shards"
    stage = f"one of {train.pp} stages" if train.pp > 1 else "the model"
    return f"{show_size(size.dense16 + size.experts16)} of {stage} in 16 bits - {show_size(size.own)} of its own"


def _joined_s(size: _Bytes, how: How, efficiency: Efficiency) -> float:
    """Seconds of joining at rates that nobody published for this setting."""
    if how == "reshard":
        return 0.0
    dense = 0.0 if "gather" in efficiency.own else size.dense16 / efficiency.gather
    return dense + (0.0 if "gather_experts" in efficiency.own else size.experts16 / efficiency.gather_experts)


def _sender_memory(how: How, size: _Bytes, bucket: float, unit: float) -> Figure:
    if how == "reshard":
        return Figure(bucket, "bytes", f"staging of one bucket, {show_size(bucket)}")
    if how == "gather":
        return Figure(size.total, "bytes", f"the whole model, {show_size(size.total)}")
    return Figure(2 * bucket + unit, "bytes", f"2 buckets and the largest whole piece, {show_size(unit)}")
