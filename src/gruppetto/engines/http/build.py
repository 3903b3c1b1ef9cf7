"""Engines behind HTTP from plain settings: which wire, which process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.engine import HttpEngine
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.wire import Wire, WireSettings
from gruppetto.engines.launch import EngineProcess, Launch
from gruppetto.engines.sglang import SGLangWire
from gruppetto.engines.vllm import VLLMWire

KEY = "GRUPPETTO_ENGINE_API_KEY"
"""Environment variable with the servers' key; never in a config, which is copied into the run folder."""
WIRES: dict[str, type[Wire]] = {"sglang": SGLangWire, "vllm": VLLMWire}


def http_engine(
    kind: str,
    name: str,
    settings: HttpSettings,
    staging: Staging,
    *,
    url: str = "",
    launch: Launch | None = None,
    temperature: float = 1.0,
) -> HttpEngine:
    """An engine that is not started: a running server at `url`, or one to `launch`."""
    told = WireSettings(temperature=temperature, keep_kv=settings.keep_kv)
    wire_of: Callable[[HttpClient], Wire] = lambda client: WIRES[kind](client, told, settings.deadlines)  # noqa: E731
    process = None if launch is None else EngineProcess(replace(launch, name=name))
    return HttpEngine(
        name,
        wire_of,
        lambda at: HttpClient(name, at, api_key=os.environ.get(KEY, "")),
        settings,
        staging,
        url=url,
        process=process,
    )


def staging_in(folder: Path, model: str | Path) -> Staging:
    """Where one run's weights are put for its engines."""
    return Staging(folder, Path(model))
