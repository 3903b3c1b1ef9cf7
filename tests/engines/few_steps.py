"""An engine that decodes little while a file is there: what has to be under way stays so, however slow a test is.

As a program it is `gruppetto` with such an engine: `python few_steps.py FILE serve MODEL …`.
"""

import sys
import time

import torch

from gruppetto.engines.embedded.core import Core

STEPS = 10


def few_steps(file, plain=Core.step):
    """`Core.step` that decodes at most `STEPS` times while `file` is there, and as often again when it is touched;
    then it waits. What is asked of the engine meanwhile is done, and requests enter: each call returns soon."""
    seen = {}

    @torch.inference_mode()
    def step(core):
        try:
            touched = file.stat().st_mtime_ns
        except FileNotFoundError:
            seen.clear()
            return plain(core)
        if core not in seen or seen[core][0] != touched:
            seen[core] = touched, core.decode_steps
        if core.decode_steps < seen[core][1] + STEPS:
            return plain(core)
        core._admit()
        if core._prefilling:
            return plain(core)
        time.sleep(0.002)
        return []

    return step


if __name__ == "__main__":
    from pathlib import Path

    from gruppetto.cli.main import main

    Core.step = few_steps(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
