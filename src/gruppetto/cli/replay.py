"""`gruppetto replay`: recorded rollouts again, under several scheduling policies side by side, on virtual time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.cli.output import check_json
from gruppetto.cli.settings import split_settings
from gruppetto.errors import UserError

if TYPE_CHECKING:
    from gruppetto.config.loader import Loaded
    from gruppetto.config.schema import Config
    from gruppetto.sim.replay.again import Replay

COMPARE = "sync,partial,layered:max_staleness=1,layered:max_staleness=1:over_age=mask:depth=1.5,oracle"
"""What is compared where nothing is asked for."""

MEASURED = "measured"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "replay",
        help="run recorded rollouts again under other scheduling policies",
        description="Runs the rollouts of a run folder, a verl dump, a slime debug dump or a table of lengths again on "
        "virtual time, once for each scheduling policy. Engine prices come from the run folder, else from [sim].",
        epilog="Example: gruppetto replay runs/demo --compare sync,partial,layered:max_staleness=1",
    )
    parser.add_argument("path", metavar="PATH", help="run folder, dump (file or folder of them), or CSV/JSONL table")
    parser.add_argument(
        "settings", nargs="*", metavar="FILE | key=value", help="engines and prices: TOML files or recipes, settings"
    )
    parser.add_argument(
        "--compare",
        metavar="A,B",
        help="scheduler types, each may carry settings: partial:depth=2; oracle knows lengths beforehand",
    )
    parser.add_argument(
        "--column", metavar="ROLE=NAME", action="append", default=[], help="column of a table: length=n_tokens"
    )
    parser.add_argument(
        "--characters-per-token", metavar="N", type=float, help="turns lengths that are characters into tokens"
    )
    parser.add_argument("--json", metavar="FILE", help="write figures and assumptions (- = standard output)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where an entry that was asked for failed, or every one."""
    from gruppetto.cli.side_by_side import tell_failed, with_failed
    from gruppetto.cli.simulate import print_differences, print_table, write_figures
    from gruppetto.sim.compare import entries, refuse_shared
    from gruppetto.sim.replay.again import prepare

    check_json(args.json)
    asked = entries(COMPARE if args.compare is None else args.compare)
    replay = prepare(args.path, _columns(args.column), args.characters_per_token)
    files, overrides = split_settings(args.settings)
    configs = {name: _config(replay, name, files, overrides) for name in _names(replay, asked)}
    refuse_shared({name: loaded.config for name, loaded in configs.items()})
    words = [*replay.words, *_what_is_run(next(iter(configs.values())).config)]
    if args.json != "-":
        print(f"{replay.trace.kind} {replay.trace.path}: {len(replay.trace.rollouts):,} rollouts")
        print("".join(f"  {word}\n" for word in words), end="", flush=True)
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    try:
        failed = _run_all(replay, configs, results)
    finally:  # an interruption leaves the table of what is there
        if results and args.json != "-":
            print_table(results)
            print_differences({name: configs[name].config for name in results if name in configs})
        if (results or failed) and args.json:
            found = {"trace": {"path": replay.trace.path, "assumed": words}}
            write_figures({**found, "schedulers": with_failed(results, failed)}, args.json)
        serious = bool(failed) and (args.compare is not None or len(failed) == len(configs))
        tell_failed(failed, as_error=serious)
    return 1 if serious else 0


def _names(replay: Replay, wanted: Sequence[str]) -> list[str]:
    """What is run; a run's own policy first, beside which stands what was measured."""
    from gruppetto.sim.replay.again import AS_RUN

    return list(dict.fromkeys([AS_RUN, *wanted] if replay.scheduler is not None else wanted))


def _beneath(entry: str, overrides: Sequence[str]) -> list[str]:
    """The command line's settings as one entry has them: its own go before, and a run name is the stem of all."""
    from gruppetto.sim.compare import folder_name, options
    from gruppetto.sim.replay.again import AS_RUN

    own = {} if entry == AS_RUN else dict(option.split("=", 1) for option in options(entry)[1])
    given = dict(setting.split("=", 1) for setting in overrides)
    if "run.name" in given:
        given["run.name"] = folder_name(given["run.name"].strip("\"'"), entry)
    return [f"{key}={value}" for key, value in given.items() if key not in own]


def _config(replay: Replay, name: str, files: list[str], overrides: list[str]) -> Loaded:
    """Raises `UserError` for a policy that cannot be, for a setting that would say nothing, and where another run has
    the folder."""
    from gruppetto.config.loader import COMMAND_LINE
    from gruppetto.config.preflight import refuse_name, refuse_scheduler
    from gruppetto.config.toml import value_text
    from gruppetto.sim.anew import refuse_source, refuse_taken
    from gruppetto.sim.compare import OF_THE_RECORD
    from gruppetto.sim.replay.again import AS_RUN
    from gruppetto.sim.unread import refuse_unread

    loaded = replay.config(name, files, _beneath(name, overrides))
    for key, origin in loaded.origins.items():
        if origin == COMMAND_LINE and key.startswith(OF_THE_RECORD):
            said = f"{key} = {value_text(loaded.values()[key])} ({COMMAND_LINE})"
            raise UserError(f"{said}: the rollouts of a replay are those of {replay.trace.path}; leave it out")
    refuse_unread(loaded)
    refuse_scheduler(loaded.config, ran=replay.config(AS_RUN).config if name == AS_RUN else None)
    refuse_name(loaded.config)
    target = Path(loaded.config.run.dir) / loaded.config.run.name
    refuse_source(target, replay.trace.path)
    refuse_taken(target)
    return loaded


def _run_all(replay: Replay, configs: dict[str, Loaded], results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Fills in the figures of what was measured and of each replay, all over the same steps; why replays failed."""
    from gruppetto.cli.side_by_side import carry_out
    from gruppetto.sim.compare import warm_up
    from gruppetto.sim.replay.running import is_oracle, run_again

    skipped = warm_up([loaded.config for loaded in configs.values()])
    results.update({} if replay.measured is None else _measured(replay.measured, skipped))

    def run_one(name: str, loaded: Loaded) -> Path:
        return run_again(loaded, replay.demand, oracle=is_oracle(name))

    return carry_out(configs, run_one, skipped, results)


def _measured(run: Path, skipped: int) -> dict[str, dict[str, Any]]:
    """What really happened; nothing where an older record lacks a figure."""
    from gruppetto.sim.compare import figures

    try:
        return {MEASURED: figures(run, skipped)}
    except KeyError as lacking:
        print(f"{lacking}; what was measured is not in the table", file=sys.stderr)
        return {}


def _what_is_run(config: Config) -> tuple[str, ...]:
    engine, sim, size = config.engine, config.sim, config.rollout
    step = sim.decode_base_s + sim.decode_weights_s + sim.decode_experts_s * sim.decode_expert_share
    return (
        f"each runs {config.run.steps} steps of {size.prompts_per_step} groups of {size.group_size}",
        f"engines: {engine.count} of {engine.slots} slots, {config.run.placement}; a decode step takes "
        f"{step * 1e3:.4g} ms and {sim.decode_row_s * 1e3:.3g} ms a row; the trainer takes {sim.train_step_s:.3g} s a "
        f"step and {sim.train_token_s * 1e3:.3g} ms a token",
        *_what_is_free(config),
        "any of it can be changed by settings, such as engine.slots=128 or sim.decode_base_s=0.02",
    )


def _what_is_free(config: Config) -> Iterator[str]:
    """What takes no time here and may take some elsewhere, and how it is priced."""
    from gruppetto.record.explain.read import listed

    sim = config.sim
    prices = {
        "prefill (on resuming, too)": ("sim.prefill_token_s", sim.prefill_token_s),
        "publish": ("sim.publish_s", sim.publish_s),
        "switch": ("sim.switch_s", sim.switch_s if config.run.placement == "colocated" else 1.0),
        "rewards": ("sim.score_s", sim.score_s),
    }
    free = {what: key for what, (key, price) in prices.items() if not price}
    keys, words = list(free.values()), []
    if free:
        words.append(f"no time is taken by {listed(list(free))}")
    if not sim.kv_tokens:
        words, keys = [*words, "KV has no limit"], [*keys, "sim.kv_tokens"]
    if words:
        yield f"{', '.join(words)}: {listed(keys)} {'set them' if len(keys) > 1 else 'sets it'}"


def _columns(texts: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for text in texts:
        role, equals, name = text.partition("=")
        if not equals or not role or not name:
            raise UserError(f"--column {text} is no role and name; write --column length=n_tokens")
        if columns.setdefault(role, name) != name:
            raise UserError(
                f"--column {role}={columns[role]} and --column {text} name two columns for one role; write one"
            )
    return columns
