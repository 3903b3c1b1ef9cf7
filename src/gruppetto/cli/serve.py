"""`gruppetto serve`: a model folder as an HTTP server with SGLang's and OpenAI's APIs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gruppetto.cli.listening import HIDDEN, SIZES, add_network, add_sizes, require_more_than_0, say, sizes, where
from gruppetto.cli.settings import quiet
from gruppetto.errors import UserError
from gruppetto.extras import needs

if TYPE_CHECKING:
    from gruppetto.engines.serve.settings import ServeSettings

_OPTIONS = ("context", "slots", "kv_on_swap", "dtype", "device", "threads", "deterministic")
"""Settings of a config that are options here."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as SGLang and OpenAI do",
        description="Serves a Hugging Face model folder with the embedded engine: SGLang's native API and OpenAI's.",
        epilog="Example: gruppetto serve models/small --port 8000",
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face model folder")
    add_network(parser)
    _add_engine(parser)
    add_sizes(parser, late=503)
    parser.add_argument("--drain", type=float, default=5.0, metavar="S", help="for open requests after SIGTERM (5)")
    parser.set_defaults(run=run)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--served-model-name", metavar="NAME", help="name in answers (MODEL)")
    parser.add_argument("--slots", type=int, default=16, help="sequences that run at once (16)")
    parser.add_argument("--context", type=int, help="longest prompt + response in tokens (the model's, at most 4096)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (auto)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a decode step (1)")
    parser.add_argument("--deterministic", action="store_true", help="tokens depend on a request alone, bit for bit")
    parser.add_argument(
        "--kv-on-swap",
        default="recompute",
        choices=("keep", "recompute"),
        help="KV of requests frozen in place when the weights change (recompute)",
    )
    parser.add_argument("--random-seed", type=int, help="of requests that name none (drawn at start)")
    parser.add_argument("--weight-version", default="default", help="label of the weights in MODEL (default)")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only, no text")
    parser.add_argument("--incremental-streaming-output", action="store_true", help="stream only what is new")
    parser.add_argument("--allow-auto-truncate", action="store_true", help="cut max_new_tokens to the context")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    require_more_than_0(args, ("threads", "slots", *SIZES))
    if args.drain < 0:
        raise UserError(f"--drain {args.drain:g}; write 0 or more")
    for module in ("torch", "transformers"):
        if find_spec(module) is None:
            raise UserError(needs("serving", module))
    settings = _settings(args)
    print(settings.coming(f"loading {args.model}"), file=sys.stderr, flush=True)  # the imports below take seconds
    quiet(args.threads)
    import asyncio

    import torch

    from gruppetto.engines.serve.build import EngineChoice, build
    from gruppetto.engines.serve.build import run as serve

    torch.set_num_threads(args.threads)
    choice = EngineChoice(
        slots=args.slots,
        context=args.context,
        dtype=args.dtype,
        device=args.device,
        deterministic=args.deterministic,
        kv_on_swap=args.kv_on_swap,
        skip_tokenizer=args.skip_tokenizer_init,
        name=args.served_model_name,
        weight_version=args.weight_version,
    )
    shown = {key: value for key, value in vars(args).items() if key not in HIDDEN}
    try:
        server = build(args.model, choice, settings, shown)
        return asyncio.run(serve(server, say))
    except UserError as error:
        raise UserError(as_options(str(error))) from None


def as_options(message: str) -> str:
    """A message of the engine in the words of this command: `engine.context = 9` is `--context 9` here."""

    def option(found: re.Match[str]) -> str:
        name, value = f"--{found[1].replace('_', '-')}", found[2].strip("'\"")
        return name if value == "true" else f"{name} {value}"

    return re.sub(rf"\b(?:engine|model|run)\.({'|'.join(_OPTIONS)}) = ('[^']*'|\"[^\"]*\"|[\w.]+)", option, message)


def _settings(args: argparse.Namespace) -> ServeSettings:
    from gruppetto.engines.serve.settings import Limits, ServeSettings

    return ServeSettings(
        **where(args),
        incremental=args.incremental_streaming_output,
        truncate=args.allow_auto_truncate,
        seed=int.from_bytes(os.urandom(6)) if args.random_seed is None else args.random_seed,  # exact in any JSON
        limits=Limits(**sizes(args), drain_s=args.drain),
    )
