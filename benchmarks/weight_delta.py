"""What a weight delta costs and saves: bytes against full weights, speed against a plain copy of the same bytes.

A bfloat16 model of --mb MB in matrices of 4096 x 4096 with a vector beside each; a given share of its elements differs,
spread evenly and, for `block_bytes_share`, in whole rows (what a batch did not reach stays as it is). Encoding is all
of `Snapshot.propose` and the packet: compare with the snapshot, find positions, code, digest, join. Applying is reading
the packet, checking every digest and writing. memcpy copies the same bytes in the same rounds. Figures are medians of
CPU seconds of one thread.

    python benchmarks/weight_delta.py [--mb 256] [--density 0.01] [--reps 5] [--json FILE]

    delta.bytes_share          packet / full bytes; bar 0.03 at density 0.01
    delta.encode_over_memcpy   compared bytes a second / copied bytes a second
    delta.encode_gb_s          compared bytes a second of one core; bar 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gruppetto.weights.delta.digest import digest
from gruppetto.weights.delta.held import Held
from gruppetto.weights.delta.packet import from_bytes, to_bytes
from gruppetto.weights.delta.snapshot import EngineState, Snapshot
from gruppetto.weights.layouts.spec import Spec

SIDE = 4096


def model(megabytes: int) -> tuple[dict[str, Spec], dict[str, np.ndarray]]:
    """Specs and bits of a model of about so many MB; weights as an initialiser leaves them."""
    rng = np.random.default_rng(0)
    specs = {}
    for layer in range(max(1, megabytes * 10**6 // (2 * SIDE * SIDE))):
        specs[f"w{layer}"] = Spec(f"w{layer}", (SIDE, SIDE), "bfloat16")
        specs[f"n{layer}"] = Spec(f"n{layer}", (SIDE,), "bfloat16")
    arrays = {}
    for name, spec in specs.items():
        values = rng.standard_normal(spec.shape, np.float32) * np.float32(0.02)
        arrays[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return specs, arrays


def stepped(arrays: dict[str, np.ndarray], density: float, whole_rows: bool) -> dict[str, np.ndarray]:
    """A share of the elements one unit in the last place away."""
    rng = np.random.default_rng(1)
    made = {}
    for name, array in arrays.items():
        new = array.copy()
        if whole_rows and array.ndim == 2:
            new[rng.choice(SIDE, round(SIDE * density), replace=False)] ^= 1
        else:
            flat = new.reshape(-1)
            flat[rng.random(flat.size, np.float32) < density] ^= 1
        made[name] = new
    return made


def seconds(work: Callable[[], object]) -> float:
    """Of one call, in CPU time: everything here is one thread, and other programs must not count."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(megabytes: int, density: float, reps: int) -> dict[str, float]:
    """All figures, the parts of each round one after the other so that a busy machine slows all of them."""
    specs, old = model(megabytes)
    new = stepped(old, density, whole_rows=False)
    size = sum(spec.num_bytes for spec in specs.values())
    snapshot = Snapshot(specs)
    first = snapshot.propose(0, old, {"e": EngineState("1", None)})
    snapshot.confirmed("e", EngineState("1", 0), first.digests)
    snapshot.settle()
    target = {name: np.empty_like(array) for name, array in new.items()}
    took: dict[str, list[float]] = {"memcpy": [], "encode": [], "apply": [], "digest": []}
    packet = b""

    def encode(values: dict[str, np.ndarray]) -> bytes:
        proposal = snapshot.propose(1, values, {"e": EngineState("1", 0)})
        snapshot.drop()
        assert proposal.delta is not None, proposal.full
        return to_bytes(proposal.delta)

    def apply(held: Held) -> None:
        held.commit(held.prepare(from_bytes(packet, size)))

    def copy() -> None:
        for name, array in new.items():
            np.copyto(target[name], array)

    encode(new)
    for _ in range(reps):
        took["memcpy"].append(seconds(copy))
        begin = time.process_time()
        packet = encode(new)
        took["encode"].append(time.process_time() - begin)
        held = Held(0, specs, {name: array.copy() for name, array in old.items()})
        took["apply"].append(seconds(lambda: apply(held)))  # noqa: B023
        took["digest"].append(seconds(lambda: [digest(array) for array in new.values()]))
        assert not held.audit()
    rows = encode(stepped(old, density, whole_rows=True))
    middle = {name: statistics.median(values) for name, values in took.items()}
    return {
        "delta.bytes_share": len(packet) / size,
        "delta.block_bytes_share": len(rows) / size,
        "delta.encode_over_memcpy": middle["memcpy"] / middle["encode"],
        "delta.encode_gb_s": size / middle["encode"] / 1e9,
        "delta.apply_gb_s": size / middle["apply"] / 1e9,
        "delta.digest_gb_s": size / middle["digest"] / 1e9,
        "memcpy_gb_s": size / middle["memcpy"] / 1e9,
        "model_mb": size / 1e6,
        "density": density,
    }


def main() -> None:
    """Prints the figures, and writes them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="bytes of the model in MB")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that differ")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    figures = measure(options.mb, options.density, options.reps)
    for name, value in figures.items():
        print(f"{name:28} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
