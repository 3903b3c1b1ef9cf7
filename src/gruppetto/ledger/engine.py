"""What one engine costs: seconds of decode steps and prefill, KV room, speculation. Pure arithmetic, no state.

A decode step with `b` live rows that hold `kv` context tokens in all takes

    tau(b, kv) = base + max(read(b) + kv * kv_token, b * compute_row) + b * row        seconds
    read(b)    = weights + experts * (1 - (1 - share)^b)

(weights and KV are read once a step, or the matrix units are the limit; TRT-LLM's published saturation rows fit within
2 % to 9 %; of a mixture's experts those are read that a row chose, each a share k / E of them). Every row gets one
token a step, so `kv` grows by `b`, and the seconds of n steps are a quadratic in n once reading is the limit: `steps_s`
sums it and `steps_in` inverts it, both in O(1).

With speculation a step stands for one accepted token of each row at its average price: tau * cost / accepted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.ledger.machines.gpus import GPU

_SECONDS = (
    "base_s", "weights_s", "experts_s", "kv_token_s", "compute_row_s", "row_s", "prefill_token_s", "move_token_s",
)  # fmt: skip
NEVER_ENDS = 1 << 60
"""Decode steps that fit into any time when they take none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The price list of one engine (of all its GPUs together). Seconds and tokens; 0 turns a price off."""

    slots: int
    base_s: float = 1.0
    """Of every decode step, whatever is in it."""
    weights_s: float = 0.0
    """To read once the weights that every step reads: all of a dense model, all but the experts of a mixture."""
    experts_s: float = 0.0
    """To read all routed experts once."""
    expert_share: float = 1.0
    """Share of the experts that one row chooses, top_k / experts; rows choose independently of each other."""
    kv_token_s: float = 0.0
    """To read one context token's KV."""
    compute_row_s: float = 0.0
    """The matrix units' time for one row's token."""
    row_s: float = 0.0
    """Sampling and bookkeeping of one row."""
    prefill_token_s: float = 0.0
    kv_capacity: int = 0
    """Context tokens that fit; 0 = no limit."""
    move_token_s: float = 0.0
    """To move one context token's KV here from a separate prefill side."""
    swap_s: float = 0.0
    """Of a weight swap at the engine itself, beyond what the channel takes."""
    prefill_elsewhere: bool = False
    """A separate prefill side works first come, first served; prefill does not hold up decoding here."""
    shares_prompts: bool = False
    """Rows of one group that run together hold and prefill their prompt once."""
    speculation: tuple[tuple[int, float, float], ...] = ()
    """(from so many rows on, accepted tokens a step, step time as a multiple), rows ascending."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise UserError(f"slots = {self.slots}: an engine needs at least one; write slots = 1 or more")
        for name in _SECONDS:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{name} = {value}: seconds are finite and not negative; write 0 to leave it out")
        if not 0 < self.expert_share <= 1:
            raise UserError(f"expert_share = {self.expert_share}: top_k / experts lies above 0 and at most at 1")
        for rows, accepted, cost in self.speculation:
            if rows < 0 or accepted <= 0 or cost <= 0:
                raise UserError(f"speculation {(rows, accepted, cost)}: tokens a step and cost must be above 0")
        if self.step_s(1, 0) == 0 and self.kv_token_s > 0:
            raise UserError("kv_token_s alone is set: a decode step also takes base_s or weights_s; write one above 0")
        if self.kv_capacity < 0:
            raise UserError(f"kv_capacity = {self.kv_capacity}: tokens are not negative; write 0 for no limit")

    @staticmethod
    def speculating(speculation: Mapping[int, tuple[float, float]]) -> tuple[tuple[int, float, float], ...]:
        """`speculation` from {rows from which it holds: (accepted tokens a step, step time as a multiple)}."""
        return tuple((rows, *speculation[rows]) for rows in sorted(speculation))

    @classmethod
    def of_hardware(
        cls,
        *,
        params: float,
        kv_bytes_per_token: float,
        gpu: GPU,
        slots: int,
        active_params: float | None = None,
        weight_bytes_per_param: float = 2.0,
        tp: int = 1,
        overhead_s: float | None = None,
        row_s: float = 10e-6,
        bandwidth_efficiency: float = 0.75,
        compute_efficiency: float = 0.6,
        prefill_efficiency: float = 0.41,
        engine_efficiency: float = 1.0,
        memory_fraction: float = 0.9,
        link_bytes_s: float = 50e9,
        swap_s: float = 0.0,
        prefill_elsewhere: bool = False,
        speculation: tuple[tuple[int, float, float], ...] = (),
    ) -> EngineModel:
        """The constants of `tp` GPUs that serve one model. Raises `UserError` where the weights leave no room for KV.

        Defaults fit TRT-LLM's published rows: 75 % of the bandwidth and 60 % of the peak in decode, 41 % in prefill,
        0.5 ms a step on one GPU, 6 ms with tensor parallelism (all-reduces). RL engines run at 0.15 to 0.6 of that:
        `engine_efficiency` divides every time. A mixture of experts is charged for reading all of its weights, which
        holds for batches, and computes with `active_params`. `link_bytes_s` is what a KV move gets (400 Gb/s).
        """
        flops = gpu.flops(weight_bytes_per_param) * tp * engine_efficiency
        bandwidth = gpu.bandwidth * tp * bandwidth_efficiency * engine_efficiency
        work = 2 * (params if active_params is None else active_params)
        weights = params * weight_bytes_per_param
        room = gpu.memory * tp * memory_fraction - weights
        if room < kv_bytes_per_token:
            least = math.ceil((weights + kv_bytes_per_token) / (gpu.memory * memory_fraction))
            raise UserError(
                f"{weights / 1e9:.0f} GB of weights do not fit {tp} x {gpu.name} ({memory_fraction:.0%} of "
                f"{gpu.memory / 1e9:.0f} GB each); use tp = {least} or more"
            )
        if overhead_s is None:
            overhead_s = 0.5e-3 if tp == 1 else 6e-3
        return cls(
            slots=slots,
            base_s=overhead_s / engine_efficiency,
            weights_s=weights / bandwidth,
            kv_token_s=kv_bytes_per_token / bandwidth,
            compute_row_s=work / (flops * compute_efficiency),
            row_s=row_s / engine_efficiency,
            prefill_token_s=work / (flops * prefill_efficiency),
            kv_capacity=int(room / kv_bytes_per_token),
            move_token_s=kv_bytes_per_token / link_bytes_s,
            swap_s=swap_s,
            prefill_elsewhere=prefill_elsewhere,
            speculation=speculation,
        )

    # -- decode -------------------------------------------------------------------------------------------------------

    def read_s(self, rows: float) -> float:
        """Seconds to read what `rows` rows need of the weights in one step."""
        if not self.experts_s:
            return self.weights_s
        return self.weights_s + self.experts_s * (1.0 - math.pow(1.0 - self.expert_share, rows))

    def step_s(self, rows: int, kv: int) -> float:
        """Seconds of one decode step with `rows` live rows that hold `kv` context tokens in all."""
        read = self.read_s(rows) if self.experts_s else self.weights_s
        read, compute = read + self.kv_token_s * kv, self.compute_row_s * rows
        step = self.base_s + self.row_s * rows + (read if read > compute else compute)
        return step * self._price(rows) if self.speculation else step

    def steps_s(self, rows: int, kv: int, steps: int) -> float:
        """Seconds of `steps` decode steps in a row; `kv` is what the rows hold at the first, and grows by `rows`."""
        flat = self.base_s + self.row_s * rows
        read = self.read_s(rows) if self.experts_s else self.weights_s
        read, compute = read + self.kv_token_s * kv, self.compute_row_s * rows
        grow = self.kv_token_s * rows
        bound = 0  # steps in which the matrix units are the limit
        if read < compute:
            bound = steps if grow == 0.0 else min(steps, math.ceil((compute - read) / grow))
        rest = steps - bound
        seconds = steps * flat + bound * compute + rest * (read + grow * bound) + grow * (rest * (rest - 1) // 2)
        return seconds * self._price(rows) if self.speculation else seconds

    def steps_in(self, rows: int, kv: int, seconds: float) -> int:
        """Whole decode steps that fit into `seconds`."""
        if self.step_s(rows, kv) == 0.0:
            return NEVER_ENDS
        steps = self._about(rows, kv, seconds / self._price(rows))
        while steps > 0 and self.steps_s(rows, kv, steps) > seconds:
            steps -= 1
        while self.steps_s(rows, kv, steps + 1) <= seconds:
            steps += 1
        return steps

    def steps_past(self, rows: int, kv: int, most: int, seconds: float) -> tuple[int, float]:
        """The fewest decode steps that take longer than `seconds`, `most` of them at most, and what they take."""
        flat = self.base_s + self.row_s * rows
        read = (self.read_s(rows) if self.experts_s else self.weights_s) + self.kv_token_s * kv
        grow = self.kv_token_s * rows
        if self.speculation or grow == 0.0 or read < self.compute_row_s * rows:
            return self._searched(rows, kv, most, seconds)
        took = _reading_s(most, flat, read, grow)
        if took <= seconds:
            return most, took
        linear, steps = flat + read - grow / 2, 1
        if seconds > 0:
            steps += int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * grow * seconds)))
        while steps > 1 and _reading_s(steps - 1, flat, read, grow) > seconds:
            steps -= 1
        while (took := _reading_s(steps, flat, read, grow)) <= seconds:
            steps += 1
        return steps, took

    def _searched(self, rows: int, kv: int, most: int, seconds: float) -> tuple[int, float]:
        """The same for steps of any kind."""
        took = self.steps_s(rows, kv, most)
        if took <= seconds:
            return most, took
        steps = self.steps_in(rows, kv, seconds) + 1
        return steps, self.steps_s(rows, kv, steps)

    def _about(self, rows: int, kv: int, seconds: float) -> int:
        """`steps_in` up to rounding: the root of the quadratic."""
        if seconds <= 0:
            return 0
        flat = self.base_s + self.row_s * rows
        read, compute = self.read_s(rows) + self.kv_token_s * kv, self.compute_row_s * rows
        grow, bound = self.kv_token_s * rows, 0
        if grow == 0.0 or read < compute:
            step = flat + max(read, compute)
            fit = int(seconds / step)
            bound = fit if grow == 0.0 else math.ceil((compute - read) / grow)
            if fit <= bound:
                return fit
            seconds -= bound * step
            read += grow * bound
        linear = flat + read - grow / 2
        root = 2 * seconds / (linear + math.sqrt(max(0.0, linear * linear + 2 * grow * seconds)))
        return bound + int(root)

    def _price(self, rows: int) -> float:
        """Step time per accepted token, as a multiple of a step without speculation."""
        price = 1.0
        for least, accepted, cost in self.speculation:
            if rows >= least:
                price = cost / accepted
        return price

    # -- for bounds ---------------------------------------------------------------------------------------------------

    def rows_at(self, context: float) -> int:
        """Rows that can be live with `context` tokens each, at least 1."""
        if not self.kv_capacity or context <= 0:
            return self.slots
        return max(1, min(self.slots, int(self.kv_capacity / (context + 1))))

    def rate(self, rows: int, context: float = 0.0) -> float:
        """Tokens per second of one engine with `rows` live rows that hold `context` tokens each on average."""
        step = self.step_s(rows, int(rows * context))
        return rows / step if step else math.inf

    def best_rate(self, context: float = 0.0) -> float:
        """The best throughput at any number of rows that fit, tokens per second."""
        return max(self.rate(rows, context) for rows in range(1, self.rows_at(context) + 1))

    def alone_s(self, prompt: int, tokens: int) -> float:
        """Critical path of one rollout that has an engine to itself: prefill, then a L + b L + c (P L + L^2 / 2)."""
        return prompt * self.prefill_token_s + self.steps_s(1, prompt, tokens)


def _reading_s(steps: int, flat: float, read: float, grow: float) -> float:
    """`steps_s` where reading is the limit of every step."""
    return steps * flat + steps * read + grow * (steps * (steps - 1) // 2)
