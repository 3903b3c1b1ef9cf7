"""The one place that picks implementations: from a config to a run, and through it.

Owns the order of construction (cheap and refusable first, heavy last), the signals, and the order of closing. Promise:
whatever fails while things are built or run, everything that was started is closed, and the run folder is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path

from gruppetto.auto.ask import AskBeside
from gruppetto.auto.chooser import Chooser
from gruppetto.auto.settings import auto_settings
from gruppetto.checkpoint import Checkpoints
from gruppetto.config.loader import Loaded
from gruppetto.config.preflight import refuse_changes
from gruppetto.config.schema import Config
from gruppetto.controller import Controller, Interrupted, Stages
from gruppetto.data.source import RowSource, build_source
from gruppetto.data.tokenizer import HFTokenizer
from gruppetto.engines.base import Engine
from gruppetto.errors import UserError
from gruppetto.evaluation import Evaluator
from gruppetto.first_weights import bring_first_weights, build_channel, kv_kept
from gruppetto.presets import build_policy, loop_settings
from gruppetto.record.base import Recorder
from gruppetto.record.environment import environment
from gruppetto.record.fanout import Fanout
from gruppetto.record.folder import RunFolder, require_run
from gruppetto.record.screen import build_screen
from gruppetto.rewards.build import build_reward
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.starting import awaited, said_when_late, tell_determinism, tell_kv_pool, tell_slots
from gruppetto.trainer.advantages import group_advantages
from gruppetto.trainer.base import Trainer

INTERRUPTED = 130
GENERATE_GRACE_S = 120.0
"""An HTTP request outlives the rollout's deadline by so much, for its abort to bring back what was made."""


def train(loaded: Loaded, *, resume: bool = False) -> int:
    """Runs a training run to its end; returns the exit code (0, or 130 when interrupted and saved)."""
    return asyncio.run(_train(loaded, resume))


def rehearse(loaded: Loaded, *, resume: bool = False) -> None:
    """Everything of `train` that loads no weights and writes nothing. Raises the `UserError` that it would."""
    config = loaded.config
    tokenizer, _, _ = _inputs(loaded, resume)
    _check_model(config)

    async def start_reward() -> None:
        reward = build_reward(config.reward, tokenizer.decode)
        try:
            await reward.start()
        finally:
            await reward.close()

    asyncio.run(start_reward())


def _inputs(loaded: Loaded, resume: bool) -> tuple[HFTokenizer, RowSource, RowSource | None]:
    """Tokenizer, tasks, held-out tasks: what can be refused before a run folder is made."""
    config = loaded.config
    if resume:
        require_run(_place(config))
        refuse_changes(_place(config), loaded.resolved())
    tokenizer = HFTokenizer(config.model.path)
    source = build_source(config.data, config.rollout, config.engine.context, tokenizer, config.run.seed)
    return tokenizer, source, _held_out(config, tokenizer)


def _check_model(config: Config) -> None:
    from gruppetto.engines.embedded.load import refuse
    from gruppetto.model_folder import device_for, read_config

    device_for(config.model.device)
    refuse(read_config(Path(config.model.path)), config.engine.context)


async def _train(loaded: Loaded, resume: bool) -> int:
    config = loaded.config
    _set_threads(config)
    tokenizer, source, held_out = _inputs(loaded, resume)
    folder = _folder(loaded, resume)
    async with contextlib.AsyncExitStack() as stack:
        recorder = _recorder(config, folder)
        stack.callback(recorder.close)
        _tell_data(source, recorder)
        stages = await stack.enter_async_context(_stages(config, tokenizer, source, held_out, folder, recorder))
        controller = Controller(
            stages, steps=config.run.steps, eval_every=config.eval.every, checkpoint_every=config.checkpoint.every
        )
        if resume:
            await _resume(controller, folder)
        return await _run(controller, folder)


async def _run(controller: Controller, folder: RunFolder) -> int:
    with _signals(controller):
        try:
            await controller.run()
        except Interrupted:
            how = f"gruppetto train {folder.path}/config.toml --resume"
            print(f"interrupted after step {controller.version}; saved in {folder.path}, go on with: {how}")
            return INTERRUPTED
    return 0


@contextlib.contextmanager
def _signals(controller: Controller) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the run to end and be saved; a second one kills it as usual."""
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGINT, signal.SIGTERM)

    def first(kind: signal.Signals) -> None:
        loop.remove_signal_handler(kind)
        controller.interrupt()

    for kind in kinds:
        loop.add_signal_handler(kind, first, kind)
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


@contextlib.asynccontextmanager
async def _stages(
    config: Config,
    tokenizer: HFTokenizer,
    source: RowSource,
    held_out: RowSource | None,
    folder: RunFolder,
    recorder: Recorder,
) -> AsyncIterator[Stages]:
    """Starts every stage, and closes all that were started whatever happens."""
    async with contextlib.AsyncExitStack() as stack:
        reward = build_reward(config.reward, tokenizer.decode, folder.path / "logs" / "reward.log")
        stack.push_async_callback(reward.close)
        await reward.start()
        engines = build_engines(config, tokenizer, folder)
        if config.engine.type != "embedded":
            stack.callback(shutil.rmtree, folder.path / "weights", ignore_errors=True)
        for index, engine in enumerate(engines):
            stack.push_async_callback(engine.close)
            with said_when_late(awaited(config, index, engine.name, folder)):
                await engine.start()
        tell_determinism(config, engines, recorder)
        tell_slots(config, engines, recorder)
        tell_kv_pool(config, recorder)
        trainer = build_trainer(config)
        stack.push_async_callback(trainer.close)
        await trainer.start()
        channel = await build_channel(config, folder.path / "weights", tokenizer, trainer, engines, recorder)
        if config.engine.type != "embedded":
            await bring_first_weights(channel, trainer, engines)
        settings = loop_settings(config, tokenizer.eos_ids)
        loop = RolloutLoop(settings, build_policy(config), engines, reward, source, recorder)
        channel.tell = loop.tell
        stack.push_async_callback(loop.close)
        chooser = _chooser(config, loop, stack)
        yield Stages(
            engines=engines,
            reward=reward,
            trainer=trainer,
            channel=channel,
            recorder=recorder,
            loop=loop,
            advantages=lambda rewards: group_advantages(rewards, normalize=config.train.normalize_advantage),
            checkpoints=Checkpoints(folder.path / "checkpoints", config.checkpoint.keep),
            evaluator=(
                Evaluator(held_out.take(config.eval.tasks), settings, config.eval.temperature, reward)
                if held_out
                else None
            ),
            decode=tokenizer.decode,
            record_rollouts=config.log.rollouts,
            kv_kept=kv_kept(config),
            restarts=config.engine.restarts,
            chooser=chooser,
            offsets=folder.offsets,
        )


def _chooser(config: Config, loop: RolloutLoop, stack: contextlib.AsyncExitStack) -> Chooser | None:
    """Who picks the scheduling policy, with a process of its own for forecasts; None where the config has picked it."""
    if config.scheduler.type != "auto":
        return None
    beside = AskBeside()
    stack.callback(beside.close)
    settings = auto_settings(config, turns=False, kv_kept=kv_kept(config), waits=config.run.deterministic)
    chooser = Chooser(settings, beside, loop)
    stack.push_async_callback(chooser.close)
    return chooser


def build_engines(config: Config, tokenizer: HFTokenizer, folder: RunFolder) -> list[Engine]:
    """The engines of the [engine] section, not started."""
    if config.engine.type != "embedded":
        return _build_servers(config, tokenizer, folder)
    from gruppetto.engines.embedded.engine import EmbeddedEngine

    engine = config.engine
    return [
        EmbeddedEngine(
            f"embedded-{index}",
            config.model.path,
            dtype=config.model.dtype,
            device=config.model.device,
            slots=engine.slots,
            context=engine.context,
            admit_batch=engine.admit_batch,
            prefill_chunk=engine.prefill_chunk,
            kv_on_swap=engine.kv_on_swap,
            deterministic=config.run.deterministic,
            lockstep=config.run.deterministic,
            decode=tokenizer.decode,
        )
        for index in range(engine.count)
    ]


def _build_servers(config: Config, tokenizer: HFTokenizer, folder: RunFolder) -> list[Engine]:
    from gruppetto.engines.http.build import Servers, http_engines
    from gruppetto.engines.http.requests import HttpSettings
    from gruppetto.engines.http.staging import Staging
    from gruppetto.engines.http.wire import Deadlines, WireSettings

    engine, rollout = config.engine, config.rollout
    assert engine.type != "embedded"
    keep_kv = engine.kv_on_swap == "keep"
    truncated = rollout.top_p < 1 or rollout.top_k > 0
    servers = Servers(
        kind=engine.type,
        model=config.model.path,
        logs=folder.path / "logs",
        urls=engine.urls,
        count=engine.count,
        python=engine.python,
        command=engine.command,
        args=engine.args,
        dtype=config.model.dtype,
        wire=WireSettings(temperature=rollout.temperature, truncated=truncated, keep_kv=keep_kv),
    )
    settings = HttpSettings(
        slots=engine.slots,
        context=engine.context,
        stream=engine.stream,
        keep_kv=keep_kv,
        decode=tokenizer.decode,
        vocab=tokenizer.model_ids,
        deadlines=Deadlines(start=engine.start_s, generate=rollout.timeout_s + GENERATE_GRACE_S),
    )
    staging = Staging(folder.path / "weights", Path(config.model.path))
    return list(http_engines(servers, settings, staging))


def build_trainer(config: Config) -> Trainer:
    """The trainer of the [train] section, not started."""
    from gruppetto.trainer.embedded.trainer import EmbeddedTrainer

    return EmbeddedTrainer(
        config.model.path,
        model=config.model,
        train=config.train,
        max_tokens=config.rollout.max_tokens,
        temperature=config.rollout.temperature,
        total_steps=config.run.steps,
        seed=config.run.seed,
    )


def _set_threads(config: Config) -> None:
    import torch

    torch.set_num_threads(config.run.threads)


def _tell_data(source: RowSource, recorder: Recorder) -> None:
    """What became of the rows, in the record and, where some were left out, on the screen."""
    report = source.report
    recorder.event("data", 0.0, **{key: value for key, value in asdict(report).items() if key != "duplicate_pairs"})
    if report.dropped_too_long:
        print(
            f"data: {report.dropped_too_long} of {report.rows} prompts in {report.name} are longer than "
            f"{report.max_prompt_tokens} tokens and were left out"
        )


def _held_out(config: Config, tokenizer: HFTokenizer) -> RowSource | None:
    if not config.eval.tasks:
        return None
    source = build_source(config.data, config.rollout, config.engine.context, tokenizer, config.run.seed, held_out=True)
    if len(source) < config.eval.tasks:
        raise UserError(
            f"eval.tasks = {config.eval.tasks}, but {source.report.name} has {len(source)} held-out tasks; "
            f"write eval.tasks = {len(source)} or fewer"
        )
    return source


def _place(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def _folder(loaded: Loaded, resume: bool) -> RunFolder:
    path = _place(loaded.config)
    if resume:
        return RunFolder.open(path, loaded.source_text, loaded.resolved())
    return RunFolder.create(path, loaded.source_text, loaded.resolved(), environment())


def _recorder(config: Config, folder: RunFolder) -> Recorder:
    engine = config.engine
    slots = {f"{engine.type}-{index}": engine.slots for index in range(len(engine.urls) or engine.count)}
    screen = build_screen(
        config.log.screen,
        run=config.run.name,
        steps=config.run.steps,
        group_size=config.rollout.group_size,
        slots=slots,
    )
    sinks: list[Recorder] = []
    if "tensorboard" in config.log.sinks:
        from gruppetto.record.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(folder.path / "tensorboard"))
    return Fanout([folder, screen, *sinks])


async def _resume(controller: Controller, folder: RunFolder) -> None:
    """Loads the newest checkpoint that can be loaded, and takes away what was recorded after it."""
    checkpoints = controller.stages.checkpoints
    assert checkpoints is not None
    checkpoints.mend()
    for path in checkpoints.broken():
        print(f"passed over {path}: it is not complete")
    damaged: list[Path] = []
    for path in checkpoints.complete():
        try:
            state = checkpoints.read_state(path)
            await controller.stages.trainer.load(path)
        except UserError as error:
            print(f"passed over {path}: {error}")
            damaged.append(path)
            continue
        await controller.restore(state)
        folder.rewind(state["record"])
        if controller.stages.chooser is None:  # it says so itself, of the scheduling policy that it begins with
            controller.stages.loop.carrier.tell_left_over()
        checkpoints.reject(damaged)
        print(f"resumed {path}")
        return
    what = f"no checkpoint that can be loaded ({len(damaged)} are damaged)" if damaged else "no complete checkpoint"
    raise UserError(f"{folder.path} has {what}; start the run anew under another run.name")
