"""The synchronous engine: slots, admission, one prefill or decode call a step. Knows no threads and no event loop.

Every live row sits in a slot and has its own position; nothing is padded to a common length. A step is one prefill
call (which goes first, and is at most `prefill_chunk` tokens, so that an abort never waits longer) or one decode step
of all live rows. Promises: results of one step come in the order of submission; a row's tokens depend on its request
alone (in deterministic mode bit for bit); logits that are not finite raise, they are never sampled from.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from gruppetto.clock import monotonic
from gruppetto.engines.base import EngineFinish, EngineStats, GenerateRequest, GenerateResult
from gruppetto.engines.embedded.cache import SlotKV
from gruppetto.engines.embedded.depth import classes, exchanges
from gruppetto.engines.embedded.forward import Forward
from gruppetto.engines.embedded.left import LeftKV
from gruppetto.engines.embedded.rows import Row, row_for
from gruppetto.engines.embedded.sampling import SamplingPlan, plan_for, sample
from gruppetto.engines.embedded.settings import MIN_ROWS, Settings, aligned
from gruppetto.errors import EngineError
from gruppetto.types import Segment


class Core:
    """Continuous batching over one `Forward`. `version` is stamped on every token sampled."""

    def __init__(self, settings: Settings, forward: Forward, kv: SlotKV, *, vocab: int, version: int = 0) -> None:
        self.settings, self.forward, self.kv = settings, forward, kv
        self.version = version
        self.fixed_batch = False
        self.admit_before: float = math.inf
        self.submitted = 0
        self._vocab, self._device = vocab, kv.device
        self._waiting: OrderedDict[str, Row] = OrderedDict()
        self._slots: list[Row | None] = [None] * settings.slots
        self._by_rid: dict[str, Row] = {}
        self._prefilling: list[Row] = []
        self._prompts: dict[tuple[int, ...], Row] = {}
        self.left = LeftKV()
        self._plan: SamplingPlan | None = None
        self._plan_rows = 0
        self._ids = np.zeros(kv.rows, dtype=np.int64)
        self._positions = np.zeros(kv.rows, dtype=np.int64)
        self._uniforms = np.zeros(kv.rows, dtype=np.float32)
        self.reset_counters()

    def reset_counters(self) -> None:
        """Zeroes the counters that `stats` shows."""
        self.decode_steps = self.decode_tokens = self.prefill_tokens = self.cached_tokens = 0
        self.decode_s = self.prefill_s = 0.0
        self.batch_steps: Counter[int] = Counter()
        self.batch_s: defaultdict[int, float] = defaultdict(float)

    def count_on(self, last: EngineStats) -> None:
        """Goes on with the counters of the one before."""
        self.decode_steps, self.decode_tokens = last.decode_steps_total, last.decode_tokens_total
        self.prefill_tokens, self.cached_tokens = last.prefill_tokens_total, last.cached_tokens_total
        self.decode_s, self.prefill_s = last.decode_s_total, last.prefill_s_total
        self.batch_steps.update(last.batch_steps)
        self.batch_s.update(last.batch_s)

    # --- requests in and out -----------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queues a request. `UserError` when it cannot be served, `EngineError` when its rid is live."""
        if request.rid in self._by_rid:
            raise EngineError(self.settings.name, f"request {request.rid} is already live; a rid is one call at a time")
        row = row_for(
            request,
            self.submitted,
            context=self.settings.context,
            vocab=self._vocab,
            has_decode=self.settings.decode is not None,
        )
        self.submitted += 1
        self._by_rid[request.rid] = row
        self._waiting[request.rid] = row

    def abort(self, rid: str | None = None) -> list[GenerateResult]:
        """Takes out one request or all; what each has made so far, in order of submission. Unknown rids are fine."""
        rows = list(self._by_rid.values()) if rid is None else [r for r in [self._by_rid.get(rid)] if r is not None]
        for row in rows:
            self._remove(row)
        return [row.result(EngineFinish.ABORT) for row in rows]

    def _remove(self, row: Row) -> None:
        del self._by_rid[row.request.rid]
        if self._waiting.pop(row.request.rid, None) is not None:
            return
        self._slots[row.slot] = None
        self._positions[row.slot] = 0
        self._plan = None
        if row in self._prefilling:
            self._prefilling.remove(row)
        if self._prompts.get(row.prefix) is row:
            del self._prompts[row.prefix]

    def row(self, rid: str) -> Row:
        """A live request's row; `KeyError` when it is not live."""
        return self._by_rid[rid]

    def progress(self, have: Mapping[str, int]) -> dict[str, tuple[int, tuple[Segment, ...]]]:
        """What rows in slots have made beyond `have[rid]` tokens, behind that number; those with nothing more are left
        out."""
        rows = [row for row in self._slots if row is not None]
        return {
            rid: (start, row.since(start))
            for row in rows
            if (start := have.get(rid := row.request.rid, -1)) >= 0 and len(row.logprobs) > start
        }

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._by_rid) - len(self._waiting)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is kept."""
        return sum(len(row.tokens) - 1 for row in list(self._slots) if row is not None)

    @property
    def has_work(self) -> bool:
        """Whether `step` can do anything now."""
        return self.running > 0 or self._may_enter() > 0

    def _may_enter(self) -> int:
        """Waiting requests that may be admitted now, counted up to `admit_at`."""
        first = islice(self._waiting.values(), self.settings.admit_at)
        return sum(row.order < self.admit_before for row in first)

    def set_version(self, version: int) -> None:
        """New weights are in: stamps later tokens, forgets shared prompts, recomputes live KV where configured."""
        self.version = version
        self._prompts.clear()
        self.forget_left()
        live = [row for row in self._slots if row is not None]
        if self.settings.kv_on_swap == "recompute":
            for row in live:
                row.need_prefill()
            self._prefilling = sorted(live, key=lambda row: row.order)

    def forget_left(self) -> None:
        """Nothing is known any more of the KV in slots without a request."""
        self.left.forget_all()
        for slot, row in enumerate(self._slots):
            if row is None:
                self._positions[slot] = 0

    # --- one step ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[GenerateResult]:
        """One prefill call or one decode step; returns the requests that ended in it."""
        self._admit()
        begin = monotonic()
        while self._prefilling:
            if self._share_prompt(self._prefilling[0]):
                continue
            self._prefill_call()
            self.prefill_s += monotonic() - begin
            return []
        if not self.running:
            return []
        rows = self.running
        results = self._decode_call()
        seconds = monotonic() - begin
        self.decode_s += seconds
        self.batch_s[rows] += seconds
        return results

    def _admit(self) -> None:
        entering = self._may_enter()
        if not entering:
            return
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        if self.running and len(free) < entering:
            return
        while free and self._may_enter():
            _, row = self._waiting.popitem(last=False)
            kept = self.left.take(row.request.rid, row.tokens)
            slot = self.left.choose(free) if kept is None else kept
            free.remove(slot)
            row.enter(slot, self.settings.decode)
            self._slots[slot] = row
            self._set_input(row)
            if kept is None:
                self._prefilling.append(row)
            else:
                row.prefilled = row.cached = len(row.prefix)
                self.cached_tokens += row.prefilled
            self._plan = None

    def _set_input(self, row: Row) -> None:
        self._ids[row.slot] = row.tokens[-1]
        self._positions[row.slot] = len(row.tokens) - 1

    def _share_prompt(self, row: Row) -> bool:
        """Takes the KV of a live row with the same prompt and weights; True when the row is ready to decode."""
        target = len(row.prefix)
        source = self._prompts.get(row.prefix)
        if target and row.prefilled == 0 and source is not None:
            self.kv.copy_row(source.slot, row.slot, target)
            self._prompts[row.prefix] = row  # the newest lives longest
            row.prefilled = target
            self.cached_tokens += target
            row.cached = row.cached if row.logprobs else target  # later ones are recomputations
        if row.prefilled < target:
            return False
        self._prefilling.remove(row)
        return True

    def _prefill_call(self) -> None:
        rows, length = self._prefill_batch()
        start = rows[0].prefilled
        ids = np.zeros((len(rows), length), dtype=np.int64)
        for i, row in enumerate(rows):
            piece = row.prefix[start : start + length]
            ids[i, : len(piece)] = piece
            self.prefill_tokens += len(piece)
            row.prefilled += len(piece)
        tokens = torch.from_numpy(ids).to(self._device)
        if self.settings.deterministic:
            self.forward.prefill_by_token(tokens[0], rows[0].slot, start)
        else:
            self.forward.prefill(tokens, torch.tensor([row.slot for row in rows], device=self._device), start)
        for row in rows:
            if row.prefilled >= len(row.prefix):
                self._prefilling.remove(row)
                self._prompts[row.prefix] = row

    def _prefill_batch(self) -> tuple[list[Row], int]:
        """Rows to prefill together (same start, different prompts) and the columns that each gets."""
        chunk, first = self.settings.prefill_chunk, self._prefilling[0]
        length = min(chunk, len(first.prefix) - first.prefilled)
        if self.settings.deterministic:
            return [first], aligned(length)
        rows, seen = [first], {first.prefix}
        for row in self._prefilling[1:]:
            longer = max(length, min(chunk, len(row.prefix) - row.prefilled))
            if row.prefilled != first.prefilled or row.prefix in seen or longer * (len(rows) + 1) > chunk:
                continue
            rows.append(row)
            seen.add(row.prefix)
            length = longer
        return rows, length

    def _decode_call(self) -> list[GenerateResult]:
        if not self._may_enter():
            self._close_holes()
        if self.forward.by_depth:
            self._sort_rows()
        live = [row for row in self._slots if row is not None]
        batch = self._batch_rows(live[-1].slot + 1)
        for row in live:
            self._uniforms[row.slot] = row.table[len(row.logprobs)]
        span = min(aligned(int(self._positions[:batch].max()) + 1), self.kv.capacity)
        logits = self.forward.decode(self._tensor(self._ids[:batch]), self._tensor(self._positions[:batch]), span)
        picks, logprobs = sample(logits, self._tensor(self._uniforms[:batch]), self._sampling_plan(batch))
        self.decode_steps += 1
        self.decode_tokens += len(live)
        self.batch_steps[len(live)] += 1
        return self._append(live, picks.tolist(), logprobs.tolist())

    def _append(self, live: Iterable[Row], picks: list[int], logprobs: list[float]) -> list[GenerateResult]:
        ended: list[tuple[int, GenerateResult]] = []
        for row in live:
            slot = row.slot
            token, logprob = picks[slot], logprobs[slot]
            if not math.isfinite(logprob):
                raise EngineError(
                    self.settings.name, f"weights version {self.version} gave logits that are not finite ({logprob})"
                )
            result = row.add(token, logprob, self.version)
            if result is not None:
                ended.append((row.order, result))
                self._remove(row)
                if result.finish is EngineFinish.LENGTH:
                    self.left.leave(slot, row.request.rid, row.tokens)
                    self._positions[slot] = self.left.position(slot)
            else:
                self._ids[slot] = token
                self._positions[slot] += 1
        return [result for _, result in sorted(ended, key=lambda pair: pair[0])]

    def _batch_rows(self, used: int) -> int:
        """Rows that a decode step computes when slots 0..used-1 are in use."""
        if self.fixed_batch:
            return self.kv.rows
        if self.settings.deterministic:
            used = max(used, MIN_ROWS)
        step = 8 if used > MIN_ROWS else 4 if used > 4 else 1
        return min(-(-used // step) * step, self.kv.rows)

    def _close_holes(self) -> None:
        """Moves the highest rows into free low slots where that makes the decode batch smaller."""
        live = [row for row in self._slots if row is not None]
        target = self._batch_rows(len(live))
        outside = [row for row in live if row.slot >= target]
        if not outside:
            return
        holes = [slot for slot in range(target) if self._slots[slot] is None]
        for row, slot in zip(outside, holes, strict=False):
            self.left.forget(slot)
            self.kv.copy_row(row.slot, slot, len(row.tokens) - 1)
            self._slots[row.slot], self._slots[slot] = None, row
            self._positions[row.slot] = 0
            row.slot = slot
            self._set_input(row)
        self._plan = None

    def _sort_rows(self) -> None:
        """Brings the longest contexts into the lowest slots."""
        used = max(slot for slot, row in enumerate(self._slots) if row is not None) + 1
        for low, high in exchanges(classes(self._positions[:used])):
            pair = self._slots[high], self._slots[low]
            self.kv.swap_rows(low, high, int(max(self._positions[low], self._positions[high])))
            self._slots[low], self._slots[high] = pair
            self.left.exchange(low, high)
            for slot, row in zip((low, high), pair, strict=True):
                self._positions[slot] = self.left.position(slot)
                if row is not None:
                    row.slot = slot
                    self._set_input(row)
            self._plan = None

    def _sampling_plan(self, batch: int) -> SamplingPlan:
        if self._plan is None or self._plan_rows != batch:
            settings = [row.request.sampling if row is not None else None for row in self._slots[:batch]]
            settings += [None] * (batch - len(settings))
            self._plan, self._plan_rows = plan_for(settings, self._vocab, self._device), batch
        return self._plan

    def _tensor(self, array: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
