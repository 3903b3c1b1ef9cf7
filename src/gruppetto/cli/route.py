"""`gruppetto route`: one address in front of several engines."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.engines.router.settings import RouteSettings


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "route",
        help="one address for several engines: sticky, load-aware",
        description="Stands in front of engines that speak SGLang's or OpenAI's API: sessions go where their prefix "
        "is, control calls go to every engine.",
        epilog="Example: gruppetto route --engine http://10.0.0.1:30000 --engine http://10.0.0.2:30000 --port 8000",
    )
    parser.add_argument(
        "--engine", action="append", default=[], metavar="URL", help="an engine's address; repeat for each one"
    )
    _add_network(parser)
    _add_rules(parser)
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
    parser.add_argument("--engine-api-key", metavar="KEY", help="sent to engines (or set GRUPPETTO_ENGINE_API_KEY)")


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="of an engine that does not say, at first (64)"
    )
    parser.add_argument("--hold", type=float, default=0.9, metavar="SHARE", help="of KV that is given (0.9)")
    parser.add_argument("--no-prefixes", action="store_true", help="no sessions without a key from the client")
    parser.add_argument("--health-interval", type=float, default=10.0, metavar="S", help="between looks (10)")
    parser.add_argument("--health-timeout", type=float, default=20.0, metavar="S", help="of a look (20)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-open-requests", type=int, default=65536, metavar="N", help="beyond it: 503 (65536)")
    parser.add_argument("--max-body-mb", type=int, default=64, metavar="MB", help="of one request (64)")
    parser.add_argument("--max-weights-mb", type=int, default=4096, metavar="MB", help="of a weight update (4096)")
    parser.add_argument("--queue-timeout", type=float, default=1800.0, metavar="S", help="for room, then 503 (1800)")
    parser.add_argument("--request-timeout", type=float, default=3600.0, metavar="S", help="then 504 (3600)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if not args.engine:
        raise UserError("no engine is given; write --engine http://HOST:PORT for each one")
    for name in ("concurrency", "health_interval", "health_timeout", "max_open_requests", "max_body_mb",
                 "max_weights_mb", "queue_timeout", "request_timeout"):  # fmt: skip
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}; write more than 0")
    import asyncio

    from gruppetto.engines.router.front import Front
    from gruppetto.engines.router.front import run as serve
    from gruppetto.engines.router.sockets import many_files

    many_files()
    front = Front(_settings(args))
    return asyncio.run(serve(front, lambda line: print(line, flush=True)))


def _settings(args: argparse.Namespace) -> RouteSettings:
    from gruppetto.engines.router.rules import CapRules, Rules
    from gruppetto.engines.router.settings import HealthRules, RouteLimits, RouteSettings

    limits = RouteLimits(
        body_bytes=args.max_body_mb << 20,
        weights_bytes=args.max_weights_mb << 20,
        open_requests=args.max_open_requests,
        queue_s=args.queue_timeout,
        request_s=args.request_timeout,
    )
    return RouteSettings(
        engines=tuple(url.rstrip("/") for url in args.engine),
        host=args.host,
        port=args.port,
        control_port=args.control_port,
        api_key=args.api_key or os.environ.get("GRUPPETTO_API_KEY", ""),
        admin_api_key=args.admin_api_key or os.environ.get("GRUPPETTO_ADMIN_API_KEY", ""),
        engine_key=args.engine_api_key or os.environ.get("GRUPPETTO_ENGINE_API_KEY", ""),
        find_prefixes=not args.no_prefixes,
        rules=Rules(hold=args.hold, cap=CapRules(start=args.concurrency)),
        health=HealthRules(probe_s=args.health_interval, timeout_s=args.health_timeout),
        limits=limits,
    )
