"""What of [engine] and [weights] does not go together: engines in this process, servers started here, servers that run.

Promise: looks at names only; one line for each problem, with what to write instead.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from gruppetto.addresses import server_address
from gruppetto.config.schema import Config
from gruppetto.config.toml import value_text

FOR_SERVERS = ("urls", "python", "command", "stream", "args")
TO_START = ("python", "command", "args")


def engine_problems(config: Config) -> Iterator[str]:
    """One line each."""
    yield from _kv_while_updating(config)
    if config.engine.type == "embedded":
        yield from _embedded(config)
        return
    yield from _with_servers(config)
    if config.engine.urls:
        yield from _running(config)
    else:
        yield from _started_here(config)


def _kv_while_updating(config: Config) -> Iterator[str]:
    weights = config.weights
    kept = weights.pause == "keep" or (weights.pause == "auto" and config.run.placement == "disaggregated")
    if weights.release_kv and kept:
        yield (
            f"weights.release_kv = true with weights.pause = '{weights.pause}': requests are kept in the KV that would "
            "be released; write weights.pause = 'abort'"
        )


def _embedded(config: Config) -> Iterator[str]:
    engine = config.engine
    if engine.args:
        yield f"engine.args = {value_text(engine.args)}: the embedded engine takes none; leave engine.args out"
    for name in FOR_SERVERS[:-1]:
        if value := getattr(engine, name):
            yield (
                f"engine.{name} = {value_text(value)} is for servers, and engine.type = 'embedded' runs in this "
                f"process; write engine.type = 'sglang' or 'vllm', or leave engine.{name} out"
            )


def _with_servers(config: Config) -> Iterator[str]:
    kind, rollout = config.engine.type, config.rollout
    if config.run.deterministic:
        yield (
            f"run.deterministic = true with engine.type = '{kind}': a server decodes at its own pace, so that no two "
            "runs are alike; write engine.type = 'embedded' or run.deterministic = false"
        )
    yield from _weights(config)
    cut = rollout.top_p < 1 or rollout.top_k > 0
    if kind == "vllm" and cut and rollout.temperature not in (0.0, 1.0):
        yield (
            f"rollout.temperature = {rollout.temperature:g} with top_p = {rollout.top_p:g}, top_k = {rollout.top_k}: "
            "vLLM's logprobs are either before the temperature or after top_p and top_k, and the trainer needs those "
            "between; write rollout.temperature = 1.0, or top_p = 1.0 and top_k = 0"
        )


def _weights(config: Config) -> Iterator[str]:
    """What the usual commands start reads whole weights from disk; other servers are asked when they run."""
    weights, engine = config.weights, config.engine
    if weights.channel == "inprocess":
        yield (
            f"weights.channel = 'inprocess' is for engines in this process, and engine.type = '{engine.type}' is a "
            "server; write weights.channel = 'auto'"
        )
    elif not (engine.urls or engine.command) and (weights.channel not in ("auto", "disk") or weights.mode != "full"):
        yield (
            f"weights.channel = '{weights.channel}', weights.mode = '{weights.mode}': {engine.type} reads whole "
            "weights from disk; write weights.channel = 'auto', weights.mode = 'full', or engine.command = "
            '["gruppetto", "serve", "{model}", "--port", "{port}"]'
        )


def _running(config: Config) -> Iterator[str]:
    engine = config.engine
    for name in TO_START:
        if value := getattr(engine, name):
            yield (
                f"engine.{name} = {value_text(value)} is for servers that are started here, and engine.urls names "
                f"running ones; leave one of the two out"
            )
    if engine.count not in (1, len(engine.urls)):
        yield f"engine.count = {engine.count}, but engine.urls names {len(engine.urls)}; leave engine.count out"
    if len({url.rstrip("/") for url in engine.urls}) != len(engine.urls):
        yield f"engine.urls = {value_text(engine.urls)} names a server twice; each is one engine"
    for url in engine.urls:
        if server_address(url) is None:
            yield f'engine.urls has "{url[:200]}", which is no address of a server; write it as http://127.0.0.1:30000'


def _started_here(config: Config) -> Iterator[str]:
    engine, kind = config.engine, config.engine.type
    if engine.command:
        if engine.python:
            yield "engine.command and engine.python: the command names its own program; leave engine.python out"
        if shutil.which(engine.command[0]) is None:
            yield f'engine.command begins with "{engine.command[0]}", which is no program here; write its whole path'
        if not any("{port}" in part for part in engine.command):
            yield (
                f"engine.command = {value_text(engine.command)} does not say where to listen; put {{port}} into it, "
                'as in ["gruppetto", "serve", "{model}", "--port", "{port}"]'
            )
    elif engine.python:
        if shutil.which(os.path.expanduser(engine.python)) is None:
            yield f'engine.python = "{engine.python}" is no program; write the path of a Python that has {kind}'
    elif find_spec(kind) is None:
        yield (
            f"engine.type = '{kind}' needs {kind}, which {sys.executable} does not have; write engine.python = the "
            f"Python of an environment that has it, engine.command = what starts the server, or engine.urls"
        )
