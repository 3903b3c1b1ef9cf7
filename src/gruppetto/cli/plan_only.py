"""One account of a plan by itself: a weight sync, the hand-over of memory, KV, or sandboxes. No placement is needed, so
layouts that do not fit a GPU can be asked about too; then it says that they do not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gruppetto.cli.plan_arguments import Given, ask_of
from gruppetto.cli.plan_unmoved import unread
from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import TrainWork, train_memory
from gruppetto.ledger.layouts.rules import serve_objection, train_objection
from gruppetto.ledger.layouts.serving import ServeOverheads, kv_share, serve_memory
from gruppetto.ledger.layouts.shares import shares_of
from gruppetto.ledger.machines.storage import kv_element_bytes
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.placements import Placements
from gruppetto.ledger.plan.sandboxes import account
from gruppetto.ledger.transfers.delta import delta
from gruppetto.ledger.transfers.switch import switch
from gruppetto.ledger.transfers.sync import Route, sync
from gruppetto.ledger.units import seconds, show_binary, show_seconds, show_share, show_size

ACCOUNTS = ("kv", "sync", "switch", "sandboxes")


def show_only(args: argparse.Namespace, given: Given) -> dict[str, Any]:
    """Prints one account and returns it as plain data."""
    lines, found = _account(ask_of(args, given), args)
    unmoved = unread(args, lambda ask, words: [*_account(ask, words)[0]])
    if args.json != "-":
        print("\n".join([*lines, *unmoved]))
    data = {name: {"value": f.value, "unit": f.unit, "formula": f.formula} for name, f in found.items()}
    return {args.only: data, "without_effect": list(unmoved)}


def _account(ask: Ask, args: argparse.Namespace) -> tuple[list[str], dict[str, Figure]]:
    """Its lines, and the figures in them."""
    makers = {"kv": _kv, "sync": _sync, "switch": _switch, "sandboxes": _sandboxes}
    found: dict[str, Figure] = {}
    return list(makers[args.only](ask, args, found)), found


def _lines(found: Mapping[str, Figure]) -> Iterator[str]:
    for name, figure in found.items():
        shown = {"bytes": show_size, "s": show_seconds}.get(figure.unit)
        value = shown(figure.value) if shown else f"{figure.value:,.6g} {figure.unit}".rstrip()
        yield f"  {name} = {value}: {figure.formula}" + (f"  [{figure.source}]" if figure.source else "")


# -- accounts ----------------------------------------------------------------------------------------------------------


def _kv(ask: Ask, args: argparse.Namespace, found: dict[str, Figure]) -> Iterator[str]:
    model, element = ask.model, kv_element_bytes(ask.kv_dtype)
    length = round(ask.sequence(ask.lengths.mean))
    count = ask.rollouts.count
    token = model.kv_bytes_per_token(element)
    each = model.sequence_bytes(length, element)
    grows = "grows with every token of context" if token else "beyond its window no layer keeps a token"
    found["token"] = Figure(token, "bytes", f"{grows}, {ask.kv_dtype}")
    found["sequence"] = Figure(each, "bytes", _sequence_words(model, length, element))
    found["all"] = Figure(each * count, "bytes", f"{count:,} sequences x {each:,.0f} bytes")
    size = f"{_gib(each * count)} ({show_size(each * count)})"
    yield f"KV of {count:,} sequences of {length:,} tokens on {model.name}: {size}"
    yield from _lines(found)
    yield from (f"  not known: {sentence}" for sentence in model.unknown)


def _sequence_words(model: Model, length: int, element: float) -> str:
    """What a sequence keeps: what grows, what ends at a window, and states."""
    share, parts = kv_share(model, 1, element), []
    if share.growing:
        parts.append(f"{length:,} tokens x {share.growing:,.0f} bytes")
    for window, each in share.windows:
        capped = f" (a window of {window:,})" if window < length else ""
        parts.append(f"{min(length, window):,} tokens{capped} x {each:,.0f} bytes")
    if share.state:
        parts.append(f"{share.state:,.0f} bytes of states")
    return " + ".join(parts)


def _gib(num_bytes: float) -> str:
    """One more digit than elsewhere: this is what people compare."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if 1 <= gib < 1e5 else show_binary(num_bytes)


def _layouts(ask: Ask) -> tuple[TrainLayout, ServeLayout, list[str]]:
    """The user's layouts, or the best ones; and what does not fit."""
    placements, said = Placements(ask), []
    serve = ask.serve or placements.sides.rollout(_rollout_gpus(ask)).layout
    trainers = ask.gpus if ask.split is None else ask.split[1]
    if ask.train is None:
        train = placements.sides.trainer(trainers).layout
    else:
        cut = ask.train.tp * ask.train.pp * ask.train.cp
        train = replace(ask.train, dp=max(1, trainers // cut))
    shares = shares_of(ask.model)
    wrong = train_objection(shares, train, train.gpus, ask.gpu.gpus_per_node) if ask.train else None
    wrong = wrong or (serve_objection(shares, serve, serve.gpus, ask.gpu.gpus_per_node) if ask.serve else None)
    if wrong is not None:
        said.append(f"{wrong[1]}: no run has it")
    work = TrainWork(tokens_per_micro_batch=ask.micro_tokens, longest=ask.context, sequences=ask.rollouts.count)
    held = train_memory(ask.model, train, work, ask.gpu.memory)
    if not held.fits:
        said.append(f"a trainer rank would hold {show_size(held.total)} of {show_size(held.capacity)}: it does not fit")
    over = ServeOverheads.of(ask.efficiency)
    kept = serve_memory(ask.model, serve, ask.gpu.memory, dtype=ask.serve_dtype, over=over)
    if not kept.fits:
        said.append(
            f"an engine GPU would hold {show_size(kept.total)} without KV, of {show_size(kept.capacity)}: it does not "
            "fit"
        )
    return train, serve, said


def _rollout_gpus(ask: Ask) -> int:
    return ask.gpus if ask.split is None else ask.split[0]


def _saved(seconds: float) -> str:
    return f"saves {show_seconds(seconds)}" if seconds >= 0 else f"slower than a full sync by {show_seconds(-seconds)}"


def _sync(ask: Ask, args: argparse.Namespace, found: dict[str, Figure]) -> Iterator[str]:
    train, serve, said = _layouts(ask)
    engines = max(1, _rollout_gpus(ask) // serve.gpus)
    route: Route = args.route or ("network" if ask.gpus > ask.gpu.gpus_per_node else "node")
    one = sync(
        ask.model, train, serve, ask.gpu, how=ask.sync_how, route=route, dtype=ask.serve_dtype, engines=engines,
        efficiency=ask.efficiency,
    )  # fmt: skip
    yield (
        f"Weight sync of {ask.model.name}: trainer tp{train.tp} pp{train.pp} cp{train.cp} ep{train.ep} dp{train.dp}, "
        f"{engines} engines of tp{serve.tp} ep{serve.ep} dp{serve.dp} in {ask.serve_dtype}; {one.how}, {route}"
    )
    yield from (f"  note: {sentence}" for sentence in said)
    yield from (f"  {number}. {step.name}: {step.what}" for number, step in enumerate(one.steps, start=1))
    for name in ("total", "needed", "received", "sent", "gathered", "tensors", "buckets", "sender_memory",
                 "receiver_memory", "bound", "expected"):  # fmt: skip
        found[name] = getattr(one, name)
    yield from _lines(found)
    yield from (f"    {show_seconds(part.value)}: {part.formula}  [{part.source}]" for part in one.parts)
    if one.joined_s:
        fast, slow = (show_seconds(seconds) for seconds in one.between)
        yield f"  {fast} to {slow} where whole tensors are made at 60 to 5 GB/s, as published exporters make them"
    less = delta(ask.model, train, one, density=ask.changed, efficiency=ask.efficiency)
    found |= {"delta": less.payload, "delta_expected": less.expected, "delta_saved": less.saved}
    yield (
        f"As a delta of {ask.changed * 100:.3g} % of the weights ({less.encoding}): {show_size(less.payload.value)}, "
        f"{show_seconds(less.expected.value)}; {_saved(less.saved.value)}; a full sync is faster from "
        f"{less.break_even_seconds.value:.2%} on"
    )
    yield from _share(args, one.expected)


def _switch(ask: Ask, args: argparse.Namespace, found: dict[str, Figure]) -> Iterator[str]:
    train, serve, said = _layouts(replace(ask, split=None))
    one = switch(ask.model, train, serve, ask.gpu, sleep=ask.sleep, dtype=ask.serve_dtype, efficiency=ask.efficiency)
    yield (
        f"Hand-over of {ask.model.name} on {ask.gpus} x {ask.gpu.name}: engine tp{serve.tp}, trainer tp{train.tp} "
        f"pp{train.pp} dp{train.dp} {train.shard}; engines sleep by {ask.sleep}"
    )
    yield from (f"  note: {sentence}" for sentence in said)
    for each in one.hand_overs:
        yield (
            f"  {each.what}, {each.when}: {show_size(each.bytes.value)} a GPU, {each.route}, "
            f"{show_seconds(each.seconds.value)}  ({each.seconds.formula})"
        )
    for name in ("to_training", "to_generation", "seconds", "engine_residue", "trainer_residue", "host_memory"):
        found[name] = getattr(one, name)
    yield from _lines(found)
    yield from _share(args, one.seconds)


def _share(args: argparse.Namespace, taken: Figure) -> Iterator[str]:
    if args.step:
        step_s = seconds(args.step, "--step")
        if not step_s > 0:
            raise UserError(f"--step {args.step}: a step takes time; write --step 5m")
        yield f"{show_share(taken.value / step_s)} ({taken.value / step_s:.2%}) of a step of {show_seconds(step_s)}"


def _sandboxes(ask: Ask, args: argparse.Namespace, found: dict[str, Figure]) -> Iterator[str]:
    placements = Placements(ask)
    named = account(ask, placements.place(ask.placements[0]))
    if named is None:
        raise UserError("--only sandboxes: nothing is executed; write --workload agent, --turns or --sandbox-seconds")
    found |= named
    yield f"Sandboxes for {ask.groups:,} tasks x {ask.group_size}"
    yield from _lines(found)
