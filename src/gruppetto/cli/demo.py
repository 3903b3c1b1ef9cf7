"""`gruppetto demo`: from nothing to a model that has learned, in about a minute, through the real loop."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gruppetto.cli.settings import quiet_threads

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded


SCHEDULERS = ("sync", "partial", "tail_batch", "divided", "async_bounded", "windowed", "layered", "auto")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "demo",
        help="watch a small model learn, on any CPU, in about a minute",
        description="Warm-starts a model of a million parameters (once, cached), then trains it by GRPO.",
        epilog="Example: gruppetto demo --scheduler sync run.steps=40",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings over the recipe `demo`")
    parser.add_argument("--seed", type=int, help="run.seed; also seeds the warm start")
    parser.add_argument("--steps", type=int, help="run.steps")
    parser.add_argument("--scheduler", choices=SCHEDULERS, help="the preset, in the place of the recipe's [scheduler]")
    parser.add_argument("--out", help="run.dir, the folder of run folders")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from gruppetto.config.loader import load

    settings = _settings(args)
    seed = load(["demo"], settings).config.run.seed
    quiet_threads(load(["demo"], settings).config)
    model = _model(seed)
    loaded = load(["demo"], [*_named(settings), f'model.path="{model}"'])
    return _train(loaded)


def _settings(args: argparse.Namespace) -> list[str]:
    from gruppetto.sim.compare import overrides

    preset = overrides(args.scheduler) if args.scheduler else []
    chosen = {"run.seed": args.seed, "run.steps": args.steps, "run.dir": args.out}
    return [*preset, *args.settings, *(f"{key}={value}" for key, value in chosen.items() if value is not None)]


def _named(settings: list[str]) -> list[str]:
    """The settings, with the first free run name `demo`, `demo-2`, … where none was given."""
    from gruppetto.config.loader import load

    if any(setting.startswith("run.name=") for setting in settings):
        return settings
    config = load(["demo"], settings).config.run
    names = (config.name if n == 1 else f"{config.name}-{n}" for n in range(1, 10_000))
    free = next(name for name in names if not (Path(config.dir) / name).exists())
    return [*settings, f"run.name={free}"]


def _model(seed: int) -> Path:
    from gruppetto.demo.warmstart import cached_folder, warm_start

    folder = cached_folder(seed)
    if folder.exists():
        print(f"1/3 model: warm-started before, {folder}")
    else:
        print("1/3 model: a million parameters, taught the form of an answer by sloppy examples …", flush=True)
        warm_start(seed, folder)
        print(f"    kept for the next time in {folder}")
    return folder


def _train(loaded: Loaded) -> int:
    from rich.console import Console

    from gruppetto.assemble import train
    from gruppetto.cli.train import check
    from gruppetto.demo.summary import summary_table

    config = loaded.config
    check(loaded, resume=False)
    print(
        f"2/3 train: {config.run.steps} steps of GRPO, {config.rollout.prompts_per_step} x {config.rollout.group_size} "
        f"rollouts each, scheduler {config.scheduler.type}; reward 1 for 'c..h:' -> 'cdefgh', else 0",
        flush=True,
    )
    code = train(loaded)
    if code:
        return code
    folder = Path(config.run.dir) / config.run.name
    print("3/3 what happened")
    Console().print(summary_table(folder))
    print(_next(folder))
    return 0


def _next(folder: Path) -> str:
    return "\n".join(
        (
            "try next:",
            "  gruppetto demo --scheduler sync               # the same, waiting for the slowest rollout of each step",
            f"  {f'gruppetto explain {folder}':<45} # what held it up, and what to write instead",
            "  gruppetto config demo                         # every setting, and where it comes from",
            f"  open https://ui.perfetto.dev with {folder}/trace.json    # every rollout on its slot",
        )
    )
