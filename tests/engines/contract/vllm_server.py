"""One real vLLM for all test processes: started by whoever needs it first, used by one test at a time."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import time
import urllib.request

import pytest
from engines.contract.kinds import CONTEXT, SLOTS, VLLM_PYTHON

from gruppetto.engines.http.build import INSIDE_VLLM


def need_vllm():
    """Skips, or in CI fails, where there is no vLLM."""
    if not VLLM_PYTHON.exists():
        said = "no vLLM in .venv-vllm; scripts/install-vllm puts it there"
        assert not os.environ.get("GRUPPETTO_NEEDS_VLLM"), said
        pytest.skip(said)


def environment():
    return os.environ | {
        "PYTHONPATH": str(INSIDE_VLLM),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def command(model, port):
    sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--dtype", "float32", "--enforce-eager"]
    modes = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    modes += ["--worker-extension-cls", "gruppetto_inside_vllm.Weights"]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    return [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *place, *sizes, *modes]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def healthy(url):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
        return answer.status == 200
    return False


class SharedVLLM:
    """The server behind a lock file in `folder`, which all test processes share."""

    def __init__(self, folder):
        self.folder = folder
        self._started = None

    @contextlib.contextmanager
    def alone(self):
        """Nobody else uses a vLLM meanwhile."""
        with (self.folder / "vllm.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def serving(self, model):
        """The server's URL; it is started where it does not run."""
        with self.alone():
            state = self.folder / "vllm.json"
            found = json.loads(state.read_text()) if state.exists() else None
            if found is None or not healthy(found["url"]):
                url = self._start(model)
                state.write_text(json.dumps({"url": url, "pid": self._started.pid}))
            yield json.loads(state.read_text())["url"]

    def _start(self, model):
        port, log = free_port(), self.folder / "vllm.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                command(model, port), stdout=out, stderr=out, env=environment(), start_new_session=True
            )
        self._started, url = process, f"http://127.0.0.1:{port}"
        for _ in range(1200):
            assert process.poll() is None, log.read_text()[-3000:]
            if healthy(url):
                return url
            time.sleep(0.5)
        raise AssertionError(log.read_text()[-3000:])

    def close(self):
        """Ends it, if it was started by this process."""
        if self._started is not None:
            with self.alone():
                self._kill(self._started.pid)
                self._started.wait()

    def end(self):
        """Ends it, whoever started it, for a test that needs the room; the lock is held."""
        state = self.folder / "vllm.json"
        if state.exists():
            self._kill(json.loads(state.read_text())["pid"])
            state.unlink()

    @staticmethod
    def _kill(group):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, 9)
