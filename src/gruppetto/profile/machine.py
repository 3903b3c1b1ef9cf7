"""What one thread of this machine does at best: matrix products, memory, copies between processes, the disk.

Every figure is the best of a few tries (a peak, not a mean) of an amount large enough to leave the caches.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from gruppetto.clock import monotonic
from gruppetto.doctor import cores, memory_bytes, processor_name
from gruppetto.ledger.machines.gpus import GPU

TRIES = 5
SIDE = 640
"""Of the square matrices that are multiplied."""
COPIED = 64 << 20
"""Bytes of a copy."""
_SHARED = Path("/dev/shm")


def measure_machine(folder: Path) -> tuple[GPU, dict[str, float]]:
    """One thread of this machine as a "GPU", and the bytes/s of the disk under `folder` (disk_write, disk_read).

    Its node is the machine: as many "GPUs" as cores, whose copies go through shared memory.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shared, _ = _file(_SHARED if _SHARED.is_dir() else folder, sync=False)
        write, read = _file(folder, sync=True)
        gpu = GPU(
            name=processor_name(),
            bf16_flops=_matmul(torch.bfloat16),
            fp32_flops=_matmul(torch.float32),
            bandwidth=_memory(),
            memory=float(memory_bytes()),
            peer_link=shared,
            host_link=shared,
            network=shared,
            gpus_per_node=cores(),
            host_memory=float(memory_bytes()),
            source="measured by gruppetto doctor, one thread; links are copies through shared memory",
        )
    finally:
        torch.set_num_threads(threads)
    return gpu, {"disk_write": write, "disk_read": read}


def best(work: Callable[[], object], tries: int = TRIES) -> float:
    """Seconds of the fastest try; one before them warms up."""
    work()
    found = []
    for _ in range(tries):
        begin = monotonic()
        work()
        found.append(monotonic() - begin)
    return max(min(found), 1e-9)


def _matmul(dtype: torch.dtype) -> float:
    a, b = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
    return 2.0 * SIDE**3 / best(lambda: a @ b)


def _memory() -> float:
    """Bytes read and written a second by a copy."""
    source, target = torch.ones(COPIED // 4), torch.empty(COPIED // 4)
    return 2.0 * COPIED / best(lambda: target.copy_(source))


def _file(folder: Path, *, sync: bool) -> tuple[float, float]:
    """Bytes/s of writing and of reading back (mostly from the page cache) a file in `folder`."""
    data = bytes(COPIED)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".gruppetto-profile-") as file:

        def write() -> None:
            file.seek(0)
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())

        def read() -> None:
            file.seek(0)
            file.read()

        return COPIED / best(write, 2), COPIED / best(read, 2)
