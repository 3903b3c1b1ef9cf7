"""What this machine has, check by check. A check never fails: what is missing is its answer, with what will not work.

`CHECKS` is the registry, in the order in which they are shown; a stage that has something to say about a machine adds
its own.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from gruppetto import __version__
from gruppetto.extras import EXTRAS as EXTRAS

LEAST_MEMORY = 2e9
"""Bytes; below this the demo's engine, trainer and Python do not fit side by side."""
LEAST_DISK = 1e9


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `without`: what will not work, in one line; for what works it is empty."""

    name: str
    works: bool
    says: str
    without: str = ""


Check = Callable[[], Sequence[Finding]]


def examine(checks: Sequence[Check]) -> list[Finding]:
    """Runs all checks in their order."""
    return [finding for check in checks for finding in check()]


def check_python() -> Sequence[Finding]:
    """Python and this package."""
    return [
        Finding("python", True, f"{platform.python_version()}, {platform.platform()}"),
        Finding("gruppetto", True, __version__),
    ]


def check_extras() -> Sequence[Finding]:
    """Each extra, whole or not."""
    return [_extra(name, modules, needs) for name, (modules, needs) in EXTRAS.items()]


def _extra(name: str, modules: Sequence[str], needs: str) -> Finding:
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return Finding(f"extra {name}", True, ", ".join(f"{module} {_version(module)}" for module in modules))
    return Finding(
        f"extra {name}",
        False,
        f"without {', '.join(missing)}",
        f'{needs}: run pip install "gruppetto[{name}]"',
    )


def _version(module: str) -> str:
    for name in (module, module.replace("_", "-")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "(version unknown)"


def check_processor() -> Sequence[Finding]:
    """Cores and memory."""
    memory = memory_bytes()
    enough = memory >= LEAST_MEMORY
    without = f"the demo, which takes about {LEAST_MEMORY / 1e9:.0f} GB: use a machine with more memory"
    return [
        Finding("processor", True, f"{processor_name()}, {cores()} cores for this process"),
        Finding("memory", enough, f"{memory / 1e9:.1f} GB", "" if enough else without),
    ]


def processor_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine() or "processor"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_disk() -> Sequence[Finding]:
    """Room where run folders go by default: the current folder."""
    free = shutil.disk_usage(".").free
    enough = free >= LEAST_DISK
    without = "" if enough else "runs with checkpoints: free space here, or write run.dir = a folder elsewhere"
    return [Finding("disk", enough, f"{free / 1e9:.1f} GB free in {Path.cwd()}", without)]


def check_gpus() -> Sequence[Finding]:
    """GPUs that torch can use; none is no fault, as all that is embedded runs on processors."""
    if find_spec("torch") is None:
        return [Finding("GPUs", True, "not looked for, without torch")]
    import torch

    if not torch.cuda.is_available():
        return [Finding("GPUs", True, 'none; model.device = "auto" is the processor')]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [Finding("GPUs", True, ", ".join(names))]


CHECKS: list[Check] = [check_python, check_extras, check_processor, check_disk, check_gpus]
