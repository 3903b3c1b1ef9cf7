"""The engines that the one suite runs on, and what of them is compared with what."""

import contextlib
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.engines.http.build import http_engine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import Deadlines

ROOT = Path(__file__).parents[3]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
FEW_STEPS = ROOT / "tests" / "engines" / "few_steps.py"
SLOTS, CONTEXT = 8, 1024
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
def served(model, *arguments, few_steps=None):
    """`gruppetto serve` as a process: its URL. Its engine decodes few steps while a file `few_steps` is there."""
    program = ["-m", "gruppetto"] if few_steps is None else [str(FEW_STEPS), str(few_steps)]
    command = [sys.executable, *program, "serve", str(model), *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert "serving" in line, (line, process.stderr.read())
            yield re.search(r"http://\S+:\d+", line)[0]
        finally:
            process.kill()
