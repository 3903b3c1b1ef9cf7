"""`gruppetto serve`: a model folder as an HTTP server with SGLang's and OpenAI's APIs."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING

from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.engines.serve.settings import ServeSettings

_HIDDEN = ("api_key", "admin_api_key", "run", "command", "debug")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, as SGLang and OpenAI do",
        description="Serves a Hugging Face model folder with the embedded engine: SGLang's native API and OpenAI's.",
        epilog="Example: gruppetto serve models/small --port 8000",
    )
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face model folder")
    _add_network(parser)
    _add_engine(parser)
    _add_limits(parser)
    parser.set_defaults(run=run)


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=30000, help="0 = any that is free, named on the screen (30000)")
    parser.add_argument("--control-port", type=int, metavar="PORT", help="serve control routes there, and only there")
    parser.add_argument("--api-key", metavar="KEY", help="clients must send it (or set GRUPPETTO_API_KEY)")
    parser.add_argument(
        "--admin-api-key", metavar="KEY", help="control routes need this one (or set GRUPPETTO_ADMIN_API_KEY)"
    )


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


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-open-requests", type=int, default=65536, metavar="N", help="beyond it: 503 (65536)")
    parser.add_argument("--max-body-mb", type=int, default=64, metavar="MB", help="of one request (64)")
    parser.add_argument("--max-weights-mb", type=int, default=4096, metavar="MB", help="of one weight bucket (4096)")
    parser.add_argument("--request-timeout", type=float, default=3600.0, metavar="S", help="then abort with 503 (3600)")
    parser.add_argument("--drain", type=float, default=5.0, metavar="S", help="for open requests after SIGTERM (5)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    for name in ("max_open_requests", "max_body_mb", "max_weights_mb", "threads", "request_timeout", "slots"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}; write more than 0")
    if args.drain < 0:
        raise UserError(f"--drain {args.drain:g}; write 0 or more")
    if importlib.util.find_spec("torch") is None:
        raise UserError("serving needs torch; write pip install 'gruppetto[train]'")
    _quiet_threads(args.threads)
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
    shown = {key: value for key, value in vars(args).items() if key not in _HIDDEN}
    server = build(args.model, choice, _settings(args), shown)
    return asyncio.run(serve(server, lambda line: print(line, flush=True)))


def _settings(args: argparse.Namespace) -> ServeSettings:
    from gruppetto.engines.serve.settings import Limits, ServeSettings

    limits = Limits(
        body_bytes=args.max_body_mb << 20,
        weights_bytes=args.max_weights_mb << 20,
        open_requests=args.max_open_requests,
        request_s=args.request_timeout,
        drain_s=args.drain,
    )
    return ServeSettings(
        host=args.host,
        port=args.port,
        control_port=args.control_port,
        api_key=args.api_key or os.environ.get("GRUPPETTO_API_KEY", ""),
        admin_api_key=args.admin_api_key or os.environ.get("GRUPPETTO_ADMIN_API_KEY", ""),
        incremental=args.incremental_streaming_output,
        truncate=args.allow_auto_truncate,
        seed=int.from_bytes(os.urandom(8)) if args.random_seed is None else args.random_seed,
        limits=limits,
    )


def _quiet_threads(threads: int) -> None:
    """What OpenMP and the tokenizers read when they are loaded, where the user has not set it."""
    values = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in (values | {"OMP_NUM_THREADS": str(threads)}).items():
        os.environ.setdefault(name, value)
