"""The trainer in this process: packed forward and backward, exact global denominators, AdamW.

    forward_backward(samples) ─▶ cut ─▶ rows under train.micro_tokens ─▶ forward ─▶ loss ─▶ backward (sums add up)
    … any number of times …
    optim_step() ─▶ divide once, check, clip, AdamW, version + 1 ─▶ metrics

Promises, besides the contract's: all torch work happens on one thread of its own, never on the event loop; the
trainer's log-probabilities come from the training forward itself, there is no second pass; no dropout; on one thread
the same calls give bitwise the same weights. Samples with advantage 0 and no KL have no gradient: they are only run
forward, for the metrics.
"""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gruppetto.config.schema import ModelSection, TrainSection
from gruppetto.errors import RunError
from gruppetto.model_folder import device_for
from gruppetto.rng import seed_for
from gruppetto.trainer import losses
from gruppetto.trainer.base import Trainer
from gruppetto.trainer.embedded import checkpoint
from gruppetto.trainer.embedded.model import load_model, row_logprobs
from gruppetto.trainer.embedded.optimizer import gradients, learning_rate, make_optimizer, norm_of, rescale
from gruppetto.trainer.embedded.packing import Piece, Row, cut, pack, rows
from gruppetto.trainer.embedded.thread import CallThread
from gruppetto.trainer.embedded.totals import Totals
from gruppetto.types import Sample, TokenUse

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Columns:
    """Per trained token of one row, [n] each, in the row's order."""

    engine_logprob: Tensor
    advantage: Tensor
    weight: Tensor
    fresh: Tensor


class EmbeddedTrainer(Trainer):
    """One model, one process, CPU or CUDA.

    `max_tokens` is rollout.max_tokens (Dr.GRPO's constant), `total_steps` run.steps (the schedule's end), `temperature`
    the one tokens are sampled with (0 = greedy, whose log-probabilities are at temperature 1).
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        model: ModelSection,
        train: TrainSection,
        max_tokens: int,
        temperature: float,
        total_steps: int,
        seed: int,
    ) -> None:
        self.version = 0
        self._path, self._settings, self._train = Path(model_path), model, train
        self._max_tokens, self._total_steps, self._seed = max_tokens, total_steps, seed
        self._temperature = temperature or 1.0
        self._thread = CallThread("trainer")
        self._closed = threading.Event()
        self._cancelled = threading.Event()
        self._totals = Totals()
        self._model: Any = None
        self._reference: Any = None
        self._optimizer: torch.optim.AdamW

    async def start(self) -> None:
        """Loads the model, and a frozen copy when loss.kl_coef > 0. Raises `UserError` for a model it cannot train."""
        await self._run(self._start)

    async def forward_backward(self, samples: Sequence[Sample], *, share: float = 1.0) -> None:
        """Adds the samples' unnormalised gradients; `share` changes nothing here.

        Raises `RunError` when not started, closed, or on a bad sample.
        """
        self._cancelled.clear()
        try:
            await self._run(self._forward_backward, samples)
        except asyncio.CancelledError:
            self._cancelled.set()
            raise

    async def drop_gradients(self) -> None:
        """Forgets what was accumulated; also when it was closed or never started."""
        if self._model is not None and not self._closed.is_set():
            await self._run(self._drop_gradients)

    async def optim_step(self) -> Mapping[str, float]:
        """Normalises, clips, applies; `version` + 1. Besides the contract's metrics: logprob_diff/max, is_ratio/mean,
        train/samples, train/tokens, train/processed_tokens, train/unscored_tokens, optim/skipped.

        mismatch_kl (k3 of engine against trainer) and logprob_diff are over tokens of staleness 0. A metric that
        nothing was measured for is absent. When a loss or the gradient is not finite, train.on_nan decides: `stop`
        raises `RunError` naming it, `skip` drops the gradients, counts optim/skipped = 1, and still adds 1 to
        `version`: the batch is consumed, and the version that follows has the same weights. So it is with a batch in
        which no token is trained on (all are over-age and masked).
        """
        return await self._run(self._optim_step)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every parameter and persistent buffer, float32, detached, sharing memory with the trainer:
        copy before the next `optim_step`. A tied weight comes once, under its first name in the state dict."""
        seen: set[tuple[int, torch.Size]] = set()
        for name, tensor in self._started().state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if tensor.numel() == 0 or key not in seen:
                seen.add(key)
                yield name, tensor

    async def token_logprobs(self, token_ids: Sequence[int], last: int) -> list[float]:
        """Log-probabilities of the last `last` tokens of a sequence, at the run's temperature, by the training forward:
        what an engine with these weights is compared with."""
        return await self._run(self._token_logprobs, token_ids, last)

    async def save(self, folder: Path) -> None:
        """Writes `hf/` and `trainer/` under `folder`, whole or not at all. Gradients of an unfinished batch are not
        part of it: its samples are given again."""
        await self._run(self._save, folder)

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote, bitwise, and drops accumulated gradients. Raises `UserError` when incomplete."""
        await self._run(self._load, folder)

    async def close(self) -> None:
        """Stops between two micro-batches and frees all; may be called twice. A call that hangs is left behind."""
        self._closed.set()
        await self._thread.close()
        self._model = self._reference = None

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._closed.is_set():
            raise RunError("trainer: it is closed")
        return await self._thread.run(function, *arguments)

    def _started(self) -> Any:
        if self._model is None:
            raise RunError("trainer: not started; call start() first")
        return self._model

    def _start(self) -> None:
        torch.manual_seed(seed_for(self._seed, "trainer"))
        self._device = device_for(self._settings.device)
        self._dtype = torch.bfloat16 if self._settings.dtype == "bfloat16" else None
        self._model = load_model(self._path, self._device)
        self._optimizer = make_optimizer(self._model, self._train)
        if self._train.loss.kl_coef > 0:
            self._reference = copy.deepcopy(self._model).requires_grad_(False)

    def _forward_backward(self, samples: Sequence[Sample]) -> None:
        self._started()
        pieces = [piece for owner, sample in enumerate(samples) if (piece := _piece(owner, sample)) is not None]
        moving = [piece for piece in pieces if self._has_gradient(samples[piece.owner])]
        still = [piece for piece in pieces if not self._has_gradient(samples[piece.owner])]
        for chosen, with_gradient in ((moving, True), (still, False)):
            for row in rows(chosen, self._train.micro_tokens):
                if self._closed.is_set() or self._cancelled.is_set():
                    self._drop_gradients()
                    raise RunError("trainer: forward_backward was cancelled or the trainer closed")
                with torch.set_grad_enabled(with_gradient):
                    self._micro_batch(row, samples)
        self._totals.samples += len(samples)

    def _has_gradient(self, sample: Sample) -> bool:
        return sample.advantage != 0.0 or self._reference is not None

    def _micro_batch(self, pieces: Sequence[Piece], samples: Sequence[Sample]) -> None:
        row, settings = pack(pieces, self._device), self._train.loss
        logprob, entropy = self._logprobs(self._model, row)
        columns = self._columns(pieces, samples, logprob.dtype)
        terms = losses.policy_loss(logprob, columns.engine_logprob, columns.advantage, settings)
        loss, kl = terms.loss, None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference, row)
            kl = losses.kl_divergence(logprob, reference, settings.kl_estimator)
            loss = loss + settings.kl_coef * kl
        total = (columns.weight * loss).sum()
        if not math.isfinite(total.item()):
            self._totals.fault = self._totals.fault or _blame(loss, pieces, samples)
        elif total.requires_grad:
            torch.autograd.backward(total)
        self._totals.processed_tokens += row.ids.numel()
        self._totals.add(
            terms,
            weight=columns.weight,
            kl=kl,
            entropy=entropy,
            log_ratio=logprob.detach() - columns.engine_logprob,
            fresh=columns.fresh,
        )

    def _logprobs(self, model: Any, row: Row) -> tuple[Tensor, Tensor]:
        chunk = self._train.logprob_chunk
        return row_logprobs(model, row, temperature=self._temperature, chunk=chunk, dtype=self._dtype)

    @torch.no_grad()
    def _token_logprobs(self, token_ids: Sequence[int], last: int) -> list[float]:
        piece = cut(0, token_ids, np.arange(len(token_ids)) >= len(token_ids) - last)
        if piece is None:
            return []
        found, _ = self._logprobs(self._started(), pack([piece], self._device))
        values: list[float] = found.tolist()
        return values

    def _columns(self, pieces: Sequence[Piece], samples: Sequence[Sample], dtype: torch.dtype) -> _Columns:
        owners = [samples[piece.owner] for piece in pieces]
        counts = [piece.trained.size for piece in pieces]
        aggregation = self._train.loss.aggregation
        weights = [losses.token_weight(aggregation, count, self._max_tokens) for count in counts]
        fresh = [np.asarray(s.versions)[p.trained] >= self.version for p, s in zip(pieces, owners, strict=True)]
        engine = [np.asarray(s.logprobs)[p.trained] for p, s in zip(pieces, owners, strict=True)]

        def floats(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.astype(np.float64)).to(self._device, dtype)

        return _Columns(
            engine_logprob=floats(np.concatenate(engine)),
            advantage=floats(np.repeat([s.advantage for s in owners], counts)),
            weight=floats(np.repeat(weights, counts)),
            fresh=torch.from_numpy(np.concatenate(fresh)).to(self._device),
        )

    def _optim_step(self) -> dict[str, float]:
        model, totals = self._started(), self._totals
        denominator = max(1, losses.denominator(self._train.loss.aggregation, totals.tokens, totals.samples))
        grads = gradients(model)
        norm = norm_of(list(grads.values()), denominator)
        lr = learning_rate(self.version, self._train, self._total_steps)
        fault = totals.fault or _fault(norm, grads)
        skip = bool(fault) or not totals.tokens
        metrics = totals.metrics(denominator) | {"optim/lr": lr, "optim/skipped": float(skip)}
        if not skip:
            rescale(list(grads.values()), denominator, norm, self._train.grad_clip)
            self._apply(lr)
            metrics["optim/grad_norm"] = norm
        self._drop_gradients()
        if fault and self._train.on_nan == "stop":
            raise RunError(
                f"trainer, step {self.version + 1}: {fault}; the weights are as before (train.on_nan = 'stop')"
            )
        self.version += 1
        return metrics

    def _apply(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def _drop_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._totals = Totals()

    def _save(self, folder: Path) -> None:
        checkpoint.save(folder, self._started(), self._optimizer, version=self.version, source=self._path)

    def _load(self, folder: Path) -> None:
        self._drop_gradients()
        self.version = checkpoint.load(folder, self._started(), self._optimizer)


def _piece(owner: int, sample: Sample) -> Piece | None:
    try:
        return cut(owner, sample.token_ids, np.asarray(sample.use) == TokenUse.TRAINED)
    except ValueError as error:
        raise RunError(f"trainer: sample {sample.rollout_id}: {error}") from None


def _blame(loss: Tensor, pieces: Sequence[Piece], samples: Sequence[Sample]) -> str:
    """Which rollout's loss is not finite."""
    parts = torch.split(loss.detach(), [piece.trained.size for piece in pieces])
    for part, piece in zip(parts, pieces, strict=True):
        if not torch.isfinite(part).all():
            value = part[~torch.isfinite(part)][0].item()
            return f"the loss of rollout {samples[piece.owner].rollout_id} is {value}"
    return f"the loss summed over {len(pieces)} rollouts overflows"


def _fault(norm: float, grads: Mapping[str, Tensor]) -> str:
    if math.isfinite(norm):
        return ""
    bad = next(
        (name for name, gradient in grads.items() if not torch.isfinite(gradient).all()), "all parameters together"
    )
    return f"the gradient norm is {norm} (first at {bad})"
