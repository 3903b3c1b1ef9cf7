"""A whole run on virtual time: the real controller, scheduler and records over simulated engines, rewards and trainer.

What a rollout asks for depends on the seed, its task and its member alone, so two scheduling policies are compared on
the same rollouts. Promise: the same config writes the same run folder, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from gruppetto import __version__
from gruppetto.auto.ask import ask_here
from gruppetto.auto.chooser import Chooser
from gruppetto.auto.settings import auto_settings
from gruppetto.clock import run_virtual
from gruppetto.config.loader import COMMAND_LINE, DEFAULT, Loaded
from gruppetto.config.schema import Config
from gruppetto.errors import UserError
from gruppetto.presets import build_policy, loop_settings
from gruppetto.record.base import Recorder
from gruppetto.record.folder import RunFolder
from gruppetto.sim.anew import refuse_source, written_anew
from gruppetto.sim.demand import Plans
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.failures import read_failures
from gruppetto.sim.replay.launched import recorded_workload
from gruppetto.sim.replay.ready import size_words
from gruppetto.sim.workload.base import Demand, uniform
from gruppetto.sim.workload.families import FAMILIES, family
from gruppetto.sim.workload.generator import Workload
from gruppetto.sim.workload.published import PUBLISHED
from gruppetto.sim.workload.recorded import TraceWorkload
from gruppetto.sim.world import Spec, TrainerModel, World
from gruppetto.types import Rollout, Score

GENERATED = "lengths"
"""The sim.workload that [sim.lengths] draws."""

LOOKED_AT = 64
"""Groups whose prompts are looked at before a run."""


def simulate(loaded: Loaded, demand: Demand | None = None) -> Path:
    """Runs to the end of the steps in virtual time; returns the run folder. Raises `UserError` for a bad workload.

    `demand`: the workload, where it is not the one that sim.workload names.
    """
    config = loaded.config
    if demand is None:
        refuse_idle(loaded)
        demand = workload_of(config)
    check(config, demand)
    path = Path(config.run.dir) / config.run.name
    environment = {"simulated": True, "packages": {"gruppetto": __version__}}
    with written_anew(path) as new:
        folder = RunFolder.create(new, loaded.source_text, loaded.resolved(), environment)
        try:
            run_virtual(run(config, demand, folder))
        finally:
            folder.close()
    return path


def refuse_idle(loaded: Loaded) -> None:
    """Raises `UserError` for settings of [sim.lengths] that nothing takes notice of: given together with a workload
    that draws its own lengths, or over it. Those that a later workload has replaced are no mistake."""
    workload, origins = loaded.config.sim.workload, loaded.origins
    if workload == GENERATED:
        return
    chosen = _file(origins["sim.workload"])
    for key, origin in origins.items():
        if not key.startswith("sim.lengths.") or origin == DEFAULT:
            continue
        if origin == COMMAND_LINE or chosen in (DEFAULT, _file(origin)):
            raise UserError(
                f'{key} ({origin}) has no use with sim.workload = "{workload}", whose lengths are its own; leave it '
                f'out, or write sim.workload = "{GENERATED}"'
            )


def _file(origin: str) -> str:
    """Where a value comes from, without its line."""
    return origin.rpartition(":")[0] or origin


def check(config: Config, demand: Demand) -> None:
    """Raises `UserError` for a scheduler, a failure or an engine that cannot be, and for a run that would be written
    over the rollouts it is made from."""
    build_policy(config)
    if not known_by_name(config.sim.workload):
        refuse_source(Path(config.run.dir) / config.run.name, config.sim.workload)
    read_failures(config.sim.failures, config.engine.count)
    if config.sim.score_s > config.reward.timeout_s:
        raise UserError(
            f"sim.score_s = {config.sim.score_s:g} is over reward.timeout_s = {config.reward.timeout_s:g}: every score "
            f"of such a run would fail; write reward.timeout_s = {config.sim.score_s:g} or more"
        )
    prompt = max(demand.prompt(config.run.seed, group) for group in range(LOOKED_AT))
    needed = min(config.engine.context, prompt + config.rollout.max_tokens)
    if 0 < config.sim.kv_tokens < needed:
        raise UserError(
            f"sim.kv_tokens = {config.sim.kv_tokens} does not hold one rollout: a prompt of {prompt} tokens and "
            f"rollout.max_tokens = {config.rollout.max_tokens}; write sim.kv_tokens = {needed} or more, or 0 for no "
            "limit"
        )


def workload_of(config: Config) -> Demand:
    """What sim.workload names; "lengths" is drawn by [sim.lengths]. Raises `UserError` where it cannot be."""
    if config.sim.workload != GENERATED:
        return demand_of(config.sim.workload)
    lengths = config.sim.lengths
    try:
        return Workload.from_mean_cv(
            lengths.mean_tokens,
            lengths.cv,
            lengths.icc,
            config.rollout.max_tokens,
            q0=lengths.runaway_share,
            prompt_tokens=lengths.prompt_tokens,
            turn_tokens=lengths.turn_tokens,
            observation_tokens=lengths.observation_tokens,
            tool_median_s=lengths.tool_median_s,
            tool_sigma=lengths.tool_sigma,
        )
    except UserError as error:
        raise UserError(f"[sim.lengths] with rollout.max_tokens as the cap: {error}") from error


def known_by_name(workload: str) -> bool:
    """Whether this is the name of a workload; else it is the path of recorded rollouts."""
    return workload in PUBLISHED or workload in FAMILIES or workload == GENERATED


def demand_of(workload: str) -> Demand:
    """A family of the study or a published workload by name, or the recorded rollouts of a file or folder, whole groups
    drawn again and again."""
    if workload in PUBLISHED:
        return PUBLISHED[workload].workload
    if workload in FAMILIES:
        return family(workload).workload
    if not workload or not Path(workload).exists():
        near = get_close_matches(workload, [*FAMILIES, *PUBLISHED, GENERATED], n=1, cutoff=0.0)[0] if workload else "A"
        raise UserError(
            f'sim.workload = "{workload}" is no family ({", ".join(FAMILIES)}), no published workload '
            f'({", ".join(PUBLISHED)}), not "{GENERATED}", which [sim.lengths] draws, and no file; '
            f'write sim.workload = "{near}" or the path of a recorded run'
        )
    return recorded_workload(Path(workload))


def words_of(config: Config, demand: Demand) -> tuple[str, ...]:
    """What a recorded workload lacks and what stands in its place, and what of it this config does not run: a line
    each."""
    if known_by_name(config.sim.workload) or not isinstance(demand, TraceWorkload):
        return ()
    sizes = [len(group) for group in demand.groups]
    return (*demand.words, *size_words(sizes, config.rollout.group_size), *_cut_words(config, demand))


def _cut_words(config: Config, demand: TraceWorkload) -> Iterator[str]:
    recorded = [rollout for group in demand.groups for rollout in group]
    longer = sum(r.length > config.rollout.max_tokens for r in recorded)
    if longer:
        limit = f"rollout.max_tokens = {config.rollout.max_tokens}"
        yield f"{longer:,} of {len(recorded):,} recorded rollouts are longer than {limit}: they are cut there"
    whole = (
        (demand.prompt_tokens if r.prompt_tokens is None else r.prompt_tokens)
        + min(r.length, config.rollout.max_tokens)
        + sum(turn.observation_tokens for turn in r.turns[:-1])
        for r in recorded
    )
    if over := sum(context > config.engine.context for context in whole):
        limit = f"engine.context = {config.engine.context}"
        yield f"{over:,} of {len(recorded):,} recorded rollouts need a longer context than {limit}: they are cut there"


async def run(config: Config, demand: Demand, recorder: Recorder) -> None:
    """The run itself, on the running (virtual) loop."""
    world = build_world(config, demand, recorder)
    if config.scheduler.type == "auto":
        settings = auto_settings(config, turns=world.spec.plans.turns, kv_kept=world.stages.kv_kept, waits=True)
        world.stages.chooser = Chooser(settings, ask_here, world.loop)
    await world.run()


def build_world(config: Config, demand: Demand, recorder: Recorder) -> World:
    """Stages and loop, not started."""
    return World.of(spec_of(config, demand), recorder)


def spec_of(config: Config, demand: Demand) -> Spec:
    """The run in numbers."""
    sim = config.sim
    settings = replace(  # virtual time is repeatable as it is, and simulated engines need no queue of their own
        loop_settings(config, ()), lockstep=False, engine_queue=0, tool_timeout_s=config.rollout.timeout_s
    )
    return Spec(
        settings=settings,
        policy=build_policy(config),
        plans=Plans(demand, config.run.seed, turns=demand.has_turns),
        model=engine_model(config),
        engines=config.engine.count,
        steps=config.run.steps,
        seed=config.run.seed,
        tasks=sim.tasks,
        trainer=TrainerModel(
            step_s=sim.train_step_s,
            token_s=sim.train_token_s,
            publish_s=sim.publish_s,
            switch_s=sim.switch_s,
            score_s=sim.score_s,
        ),
        kv_on_swap=sim.kv_on_swap,
        score_of=_scores(config),
        failures=read_failures(sim.failures, config.engine.count),
        normalize=config.train.normalize_advantage,
        record_rollouts=config.log.rollouts,
    )


def engine_model(config: Config) -> EngineModel:
    """The price list of the [sim] section."""
    sim = config.sim
    return EngineModel(
        slots=config.engine.slots,
        base_s=sim.decode_base_s,
        weights_s=sim.decode_weights_s,
        experts_s=sim.decode_experts_s,
        expert_share=sim.decode_expert_share,
        kv_token_s=sim.decode_kv_s,
        compute_row_s=sim.decode_compute_s,
        row_s=sim.decode_row_s,
        prefill_token_s=sim.prefill_token_s,
        kv_capacity=sim.kv_tokens,
        prefill_elsewhere=sim.prefill_elsewhere,
        shares_prompts=sim.shares_prompts,
        speculation=EngineModel.speculating(
            {int(rows): (made, cost) for rows, (made, cost) in sim.speculation.items()}
        ),
    )


def _scores(config: Config) -> Callable[[Rollout], Score]:
    def score_of(rollout: Rollout) -> Score:
        passed = uniform(config.run.seed, "reward", rollout.group_id, rollout.member) < config.sim.pass_rate
        return Score(reward=float(passed))

    return score_of
