"""Every setting of a run, typed. The field docstrings are the reference that `gruppetto config --help-all` prints.

Owns names, types, ranges, defaults and the checks that cross fields. Promises: frozen; unknown keys are refused; sizes
that do not fit together are refused before anything starts, with the product and the nearest value that works.
Pure pydantic: no torch, no files are read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gruppetto.config.engines import EngineSection as EngineSection
from gruppetto.config.engines import WeightsSection as WeightsSection
from gruppetto.config.scheduling import SchedulerSection as SchedulerSection
from gruppetto.config.section import Count, Positive, Seconds, Section, Share

PREFILL_ALIGN = 32
"""With run.deterministic, prefill lengths are multiples of this: kernels sum in another order at other lengths."""


class RunSection(Section):
    """[run]: what is common to all."""

    name: str = "run"
    """Name of the run; its folder is `<dir>/<name>`."""
    dir: str = "runs"
    """Folder that holds run folders."""
    steps: Positive = 100
    """Optimizer steps."""
    seed: int = 0
    """Seeds data order, sampling, initial weights; streams are named, so that one does not shift another."""
    deterministic: bool = False
    """Same seed, bitwise the same metrics (time fields aside): engine and scheduler meet at every decode step, fp32,
    one thread, a rollout's tokens independent of its batch-mates."""
    threads: Positive = 1
    """Torch threads of this process."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """colocated: engines and trainer share machines and take turns; disaggregated: engines go on while the trainer
    trains."""


class ModelSection(Section):
    """[model]: the model that learns."""

    path: str = ""
    """A Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the engine's weights and of the trainer's forward; master weights are always float32."""
    device: str = "auto"
    """auto (cuda when there is one), cpu, cuda, cuda:1 …"""


class DataSection(Section):
    """[data]: where tasks come from."""

    type: Literal["file", "reasoning_gym", "function"] = "file"
    """file: JSONL or Parquet; reasoning_gym: procedural (extra `gym`); function: `path` is module:function, which
    returns rows for (seed, size)."""
    path: str = ""
    """File (or `file@[a:b]`, a Python slice of it), reasoning_gym data set, or module:function."""
    eval_path: str = ""
    """Held-out tasks, same type; empty with a procedural type means the same generator under another seed."""
    size: Positive = 1024
    """Tasks to generate (procedural types)."""
    args: dict[str, Any] = {}
    """Keyword arguments of the generator."""
    prompt_key: str = ""
    """Column of the prompt; empty = recognised from the schema."""
    answer_key: str = ""
    """Column of the answer; empty = recognised from the schema."""
    system_prompt: str = ""
    """Put before the messages of every task."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: messages are rendered by the tokenizer's template, plain text only when the tokenizer has one."""
    shuffle: bool = True
    """Seeded order, another one each epoch."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt; None = what the context leaves."""
    too_long: Literal["drop", "refuse"] = "drop"
    """A prompt longer than that: drop and count, or refuse the data."""


class RolloutSection(Section):
    """[rollout]: what a step generates, and how it samples."""

    prompts_per_step: Count = 16
    """Groups in one batch."""
    group_size: Count = 8
    """Rollouts of one task."""
    max_tokens: Positive = 256
    """Model tokens of one rollout, over all its segments."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; logprobs and the trainer use the same."""
    top_p: Share = 1.0
    """Nucleus; below 1 the sampled distribution is not the one trained on."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 = off; otherwise as for top_p."""
    stop: list[str] = []
    """Stop strings, found across token boundaries too."""
    stop_ids: list[int] = []
    """Stop token ids besides the tokenizer's end tokens."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A rollout that has not come back after this is failed (liveness)."""


class RewardSection(Section):
    """[reward]: what scores."""

    type: Literal["exact", "numeric", "regex", "math", "reasoning_gym", "function"] = "exact"
    """exact, numeric (last number), regex (first group of `pattern`), math (extra `math`), reasoning_gym (the data
    set's own), function (`path` = module:function of (prompt, response, answer, extra) -> number)."""
    path: str = ""
    """module:function, for type = "function"; `file.py:function` works too."""
    pattern: str = ""
    """Where the answer stands in the response, for regex; with exact and numeric it is applied first when given."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """After this the verifier's process is killed and the reward is None."""
    processes: Annotated[int, Field(ge=0)] = 1
    """Verifier processes; 0 = in this process (only for exact and numeric without a pattern)."""


class BufferSection(Section):
    """[buffer]: which groups may be trained on."""

    drop_zero_variance: bool = False
    """Groups in which all rewards are equal are dropped and replaced (DAPO's dynamic sampling)."""
    max_filtered_groups: Positive = 256
    """Groups dropped in a row before the run says that nothing passes."""
    when_starved: Literal["stop", "train"] = "stop"
    """Then: stop with counts per reason and a checkpoint, or stop filtering and train on what comes."""


class LossSection(Section):
    """[train.loss]: policy loss (PPO clip) and KL."""

    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """1 - lower bound of the ratio."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper bound of the ratio - 1 (0.28 = DAPO's clip-higher)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Cap of the ratio for negative advantages; None = off."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """token_mean (DAPO), seq_mean_token_mean (GRPO), seq_mean_token_sum, seq_mean_token_sum_norm (Dr.GRPO: divided by
    rollout.max_tokens)."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """KL to the reference in the loss; above 0 a reference model is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators; k2 has the on-policy gradient of the reverse KL."""
    importance: Literal["none", "token"] = "none"
    """Correction of engine against trainer: token = truncated importance sampling at `importance_cap`."""
    importance_cap: Annotated[float, Field(gt=0)] = 2.0
    """Cap of the weight."""


class TrainSection(Section):
    """[train]: how weights learn."""

    type: Literal["embedded"] = "embedded"
    """embedded: in this process, CPU or CUDA."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, to 0 at run.steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    normalize_advantage: bool = True
    """Divide by the group's standard deviation (False = Dr.GRPO)."""
    micro_tokens: Positive = 4096
    """Tokens of one forward; changes memory and speed, never the gradient."""
    logprob_chunk: Positive = 256
    """Positions whose logits exist at a time."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop the run, or skip the optimizer step and count it."""
    loss: LossSection = LossSection()


class EvalSection(Section):
    """[eval]: held-out accuracy."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 = only at the start and the end when `tasks` > 0."""
    tasks: Annotated[int, Field(ge=0)] = 0
    """Held-out tasks; 0 = no evaluation."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature of an evaluation."""


class CheckpointSection(Section):
    """[checkpoint]: what survives."""

    every: Annotated[int, Field(ge=0)] = 25
    """Steps between checkpoints, what `kill -9` can cost; 0 = only at the end and on interruption."""
    keep: Positive = 2
    """Newest complete checkpoints kept."""


class LogSection(Section):
    """[log]: who else is told."""

    screen: Literal["auto", "live", "lines", "none"] = "auto"
    """auto: a live screen on a terminal, one line a step elsewhere."""
    sinks: list[Literal["tensorboard"]] = []
    """Fed from metrics.jsonl's records."""
    rollouts: bool = True
    """Write every consumed or dropped rollout with its text."""


class LengthsSection(Section):
    """[sim.lengths]: rollouts in numbers, for sim.workload = "lengths"; the longest has rollout.max_tokens."""

    mean_tokens: Annotated[float, Field(gt=0)] = 1024.0
    """Mean model tokens of a rollout, what is cut at rollout.max_tokens included."""
    cv: Annotated[float, Field(ge=0)] = 1.0
    """Standard deviation over mean of the uncut (lognormal) lengths."""
    icc: Annotated[float, Field(ge=0, le=1)] = 0.3
    """How alike the log-lengths of one group are: 0 = not at all, 1 = all of a group as long."""
    runaway_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of rollouts that run to rollout.max_tokens, whatever their prompt."""
    prompt_tokens: Positive = 512
    """Of each prompt."""
    turn_tokens: Annotated[int, Field(ge=0)] = 0
    """Model tokens of a turn; 0 = one turn, no tools."""
    observation_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that a tool answers with."""
    tool_median_s: Seconds = 0.0
    """Median of a tool call (lognormal); every turn but the last ends in one."""
    tool_sigma: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithm of its seconds."""


class SimSection(Section):
    """[sim]: what `gruppetto simulate` puts in the place of model, data, rewards and trainer."""

    workload: str = "A"
    """A family of our scheduling study (A, B, C, D, E, R), the lengths of a published system (rollpacker-8k, -16k,
    -32k, seer-moonlight, seer-vl72b, seer-k2, april-4b, dapo-32b, deepcoder-14b, search-r1), a recorded run (a run
    folder, a verl or slime dump, a CSV or JSONL table of lengths), or "lengths": drawn by [sim.lengths]."""
    lengths: LengthsSection = LengthsSection()
    tasks: Annotated[int, Field(ge=0)] = 0
    """Tasks of the data set, gone through again and again; 0 = every task is new."""
    decode_base_s: Seconds = 0.0041
    """Seconds of a decode step besides all else (launches, all-reduces)."""
    decode_weights_s: Seconds = 0.0127
    """Seconds to read the weights once; of a mixture of experts, all but the experts."""
    decode_experts_s: Seconds = 0.0
    """Seconds to read all experts once; a step reads those that its rows chose, 1 - (1 - share)^rows of them."""
    decode_expert_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the experts that one row chooses: top_k / experts."""
    decode_compute_s: Seconds = 0.0
    """Seconds of arithmetic that each live row adds; a step takes this or the reading, whichever is longer."""
    decode_kv_s: Seconds = 0.0
    """Seconds to read the KV of one context token."""
    decode_row_s: Seconds = 0.00033
    """Seconds that each live row adds to a step besides."""
    prefill_token_s: Seconds = 0.0
    """Seconds to prefill one token, during which the engine does not decode."""
    prefill_elsewhere: bool = False
    """Prefill runs on machines of its own."""
    shares_prompts: bool = False
    """Rollouts of a group that run together on an engine hold and prefill their prompt once, as with a prefix cache."""
    kv_tokens: Annotated[int, Field(ge=0)] = 0
    """KV capacity of an engine in tokens; 0 = unlimited."""
    kv_on_swap: Literal["keep", "recompute"] = "recompute"
    """What an engine does with the KV of live rollouts when the weights change under them."""
    speculation: dict[str, list[float]] = {}
    """Speculative decoding by batch: {"1" = [2.5, 1.2], "32" = [1.0, 1.0]} makes 2.5 tokens in 1.2 times the time below
    32 rows."""
    score_s: Seconds = 0.0
    """Seconds of one score."""
    pass_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of rollouts with reward 1; the others have 0."""
    train_token_s: Seconds = 0.0
    """Trainer seconds per token of a batch."""
    train_step_s: Seconds = 0.0
    """Trainer seconds per step besides."""
    publish_s: Seconds = 0.0
    """Seconds of one publish."""
    switch_s: Seconds = 0.0
    """Seconds to hand the memory over from engines to trainer and back, once each a step (colocated)."""
    failures: list[str] = []
    """What breaks, as "kind:engine@second": "dead:3@1200", "slow:0@60x10" (ten times slower), "mute:1@600"."""


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    rollout: RolloutSection = RolloutSection()
    scheduler: SchedulerSection = SchedulerSection()
    engine: EngineSection = EngineSection()
    reward: RewardSection = RewardSection()
    buffer: BufferSection = BufferSection()
    train: TrainSection = TrainSection()
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
    sim: SimSection = SimSection()

    @model_validator(mode="after")
    def _sizes_fit(self) -> Config:
        if problems := list(self._misfits()):
            raise ValueError("\n".join(problems))
        return self

    def _misfits(self) -> Iterator[str]:
        """One line for each pair of settings that do not fit together."""
        prompt, answer, context = self.data.max_prompt_tokens, self.rollout.max_tokens, self.engine.context
        if answer >= context:
            yield (
                f"rollout.max_tokens = {answer} leaves no room for a prompt in engine.context = {context}; "
                f"write engine.context = {answer * 2} or rollout.max_tokens = {context // 2}"
            )
        elif prompt and prompt + answer > context:
            yield (
                f"data.max_prompt_tokens + rollout.max_tokens = {prompt} + {answer} = {prompt + answer} exceeds "
                f"engine.context = {context}; write engine.context = {prompt + answer}"
            )
        if self.rollout.group_size < 2:
            yield (
                "rollout.group_size = 1: a group of one has no baseline and weight 0; "
                "write rollout.group_size = 2 or more"
            )
        if self.run.deterministic and (self.model.dtype != "float32" or self.run.threads != 1):
            yield (
                f"run.deterministic = true needs model.dtype = 'float32' and run.threads = 1, not "
                f"'{self.model.dtype}' and {self.run.threads}; bits are only independent of the batch there"
            )
        if self.run.deterministic and self.run.placement == "disaggregated":
            yield (
                "run.deterministic = true needs engine and trainer to take turns, and run.placement = 'disaggregated' "
                "lets them run at once, so that their speed would decide what is trained on; write run.placement = "
                "'colocated' or run.deterministic = false"
            )
        if 0 < self.sim.kv_tokens < answer:
            yield (
                f"sim.kv_tokens = {self.sim.kv_tokens} does not hold one rollout of rollout.max_tokens = {answer}; "
                f"write sim.kv_tokens = {context} or more, or 0 for no limit"
            )
        for rows, price in self.sim.speculation.items():
            if not rows.isdecimal() or len(price) != 2 or min(price) <= 0:
                yield (
                    f'sim.speculation: "{rows}" = {price} is not rows = [tokens, times], all above 0; '
                    'write {"1" = [2.5, 1.2], "32" = [1.0, 1.0]}'
                )
        chunk = self.engine.prefill_chunk
        if self.run.deterministic and chunk % PREFILL_ALIGN:
            yield (
                f"engine.prefill_chunk = {chunk} with run.deterministic = true must be a multiple of {PREFILL_ALIGN}; "
                f"write engine.prefill_chunk = {-(-chunk // PREFILL_ALIGN) * PREFILL_ALIGN}"
            )
