"""A publish into an engine in a process of its own: its speed against a plain copy, and the memory it takes.

Starts `gruppetto serve` on a bfloat16 model of --mb MB and publishes to it over shared memory: everything, and as a
delta of which --density of the elements differ. A publish is all of it: the engine's state and manifest, digests on
both sides, the transfer, the loading in place, the comparison, the commit. memcpy copies the same bytes from the same
tensors into memory that has been written to before, on one thread. One after the other in each round. The two ends of a
publish work at the same time, so with a core for each it takes as long as the busier one computes: `over_memcpy` is of
CPU seconds (of the engine's process in ticks of 10 ms, so all rounds together), `wall_over_memcpy` of wall seconds as
they were, and `cores_over_memcpy` of wall seconds less those in which an end could run and no core took it (the
kernel's run-queue delay; of a publish that of the end which waited longer): what is left when other programs are not
there. Memory is what both processes hold over what they held before, shared pages counted once, sampled in a publish of
its own.

    python benchmarks/weight_sync.py [--mb 1000] [--density 0.01] [--reps 5] [--bucket-mb 64] [--json FILE]

    shm.over_memcpy      memcpy CPU seconds / CPU seconds of the busier end; bar 0.5
    shm.wall_over_memcpy memcpy wall seconds / publish wall seconds, medians
    shm.cores_over_memcpy the same without the waits for a core; bar 0.5
    shm.buckets_held     most memory held beside the model, in buckets; bar 2 (and noise of an allocator)
    delta.bytes_share    bytes sent / full bytes; bar 0.03 at density 0.01
    delta.encode_gb_s    compared bytes a second of one core, of `weight_delta.py`, here in the publish
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from gruppetto.weights.channels.base import BUFFERS
from gruppetto.weights.channels.port import RemotePort
from gruppetto.weights.delta.packet import to_bytes
from gruppetto.weights.delta.snapshot import EngineState, Snapshot
from gruppetto.weights.layouts.tensors import as_bits, specs_of
from gruppetto.weights.publish import Published, PublishSettings, TwoPhase

HIDDEN, INNER, VOCAB = 2048, 6144, 1024
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def make_model(megabytes: int, folder: Path) -> dict[str, Tensor]:
    """A Llama-shaped model of about so many MB, also in `folder`."""
    per_layer = sum(int(np.prod(shape)) for shape in LAYER.values()) * 2
    layers = max(1, round(megabytes * 10**6 / per_layer))
    block = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    tensors = {name: _filled(block, shape) for name, shape in shapes.items()}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": VOCAB, "max_position_embeddings": 256, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def _filled(block: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = int(np.prod(shape))
    return block.repeat(-(-count // len(block)))[:count].reshape(shape).clone()


def changed(tensors: dict[str, Tensor], density: float, seed: int) -> None:
    """A share of the elements one unit in the last place away."""
    rng = np.random.default_rng(seed)
    for tensor in tensors.values():
        flat = as_bits(tensor).reshape(-1)
        flat[rng.integers(0, len(flat), round(len(flat) * density))] ^= 1


class Served:
    """The engine's process, as the publisher needs it."""

    name = "served"
    control_key = ""

    def __init__(self, url: str) -> None:
        self.control_url = url

    def weights_label(self, version: int) -> str:
        return str(version)

    def weights_taken(self, version: int) -> None:
        return None


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """(url, pid)."""
    sizes = ["--slots", "1", "--context", "64", "--dtype", "bfloat16", "--skip-tokenizer-init", "--port", "0"]
    command = [sys.executable, "-m", "gruppetto", "serve", str(folder), *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+:\d+", line)
            assert found, line
            yield found[0], process.pid
        finally:
            process.kill()


class Held:
    """The most that some processes hold beyond what they held at the beginning, in bytes; shared pages once."""

    def __init__(self, *pids: int | str) -> None:
        self._pids, self._stop, self.most = pids, threading.Event(), 0
        self._before = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        return sum(_proportional(pid) for pid in self._pids)

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, self._now() - self._before)

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.most


def _proportional(pid: int | str) -> int:
    """Pss: pages shared by n processes count 1/n for each."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) * 1024  # type: ignore[index]


def last(channel: TwoPhase) -> Published:
    """What its latest publish did."""
    assert channel.last is not None
    return channel.last


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_seconds(pid: int | str) -> float:
    """Time in which threads of a process could have run and stood in the queue of a core."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # one that has just ended
            found += int((task / "schedstat").read_text().split()[1])
    return found / 1e9


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


async def measure(megabytes: int, density: float, reps: int, bucket_mb: int) -> dict[str, float]:
    """All figures."""
    with tempfile.TemporaryDirectory() as path:
        tensors = make_model(megabytes, Path(path))
        with serving(Path(path)) as (url, pid):
            async with (
                aiohttp.ClientSession(url) as session,
                session.post("/pause_generation", json={"mode": "in_place"}),
            ):
                pass
            return await _rounds(tensors, Served(url), pid, density, reps, bucket_mb)


async def _rounds(
    tensors: dict[str, Tensor], engine: Any, pid: int, density: float, reps: int, bucket_mb: int
) -> dict[str, float]:
    size = sum(tensor.nbytes for tensor in tensors.values())
    settings: dict[str, Any] = {"bucket_bytes": bucket_mb << 20, "verify_every": 0}
    full = TwoPhase(PublishSettings(**settings))
    delta = TwoPhase(PublishSettings(mode="delta", **settings))
    target = {name: tensor.clone() for name, tensor in tensors.items()}
    took: dict[str, list[float]] = {"memcpy": [], "full": [], "delta": [], "memcpy alone": [], "full alone": []}
    cpu = {"memcpy": 0.0, "trainer": 0.0, "engine": 0.0}
    await RemotePort(engine).state()
    held = Held("self", pid)  # the first: its buckets are kept for those that follow
    await full.publish(1, tensors.items(), [engine])
    most = held.end()
    for version in range(2, 2 + reps):
        changed(tensors, density, version)
        begin, queued = time.process_time(), waited_seconds("self")
        took["memcpy"].append(seconds(lambda: copy(tensors, target)))
        middle_s, engine_s = time.process_time(), cpu_seconds(pid)
        own, other = waited_seconds("self"), waited_seconds(pid)
        await full.publish(version, tensors.items(), [engine])
        took["full"].append(last(full).seconds)
        took["memcpy alone"].append(took["memcpy"][-1] - (own - queued))
        took["full alone"].append(took["full"][-1] - max(waited_seconds("self") - own, waited_seconds(pid) - other))
        cpu["memcpy"] += middle_s - begin
        cpu["trainer"] += time.process_time() - middle_s
        cpu["engine"] += cpu_seconds(pid) - engine_s
    shares = []
    for version in range(2 + reps, 3 + 2 * reps):
        await delta.publish(version, tensors.items(), [engine])
        if last(delta).kinds["served"] == "delta":
            shares.append(last(delta).sent_bytes / size)
            took["delta"].append(last(delta).seconds)
        changed(tensors, density, version)
    middle = {name: statistics.median(values) for name, values in took.items()}
    return {
        "shm.over_memcpy": cpu["memcpy"] / max(cpu["trainer"], cpu["engine"]),
        "shm.wall_over_memcpy": middle["memcpy"] / middle["full"],
        "shm.cores_over_memcpy": middle["memcpy alone"] / middle["full alone"],
        "shm.trainer_cpu_s": cpu["trainer"] / reps,
        "shm.engine_cpu_s": cpu["engine"] / reps,
        "memcpy_cpu_s": cpu["memcpy"] / reps,
        "shm.gb_s": size / middle["full"] / 1e9,
        "shm.buckets_held": BUFFERS * most / last(full).buffer_bytes,
        "shm.held_mb": most / 1e6,
        "shm.buffers_mb": last(full).buffer_bytes / 1e6,
        "delta.bytes_share": statistics.median(shares),
        "delta.encode_gb_s": size / encode_seconds(tensors, density, reps) / 1e9,
        "delta.publish_s": middle["delta"],
        "full.publish_s": middle["full"],
        "memcpy_gb_s": size / middle["memcpy"] / 1e9,
        "model_mb": size / 1e6,
        "density": density,
    }


def copy(tensors: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """One thread, every tensor's bytes."""
    for name, tensor in tensors.items():
        np.copyto(as_bits(target[name]), as_bits(tensor))


def encode_seconds(tensors: dict[str, Tensor], density: float, reps: int) -> float:
    """CPU seconds of one core to compare, find, code and join what changed."""
    arrays = {name: as_bits(tensor) for name, tensor in tensors.items()}
    snapshot = Snapshot({spec.name: spec for spec in specs_of(tensors.items())})
    first = snapshot.propose(0, arrays, {"e": EngineState("1", None)})
    snapshot.confirmed("e", EngineState("1", 0), first.digests)
    snapshot.settle()
    changed(tensors, density, 1)
    took = []
    for _ in range(reps):
        begin = time.process_time()
        proposal = snapshot.propose(1, arrays, {"e": EngineState("1", 0)})
        assert proposal.delta is not None
        to_bytes(proposal.delta)
        took.append(time.process_time() - begin)
        snapshot.drop()
    return statistics.median(took)


def main() -> None:
    """Prints the figures, and writes them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="bytes of the model in MB")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that differ")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = asyncio.run(measure(options.mb, options.density, options.reps, options.bucket_mb))
    for name, value in figures.items():
        print(f"{name:28} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
