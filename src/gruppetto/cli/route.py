"""`gruppetto route`: one address in front of several engines."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from gruppetto.cli.listening import SIZES, add_network, add_sizes, key, require_more_than_0, say, sizes, where
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
    add_network(parser)
    parser.add_argument("--engine-api-key", metavar="KEY", help="sent to engines (or set GRUPPETTO_ENGINE_API_KEY)")
    _add_rules(parser)
    add_sizes(parser, late=504)
    parser.add_argument("--queue-timeout", type=float, default=1800.0, metavar="S", help="for room, then 503 (1800)")
    parser.set_defaults(run=run)


def _add_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="of an engine that does not say, at first (64)"
    )
    parser.add_argument("--hold", type=float, default=0.9, metavar="SHARE", help="of KV that is given (0.9)")
    parser.add_argument("--no-prefixes", action="store_true", help="no sessions without a key from the client")
    parser.add_argument("--health-interval", type=float, default=10.0, metavar="S", help="between looks (10)")
    parser.add_argument("--health-timeout", type=float, default=20.0, metavar="S", help="of a look (20)")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if not args.engine:
        raise UserError("no engine is given; write --engine http://HOST:PORT for each one")
    require_more_than_0(args, ("concurrency", "health_interval", "health_timeout", "queue_timeout", *SIZES))
    import asyncio

    from gruppetto.engines.router.front import Front
    from gruppetto.engines.router.front import run as serve
    from gruppetto.engines.serve.listening import many_files

    many_files()
    front = Front(_settings(args))
    return asyncio.run(serve(front, say))


def _settings(args: argparse.Namespace) -> RouteSettings:
    from gruppetto.engines.router.settings import HealthRules, RouteLimits, RouteSettings
    from gruppetto.routing.rules import CapRules, Rules

    return RouteSettings(
        **where(args),
        engines=tuple(url.rstrip("/") for url in args.engine),
        engine_key=key(args.engine_api_key, "GRUPPETTO_ENGINE_API_KEY"),
        find_prefixes=not args.no_prefixes,
        rules=Rules(hold=args.hold, cap=CapRules(start=args.concurrency)),
        health=HealthRules(probe_s=args.health_interval, timeout_s=args.health_timeout),
        limits=RouteLimits(**sizes(args), queue_s=args.queue_timeout),
    )
