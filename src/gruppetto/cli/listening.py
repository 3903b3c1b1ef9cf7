"""The arguments that `serve` and `route` have in common, and what is read of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TypedDict

from gruppetto.errors import UserError

HIDDEN = ("api_key", "admin_api_key", "engine_api_key", "run", "command", "debug")
"""Arguments that nobody is shown."""
SIZES = ("max_open_requests", "max_body_mb", "max_weights_mb", "request_timeout")


class Sizes(TypedDict):
    """Fields of `InputLimits` that have an argument."""

    body_bytes: int
    weights_bytes: int
    open_requests: int
    request_s: float


class Where(TypedDict):
    """Fields of `Listening`."""

    host: str
    port: int
    control_port: int | None
    api_key: str
    admin_api_key: str


def add_network(parser: argparse.ArgumentParser) -> None:
    """Where it listens, and the keys."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    parser.add_argument("--port", type=int, default=30000, help="0 = any that is free, named on the screen (30000)")
    parser.add_argument("--control-port", type=int, metavar="PORT", help="serve control routes there, and only there")
    parser.add_argument("--api-key", metavar="KEY", help="clients must send it (or set GRUPPETTO_API_KEY)")
    parser.add_argument(
        "--admin-api-key", metavar="KEY", help="control routes need this one (or set GRUPPETTO_ADMIN_API_KEY)"
    )


def add_sizes(parser: argparse.ArgumentParser, *, late: int) -> None:
    """How much of everything; `late` is the status of a request that takes too long."""
    parser.add_argument("--max-open-requests", type=int, default=65536, metavar="N", help="beyond it: 503 (65536)")
    parser.add_argument("--max-body-mb", type=int, default=64, metavar="MB", help="of one request (64)")
    parser.add_argument("--max-weights-mb", type=int, default=4096, metavar="MB", help="of a weight update (4096)")
    parser.add_argument("--request-timeout", type=float, default=3600.0, metavar="S", help=f"then {late} (3600)")


def where(args: argparse.Namespace) -> Where:
    """What `Listening` is made of."""
    return Where(
        host=args.host,
        port=args.port,
        control_port=args.control_port,
        api_key=key(args.api_key, "GRUPPETTO_API_KEY"),
        admin_api_key=key(args.admin_api_key, "GRUPPETTO_ADMIN_API_KEY"),
    )


def sizes(args: argparse.Namespace) -> Sizes:
    """What `InputLimits` is made of."""
    return Sizes(
        body_bytes=args.max_body_mb << 20,
        weights_bytes=args.max_weights_mb << 20,
        open_requests=args.max_open_requests,
        request_s=args.request_timeout,
    )


def key(given: str | None, variable: str) -> str:
    """A key as given, else from the environment, else none."""
    return given or os.environ.get(variable, "")


def require_more_than_0(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises `UserError` for the first that is not."""
    for name in names:
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}; write more than 0")


def say(line: str) -> None:
    """For who watches the screen."""
    print(line, flush=True)
