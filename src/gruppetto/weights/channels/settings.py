"""How versions are published, and what one publish did."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gruppetto.errors import EngineError, UserError

Channel = Literal["shm", "disk", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """How versions travel. `deadline_s`: the longest that one engine is waited for without progress; `verify_every`:
    after the first and every so many-th publish engines read everything back and are probed (0: only the first)."""

    channel: Channel = "shm"
    mode: Literal["full", "delta"] = "full"
    bucket_bytes: int = 64 << 20
    folder: Path | None = None
    host: str = "127.0.0.1"
    deadline_s: float = 60.0
    verify_every: int = 16

    def __post_init__(self) -> None:
        if self.channel == "disk" and self.folder is None:
            raise UserError("weights.channel = 'disk' needs a folder that trainer and engines share")
        if self.bucket_bytes < 1 or self.deadline_s <= 0 or self.verify_every < 0:
            raise UserError(
                f"bucket_bytes = {self.bucket_bytes}, deadline_s = {self.deadline_s:g}, verify_every = "
                f"{self.verify_every}; write 1 or more, more than 0, 0 or more"
            )


@dataclass(slots=True)
class Published:
    """What one publish did. `kinds`: "full", "delta" or "had it", by engine; `sent_bytes` of one copy of each kind;
    `why_full`: of engines that were to get a delta and got all, a word and, behind a colon, its figures."""

    version: int
    kinds: dict[str, str] = field(default_factory=dict)
    why_full: dict[str, str] = field(default_factory=dict)
    failed: dict[str, EngineError] = field(default_factory=dict)
    sent_bytes: int = 0
    buffer_bytes: int = 0
    audited: bool = False
    seconds: float = 0.0
