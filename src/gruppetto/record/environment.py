"""What a run ran on: versions, code, machine. Promise: no secrets: no environment variables, users or command lines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from gruppetto import clock

_PACKAGES = (
    "gruppetto",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "msgspec",
    "aiohttp",
    "pyarrow",
    "reasoning-gym",
    "math-verify",
)


def environment() -> dict[str, Any]:
    """The contents of env.json."""
    return {
        "started_unix_s": clock.wall(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "gpus": _gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": _git(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gpus() -> list[str]:
    """Names of the GPUs, where torch has been loaded anyway."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git() -> dict[str, Any] | None:
    """Commit of the current directory and whether files differ from it; None outside a repository."""
    commit = _run_git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_run_git("status", "--porcelain", "--untracked-files=no"))}


def _run_git(*args: str) -> str | None:
    try:
        result = subprocess.run(["git", *args], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
