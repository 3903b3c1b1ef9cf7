"""The steps of a run folder as the ledger reconciles them: seconds by stage, what was done, and of which rollout.

Promise: what a run did not record is left out or divided evenly, never invented; the callers say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gruppetto.config.schema import Config
from gruppetto.errors import UserError
from gruppetto.ledger.lengths import Tools, TracedLengths
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.reconcile.measured import MeasuredRun, MeasuredStep, StepWork
from gruppetto.ledger.reconcile.pieces import Piece
from gruppetto.presets import compose
from gruppetto.record.explain.engines import kv_limited
from gruppetto.record.explain.read import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is common to reading a real run and a simulated one."""

    record: RunRecord
    config: Config
    lengths: TracedLengths
    simulated: bool
    model: Model | None
    prompt: float
    tools: Tools | None
    observation: int

    @property
    def own_versions(self) -> bool:
        """Rollouts keep the weights version that they began with, over publishes to others."""
        return compose(self.config.scheduler).placing.own_version


def measured_run(facts: Facts) -> MeasuredRun:
    """All steps of the run."""
    return MeasuredRun(
        engines=facts.config.engine.count,
        apart=facts.config.run.placement == "disaggregated",
        steps=_with_pieces([_step(row, facts) for row in facts.record.rows], facts),
    )


def _step(row: Mapping[str, Any], facts: Facts) -> MeasuredStep:
    """One line of metrics as seconds by stage."""
    engines = facts.config.engine.count
    account = {key[len("engine_s/") :]: float(value) for key, value in row.items() if key.startswith("engine_s/")}
    if not kv_limited(facts.record.config):  # as in explain
        account["queue"] = account.get("queue", 0.0) + account.pop("kv_full", 0.0)
    decode, prefill = (float(row.get(f"engine/{name}_s") or 0.0) / engines for name in ("decode", "prefill"))
    score = account.get("reward", 0.0) / engines
    generate = float(row["schedule/makespan_s"])
    switch = account.get("switch", 0.0) / engines
    train = float(row["time/train_s"])
    if facts.config.run.placement == "colocated":  # older records book the way to the trainer with it
        train = max(0.0, train - max(0.0, switch - float(row.get("time/switch_s") or 0.0)))
    if (inside := decode + prefill + score) > generate:  # engines go by their own clock, a little past the phase's end
        decode, prefill, score = (part * generate / inside for part in (decode, prefill, score))
    seconds = {
        "generate": generate,
        "decode": decode,
        "prefill": prefill,
        "score": score,
        "waiting": max(0.0, generate - decode - prefill - score),
        "train": train,
        "publish": float(row["time/publish_s"]),
        "switch": switch,
        "step": (account["total"] - account.get("eval", 0.0)) / engines,  # of which nothing is forecast
    }
    return MeasuredStep(step=int(row["step"]), seconds=seconds, work=_work(row, facts), engine_s=account)


def _with_pieces(steps: Sequence[MeasuredStep], facts: Facts) -> tuple[MeasuredStep, ...]:
    """What each step made of which rollout. What it made of rollouts that were unfinished when the run ended is not in
    the record; it is taken to be divided evenly among those."""
    made: dict[int, list[Piece]] = {}
    own = facts.own_versions
    for final in (*(step.step for step in steps), steps[-1].step + 1):  # the last one: given up at the end
        for row in _lines(_rollouts_file(facts, final)):
            for version, piece in _pieces(row, facts):
                last = final if own else version + 1
                for number, part in _spread(piece, version + 1, last):
                    made.setdefault(number, []).append(part)
    live = int(facts.record.rows[-1].get("rollouts/live") or 0)
    found, streamed = [], _streamed(facts)
    for step in steps:
        step = replace(step, streamed=streamed.get(step.step, 0.0))
        pieces = made.get(step.step, [])
        missing = round(step.work.tokens) - sum(piece.tokens for piece in pieces)
        if pieces and missing > 0 and live:
            each, left = divmod(missing, live)
            sizes = [size for number in range(live) if (size := each + (number < left))]
            pieces += [Piece(_LAST + number, round(facts.prompt), size) for number, size in enumerate(sizes)]
        found.append(replace(step, pieces=tuple(pieces)) if pieces else step)
    return tuple(found)


_LAST = 1 << 40
"""Order of launch of those whose launch is not known."""


def _spread(piece: Piece, first: int, last: int) -> Iterator[tuple[int, Piece]]:
    """(step, part of the piece): evenly over the steps from `first` to `last`, as a rollout that keeps its version over
    them; where it is one step, the piece."""
    count = max(1, min(last - first + 1, piece.tokens))
    each, left = divmod(piece.tokens, count)
    had = 0
    for number in range(count):
        tokens = each + (number < left)
        share = tokens / piece.tokens
        yield (
            first + number,
            piece._replace(
                context=piece.context + had,
                tokens=tokens,
                waits=round(piece.waits * share),
                tool_s=piece.tool_s * share,
                goes_on=piece.goes_on or had > 0,
            ),
        )
        had += tokens


def _rollouts_file(facts: Facts, step: int) -> Path:
    return facts.record.path / "rollouts" / f"step_{step:06d}.jsonl"


def _streamed(facts: Facts) -> dict[int, float]:
    """By step, the share of its training that was done before its batch was complete: of the parts that the trainer was
    given, all but the last."""
    sizes: dict[int, float] = {}
    steps: dict[int, int] = {}
    for row in facts.record.rows:
        for one in facts.record.rollouts(int(row["step"])):
            if one.fate == "trained":
                steps[one.group] = int(row["step"])
                sizes[one.group] = sizes.get(one.group, 0.0) + one.tokens + facts.prompt
    parts: dict[int, list[float]] = {}
    for event in facts.record.events():
        if event.kind == "train_begin" and isinstance(event.groups, list):
            step = next((steps[group] for group in event.groups if group in steps), None)
            if step is not None:
                parts.setdefault(step, []).append(sum(sizes.get(group, 0.0) for group in event.groups))
    return {step: sum(found[:-1]) / sum(found) for step, found in parts.items() if sum(found)}


def _pieces(row: Mapping[str, Any], facts: Facts) -> Iterator[tuple[int, Piece]]:
    """(weights version, piece) of one rollout's row; its tool calls are divided among its pieces by their tokens."""
    group, _, member = str(row.get("rollout", "")).removeprefix("g").partition(".")
    order = int(group) * 4096 + int(member) if group.isdecimal() and member.isdecimal() else _LAST
    whole, had = max(1, int(row["tokens"])), 0
    calls, tool_s = int(row.get("turns") or 0), float(row.get("tool_s") or 0.0)
    for version, tokens in row.get("segments") or ():
        share = tokens / whole
        seen = round(facts.observation * calls * had / whole)
        context = round(facts.prompt) + had + seen
        yield (
            int(version),
            Piece(order, context, tokens, round(calls * share), tool_s * share, facts.observation, had > 0),
        )
        had += tokens


def _work(row: Mapping[str, Any], facts: Facts) -> StepWork:
    """What the step did, and the FLOP of it where the model is known."""
    made, prefilled = float(row["rollout/generated_tokens"]), float(row.get("perf/prefill_tokens") or 0)
    samples, whole, moving = _samples(row, facts)
    processed = float(row.get("train/processed_tokens") or whole)
    micro = facts.config.train.micro_tokens
    batches = sum(-(-round(part) // micro) for part in (processed * moving, processed * (1 - moving)))
    work = StepWork(
        tokens=made,
        prefill_tokens=prefilled,
        trained_tokens=processed,
        micro_batches=batches,
        batch_steps=tuple((int(rows), float(count)) for rows, count in row.get("engine/batch_steps") or ()),
    )
    if facts.model is None:
        return work
    mean = max(1, round(whole / samples)) if samples else 1
    forward = facts.model.forward_flops(mean) / mean
    context = round(facts.prompt + (whole / samples - facts.prompt) / 2) if samples else round(facts.prompt)
    return replace(
        work,
        decode_flops=made * facts.model.decode_flops(context),
        prefill_flops=prefilled * _prefill_flops(facts.model, facts.prompt),
        train_flops=processed * forward * (1 + 2 * moving),
    )


def _prefill_flops(model: Model, prompt: float) -> float:
    """FLOP of one prompt token; no logits but the last token's."""
    tokens = max(1, round(prompt))
    return model.matmul_flops(1) - 2.0 * (model.head_params or model.embed_params) + model.mixing_flops(tokens) / tokens


def _samples(row: Mapping[str, Any], facts: Facts) -> tuple[int, float, float]:
    """(samples of the batch, their tokens with prompts and observations, share of the tokens that have a gradient).

    Where rollouts were not recorded, all have one, and answers are counted by the step's metrics.
    """
    trained = [one for one in _lines(_rollouts_file(facts, int(row["step"]))) if one.get("fate") == "trained"]
    if not trained:
        count = round(sum(v or 0 for key, v in row.items() if key.startswith("rollout/finish/")))
        answers = float(row.get("tokens/batch_trained") or 0) + float(row.get("tokens/batch_masked") or 0)
        return count, answers + count * facts.prompt, 1.0
    sizes = [facts.prompt + one["tokens"] + facts.observation * one.get("turns", 0) for one in trained]
    if facts.simulated or facts.config.train.loss.kl_coef > 0:
        return len(trained), sum(sizes), 1.0
    moving = sum(size for size, one in zip(sizes, trained, strict=True) if one.get("advantage"))
    return len(trained), sum(sizes), moving / sum(sizes)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; none where it does not exist. A half-written last line, as a kill leaves one, is left out."""
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text("utf-8").splitlines(keepends=True), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if not line.endswith("\n"):
                return
            raise UserError(f"{path} line {number} cannot be read: {error}; the run folder is damaged") from None
