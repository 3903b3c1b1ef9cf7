"""Engines behind HTTP from plain settings: which wire, which command, which process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.engine import HttpEngine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import Wire, WireSettings
from gruppetto.engines.launch import EngineProcess, Launch
from gruppetto.engines.sglang import SGLangWire
from gruppetto.engines.vllm import VLLMWire

Kind = Literal["sglang", "vllm"]
KEY = "GRUPPETTO_ENGINE_API_KEY"
"""Environment variable with the servers' key; never in a config, which is copied into the run folder."""
WIRES: dict[str, type[Wire]] = {"sglang": SGLangWire, "vllm": VLLMWire}
INSIDE_VLLM = Path(__file__).parent.parent / "inside_vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Servers of one run, as [engine] has them: running at `urls`, or `count` of them to be started."""

    kind: Kind
    model: str
    logs: Path
    urls: Sequence[str] = ()
    count: int = 1
    python: str = ""
    command: Sequence[str] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    wire: WireSettings = field(default_factory=WireSettings)


def http_engine(
    kind: str,
    name: str,
    settings: HttpSettings,
    staging: Staging,
    *,
    url: str = "",
    launch: Launch | None = None,
    wire: WireSettings | None = None,
) -> HttpEngine:
    """An engine that is not started: a running server at `url`, or one to `launch`."""
    told = wire or WireSettings(keep_kv=settings.keep_kv)
    wire_of: Callable[[HttpClient], Wire] = lambda client: WIRES[kind](client, told, settings.deadlines)  # noqa: E731
    return HttpEngine(
        name,
        wire_of,
        lambda at: HttpClient(name, at, api_key=os.environ.get(KEY, "")),
        settings,
        staging,
        url=url,
        process=None if launch is None else EngineProcess(launch),
    )


def http_engines(servers: Servers, settings: HttpSettings, staging: Staging) -> list[HttpEngine]:
    """All of them, not started, named kind-0, kind-1, …"""
    found = []
    for index in range(len(servers.urls) or servers.count):
        name = f"{servers.kind}-{index}"
        url = servers.urls[index] if servers.urls else ""
        launch = None if url else launch_of(servers, settings, index)
        found.append(http_engine(servers.kind, name, settings, staging, url=url, launch=launch, wire=servers.wire))
    return found


def launch_of(servers: Servers, settings: HttpSettings, index: int) -> Launch:
    """The command that starts one, with what the run needs of it; the user's arguments come last, and so win."""
    usual = _sglang if servers.kind == "sglang" else _vllm
    command, optional, env = usual(servers, settings)
    return Launch(
        name=f"{servers.kind}-{index}",
        index=index,
        model=servers.model,
        command=servers.command or command,
        optional=() if servers.command else optional,
        args=servers.args,
        env=env,
        log=servers.logs / f"{servers.kind}-{index}.log",
    )


def _python(servers: Servers) -> str:
    return os.path.expanduser(servers.python) if servers.python else sys.executable


def _sglang(servers: Servers, settings: HttpSettings) -> tuple[list[str], list[str], dict[str, str]]:
    command = [_python(servers), "-m", "sglang.launch_server", "--model-path", "{model}"]
    command += ["--host", "{host}", "--port", "{port}", "--dtype", servers.dtype]
    command += ["--context-length", str(settings.context), "--max-running-requests", str(settings.slots)]
    streams = ["--incremental-streaming-output"] if settings.stream else []  # else each chunk has all over again
    return command, ["--enable-metrics", *streams], {}


def _vllm(servers: Servers, settings: HttpSettings) -> tuple[list[str], list[str], dict[str, str]]:
    """Raw logprobs are before top-p and top-k, as the trainer's; only processed ones are after the temperature."""
    mode = "raw_logprobs" if servers.wire.temperature in (0.0, 1.0) else "processed_logprobs"
    command = [_python(servers), "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"]
    command += ["--host", "{host}", "--port", "{port}", "--dtype", servers.dtype]
    command += ["--max-model-len", str(settings.context), "--max-num-seqs", str(settings.slots)]
    command += ["--logprobs-mode", mode, "--generation-config", "vllm"]
    command += ["--worker-extension-cls", "gruppetto_inside_vllm.Weights"]
    path = os.pathsep.join([str(INSIDE_VLLM), *filter(None, [os.environ.get("PYTHONPATH")])])
    return (
        command,
        ["--enable-scale-out"],
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path},
    )
