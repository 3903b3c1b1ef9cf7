"""What is compared: two cases, and the settings that both sides share."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
"""Threads and OpenMP settings of every process of both sides."""

GROUP, SLOTS, TASKS = 8, 64, 512


@dataclass(frozen=True, slots=True)
class Layout:
    """How TRL cuts a batch: rollouts of one forward and backward, and of one `generate` call."""

    micro_batch: int
    generate_batch: int


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `mean_length`: the model ends an answer after each character with probability 1 / mean_length;
    None: it never ends one, and all answers are `max_tokens` long. `warm` steps are not timed, `steps` are; `layouts`
    are those tried for TRL, the first is used."""

    name: str
    prompts: int
    max_tokens: int
    mean_length: int | None
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
        return replace(self, prompts=8, max_tokens=min(self.max_tokens, 256), steps=2, layouts=(layout,))


TAIL = Case(
    name="tail",
    prompts=32,
    max_tokens=512,
    mean_length=48,
    lr=1e-3,
    warm=3,
    steps=6,
    layouts=(Layout(32, 256), Layout(64, 256), Layout(256, 256), Layout(64, 64)),
)
EQUAL = Case(
    name="equal",
    prompts=16,
    max_tokens=32,
    mean_length=None,
    lr=1e-3,
    warm=3,
    steps=20,
    layouts=(Layout(128, 128), Layout(32, 128), Layout(64, 128), Layout(64, 64)),
)
