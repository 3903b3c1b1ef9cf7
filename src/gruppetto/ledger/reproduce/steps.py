"""Whole synchronous steps: 671B on 96 and on 512 GPUs, a 30B mixture on 32, 8K tokens each by hand, GPUs that are lent.

Owns five records. Systems that wait for their last rollout are forecast so (`accounts`), in their own layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from gruppetto.ledger.generation import Rollouts
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.lengths import LognormalLengths
from gruppetto.ledger.machines.efficiency import DEFAULT, SETS
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.reproduce.accounts import Run
from gruppetto.ledger.reproduce.study import Input, Row, Study, between, counts, fit, points, relative, times
from gruppetto.ledger.transfers.switch import switch
from gruppetto.ledger.transfers.sync import sync

# -- verl, DeepSeek-V3 on 96 H20 ---------------------------------------------------------------------------------------

UPDATES = 3


@cache
def _deepseek() -> tuple[float, float]:
    """(rollout, all else) seconds."""
    lengths = LognormalLengths.from_mean_cv(1960, 1.0, 9632)
    run = Run(
        model=model_of("DeepSeek-V3"),
        gpu=GPUS["H20"],
        gpus=96,
        rollouts=Rollouts(groups=96, group_size=8, lengths=lengths, prompt_tokens=200),
        serve=ServeLayout(tp=32),
        efficiency=SETS["verl"],
    )
    train = TrainLayout(tp=8, pp=12, ep=8, shard="optimizer", offload=True)
    state = UPDATES * 16.0 * run.model.params
    trainer_s = 2 * run.forward_s() + run.train_s(host_state=state)
    published = sync(
        run.model, train, run.serve, run.gpu, how="broadcast", route="ipc", engines=3, efficiency=run.efficiency
    )
    handed = switch(run.model, train, run.serve, run.gpu, efficiency=run.efficiency)
    return run.rollout_s(), trainer_s + published.expected.value + handed.seconds.value


def _predict_deepseek() -> Mapping[str, float]:
    rollout_s, rest_s = _deepseek()
    return {"rollout, seconds": rollout_s, "rollout share": rollout_s / (rollout_s + rest_s)}


DEEPSEEK = Study(
    id="verl-dsv3-96",
    source="verl docs, perf/dpsk.md",
    setting="DeepSeek-V3, 96 x 8, 96 H20, TP8 PP12 EP8, engines TP32 in BF16",
    inputs=(
        Input(
            "set verl",
            "engines at 21 % of a tuned one (no CUDA graphs), MFU 19 %, whole tensors made at 8.5 GB/s, switch 10 s, "
            "the optimizer on the host at 7 GB/s a node",
            "the page's MFU; checkpoint_engine/README.md; dynamic_schedule/README.md",
            "2 of 2 rows, 2 constants: the engines' share by rollout seconds, the host's optimizer by the share "
            "(0.74 at the default set's 27.5 GB/s)",
        ),
        Input("layouts, batch, cap, updates, reference", "as in the script", "run_deepseek671b_math_megatron_96gb.sh"),
        Input("lengths", "lognormal, mean 1,960, CV 1, cap 9,632; prompts of 200", "mean: the page; CV, prompt chosen"),
        Input("optimizer", "in host memory: 16 bytes a parameter, three updates", "the page: OFFLOAD_FRACTION 1"),
    ),
    predict=_predict_deepseek,
    tolerance="share +-0.08; rollout seconds +-20 % (none is given)",
    rows=(fit(relative("rollout, seconds", 1050, 0.20)), fit(points("rollout share", 1050 / 1700, 0.08))),
    says="Fitted: rollout seconds, and what everything else takes: two forward passes, training, the optimizer on the "
    "host, resharding tensor by tensor, the switch.",
)

# -- DeepSeek-R1-Zero --------------------------------------------------------------------------------------------------


@cache
def zero_s(mean: float) -> float:
    """Seconds of a cycle of R1-Zero, rollouts of so many tokens on average."""
    lengths = LognormalLengths.from_mean_cv(mean, 1.0, 32_768)
    run = Run(
        model=model_of("DeepSeek-R1"),
        gpu=GPUS["H800"],
        gpus=512,
        rollouts=Rollouts(groups=512, group_size=16, lengths=lengths, prompt_tokens=200),
        serve=ServeLayout(tp=8, dp=4, ep=32),
        dtype="fp8",
        slots=512,
        efficiency=DEFAULT,
    )
    train = TrainLayout(pp=16, ep=32, dp=32, shard="optimizer")
    published = sync(run.model, train, run.serve, run.gpu, dtype="fp8", route="ipc", engines=16)
    handed = switch(run.model, train, run.serve, run.gpu, dtype="fp8")
    rest_s = published.expected.value + handed.seconds.value
    return run.rollout_s() + run.forward_s() + run.train_s() + rest_s


ZERO = Study(
    id="r1-zero",
    source="DeepSeek-R1, Nature, supplementary information",
    setting="671B, 512 H800, rollouts of 8,192 answers, 16 updates each; 198 hours for 10,400 updates",
    inputs=(
        Input("lengths", "lognormal, mean 6,000, CV 1, cap 32,768; prompts of 200", "cap: the text; the rest chosen: "
              "its figure rises from hundreds of tokens to above 10,000"),
        Input("engines", "EP32 over four nodes, FP8", "the text: expert parallelism across nodes; size chosen"),
        Input("set default", "as it is", "none is fitted"),
        Input("reference", "one forward pass", "the text: KL to a reference that is renewed every 400 steps"),
    ),
    predict=lambda: {"cycle, seconds": zero_s(6000)},
    tolerance="factor 1.5",
    rows=(times("cycle, seconds", 198 * 3600 / 10_400 * 16, 1.5),),
    says="Predicted, with a chosen mean length: with 4,000 tokens a cycle takes 638 s, too few, with 8,000 1,058 s.",
)  # fmt: skip

# -- NeMo-RL, Qwen3-30B-A3B --------------------------------------------------------------------------------------------

NEMO_SAMPLES, NEMO_MEAN, NEMO_GPUS = 2048, 3203, 32
NEMO_GROUP, NEMO_CV, NEMO_PROMPT = 32, 0.5, 128


def nemo_s(model: str, gpus: int, samples: int, mean: float, cap: int, serve: ServeLayout, train: TrainLayout) -> float:
    """Seconds of a synchronous, colocated step of NeMo-RL on H100."""
    lengths = LognormalLengths.from_mean_cv(mean, NEMO_CV, cap)
    groups = samples // NEMO_GROUP
    run = Run(
        model=model_of(model),
        gpu=GPUS["H100"],
        gpus=gpus,
        rollouts=Rollouts(groups=groups, group_size=NEMO_GROUP, lengths=lengths, prompt_tokens=NEMO_PROMPT),
        serve=serve,
        efficiency=SETS["nemo-rl"],
    )
    engines = gpus // serve.gpus
    published = sync(
        run.model, train, serve, run.gpu, how="broadcast", route="ipc", engines=engines, efficiency=run.efficiency
    )
    handed = switch(run.model, train, serve, run.gpu, efficiency=run.efficiency)
    return run.rollout_s() + run.forward_s() + run.train_s() + published.expected.value + handed.seconds.value


@cache
def _nemo() -> float:
    train = TrainLayout(tp=2, ep=8, dp=16, shard="optimizer")
    return nemo_s("Qwen3-30B-A3B", NEMO_GPUS, NEMO_SAMPLES, NEMO_MEAN, 4096, ServeLayout(tp=4), train)


def _predict_nemo() -> Mapping[str, float]:
    return {
        "step, seconds": _nemo(),
        "tokens/s a GPU": NEMO_SAMPLES * NEMO_MEAN / (_nemo() * NEMO_GPUS),
        "tokens/s a GPU at the published step": NEMO_SAMPLES * NEMO_MEAN / (192 * NEMO_GPUS),
    }


NEMO = Study(
    id="nemo-30b-sync",
    source="NeMo-RL docs, about/performance-summary.md, v0.6",
    setting="Qwen3-30B-A3B, 2,048 samples, 32 H100, colocated",
    inputs=(
        Input("set nemo-rl", "engines at 45 % of a tuned one", "a fit to the step", "2 of 3 rows, 1 constant"),
        Input("the rest of the set", "MFU 15 %", "the middle of what prime-rl reaches with this model"),
        Input("layouts", "engines TP4; training TP2 EP8", "the page of v0.4; v0.6 does not print them"),
        Input("lengths", "lognormal, mean 3,203, CV 0.5, cap 4,096; 64 x 32, prompts of 128", "mean, cap: the page"),
    ),
    predict=_predict_nemo,
    tolerance="+-25 % after one constant is calibrated; what follows from published figures alone +-5 %",
    rows=(
        fit(relative("step, seconds", 192, 0.25)),
        fit(relative("tokens/s a GPU", 1102, 0.25)),
        counts(relative("tokens/s a GPU at the published step", 1102, 0.05)),
    ),
    says="Fitted: the step, and with it tokens/s. Arithmetic: that the page's own figures agree (within 3.1 %).",
)

# -- 8K tokens each, by hand -------------------------------------------------------------------------------------------

HAND_PROMPTS, HAND_GROUP, HAND_TOKENS, HAND_GPUS = 512, 16, 8192, 64


@cache
def _by_hand() -> Mapping[str, float]:
    lengths = LognormalLengths.from_median(HAND_TOKENS, 0.0, 0.0, HAND_TOKENS)
    run = Run(
        model=model_of("Meta-Llama-3-8B"),
        gpu=GPUS["H100"],
        gpus=HAND_GPUS,
        rollouts=Rollouts(groups=HAND_PROMPTS, group_size=HAND_GROUP, lengths=lengths, prompt_tokens=0),
        efficiency=DEFAULT,
        memory_taken=0.0,
    )
    forecast = run.rollout()
    kv = run.model.kv_bytes_per_token() * run.rollouts.count * HAND_TOKENS
    generate_s = forecast.ideal_s.value
    once_s, train_s = run.forward_s(), run.train_s()
    return {
        "tokens": run.rollouts.tokens,
        "KV of all, TiB": kv / 2**40,
        "KV tokens of a GPU": float(engine_model(run.model, run.gpu, slots=run.slots).kv_capacity),
        "sequences a GPU": run.rollouts.count / run.gpus,
        "waves of KV": forecast.kv_waves.value,
        "generation, seconds": generate_s,
        "a forward pass, seconds": once_s,
        "training, seconds": train_s,
        "rollout share": generate_s / (generate_s + 2 * once_s + train_s),
    }


HAND = Study(
    id="seed-q1",
    source="a worked example, by hand: 2 FLOP a parameter and token, 75 % of bandwidth, 40 % MFU",
    setting="Llama-3-8B, 512 x 16 of exactly 8,192 tokens, 64 H100",
    inputs=(
        Input("set default", "as it is", "none is fitted"),
        Input("prompts", "none", "as by hand"),
        Input("forward passes", "two: old log-probs and a reference", "as by hand"),
    ),
    predict=_by_hand,
    tolerance="+-10 %",
    rows=(
        counts(relative("tokens", 67.1e6, 0.10)),
        counts(relative("KV of all, TiB", 8.0, 0.10)),
        counts(relative("KV tokens of a GPU", 4.0e5, 0.10)),
        counts(relative("sequences a GPU", 128, 0.10)),
        counts(relative("waves of KV", 2.6, 0.10)),
        counts(relative("generation, seconds", 308, 0.10)),
        counts(relative("a forward pass, seconds", 42, 0.10)),
        counts(relative("training, seconds", 127, 0.10)),
        counts(between("rollout share", 0.58, 0.65, 0.06)),
    ),
    says="Arithmetic: constants as by hand. Attention counts here, which the hand leaves out: forward and training are "
    "6 to 8 % longer.",
)

# -- verl, GPUs lent ---------------------------------------------------------------------------------------------------

EVEN, UNEVEN = (16, 16), (24, 8)
"""Rollout and trainer GPUs of the two static splits."""
SAVED = {EVEN: 0.175, UNEVEN: 0.153}
STATIC_STEP_S, HAND_OVERS_S = 200.0, 10.0


def _lending() -> Mapping[str, float]:
    """Rollouts bind on the even split and training on the uneven one, so that their steps say what both sides' work is:
    A GPU-seconds of rollouts, and t seconds of training on 16 GPUs. With R rollout GPUs and T trainer GPUs that are
    lent while they would wait, a step of s seconds has s R + (s - t - w) T = A, w seconds for hand-overs."""
    even_s = STATIC_STEP_S
    uneven_s = even_s * (1 - SAVED[EVEN]) / (1 - SAVED[UNEVEN])
    rollouts, training = even_s * EVEN[0], uneven_s * UNEVEN[1]
    engines, trainers = EVEN
    step_s = (rollouts + training + trainers * HAND_OVERS_S) / (engines + trainers)
    return {"saved over 16 + 16": 1 - step_s / even_s, "saved over 24 + 8": 1 - step_s / uneven_s}


LENDING = Study(
    id="verl-dynamic-switch",
    source="verl, fully_async_policy/dynamic_schedule/README.md",
    setting="Qwen3.5-35B-A3B, 32 H20, trainer GPUs generate while they would wait",
    inputs=(
        Input("what binds", "rollouts on 16 + 16, training on 24 + 8", "the page, its table of trade-offs"),
        Input(
            "24 + 8 over 16 + 16, in seconds",
            f"{(1 - SAVED[EVEN]) / (1 - SAVED[UNEVEN]):.3f}",
            "the page: what is saved over each",
            "1 of 2 rows",
        ),
        Input("hand-overs", f"{HAND_OVERS_S:g} s a step, there and back", "the page: its default estimate"),
        Input("step on 16 + 16", f"{STATIC_STEP_S:g} s", "chosen: its curves are images; 100 s save 2.5 points less"),
    ),
    predict=_lending,
    tolerance="10 to 25 %",
    rows=(
        fit(Row("saved over 16 + 16", SAVED[EVEN], 0.10, 0.25)),
        Row("saved over 24 + 8", SAVED[UNEVEN], 0.10, 0.25),
    ),
    says="Fitted: how the two static splits compare. Predicted: what lending makes of them, both sides always busy.",
)

STUDIES = (DEEPSEEK, ZERO, NEMO, HAND, LENDING)
