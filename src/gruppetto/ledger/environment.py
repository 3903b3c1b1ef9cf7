"""The account of environments: executions, CPU-hours, sandboxes for a wall time, images, and GPUs that wait for them.

Two counts of sandboxes, which are often taken for one another:
    busy     those that execute something: CPU-seconds / wall time
    live     those that a rollout holds from its first turn to its last, the model's time included; by Little's law
             (concurrency = throughput x time in the system) rollouts x (model + tool + start seconds) / wall time
A stateless environment needs the first, a stateful one (a container a rollout) the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A batch of rollouts that use tools. Seconds, bytes."""

    tasks: int
    group_size: int
    turns: float
    """Executions of a rollout."""
    execution_s: float
    """Wall time of one."""
    cores: float = 1.0
    """CPU cores that an execution keeps busy."""
    model_s: float = 0.0
    """Of a rollout, in the model: decode, prefill and queues."""
    start_s: float = 0.0
    """Of a sandbox, before its first execution; a warm pool hides it."""
    stateful: bool = True
    """A rollout keeps its sandbox between turns."""
    image_bytes: float = 0.0
    """Of one image."""
    images: int = 1
    """Distinct images of the batch."""
    hosts: int = 1
    """Machines that run sandboxes; each pulls what it lacks."""
    cache_hits: float = 0.0
    """Share of pulls that a host or its cache has already."""

    def __post_init__(self) -> None:
        for name, least in (("tasks", 1), ("group_size", 1), ("images", 1), ("hosts", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: there is {least} at least; write {least} or more")
        for name in ("turns", "execution_s", "cores", "model_s", "start_s", "image_bytes"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UserError(f"{name} = {getattr(self, name)} is not possible; write 0 or more")
        if not 0 <= self.cache_hits <= 1:
            raise UserError(f"cache_hits = {self.cache_hits}: a share lies from 0 to 1; write .95 for 95 %")

    @property
    def rollouts(self) -> int:
        """Of the batch."""
        return self.tasks * self.group_size

    # -- work ---------------------------------------------------------------------------------------------------------

    def executions(self) -> Figure:
        """Tool calls of the batch."""
        value = self.rollouts * self.turns
        return Figure(value, "", f"{self.tasks:,} tasks x {self.group_size} x {self.turns:g} turns")

    def cpu_hours(self) -> Figure:
        """Core-hours of the batch."""
        runs = self.executions().value
        value = runs * self.execution_s * self.cores / 3600
        return Figure(value, "CPU-h", f"{runs:,.0f} executions x {self.execution_s:g} s x {self.cores:g} cores / 3,600")

    def rollout_s(self) -> Figure:
        """Wall time of one rollout that waits for nobody: start, model, tools."""
        tools_s = self.turns * self.execution_s
        value = self.start_s + self.model_s + tools_s
        return Figure(
            value,
            "s",
            f"start {self.start_s:g} + model {self.model_s:g} + {self.turns:g} turns x {self.execution_s:g} s",
        )

    # -- sandboxes for a wall time ------------------------------------------------------------------------------------

    def busy(self, wall_s: float) -> Figure:
        """Sandboxes that execute at a time, at least, for the executions of a batch to end within `wall_s`; what the
        model takes does not count against it."""
        self._possible(wall_s, Figure(self.turns * self.execution_s, "s", "its executions, one after the other"))
        work_s = self.executions().value * self.execution_s
        return Figure(_ceil(work_s / wall_s), "sandboxes", f"ceil({work_s:,.0f} s of executions / {wall_s:,.0f} s)")

    def live(self, wall_s: float) -> Figure:
        """Sandboxes that exist at a time for the batch to flow through in `wall_s` (Little's law), with no rollout
        waiting for one and none idle at the ends: to the nearest, since it is a mean."""
        self._possible(wall_s, self.rollout_s())
        each = self.rollout_s().value
        return Figure(
            max(1.0, float(round(self.rollouts * each / wall_s))),
            "sandboxes",
            f"{self.rollouts:,} rollouts x {each:,.0f} s / {wall_s:,.0f} s",
            "Little's law",
        )

    def needed(self, wall_s: float) -> Figure:
        """`live` where a rollout keeps its sandbox, else `busy`."""
        return self.live(wall_s) if self.stateful else self.busy(wall_s)

    def wall_s(self, sandboxes: int) -> Figure:
        """How long the batch takes with so many sandboxes: the flow through them, and never less than one rollout."""
        if sandboxes < 1:
            raise UserError(f"sandboxes = {sandboxes}: no tool call would ever run; write 1 or more")
        held = self.rollout_s() if self.stateful else Figure(self.turns * self.execution_s, "s", "its executions")
        flow = self.rollouts * held.value / min(sandboxes, self.rollouts)
        least = self.rollout_s().value
        formula = f"max({self.rollouts:,} rollouts x {held.value:,.0f} s / {sandboxes:,} sandboxes, {least:,.0f} s)"
        return Figure(max(flow, least), "s", formula)

    def idle_gpu_s(self, sandboxes: int, generate_s: float, gpus: int) -> Figure:
        """GPU-seconds of a batch in which GPUs wait because there are fewer sandboxes than the rollouts need.

        `generate_s`: the rollout phase with as many as wanted, on `gpus` GPUs.
        """
        if gpus < 0 or generate_s < 0:
            raise UserError(f"gpus = {gpus}, generate_s = {generate_s}: neither is negative; write 0 or more")
        wall = self.wall_s(sandboxes).value
        late = max(0.0, wall - generate_s)
        return Figure(
            late * gpus, "GPU-s", f"max(0, {wall:,.0f} s with {sandboxes:,} - {generate_s:,.0f} s) x {gpus} GPUs"
        )

    # -- images -------------------------------------------------------------------------------------------------------

    def image_traffic(self) -> Figure:
        """Bytes that hosts pull for a batch: every image on every host, less what caches have."""
        pulls = self.images * min(self.hosts, max(1, self.rollouts // self.images))
        value = self.image_bytes * pulls * (1 - self.cache_hits)
        hosts = pulls // self.images
        formula = (
            f"{self.image_bytes / 1e9:,.3g} GB x {self.images:,} images x {hosts:,} hosts x {1 - self.cache_hits:.0%}"
        )
        return Figure(value, "bytes", formula.replace("%", " % missed"))

    def _possible(self, wall_s: float, rollout: Figure) -> None:
        least = rollout.value
        if not wall_s > 0:
            raise UserError(f"wall time = {wall_s} s: no batch ends in no time; write seconds above 0")
        if wall_s < least:
            raise UserError(
                f"wall time = {wall_s:,.0f} s is less than one rollout takes ({least:,.0f} s: "
                f"{rollout.formula}), whatever the number of sandboxes; "
                f"write {math.ceil(least):,} s or more, or fewer turns"
            )


def _ceil(value: float) -> float:
    """`math.ceil` that does not round a float's last bit up to a whole sandbox."""
    return float(math.ceil(value - 1e-9 * max(1.0, value)))
