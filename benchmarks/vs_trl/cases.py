"""What is compared: two cases, and the settings that both sides share."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
"""Threads and OpenMP settings of every process of both sides."""

GROUP, TASKS = 8, 512


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths of the model's two kinds of answers, and how often it gives the long one."""

    short: int
    long: int
    share_long: float


@dataclass(frozen=True, slots=True)
class Layout:
    """How TRL cuts a batch: rollouts of one forward and backward, and of one `generate` call."""

    micro_batch: int
    generate_batch: int


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `lengths` None: the model never ends an answer, and all are `max_tokens` long. `slots` are our
    engine's. `warm` steps are not timed, `steps` are; `layouts` are those tried for TRL, the first is used."""

    name: str
    prompts: int
    slots: int
    max_tokens: int
    lengths: Lengths | None
    lr: float
    warm: int
    steps: int
    layouts: tuple[Layout, ...]

    @property
    def batch(self) -> int:
        """Rollouts of one step."""
        return self.prompts * GROUP

    def quick(self) -> Case:
        """The same shape, small: for a smoke run."""
        batch = 8 * GROUP
        layout = Layout(min(self.layouts[0].micro_batch, batch), min(self.layouts[0].generate_batch, batch))
        return replace(self, prompts=8, slots=16, steps=2, layouts=(layout,))


TAIL = Case(
    name="tail",
    prompts=16,
    slots=32,
    max_tokens=1536,
    lengths=Lengths(short=16, long=320, share_long=0.04),
    lr=1e-4,
    warm=2,
    steps=10,
    layouts=(Layout(8, 8), Layout(16, 16), Layout(32, 32), Layout(64, 64), Layout(32, 128), Layout(64, 128)),
)
EQUAL = Case(
    name="equal",
    prompts=16,
    slots=64,
    max_tokens=32,
    lengths=None,
    lr=1e-3,
    warm=2,
    steps=10,
    layouts=(Layout(128, 128), Layout(64, 128), Layout(32, 32), Layout(8, 8)),
)
