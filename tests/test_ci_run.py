"""What CI runs ends whole: nothing that it began in the background is left behind."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "run"
INSTALL = """#!/usr/bin/env bash
sleep 300 &
echo $! > pids
wait
"""
MAKE = """#!/usr/bin/env bash
until [ -s pids ]; do sleep 0.02; done
{then}
"""


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize(("then", "sent"), [("exit 3", None), ("touch waiting; sleep 300", signal.SIGTERM)])
def test_an_installation_ends_with_the_script_that_ended_early(tmp_path, then, sent):
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    program(tmp_path / "scripts" / "install-vllm", INSTALL)
    program(tmp_path / "bin" / "make", MAKE.format(then=then))
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "GRUPPETTO_CHROMIUM": "none"}
    with subprocess.Popen([tmp_path / ".ci" / "run"], cwd=tmp_path, env=env, process_group=0) as process:
        if sent is None:
            assert process.wait(100) == 3
        else:
            while not (tmp_path / "waiting").exists():
                time.sleep(0.02)
            os.killpg(process.pid, sent)
            assert process.wait(100) != 0
    child = int((tmp_path / "pids").read_text())
    for _ in range(3000):
        if not runs(child):
            break
        time.sleep(0.02)
    assert not runs(child)
