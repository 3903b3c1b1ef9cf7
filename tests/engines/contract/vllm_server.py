"""One real vLLM for all test processes: started by whoever needs it first, used by one test at a time."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request

import pytest
from engines.contract.kinds import CONTEXT, SLOTS, VLLM_PYTHON

from gruppetto.engines.http.build import INSIDE_VLLM
from gruppetto.engines.launch import die_with_parent


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
    """The server behind a lock file in `folder`, which all test processes share.

    Tests that use it are run by one process (`pytest_xdist_make_scheduler`), so that none waits for the lock while it
    has other tests.
    """

    def __init__(self, folder):
        self.folder = folder
        self._started = None

    @contextlib.contextmanager
    def serving(self, model):
        """The server's URL, for one test at a time; it is started where it does not run."""
        with (self.folder / "vllm.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = self.folder / "vllm.json"
            url = json.loads(state.read_text())["url"] if state.exists() else None
            if url is None or not healthy(url):
                url = self._start(model)
                state.write_text(json.dumps({"url": url}))
            yield url

    def _start(self, model):
        self.close()
        port, log = free_port(), self.folder / "vllm.log"
        with log.open("ab") as out:
            self._started = subprocess.Popen(
                command(model, port),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment(),
                process_group=0,
                preexec_fn=die_with_parent,
            )
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            assert self._started.poll() is None, log.read_text()[-3000:]
            if healthy(url):
                return url
            time.sleep(0.25)
        raise AssertionError(log.read_text()[-3000:])

    def close(self):
        """Ends it, if it was started by this process."""
        if self._started is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._started.pid, signal.SIGKILL)
            self._started.wait()
            self._started = None
