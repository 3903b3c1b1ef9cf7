"""A recorded run made ready to run again, and run again under a scheduling policy on virtual time.

    run folder of ours   sizes, engines and placement from its config; prices fitted from its record ([sim] of its
                         config where it was simulated); as many steps as it has
    any other trace      sizes from the rollouts; engines and prices from the config files that are named, else the
                         defaults; at least `FEWEST` steps

Launch i is the record's group i under every policy, in order of step; past the last one whole groups are drawn again.
What a trace does not hold is never made up silently: `Replay.words` has a line for everything that was assumed.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gruppetto.config.loader import Loaded, document_lines, load
from gruppetto.config.saved import refuse_damaged
from gruppetto.config.schema import Config
from gruppetto.errors import UserError
from gruppetto.record.explain.engines import engines
from gruppetto.record.explain.gaps import absent_steps, gaps
from gruppetto.record.explain.read import RunRecord, read_run, step_words
from gruppetto.sim import compare
from gruppetto.sim.anew import is_simulated
from gruppetto.sim.replay.demand import ReplayDemand
from gruppetto.sim.replay.launched import launched
from gruppetto.sim.replay.prices import Prices, Row, fit_prices, starts_of
from gruppetto.sim.replay.read import is_run_folder, read_trace
from gruppetto.sim.replay.ready import PROMPT_TOKENS, made_ready, not_told, size_words, usual_size
from gruppetto.sim.replay.running import ORACLE, replayed
from gruppetto.sim.replay.trace import ROUNDED_S, Trace
from gruppetto.sim.simulate import workload_of

FEWEST = 10
"""Steps that a trace of another system is run for at least: policies differ by what one step leaves to the next."""

SLOTS = 64
TIMEOUT_S = 1e6
"""No rollout of a trace of another system is given up: what it did is known."""

SLOWEST_S = 10.0
"""Nor where it is long: seconds a token that no engine takes."""

LONGEST_STEM = 100
"""Bytes of a file's name that its replays are called after."""

AS_RUN = "as it ran"
"""The name of the run's own scheduling policy."""

TABLES = ("run", "rollout", "engine", "buffer", "sim")
"""Tables of a run's config that its replay takes over."""

Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What is run again. `below` and `above`: settings that config files may replace, and those that they may not."""

    trace: Trace
    demand: ReplayDemand
    words: tuple[str, ...]
    below: Tables
    above: Tables
    scheduler: Mapping[str, Any] | None = None
    """The run's own [scheduler]; None for a trace of another system."""
    measured: Path | None = None
    """The run folder, where the trace is one."""
    error: float | None = None
    """Relative error of the fitted decode step."""

    def config(self, scheduler: str, files: Sequence[str] = (), overrides: Sequence[str] = ()) -> Loaded:
        """The config of one replay. `scheduler`: `AS_RUN`, `ORACLE`, or an entry of `--compare` (see
        `sim.compare.overrides`).

        Raises `UserError`.
        """
        placed = self.below.get("run", {}).get("placement") == "disaggregated"
        own, chosen = ({"scheduler": self.scheduler or {}}, []) if scheduler == AS_RUN else (
            {}, compare.overrides(re.sub(f"^{ORACLE}(?=:|$)", "sync", scheduler), placed=placed)
        )  # fmt: skip
        run = self.above["run"]
        above = {**self.above, "run": {**run, "name": compare.folder_name(run["name"], scheduler)}}
        with tempfile.TemporaryDirectory() as folder:
            low, high = Path(folder) / "below.toml", Path(folder) / "above.toml"
            low.write_text(_toml({**self.below, **own}))
            high.write_text(_toml(above))
            said = replayed(self.trace.path)
            try:
                loaded = load([low, *files, high], [*chosen, *overrides])
            except UserError as error:
                raise UserError(re.sub(f"{re.escape(folder)}/\\w+.toml", said, str(error))) from None
            origins = {key: said if folder in origin else origin for key, origin in loaded.origins.items()}
        values = {key: value for key, value in loaded.values().items() if origins.get(key, "default") != "default"}
        text = "".join(f"{line}\n" for line in document_lines(values, lambda key: origins[key]))
        return Loaded(loaded.config, origins, text)


def prepare(
    path: str | Path, columns: Mapping[str, str] | None = None, characters_per_token: float | None = None
) -> Replay:
    """Reads a trace and makes it ready. Raises `UserError` for what cannot be read or replayed."""
    trace = read_trace(path, columns, characters_per_token)
    place = Path(path)
    if is_run_folder(place):
        return _of_run(trace, place)
    return _of_trace(trace)


# -- a run folder of ours ---------------------------------------------------------------------------------------------


def _of_run(trace: Trace, folder: Path) -> Replay:
    record = read_run(folder)
    config = record.config
    refuse_damaged(folder / "config.resolved.json", config)
    if lacks := [name for name in ("run", "rollout", "engine", "scheduler") if name not in config]:
        raise UserError(
            f"{folder}/config.resolved.json has no [{lacks[0]}]; replay a run folder of this version, or write out its "
            "lengths as a table"
        )
    sizes = ("prompts_per_step", "group_size", "max_tokens")
    if lacks := [key for key in sizes if key not in config["rollout"]]:
        raise UserError(f"{folder}/config.resolved.json has no rollout.{lacks[0]}; replay a run folder that is whole")
    simulated = is_simulated(folder.resolve())
    prices = _prices(trace, record, simulated)
    if (
        not simulated
    ):  # the fit says what was prefilled of prompts: siblings may share theirs, which these engines do not
        trace = replace(trace, rollouts=tuple(replace(r, prompt_tokens=None) for r in trace.rollouts))
    usual = prices.prompt_tokens if simulated else None
    found = launched(trace, folder, int(config["rollout"]["group_size"]), usual)
    tables: dict[str, dict[str, Any]] = {name: _known(config, name) for name in TABLES}
    tables["sim"] = {**tables.get("sim", {}), **prices.sim, "tasks": 0, **({} if simulated else {"failures": []})}
    above = {
        "run": {"name": f"{_plain(folder.resolve().name)}-replay", "steps": record.steps[-1]},
        "rollout": {key: config["rollout"][key] for key in sizes},
        "sim": {"workload": str(folder)},
    }
    tables["run"]["dir"] = str(folder.parent)
    tables["rollout"] |= _patience(float(config["rollout"].get("timeout_s") or 0.0), found.longest_tool_s)
    known = f"{len(found.groups):,} tasks were taken; past them whole groups are drawn again"
    prompt = prices.prompt_tokens
    return Replay(
        trace=trace,
        demand=ReplayDemand(found, prompt or 1),
        words=(
            f"{len(record.rows)} recorded steps; {known}",
            *_gap_words(record),
            *trace.passed_over,
            *prices.words,
            *_failure_words(record, simulated),
            *found.words,
        ),
        below=tables,
        above=above,
        scheduler=_known(config, "scheduler"),
        measured=folder,
        error=prices.error,
    )


def _patience(timeout_s: float, longest_s: float) -> dict[str, float]:
    """No tool is given up that the run waited for (or that all of a rollout's tools together make)."""
    return {"timeout_s": 2 * longest_s} if longest_s > timeout_s + ROUNDED_S else {}


def _gap_words(record: RunRecord) -> Iterator[str]:
    """What the record lacks; where steps have no figures, the measured row is a mean over others than its replay's."""
    yield from gaps(record)
    if absent_steps(record.steps):
        yield f"measured is over {step_words(record.steps)}, each replay over all {record.steps[-1]}"


def _failure_words(record: RunRecord, simulated: bool) -> Iterator[str]:
    """What broke in a simulated run breaks again, at the same second; of a real one that cannot be said."""
    found = engines(record, record.steps)
    if found["sim_failures"] and simulated:
        told = ", ".join(found["sim_failures"])
        yield f"its engines broke as sim.failures says, and do so in a replay ({told}); sim.failures=[] leaves it out"
    elif found["happened"]:
        names = ", ".join(sorted({entry["engine"] for entry in found["happened"]}))
        yield f"{names} failed or slowed down in the run (gruppetto explain says when); that is not replayed"


def _known(config: Row, table: str) -> dict[str, Any]:
    """A table of a run's config without the settings that there are no more."""
    fields = Config.model_fields[table].annotation.model_fields  # type: ignore[union-attr]
    return {key: value for key, value in config.get(table, {}).items() if key in fields}


def _prices(trace: Trace, record: RunRecord, simulated: bool) -> Prices:
    """Fitted; a simulated run says its prices itself."""
    prompt = trace.usual_prompt
    if prompt is None and simulated:
        prompt = _drawn_prompt(record)
    found = fit_prices(record.rows, record.config, starts_of(record.events()), prompt)
    if not simulated:
        return found
    words = ("it is a simulated run: its engines are those of its [sim]",)
    return replace(found, sim={}, error=None, words=words, prompt_tokens=prompt or found.prompt_tokens)


def _drawn_prompt(record: RunRecord) -> int | None:
    """Prompt tokens of a simulated run that kept no rollouts; None where its workload is not there any more."""
    try:
        return workload_of(Config.model_validate(record.config)).prompt(0, 0)
    except (UserError, ValueError):
        return None


# -- a trace of another system ----------------------------------------------------------------------------------------


def _of_trace(trace: Trace) -> Replay:
    ready, words = made_ready(trace)
    found = launched(ready)
    groups = ready.groups()
    sizes = [len(group) for group in groups]
    size = max(2, usual_size(sizes))
    recorded = Counter(group[0].step for group in groups if group[0].step is not None)
    steps, batch = len(recorded) or 1, max(1, usual_size(list(recorded.values()) or [len(groups)]))
    longest = trace.cap or max(max(r.length for r in group.members) for group in found.groups)
    observed = max(sum(t.observation_tokens for t in r.turns) for group in found.groups for r in group.members)
    prompt = max(r.prompt_tokens or 0 for r in ready.rollouts)
    above: Tables = {
        "run": {"name": f"{_plain(Path(trace.path).stem)}-replay", "steps": max(steps, FEWEST)},
        "rollout": {"prompts_per_step": batch, "group_size": size, "max_tokens": longest},
        "engine": {"context": longest + prompt + observed + 1},
        "sim": {"workload": trace.path, "tasks": 0},
    }
    return Replay(
        trace=trace,
        demand=ReplayDemand(found, PROMPT_TOKENS),
        words=(
            *_steps_words(list(recorded.values()), batch, [group[0].step for group in groups]),
            *words,
            *size_words(sizes, size),
            *not_told(trace),
            *found.words,
        ),
        below={
            "rollout": {"timeout_s": max(TIMEOUT_S, 2 * found.longest_tool_s, SLOWEST_S * longest)},
            "engine": {"slots": SLOTS, "count": max(1, -(-batch * size // (2 * SLOTS)))},
        },
        above=above,
    )


def _steps_words(sizes: Sequence[int], batch: int, steps: Sequence[int | None]) -> Iterator[str]:
    """`sizes`: groups of each recorded step; `steps`: of each group."""
    recorded = f"{len(sizes)} recorded steps" if len(sizes) > 1 else "1 recorded step"
    yield f"{recorded}, {len(steps):,} groups; past them whole groups are drawn again"
    if sizes and min(sizes) < max(sizes):
        yield f"steps have {min(sizes)} to {max(sizes)} groups: each runs {batch}, in the order of the record's steps"
    if sizes and (untold := steps.count(None)):
        yield f"the step of {untold:,} of {len(steps):,} groups is not known: they are launched after the others"


def _plain(name: str) -> str:
    """What a run folder can be called after a file."""
    shown = "".join(character if character.isprintable() else "_" for character in name)
    return shown.encode()[:LONGEST_STEM].decode(errors="ignore")


def _toml(tables: Tables) -> str:
    """Tables as a TOML document; settings that are None are left to their defaults."""
    values = {f"{table}.{key}": v for table, entries in tables.items() for key, v in entries.items() if v is not None}
    return "".join(f"{line}\n" for line in document_lines(values, lambda key: ""))
