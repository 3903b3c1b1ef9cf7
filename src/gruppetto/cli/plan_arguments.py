"""From the words of `gruppetto plan` to an `Ask`: models, GPUs, workloads, layouts.

Raises `UserError` for words that name nothing."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.lengths import Lengths, LognormalLengths, Tools, TracedLengths
from gruppetto.ledger.machines.efficiency import Efficiency, efficiency_of
from gruppetto.ledger.machines.gpus import gpu_of
from gruppetto.ledger.machines.profile import profile_efficiency
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.ask import PLACEMENTS, Ask, Judge, Sandboxes
from gruppetto.ledger.plan.workloads import KINDS
from gruppetto.ledger.units import seconds, size, tokens

if TYPE_CHECKING:
    from gruppetto.sim.workload.generator import Workload


class Given(NamedTuple):
    """Lengths and turns of a workload, and what names it in a config."""

    lengths: Lengths
    tools: Tools | None
    prompt_tokens: int
    turns: float = 0.0
    """Model calls of a rollout where they were given as a number; 0 = as the lengths make them."""
    name: str = ""
    """A value of sim.workload that draws the same; empty where [sim.lengths] says it."""


def ask_of(args: argparse.Namespace, given: Given) -> Ask:
    """The whole ask of a command line with its workload."""
    judge = Judge(model=model_of(args.judge)) if args.judge else None
    placements = _placements(args.compare, args.max_staleness)
    _refuse_unread(args, placements)
    return Ask(
        model=model_of(args.model),
        gpu=gpu_of(args.gpu),
        gpus=args.gpus,
        groups=args.prompts,
        group_size=args.group_size,
        lengths=given.lengths,
        prompt_tokens=given.prompt_tokens,
        tools=given.tools,
        max_staleness=args.max_staleness,
        depth=args.depth,
        old_logprobs=not args.no_old_logprobs,
        reference=args.reference,
        critic=args.critic,
        judge=judge,
        sandboxes=_sandboxes(args, given),
        serve_dtype=args.serve_dtype,
        kv_dtype=args.kv_dtype,
        slots=args.slots,
        micro_tokens=tokens(args.micro_tokens, "--micro-tokens"),
        split=_split(args.split),
        serve=serve_layout(args.serve),
        train=train_layout(args.train),
        sleep=args.sleep,
        sync_how=args.sync,
        density=args.density,
        placements=placements,
        efficiency=efficiency_asked(args.efficiency, args.gpu),
    )


# -- workloads ---------------------------------------------------------------------------------------------------------


def workload_of(args: argparse.Namespace) -> Given:
    """A kind by name, a family or published workload, a recipe's, or a recorded file; sizes on the command line replace
    those of a kind."""
    name = args.workload
    if name in KINDS:
        return _by_numbers(args, name)
    from gruppetto.sim.workload.families import FAMILIES, family
    from gruppetto.sim.workload.published import PUBLISHED

    if name in FAMILIES:
        return _drawn(family(name).workload, name, args)
    if name in PUBLISHED:
        return _drawn(PUBLISHED[name].workload, name, args)
    from gruppetto.cli.plan_recipe import is_recipe, recipe_workload

    if is_recipe(name):
        refuse_sizes(args, name)
        return recipe_workload(name)
    if name and os.path.exists(name):
        refuse_sizes(args, name)
        return recorded(name)
    from difflib import get_close_matches

    from gruppetto.config.loader import recipes

    known = [*KINDS, *FAMILIES, *PUBLISHED, *recipes()]
    near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise UserError(
        f"--workload {name[:80]!r}: no kind ({', '.join(KINDS)}), no named workload "
        f"({', '.join([*FAMILIES, *PUBLISHED])}), no recipe (sim/family-a) and no file; write --workload {near}, a "
        "run.toml or the path of recorded rollouts"
    )


def _by_numbers(args: argparse.Namespace, name: str) -> Given:
    """A kind, with the sizes that are given in place of its own. Its cap leaves room for observations."""
    kind = KINDS[name]
    cap = tokens(args.max_tokens, "--max-tokens") if args.max_tokens else kind.max_tokens
    mean = tokens(args.mean_tokens, "--mean-tokens") if args.mean_tokens else min(kind.mean_tokens, max(1, cap // 2))
    if not args.max_tokens:
        cap = max(cap, 4 * mean)
    cv = kind.cv if args.cv is None else args.cv
    icc = kind.icc if args.icc is None else args.icc
    lengths = LognormalLengths.from_mean_cv(float(mean), cv, cap, icc, q0=args.runaways)
    prompt = kind.prompt_tokens if args.prompt_tokens is None else tokens(args.prompt_tokens, "--prompt-tokens")
    turns = kind.turns if args.turns is None else args.turns
    if turns == 1:
        _refuse_tools(args, name)
    tools = _tools(args, kind, mean, turns)
    return Given(lengths=lengths, tools=tools, prompt_tokens=prompt, turns=turns if tools else 0.0)


def _tools(args: argparse.Namespace, kind: Any, mean: int, turns: float) -> Tools | None:
    if turns == 1:
        return None
    if turns > mean:
        raise UserError(
            f"--turns {turns:g} with a mean of {mean:,} tokens: less than a token a turn; write --turns {mean} or less "
            "or a larger --mean-tokens"
        )
    wait = kind.tool_s if args.tool_seconds is None else seconds(args.tool_seconds, "--tool-seconds")
    sigma = kind.tool_sigma if args.tool_sigma is None else args.tool_sigma
    seen = kind.observation_tokens if args.observation_tokens is None else tokens(args.observation_tokens)
    return Tools.from_mean(wait, sigma=sigma, turn_tokens=max(1, round(mean / turns)), observation_tokens=seen)


def _refuse_tools(args: argparse.Namespace, name: str) -> None:
    """One turn calls no tool."""
    for option in ("tool_seconds", "tool_sigma", "observation_tokens"):
        if getattr(args, option) is not None:
            raise UserError(
                f"--{option.replace('_', '-')} with --workload {name} and one turn, which calls no tool; write "
                "--turns 20 with it, or --workload agent"
            )


def _drawn(workload: Workload, name: str, args: argparse.Namespace) -> Given:
    """A named workload; its numbers are its own."""
    refuse_sizes(args, name)
    return given_of(workload, name)


def given_of(workload: Workload, name: str = "") -> Given:
    """What the simulator draws, as the ledger takes it."""
    tools = None
    if workload.turn_tokens:
        tools = Tools(
            turn_tokens=workload.turn_tokens,
            observation_tokens=workload.observation_tokens,
            median_s=workload.tool_median_s,
            sigma=workload.tool_sigma,
            stuck_share=workload.stuck_share,
            stuck_s=workload.stuck_s,
        )
    return Given(lengths=workload.lengths, tools=tools, prompt_tokens=workload.prompt_tokens, name=name)


def recorded(path: str, most: float = math.inf) -> Given:
    """The lengths of recorded rollouts, none longer than `most`."""
    from pathlib import Path

    from gruppetto.sim.replay.read import read_trace

    trace = read_trace(Path(path))
    known = [rollout.prompt_tokens for rollout in trace.rollouts if rollout.prompt_tokens]
    prompt = round(sum(known) / len(known)) if known else 512
    rows = ((min(max(1, one.tokens), most), one.group) for one in trace.rollouts)
    return Given(
        lengths=TracedLengths.of(*zip(*rows, strict=True)),
        tools=None,
        prompt_tokens=prompt,
        name=path,
    )


def refuse_sizes(args: argparse.Namespace, name: str) -> None:
    """A named or recorded workload has sizes of its own."""
    for option in (
        "mean_tokens", "max_tokens", "cv", "icc", "turns", "tool_seconds", "prompt_tokens", "tool_sigma",
        "observation_tokens", "runaways",
    ):  # fmt: skip
        if getattr(args, option) not in (None, 0.0):
            raise UserError(
                f"--{option.replace('_', '-')} with --workload {name}, which has lengths of its own; leave one out, or "
                "write --workload reasoning"
            )


def _sandboxes(args: argparse.Namespace, given: Given) -> Sandboxes | None:
    if not (args.sandbox_seconds or given.tools):
        for option in ("wall", "sandboxes", "sandbox_start", "sandbox_cores"):
            if getattr(args, option) not in (None, 0, args.usual(option)):
                raise UserError(
                    f"--{option.replace('_', '-')}: nothing is executed; write --sandbox-seconds 10 with it "
                    "or --workload agent"
                )
        if not args.image_size:
            return None
    return Sandboxes(
        per_rollout=given.turns,
        exec_s=seconds(args.sandbox_seconds, "--sandbox-seconds") if args.sandbox_seconds else 0.0,
        cores=args.sandbox_cores,
        start_s=seconds(args.sandbox_start, "--sandbox-start") if args.sandbox_start else 0.0,
        image_bytes=size(args.image_size, "--image-size") if args.image_size else 0.0,
        images=args.images,
        limit=args.sandboxes,
        wall_s=seconds(args.wall, "--wall") if args.wall else 0.0,
    )


# -- layouts and choices -----------------------------------------------------------------------------------------------

_PART = re.compile(r"(tp|pp|ep|cp|dp)([0-9]{1,9})", re.IGNORECASE)


def _parts(text: str, allowed: str, option: str) -> dict[str, int]:
    words = re.split(r"[\s,x]+", text.strip())
    found = {}
    for word in words:
        match = _PART.fullmatch(word)
        if match is None or match[1].lower() not in allowed.split() or int(match[2]) < 1:
            such = " ".join(f"{name}2" for name in allowed.split()[:2])
            raise UserError(f'--{option} "{text}": {word!r} is no part of a layout; write parts such as "{such}"')
        part = match[1].lower()
        if part in found:
            raise UserError(f'--{option} "{text}": {part} stands there twice; write it once')
        found[part] = int(match[2])
    return found


def serve_layout(text: str | None) -> ServeLayout | None:
    """ "tp8 ep4 dp1": one engine."""
    return ServeLayout(**_parts(text, "tp ep dp", "serve")) if text else None


def train_layout(text: str | None) -> TrainLayout | None:
    """ "tp4 pp2 ep8": the ranks of one copy; data parallelism takes the rest of the GPUs."""
    if not text:
        return None
    parts = _parts(text, "tp pp ep cp dp", "train")
    if "dp" in parts:
        raise UserError(
            f'--train "{text}": dp follows from the GPUs there are for training; leave dp{parts["dp"]} out, and write '
            "--gpus or --split"
        )
    cut = math.prod(parts.values())
    return replace(TrainLayout(shard="full" if cut == 1 else "optimizer"), **parts)  # type: ignore[arg-type]


def _split(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text.strip())
    if match is None:
        raise UserError(f"--split {text}: not two numbers of GPUs; write rollout:trainer, as in --split 48:16")
    return int(match[1]), int(match[2])


def _refuse_unread(args: argparse.Namespace, placements: Sequence[str]) -> None:
    """What says something about two sides, or about overlap, where no placement has it."""
    if args.split and args.only is None and set(placements) == {"colocated"}:
        raise UserError(
            f"--split {args.split} with --compare colocated, which has no sides; leave it out, or write "
            "--compare disaggregated"
        )
    if args.depth is not None and not {"async", "elastic"} & set(placements):
        raise UserError(
            f"--depth {args.depth:g} is of async, which is not among {', '.join(placements)}; leave it out, or write "
            "--compare async"
        )


def _placements(text: str | None, max_staleness: int) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",")) if text else PLACEMENTS[:3]
    for name in names:
        if name not in PLACEMENTS:
            from difflib import get_close_matches

            near = get_close_matches(name, PLACEMENTS, n=1, cutoff=0.0)[0]
            raise UserError(f"--compare {name}: no such placement; write {near}, or any of {', '.join(PLACEMENTS)}")
    return names if text or max_staleness else tuple(name for name in names if name != "async")


def efficiency_asked(texts: Sequence[str], gpu: str) -> Efficiency:
    """A set's name and `field=value` parts, in any order; without a name what the file `gpu` measured, if it did."""
    found, changed = profile_efficiency(gpu) or efficiency_of("default"), {}
    for text in texts:
        if "," in text:
            parts = " ".join(f"--efficiency {part.strip()}" for part in text.split(",") if part.strip())
            raise UserError(f"--efficiency {text[:80]}: one set or one share each time; write {parts[:200]}")
        name, equals, value = text.partition("=")
        if not equals:
            found = efficiency_of(name)
            continue
        try:
            changed[name] = float(value)
        except ValueError:
            raise UserError(f"--efficiency {text}: not a number; write {name}=0.5") from None
    return found.but(**changed) if changed else found
