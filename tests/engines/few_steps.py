"""An engine that decodes little while a file is there: what has to be under way stays so, however slow a test is.

As a program it is `gruppetto` with such an engine: `python few_steps.py FILE serve MODEL …`.
"""

import sys
import time

from gruppetto.engines.embedded.core import Core

STEPS = 10


def few_steps(file, steps=STEPS, plain=Core.step):
    """`Core.step` that decodes at most so many steps while `file` is there, and then waits for it to be gone. What is
    asked of the engine meanwhile is done: each call returns soon."""
    left = {}

    def step(core):
        if not file.exists():
            left.clear()
        elif left.setdefault(core, steps):
            left[core] -= 1
        else:
            time.sleep(0.002)
            return []
        return plain(core)

    return step


if __name__ == "__main__":
    from pathlib import Path

    from gruppetto.cli.main import main

    Core.step = few_steps(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
