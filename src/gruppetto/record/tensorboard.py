"""A sink: each step's metrics as TensorBoard scalars, under their own names. Needs the extra `tensorboard`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gruppetto.errors import UserError
from gruppetto.extras import needs
from gruppetto.record.base import Recorder


class TensorBoardSink(Recorder):
    """Writes event files into `folder`. Raises `UserError` when the extra is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError(needs('log.sinks = ["tensorboard"]', "tensorboardX")) from None
        self._writer = SummaryWriter(str(folder))

    def event(self, kind: str, t: float, **fields: Any) -> None:
        return None

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        return None

    def close(self) -> None:
        self._writer.close()
