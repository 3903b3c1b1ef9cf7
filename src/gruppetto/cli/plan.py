"""`gruppetto plan`: what a step costs, which placement to choose, and why, before a GPU is rented."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gruppetto.cli.output import write_file, write_json
from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.ledger.plan.ask import Ask
    from gruppetto.ledger.plan.placements import Placed
    from gruppetto.ledger.plan.plan import Plan

EXAMPLE = (
    "Example: gruppetto plan Qwen3-8B --gpus 64 --gpu h100 --prompts 512 --group-size 16 --mean-tokens 8k "
    "--max-tokens 32k"
)

_THREADS = "OPENBLAS_NUM_THREADS"
LONG = 1000
"""Rollouts or turns of a GPU from which a plan takes longer than a second or two."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "plan",
        help="what a step costs in tokens, bytes and seconds, and how to place it on GPUs",
        description="Counts a run from a model's config: FLOP, bytes, memory and seconds of each stage, placements "
        "side by side, and a recommendation. Needs no GPU, no weights and no torch.",
        epilog=EXAMPLE,
    )
    parser.add_argument("model", nargs="?", help="a name (Qwen3-8B), a config.json, or a folder that has one")
    parser.add_argument(
        "--against", metavar="RUN", help="the forecast of a run folder beside what it took (runs/latest)"
    )
    _machines(parser.add_argument_group("machines"))
    _work(parser.add_argument_group("work of a step"))
    _choices(parser.add_argument_group("choices"))
    _environment(parser.add_argument_group("sandboxes"))
    _output(parser.add_argument_group("what comes out"))
    parser.set_defaults(run=run, usual=parser.get_default)


def _machines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpus", default=8, metavar="N", help="GPUs in all (8)")
    group.add_argument(
        "--gpu", metavar="NAME", help="kind of GPU, or a TOML file of one (H100; of --against the run's)"
    )
    group.add_argument("--split", metavar="R:T", help="GPUs for rollouts and for training where they are apart (best)")
    group.add_argument("--serve", metavar="LAYOUT", help='layout of one engine, as in "tp8 ep4" (best)')
    group.add_argument(
        "--train", metavar="LAYOUT", help='layout of one copy of the trainer, as in "tp4 pp2 ep8" (best)'
    )
    group.add_argument(
        "--efficiency",
        action="append",
        default=[],
        metavar="SET",
        help="shares of the peaks: a set (default, trtllm, prime-rl, verl, …) or one share, as in engine=0.5",
    )


def _work(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        default="reasoning",
        metavar="KIND",
        help="chat, reasoning, agent, a family (A to E, R), a published workload, that of a recipe or run.toml "
        "(sim/family-a), or a file of recorded rollouts (reasoning)",
    )
    group.add_argument("--prompts", default=128, metavar="N", help="prompts of a step (128)")
    group.add_argument("--group-size", default=8, metavar="N", help="rollouts of a prompt (8)")
    group.add_argument("--mean-tokens", metavar="N", help="mean tokens of a response, as in 8k (reasoning 8k)")
    group.add_argument("--max-tokens", metavar="N", help="longest response (reasoning 32k)")
    group.add_argument("--prompt-tokens", metavar="N", help="tokens of a prompt (reasoning 512)")
    group.add_argument(
        "--cv", metavar="X", help="standard deviation of lengths over their mean, before the cut (reasoning 1)"
    )
    group.add_argument("--icc", metavar="X", help="how alike siblings' lengths are, 0 to 1 (reasoning .5)")
    group.add_argument("--runaways", default=0.0, metavar="X", help="share of rollouts that reach the cap (0)")
    group.add_argument("--turns", metavar="N", help="model calls of a rollout (agent 20, else 1)")
    group.add_argument("--tool-seconds", metavar="T", help="mean seconds of a tool call (agent 5)")
    group.add_argument("--tool-sigma", metavar="X", help="standard deviation of its logarithm (agent 1.7)")
    group.add_argument("--observation-tokens", metavar="N", help="tokens that a call answers with (agent 600)")


def _choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--compare", metavar="A,B", help="colocated, disaggregated, async, elastic (the first three)")
    group.add_argument("--max-staleness", default=1, metavar="K", help="versions a token may be old in async (1)")
    group.add_argument("--depth", metavar="X", help="batches outstanding in async (2)")
    group.add_argument("--reference", action="store_true", help="a reference model's logprobs (KL)")
    group.add_argument("--critic", action="store_true", help="a value model of the same size (PPO)")
    group.add_argument("--no-old-logprobs", action="store_true", help="no forward pass before the update")
    group.add_argument("--judge", metavar="MODEL", help="a model that scores")
    group.add_argument(
        "--serve-dtype",
        default="bf16",
        metavar="T",
        help="weights of the engines: bf16, fp8, …, or stored, as published (bf16)",
    )
    group.add_argument("--kv-dtype", default="bf16", metavar="T", help="KV of the engines: bf16, fp8 (bf16)")
    group.add_argument("--slots", default=256, metavar="N", help="rows of an attention replica (256)")
    group.add_argument("--micro-tokens", default="32k", metavar="N", help="packed tokens of a micro-batch (32k)")
    group.add_argument(
        "--sleep",
        default="level2",
        choices=("level1", "level2", "release"),
        help="how colocated engines give up memory (level2)",
    )
    group.add_argument(
        "--sync", default="broadcast", choices=("reshard", "broadcast", "gather"), help="how weights travel (broadcast)"
    )
    group.add_argument("--density", metavar="X", help="weights that a step changes (.02; mixtures .0005)")


def _environment(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sandbox-seconds", metavar="T", help="CPU seconds of an execution (as a tool call)")
    group.add_argument("--sandbox-cores", default=1.0, metavar="N", help="cores of a sandbox (1)")
    group.add_argument("--sandbox-start", metavar="T", help="seconds to start one (0)")
    group.add_argument("--sandboxes", default=0, metavar="N", help="sandboxes there are (as many as wanted)")
    group.add_argument("--wall", metavar="T", help="in which all executions are to be done, as in 30m (the rollouts)")
    group.add_argument("--image-size", metavar="B", help="bytes of an image, as in 2GB")
    group.add_argument("--images", default=0, metavar="N", help="different images of a step")


def _output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sweep", action="append", default=[], metavar="AXIS=…", help="along an axis: mean_tokens=1k..64k, gpus=32,64"
    )
    group.add_argument(
        "--only", choices=("kv", "sync", "switch", "sandboxes"), help="one account by itself, with its arithmetic"
    )
    group.add_argument("--step", metavar="T", help="with --only: shares of a step of this length, as in 5m")
    group.add_argument(
        "--route", choices=("ipc", "node", "network", "disk"), help="with --only sync: what weights travel over"
    )
    group.add_argument("--why", action="store_true", help="every figure with its arithmetic and source")
    group.add_argument(
        "--simulate", action="store_true", help="six steps of each placement in the simulator beside its forecast"
    )
    group.add_argument("--json", metavar="FILE", help="write everything as JSON (- = standard output, and no table)")
    group.add_argument("--html", metavar="FILE", help="write one page with charts")
    group.add_argument(
        "--request", metavar="FILE", help="write what the run asks of a platform (JSON, with Ray bundles)"
    )
    group.add_argument("--write", metavar="FILE", help="write the recommended run as run.toml")
    group.add_argument("--placement", metavar="NAME", help="write this placement instead of the recommended one")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Its many small objects go by their counts: to look for cycles among them as they come takes a
    seventh of a plan's time, so nobody does."""
    with _one_thread(), _uncollected() as collecting:
        return _run(args, collecting)


@contextmanager
def _uncollected() -> Iterator[Callable[[], None]]:
    """No collection of cycles inside, until what it gives is called; after it all is as it was before, and what was
    made inside counts as old, so that nobody looks through all of it at once."""
    import gc

    looking = gc.isenabled()
    again = gc.enable if looking else gc.disable
    gc.disable()
    try:
        yield again
    finally:
        gc.freeze()
        gc.unfreeze()
        again()


@contextmanager
def _one_thread() -> Iterator[None]:
    """A numpy that is imported inside has no threads of its own: its matrix library else starts one a core, each of
    which spins on for a while after a product, and the tables of a plan are small. Who set their number is heard."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_THREADS]


def _run(args: argparse.Namespace, collecting: Callable[[], None]) -> int:
    from gruppetto.cli.plan_numbers import check_against, read_numbers
    from gruppetto.cli.plan_words import named_options, refuse_empty

    refuse_empty(args)
    if args.against:
        check_against(args)
    read_numbers(args)
    if args.against:
        return _against(args)
    if args.model is None:
        raise UserError("no model given; write a name or the path of a config.json, as in gruppetto plan Qwen3-8B")
    with named_options():
        made = _made(args)
    if made is None:
        return 0
    found, workload = made
    quiet = "-" in (args.json, args.request)
    if args.simulate:
        from gruppetto.cli.plan_simulated import check

        check(found, workload)
    if not quiet:
        from gruppetto.cli.plan_text import show

        show(found, why=args.why)
    if args.simulate:
        collecting()
        found = _simulated(found, workload, quiet)
    if args.json or args.html:
        _write_data(found, args)
    if args.request:
        from gruppetto.ledger.plan.request import request

        _write_json(request(found, _chosen(found, args)), args.request, "--request")
    if args.write:
        _write_run(found, args, workload)
    return 0


def _made(args: argparse.Namespace) -> tuple[Plan, str] | None:
    """The plan and the name of its workload; None where one account was all that was asked for, and is shown."""
    from gruppetto.cli.plan_arguments import ask_of, workload_of
    from gruppetto.cli.plan_numbers import check_together
    from gruppetto.cli.plan_unmoved import unmoved
    from gruppetto.ledger.plan.advice import read_sweep, sweep, usual_sweeps
    from gruppetto.ledger.plan.plan import plan

    check_together(args)
    given = workload_of(args)
    if args.only:
        from gruppetto.cli.plan_only import show_only

        data = show_only(args, given)
        if args.json:
            _write_json(data, args.json)
        return None
    ask, axes = ask_of(args, given), [read_sweep(text) for text in args.sweep]
    _say_if_long(ask, args)
    sweeps = [sweep(ask, *axis) for axis in axes]
    if args.html and not sweeps:
        sweeps = list(usual_sweeps(ask))
    found = plan(ask, sweeps)
    return replace(found, unmoved=unmoved(args, found)), given.name


def _simulated(found: Plan, workload: str, quiet: bool) -> Plan:
    """With what the simulator makes of it, after the forecast: simulations take a while."""
    from gruppetto.cli.plan_simulated import simulated

    sys.stdout.flush()
    found = replace(found, simulated=simulated(found, workload))
    if not quiet:
        from gruppetto.cli.plan_text import show_simulated

        show_simulated(found)
    return found


def _say_if_long(ask: Ask, args: argparse.Namespace) -> None:
    """A plan takes half a second; what takes longer says so on standard error."""
    calls = ask.tools.expected_calls(ask.lengths.mean) + 1 if ask.tools else 1.0
    each = ask.rollouts.count * calls / ask.gpus
    if args.sweep:
        print(f"--sweep {' '.join(args.sweep)}: a whole plan at each point …", flush=True, file=sys.stderr)
    elif args.html:
        print("--html: plans over spreads, GPUs and models for its charts …", flush=True, file=sys.stderr)
    elif each > LONG:
        print(f"{each:,.0f} rollouts and turns for each GPU: this takes a while …", flush=True, file=sys.stderr)


def _against(args: argparse.Namespace) -> int:
    """Forecast beside measured, in the place of a plan."""
    from gruppetto.cli.plan_against import against

    data = against(args)
    if args.json:
        _write_json(data, args.json)
    return 0


def _write_run(found: Plan, args: argparse.Namespace, workload: str) -> None:
    """run.toml of the recommended placement, or of the one that was asked for."""
    import shlex
    from pathlib import Path

    from gruppetto.ledger.plan.written import trainable_toml

    placed = _chosen(found, args)
    if placed.name == "elastic":
        known = ", ".join(key for key in found.placed if key != "elastic")
        instead = f"--placement and one of {known}" if known else "--compare async,elastic and --placement async"
        raise UserError(f"--write of elastic: no run can lend GPUs yet; write {instead}")
    folder = Path(args.model)
    folder = folder.parent if folder.name == "config.json" else folder
    model = str(folder) if folder.is_dir() else ""
    text = trainable_toml(found, placed, workload=workload, model_path=model, command=_command())
    write_file(text, args.write, "--write")
    print(f"{args.write}: {placed.name}; {shlex.join(['gruppetto', 'simulate', args.write])}", file=sys.stderr)


def _chosen(found: Plan, args: argparse.Namespace) -> Placed:
    """The recommended placement, or the one that was asked for."""
    name = args.placement or found.recommendation.placement
    if name not in found.placed:
        raise UserError(
            f"--placement {name}: it is not among the placements of this plan; write one of {', '.join(found.placed)}"
        )
    return found.placed[name]


def _write_json(data: Any, target: str, option: str = "--json") -> None:
    import json

    write_json(json.dumps(data, indent=2) + "\n", target, option)


def _command() -> str:
    import shlex

    return shlex.join(["gruppetto", *sys.argv[1:]])


def _write_data(found: Plan, args: argparse.Namespace) -> None:
    """JSON and the page."""
    from gruppetto.ledger.plan.as_json import as_json

    data: dict[str, Any] = as_json(found, command=_command(), split=bool(args.html))
    if args.json:
        _write_json(data, args.json)
    if args.html:
        from gruppetto.ledger.page import page

        write_file(page(data), args.html, "--html")
