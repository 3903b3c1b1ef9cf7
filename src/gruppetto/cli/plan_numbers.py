"""The numbers and words of `gruppetto plan`: what each option may be, and which options mean something together.

Promise: a number that is none, or out of any sense, and an option that would change nothing, is refused by its own name
before anything is computed.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import NamedTuple

from gruppetto.cli.output import check_file
from gruppetto.errors import UserError
from gruppetto.ledger.units import seconds, size, tokens

USUAL_GPU = "H100"
_YEAR = 365 * 86_400.0


def _count(text: str, name: str) -> int:
    """A whole number; 1,024 and 1_024 too."""
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise UserError(f"{name} {_short(text)}: not a whole number") from None


def _number(text: str, name: str) -> float:
    """A finite number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{name} {_short(text)}: not a number")
    return found


class Bounds(NamedTuple):
    """How an option is read, and from where to where it makes sense."""

    read: Callable[[str, str], float]
    least: float
    most: float

    def value(self, text: str, name: str) -> float:
        """The number of `--name text`. Raises `UserError` where it is none or outside."""
        try:
            found = self.read(text, name)
        except UserError as error:
            if "; write " in str(error):
                raise
            raise UserError(f"{error}; write one from {self.least:.15g} to {self.most:.15g}") from None
        for wrong, side, end, word in (
            (found < self.least, "below", self.least, "more"),
            (found > self.most, "above", self.most, "less"),
        ):
            if wrong:
                what = "the least" if side == "below" else "the most"
                shown = f"{end:.15g}"
                raise UserError(
                    f"{name} {_short(text)} is {side} {shown}, {what} that is planned; write {name} {shown} or {word}"
                )
        return found


NUMBERS = {
    "gpus": Bounds(_count, 1, 1_000_000),
    "prompts": Bounds(_count, 1, 10_000_000),
    "group_size": Bounds(_count, 1, 1_000_000),
    "mean_tokens": Bounds(tokens, 1, 10**8),
    "max_tokens": Bounds(tokens, 1, 10**9),
    "prompt_tokens": Bounds(tokens, 0, 10**9),
    "cv": Bounds(_number, 0, 20),
    "icc": Bounds(_number, 0, 1),
    "runaways": Bounds(_number, 0, 1),
    "turns": Bounds(_number, 1, 100_000),
    "tool_seconds": Bounds(seconds, 0, _YEAR),
    "tool_sigma": Bounds(_number, 0, 5),
    "observation_tokens": Bounds(tokens, 0, 10**8),
    "max_staleness": Bounds(_count, 0, 1000),
    "depth": Bounds(_number, 1, 1001),
    "slots": Bounds(_count, 1, 1_000_000),
    "micro_tokens": Bounds(tokens, 1, 10**9),
    "density": Bounds(_number, 1e-9, 1),
    "sandbox_seconds": Bounds(seconds, 0, _YEAR),
    "sandbox_cores": Bounds(_number, 0.001, 10_000),
    "sandbox_start": Bounds(seconds, 0, _YEAR),
    "sandboxes": Bounds(_count, 0, 10**9),
    "wall": Bounds(seconds, 0.001, _YEAR),
    "image_size": Bounds(size, 0, 1e15),
    "images": Bounds(_count, 0, 10**9),
    "step": Bounds(seconds, 0.001, _YEAR),
}


def read_numbers(args: argparse.Namespace) -> None:
    """Turns the texts of all numbers into numbers, and names the usual GPU where none is. Raises `UserError` for the
    first that cannot be."""
    for name, bounds in NUMBERS.items():
        text = getattr(args, name)
        if isinstance(text, str):
            setattr(args, name, bounds.value(text, option(name)))
    if not args.against:  # which has a machine of its own
        args.gpu = args.gpu or USUAL_GPU


def option(name: str) -> str:
    """--group-size for group_size."""
    return "--" + name.replace("_", "-")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


# -- together ----------------------------------------------------------------------------------------------------------


def check_together(args: argparse.Namespace) -> None:
    """Refuses an option that nothing reads, and files that cannot be written, before any work is done."""
    if args.only:
        for name in ("sweep", "html", "request", "write", "simulate", "compare", "why"):
            if getattr(args, name):
                raise UserError(f"{option(name)} with --only {args.only}, which shows one account; leave one out")
        if args.route and args.only != "sync":
            raise UserError(f"--route with --only {args.only}: nothing is sent; write --only sync")
        if args.step and args.only not in ("sync", "switch"):
            raise UserError(f"--step with --only {args.only}: no part of a step is told; write --only sync or switch")
    else:
        for name in ("step", "route"):
            if getattr(args, name):
                only = "switch" if name == "step" else "sync"
                raise UserError(f"{option(name)} without --only: a plan has its own; write --only {only} with it")
    if args.placement and not (args.write or args.request):
        raise UserError(
            f"--placement {args.placement} says what is written, and nothing is; write --write run.toml with it, or "
            f"--compare {args.placement}"
        )
    for name in ("write", "simulate"):
        if getattr(args, name) and args.group_size == 1:
            raise UserError(
                f"--{name} with --group-size 1: a run's group of one has no baseline; write --group-size 2 or more"
            )
    if args.images and not args.image_size:
        raise UserError(f"--images {args.images} without a size; write --image-size 2GB with it")
    _check_files(args)


def check_against(args: argparse.Namespace) -> None:
    """Refuses what a comparison with a run does not read: the run has work, machines and choices of its own."""
    for name, value in vars(args).items():
        if name in _OF_AGAINST or value == args.usual(name):
            continue
        raise UserError(
            f"{option(name)} with --against {args.against}, which is of a run as it was; leave it out (--gpu, --serve, "
            "--efficiency, --json and a model go with --against)"
        )
    _check_files(args)


_OF_AGAINST = ("model", "against", "gpu", "serve", "efficiency", "json", "run", "usual", "command", "debug")


def _check_files(args: argparse.Namespace) -> None:
    taken: dict[str, str] = {}
    for name in ("json", "html", "request", "write"):
        target = getattr(args, name)
        if target is None:
            continue
        if target != "-" or name in ("html", "write"):
            check_file(target, f"--{name}", _USUAL[name])
        same = target if target == "-" else os.path.abspath(target)
        if same in taken:
            raise UserError(f"--{taken[same]} and --{name} both write {target}; give one of them another file")
        taken[same] = name
    if args.write:
        _check_own(args.write)


_USUAL = {"json": "plan.json", "html": "plan.html", "request": "request.json", "write": "run.toml"}


def _check_own(target: str) -> None:
    """A config is written by hand as often as by a plan: what is none of a plan's own stays as it is."""
    from gruppetto.ledger.plan.written import is_written

    if not os.path.isfile(target):
        return
    try:
        with open(target, encoding="utf-8", errors="replace") as file:
            head = file.read(4096)
    except OSError as error:
        raise UserError(f"--write {_short(target)} cannot be read: {error.strerror}; write another file") from None
    if head.strip() and not is_written(head):
        raise UserError(
            f"--write {_short(target)}: the file is there and no plan wrote it, so it would be lost; write another "
            "name, or remove it first"
        )
