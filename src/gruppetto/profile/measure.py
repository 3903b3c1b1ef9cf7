"""All measurements in their order, and the profile that they make: figures of the machine, an efficiency set, in words.

Promise: one thread, the CPU, below a minute for the demo's model; what takes longer is cut short, not left out.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gruppetto.clock import monotonic
from gruppetto.demo.model import make_tiny_model
from gruppetto.demo.warmstart import SHAPE
from gruppetto.doctor import cores
from gruppetto.ledger.machines.efficiency import Efficiency
from gruppetto.ledger.machines.gpus import GPU
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.units import show_flops, show_seconds, show_share, show_size
from gruppetto.model_folder import quiet
from gruppetto.profile.engine import measure_engine
from gruppetto.profile.fit import Fit, fit_decode, fit_pieces, fit_share, line
from gruppetto.profile.machine import measure_machine
from gruppetto.profile.trainer import TrainerTimings, measure_publish, measure_trainer

CONTEXT = 256
ENGINE_S, TRAINER_S = 15.0, 15.0
"""After which no new point is begun."""
LARGER = {"layers": 4, "hidden": 384, "intermediate": 1024, "heads": 6, "kv_heads": 2, "head_dim": 64, "context": 512}
"""Of a second random model, of about 7 million parameters: what a publish costs beside its bytes needs two sizes."""
TYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Profile:
    """What `ledger.machines.profile` writes."""

    gpu: GPU
    efficiency: Efficiency
    notes: list[str]


def measure(
    model: Path | None,
    *,
    dtype: str = "float32",
    deterministic: bool = False,
    today: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measures this machine with the model in the folder `model`, or with a random one of the demo's shape.

    Raises `UserError` for a folder that cannot be served.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with quiet(), tempfile.TemporaryDirectory(prefix="gruppetto-profile-") as folder:
            path = model or make_tiny_model(Path(folder) / "small", **SHAPE)
            return _measure(path, Path(folder), dtype, deterministic, today, tell)
    finally:
        torch.set_num_threads(threads)


def _measure(
    path: Path, folder: Path, dtype: str, deterministic: bool, today: str, tell: Callable[[str], None]
) -> Profile:
    counted, kind = model_of(str(path)), TYPES[dtype]
    tell("1/3 matrix products, memory, disk …")
    gpu, disk = measure_machine(folder)
    context = min(CONTEXT, counted.context or CONTEXT)
    tell(f"2/3 decode and prefill of {counted.params:,} parameters …")
    steps, calls = measure_engine(
        path, counted, dtype=dtype, context=context, deterministic=deterministic, stop_at=monotonic() + ENGINE_S
    )
    tell("3/3 training and publishing …")
    stop_at = monotonic() + TRAINER_S
    timings = asyncio.run(measure_trainer(path, counted, dtype=dtype, context=context, stop_at=stop_at))
    published = [(weight_bytes(counted, kind), timings.publish_s), _larger(folder, dtype)]
    peak = gpu.peak(kind)
    fits = [
        fit_decode(counted, gpu, kind, steps),
        fit_share("prefill", peak, calls),
        *_training(counted, peak, timings),
        _publishing(gpu, published),
    ]
    words = _notes(gpu, counted, dtype, deterministic, fits)
    return Profile(gpu, _set(gpu, fits, disk, deterministic, dtype, today), words)


def weight_bytes(model: Model, kind: str) -> float:
    """Bytes that a publish brings to one engine."""
    return model.weight_bytes(kind)


def _larger(folder: Path, dtype: str) -> tuple[float, float]:
    """(bytes, seconds) of publishing a second, random model."""
    path = make_tiny_model(folder / "larger", **LARGER)
    seconds = asyncio.run(measure_publish(path, dtype=dtype))
    return weight_bytes(model_of(str(path)), TYPES[dtype]), seconds


def _training(model: Model, peak: float, timings: TrainerTimings) -> tuple[Fit, Fit, Fit]:
    """Training, forward, and the walk of the optimizer through its state of 16 bytes a parameter."""
    state = 16.0 * model.params
    update = Fit({"host_optimizer": state / max(timings.update_s, 1e-9)}, 0.0)
    return (
        fit_pieces("train", "micro_batch_s", peak, timings.train),
        fit_share("forward", peak, timings.forward),
        update,
    )


def _publishing(gpu: GPU, published: list[tuple[float, float]]) -> Fit:
    """Seconds of a publish, and bytes/s beyond the copy into place, which the ledger counts by itself."""
    copied = [2 * size / gpu.bandwidth for size, _ in published]
    rest = [max(1e-9, seconds - copy) for (_, seconds), copy in zip(published, copied, strict=True)]
    each, slope = line([size for size, _ in published], rest, [seconds for _, seconds in published])
    rate = 1 / slope if slope > 0 else 1e15
    errors = [(each + size / rate - r) / s for (size, s), r in zip(published, rest, strict=True)]
    return Fit(
        {"sync_s": each, "gather": rate, "gather_experts": rate}, max(abs(error) for error in errors), len(published)
    )


def _set(gpu: GPU, fits: list[Fit], disk: dict[str, float], deterministic: bool, dtype: str, today: str) -> Efficiency:
    figures: dict[str, float] = {"graph_s": 0.0, "graph_bytes": 0.0, "remap_s": 0.0, **disk}
    for fit in fits:
        figures |= fit.fields
    figures |= {"train_experts": figures["train"], "host_link": 1.0, "nvlink": 1.0, "network": 1.0}
    how = f"{dtype}{', deterministic' if deterministic else ''}"
    origin = f"measured by gruppetto doctor on {gpu.name}{f', {today}' if today else ''} ({how})"
    return replace(Efficiency(), name="measured", origin=origin, own=frozenset(figures), **figures)  # type: ignore[arg-type]


def _notes(gpu: GPU, model: Model, dtype: str, deterministic: bool, fits: list[Fit]) -> list[str]:
    decode, prefill, train, forward, _, publish = fits
    modes = f"{dtype}{', deterministic' if deterministic else ''}"
    return [
        f"{gpu.name}, one thread of {cores()} cores; gruppetto doctor --profile",
        f"matrix products {show_flops(gpu.fp32_flops)}/s in fp32, {show_flops(gpu.bf16_flops)}/s in bf16; memory "
        f"{show_size(gpu.bandwidth)}/s; shared memory {show_size(gpu.host_link)}/s",
        f"embedded engine and trainer on a model of {model.params:,} parameters, {modes}",
        f"decode step {show_seconds(decode.fields['step_s'])} + {show_seconds(decode.fields['row_s'])} a row, weights "
        f"and KV at {show_share(decode.fields['decode_bandwidth'])} of the bandwidth; {decode.words}",
        f"prefill at {show_share(prefill.fields['prefill'])} of the peak; {prefill.words}",
        f"training at {show_share(train.fields['train'])} of the peak + "
        f"{show_seconds(train.fields['micro_batch_s'])} a micro-batch; {train.words}; forward alone "
        f"{show_share(forward.fields['forward'])}, {forward.words}",
        f"publish {show_seconds(publish.fields['sync_s'])} + bytes at {show_size(publish.fields['gather'])}/s; "
        f"{publish.words}",
    ]
