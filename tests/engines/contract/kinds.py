"""The engines that the one suite runs on, and what of them is compared with what."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.engines.http.build import INSIDE_VLLM, http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import Deadlines

ROOT = Path(__file__).parents[3]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SLOTS, CONTEXT = 8, 256
KINDS = ("embedded", "served", "served-stream", "scripted", "vllm", "vllm-stream")


@dataclass
class Kind:
    """How to open engines of a kind. `model`: the folder whose weights they begin with."""

    name: str
    model: Path
    work: Path
    url: str = ""
    made: list = field(default_factory=list)

    @property
    def scripted(self):
        return self.name == "scripted"

    @property
    def over_http(self):
        return self.name != "embedded"

    @property
    def vllm(self):
        return self.name.startswith("vllm")

    async def open(self, *, keep_kv=False, start=True, name="e", **deadlines):
        decode = HFTokenizer(self.model).decode
        if not self.over_http:
            engine = EmbeddedEngine(
                name,
                self.model,
                device="cpu",
                slots=SLOTS,
                context=CONTEXT,
                decode=decode,
                kv_on_swap="keep" if keep_kv else "recompute",
            )
        else:
            settings = HttpSettings(
                slots=SLOTS,
                context=CONTEXT,
                stream=self.name.endswith("-stream"),
                keep_kv=keep_kv,
                decode=decode,
                deadlines=Deadlines(**{"beat": 0.5} | deadlines),
            )
            wire = "vllm" if self.vllm else "sglang"
            staging = Staging(self.work / f"weights-{len(self.made)}", self.model)
            engine = http_engine(wire, name, settings, staging, url=self.url)
        self.made.append(engine)
        if start:
            await engine.start()
        return engine


@contextlib.contextmanager
def served(model, *arguments):
    """`gruppetto serve` as a process: its URL."""
    command = [sys.executable, "-m", "gruppetto", "serve", str(model), *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert "serving" in line, (line, process.stderr.read())
            yield re.search(r"http://\S+:\d+", line)[0]
        finally:
            process.kill()


def vllm_environment():
    return os.environ | {
        "PYTHONPATH": str(INSIDE_VLLM),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def vllm_command(model, port, *more):
    sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--dtype", "float32", "--enforce-eager"]
    modes = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    modes += ["--worker-extension-cls", "gruppetto_inside_vllm.Weights"]
    module = "vllm.entrypoints.openai.api_server"
    return [str(VLLM_PYTHON), "-m", module, "--model", str(model), *place, *sizes, *modes, *more]


@contextlib.contextmanager
def vllm_served(model, log):
    """A real vLLM server on the CPU: its URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            vllm_command(model, port), stdout=out, stderr=out, env=vllm_environment(), start_new_session=True
        ) as process,
    ):
        try:
            for _ in range(1200):
                assert process.poll() is None, log.read_text()[-3000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        break
                time.sleep(0.5)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
