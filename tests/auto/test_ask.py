"""The process that forecasts beside the trainer: killed, or left behind by a run that was."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest

from gruppetto.auto import ask

ALONE = """
import asyncio, time
from gruppetto.auto import ask
from test_ask import own_pid

async def main():
    print(await ask.AskBeside()(None, (), 0, 0), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    ask.forecast_all = own_pid
    asyncio.run(main())
"""


def own_pid(question, candidates, steps, skip):
    return os.getpid()


def test_after_its_process_was_killed_one_question_fails_and_the_next_has_a_new_one(monkeypatch):
    monkeypatch.setattr(ask, "forecast_all", own_pid)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # where the new process finds this file

    async def main():
        beside = ask.AskBeside()
        try:
            first = await beside(None, (), 0, 0)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(BrokenExecutor):
                await beside(None, (), 0, 0)
            return first, await beside(None, (), 0, 0)
        finally:
            beside.close()

    first, second = asyncio.run(main())
    assert len({os.getpid(), first, second}) == 3


def test_it_ends_with_a_run_that_was_killed(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    run = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None
    assert int(run.stdout.readline()) != run.pid
    run.kill()
    run.communicate(timeout=120)  # its output ends when nobody holds it any more
