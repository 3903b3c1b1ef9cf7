"""The embedded trainer: gradients against plain formulas, and their independence of cut, order and packing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer.sample_maker import make_sample  # noqa: E402

from gruppetto.errors import RunError, UserError  # noqa: E402
from gruppetto.types import TokenUse  # noqa: E402


async def gradient(trainer, *calls):
    for call in calls:
        await trainer.forward_backward(call)
    return {name: p.grad.clone() for name, p in trainer._model.named_parameters()}


async def test_smoke(trainer_for, samples):
    async with trainer_for() as trainer:
        await trainer.forward_backward(samples)
        print(await trainer.optim_step())
