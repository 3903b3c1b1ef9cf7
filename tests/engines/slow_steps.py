"""`gruppetto` with an engine whose steps take twenty times as long while a file is there: `python slow_steps.py FILE
serve MODEL …`. By its own measure, so that it is as much slower beside others on a machine that is itself slow."""

import sys
import time
from pathlib import Path

from gruppetto.cli.main import main
from gruppetto.engines.embedded.core import Core

TIMES = 20
LONGEST_S = 0.5
"""That a step is made to take; its process may have been stopped in it."""


def slow_steps(file, plain=Core.step):
    def step(core):
        begin = time.monotonic()
        ended = plain(core)
        if file.exists():
            time.sleep(min(LONGEST_S, (TIMES - 1) * (time.monotonic() - begin)))
        return ended

    return step


if __name__ == "__main__":
    Core.step = slow_steps(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
