"""A server of a model folder, and its run from start to signal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.engines.embedded.load import refuse
from gruppetto.engines.serve.listening import ending, many_files
from gruppetto.engines.serve.served import ServedEngine
from gruppetto.engines.serve.server import Server
from gruppetto.engines.serve.settings import ModelCard, ServeSettings
from gruppetto.engines.serve.text import ChatTokenizer
from gruppetto.errors import UserError
from gruppetto.model_folder import device_for, read_config

LONGEST_DEFAULT = 4096
"""Context where none is asked for and the model has more: KV for it is taken at once, in every slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """How the model is run; names as in [engine] of a config."""

    slots: int = 16
    context: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    deterministic: bool = False
    kv_on_swap: Literal["keep", "recompute"] = "recompute"
    skip_tokenizer: bool = False
    name: str | None = None
    weight_version: str = "default"


def build(model: str, choice: EngineChoice, settings: ServeSettings, arguments: dict[str, object]) -> Server:
    """A server that is not open. Raises `UserError` for a model that cannot be served, before its weights are read."""
    path = Path(model)
    config = read_config(path, "write gruppetto serve MODEL with a whole Hugging Face model folder")
    longest = getattr(config, "max_position_embeddings", None)
    context = choice.context or min(longest or LONGEST_DEFAULT, LONGEST_DEFAULT)
    refuse(config, context)
    device_for(choice.device)
    tokenizer = None if choice.skip_tokenizer else ChatTokenizer(path)
    card = ModelCard(
        path=model,
        name=choice.name or model,
        context=context,
        vocab=int(config.vocab_size),
        eos_ids=_eos_ids(path, config) if tokenizer is None else tokenizer.eos_ids,
        model_type=str(config.model_type),
        architectures=tuple(config.architectures or ()),
        dtype=choice.dtype,
        weight_version=choice.weight_version,
        arguments=arguments,
    )

    def make() -> ServedEngine:
        engine = EmbeddedEngine(
            "served",
            path,
            dtype=choice.dtype,
            device=choice.device,
            slots=choice.slots,
            context=context,
            deterministic=choice.deterministic,
            kv_on_swap=choice.kv_on_swap,
            decode=None if tokenizer is None else tokenizer.decode,
        )
        return ServedEngine(engine, engine)

    return Server(settings, card, tokenizer, make)


def _eos_ids(path: Path, config: Any) -> tuple[int, ...]:
    """End tokens where no tokenizer is read."""
    found = [config.eos_token_id]
    if (file := path / "generation_config.json").is_file():
        found.insert(0, json.loads(file.read_text()).get("eos_token_id"))
    flat = [i for value in found for i in (value if isinstance(value, list) else [value]) if i is not None]
    if not flat:
        raise UserError(f"the model folder {path} names no end token; write eos_token_id into config.json")
    return tuple(dict.fromkeys(flat))


async def run(server: Server, say: Callable[[str], None]) -> int:
    """Serves until SIGTERM (0) or Ctrl-C (130); a second signal ends the process as usual. Does not come back where a
    thread cannot be called back: everybody has been answered, and the process ends."""
    code = await _serve(server, say)
    if server.stuck:
        say("ending beside a transfer of weights whose sender does not answer")
        sys.stdout.flush()
        os._exit(code)
    return code


async def _serve(server: Server, say: Callable[[str], None]) -> int:
    many_files()
    ended = ending()
    try:
        await server.open()
        starting = asyncio.ensure_future(server.start())
        first: list[asyncio.Future[Any]] = [starting, ended]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            say(_line(server))
            code = await ended
            say("ending: what runs is drained, then aborted")
            return code
        starting.cancel()
        return ended.result()
    finally:
        await server.close()


def _line(server: Server) -> str:
    what = f"serving {server.card.name}"
    return server.settings.line(what, server.port, server.control_port)
