"""`gruppetto route` against SGLang's router (Rust, PyPI `sglang-router`): same engines, load and client in one run.

Two engines in processes of their own; routers are measured in turn, the figures are medians over rounds. Engines that
answer at once show what a router costs; simulated engines (slots, decode steps, prefill, KV that is pushed out) under a
heavy-tailed load of sessions with tool calls show what its placing is worth; SGLang's policies are all tried, and the
best of them is the one compared with.

    python benchmarks/router.py [--only rate,library,tail,ample,streams] [--rounds 3] [--json FILE]
                                [--sglang-python PYTHON] [--policies cache_aware,manual] [--first-seed 0]
                                [--streams 8192]

PYTHON is one that has sglang-router; without it, it is installed into a temporary environment.

    rate_64.ratio              requests/s, ours over theirs, 64 open requests; bar 0.4
    rate_256.ratio             the same with 256
    rate_64.added_ms           median ms of a request above one sent to the engines directly, and .theirs_added_ms
    rate_64.cpu_us             CPU of our router a request, and .theirs_cpu_us
    library.us_per_request     CPU of the library alone, 64 engines, 8,192 open requests; bar 50
    multi_turn_tail.makespan_ratio   ours over their best policy's, KV scarce; bar 0.9
    multi_turn_ample.makespan_ratio  the same where every context fits
    streams_8192.rss_bytes     most memory of our router with 8,192 streams open at once; bar 1e9
    streams_8192.bytes_per_stream    what of it each stream adds; with fewer streams the names say how many
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from routing import clients
from routing.load import Sizes, plan
from routing.processes import Process, engines, ours, sglangs

from gruppetto.engines.router.router import Router
from gruppetto.engines.router.tickets import Ask, Outcome, Ticket
from gruppetto.engines.serve.listening import many_files
from gruppetto.routing.concurrency import Reading

POLICIES = ("cache_aware", "manual", "manual:min_load", "power_of_two", "round_robin", "random")
"""Behind the colon: how `manual` assigns a new session."""
TAIL = Sizes(
    sessions=96,
    turns_median=6,
    tokens_median=60,
    observation=200,
    tool_s=0.15,
    base_s=0.003,
    row_s=7.5e-5,
    kv_token_s=2.5e-8,
    prefill_token_s=3e-5,
    kv_capacity=24_000,
)
"""16 slots an engine, and KV for about as many sessions of an ordinary length; the longest take a third of it."""
AMPLE = replace(TAIL, kv_capacity=400_000)
Figures = dict[str, float]


@contextlib.contextmanager
def sglang_python(given: str | None) -> Iterator[str]:
    """A Python that has sglang-router."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "sglang-router"], check=True)
        yield python


def measure_rate(python: str, rounds: int, seconds: float) -> Figures:
    """Requests a second through each router, and directly to one engine."""
    found: Figures = {}
    with (
        engines(2, "echo", Sizes(slots=4096)) as behind,
        ours(behind) as our,
        sglangs(python, behind, "round_robin") as their,
    ):
        for count in (64, 256):
            seen: dict[str, list[tuple[float, float, float]]] = {"ours": [], "theirs": [], "direct": []}
            for _ in range(rounds):
                for name, process in (("theirs", their), ("ours", our), ("direct", behind[0])):
                    seen[name].append(_one_rate(process, count, seconds))
            middle = {
                name: tuple(statistics.median(column) for column in zip(*values, strict=True))
                for name, values in seen.items()
            }
            ratios = [a[0] / b[0] for a, b in zip(seen["ours"], seen["theirs"], strict=True)]
            found |= {
                f"rate_{count}.ratio": statistics.median(ratios),
                f"rate_{count}.per_s": middle["ours"][0],
                f"rate_{count}.theirs_per_s": middle["theirs"][0],
                f"rate_{count}.direct_per_s": middle["direct"][0],
                f"rate_{count}.added_ms": 1e3 * (middle["ours"][1] - middle["direct"][1]),
                f"rate_{count}.theirs_added_ms": 1e3 * (middle["theirs"][1] - middle["direct"][1]),
                f"rate_{count}.cpu_us": middle["ours"][2],
                f"rate_{count}.theirs_cpu_us": middle["theirs"][2],
            }
    return found


def _one_rate(process: Process, count: int, seconds: float) -> tuple[float, float, float]:
    before = process.cpu_s()
    begin = time.perf_counter()
    got = asyncio.run(clients.rate(process.port, count, seconds))
    took = time.perf_counter() - begin
    return got.per_s, got.median_s, 1e6 * (process.cpu_s() - before) / (got.per_s * took)


def measure_library(rounds: int, num_engines: int = 64, open_requests: int = 8192, requests: int = 20_000) -> Figures:
    """CPU of a request in the library: submitted, placed, released, its share of the looks once a second."""
    return {
        "library.us_per_request": statistics.median(
            _library_us(seed, num_engines, open_requests, requests) for seed in range(rounds)
        )
    }


def _library_us(seed: int, num_engines: int, open_requests: int, requests: int) -> float:
    rng, router, now = random.Random(seed), Router(), 0.0
    for i in range(num_engines):
        router.add(f"e{i}", now)
        slots = open_requests // num_engines + 8
        router.read(f"e{i}", Reading(at=now, kv=0.3, slots=slots, kv_capacity=slots * 4000), now)
    names = [f"s{i}" for i in range(2 * open_requests)]
    asks = [Ask(session=rng.choice(names), context=rng.randint(100, 4000), budget=4096) for _ in range(requests)]
    tokens = [int(rng.lognormvariate(5, 1)) + 1 for _ in range(requests)]
    live: list[Ticket] = []
    for i in range(open_requests):
        live.append(router.submit(asks[i % requests], now))
    router.placed()
    picks = [rng.randrange(open_requests) for _ in range(requests)]
    looked, begin = 0.0, time.process_time()
    for ask, made, pick in zip(asks, tokens, picks, strict=True):
        now += 0.001
        live.append(router.submit(ask, now))
        live[pick], live[-1] = live[-1], live[pick]
        router.release(live.pop(), Outcome(tokens=made), now)
        router.placed()
        if now - looked >= 1.0:
            looked = now
            router.tick(now)
            router.placed()
    return 1e6 * (time.process_time() - begin) / requests


def measure_tail(python: str, seeds: Sequence[int], policies: Sequence[str], sizes: Sizes, name: str) -> Figures:
    """Seconds of a whole load through our router and through each of SGLang's policies, with new engines each time."""
    seconds: dict[str, list[float]] = {policy: [] for policy in (*policies, "ours")}
    for seed in seeds:
        for policy in seconds:
            with engines(2, "simulated", sizes) as behind:
                front = ours(behind) if policy == "ours" else sglangs(python, behind, policy)
                with front as process:
                    took = asyncio.run(clients.multi_turn(process.port, plan(sizes, seed), sizes.tokens_most))
                prefill = sum(engine.get("/totals")["prefill"] for engine in behind)
            seconds[policy].append(took)
            print(f"  {name} seed {seed} {policy:12s} {took:7.2f} s, {prefill:9,d} tokens prefilled", flush=True)
    middle = {policy: statistics.median(values) for policy, values in seconds.items()}
    best = min(policies, key=middle.__getitem__)
    ratios = [mine / theirs for mine, theirs in zip(seconds["ours"], seconds[best], strict=True)]
    return {f"{name}.makespan_ratio": statistics.median(ratios)} | {
        f"{name}.{policy}.makespan_s": value for policy, value in middle.items()
    }


def measure_streams(count: int) -> Figures:
    """Memory of our router with so many streams open, each of which has had its first event."""
    with engines(2, "stream", Sizes(slots=count)) as behind, ours(behind) as our:
        idle = our.peak_bytes()

        async def run() -> Counter[str]:
            opened = asyncio.Event()
            task = asyncio.ensure_future(clients.streams(our.port, count, opened))
            async with asyncio.timeout(300):
                await asyncio.wait([task, asyncio.ensure_future(opened.wait())], return_when=asyncio.FIRST_COMPLETED)
                for engine in behind:
                    await asyncio.to_thread(engine.post, "/go")
                return await task

        ended = asyncio.run(run())
        peak = our.peak_bytes()
    if ended["whole"] != count:
        others = "; ".join(f"{times} times {what}" for what, times in ended.most_common() if what != "whole")
        raise SystemExit(f"only {ended['whole']} of {count} streams have ended as they should: {others[:2000]}")
    name = f"streams_{count}"
    return {
        f"{name}.rss_bytes": float(peak),
        f"{name}.idle_rss_bytes": float(idle),
        f"{name}.bytes_per_stream": (peak - idle) / count,
    }


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="rate,library,tail,ample,streams")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--first-seed", type=int, default=0, help="of the loads of the rounds")
    parser.add_argument("--policies", default=",".join(POLICIES), help="SGLang's, of the loads")
    parser.add_argument("--streams", type=int, default=8192, help="open at once; each takes two files of the router")
    parser.add_argument("--sglang-python", metavar="PYTHON")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    many_files()
    seeds = range(args.first_seed, args.first_seed + args.rounds)
    policies = args.policies.split(",")
    wanted, found = set(args.only.split(",")), Figures()
    if "library" in wanted:
        found |= measure_library(args.rounds)
    if "streams" in wanted:
        found |= measure_streams(args.streams)
    if wanted & {"rate", "tail", "ample"}:
        with sglang_python(args.sglang_python) as python:
            if "rate" in wanted:
                found |= measure_rate(python, args.rounds, args.seconds)
            if "tail" in wanted:
                found |= measure_tail(python, seeds, policies, TAIL, "multi_turn_tail")
            if "ample" in wanted:
                found |= measure_tail(python, seeds, policies, AMPLE, "multi_turn_ample")
    for name, value in found.items():
        print(f"{name:40s} {value:14,.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
