"""What trainers reach: prime-rl's benchmark, SkyRL's short samples, a forward pass that AReaL leaves out.

Owns three records. FLOP are counted from configurations; one efficiency set a source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gruppetto.ledger.machines.efficiency import DEFAULT, SETS
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.machines.training import forward_seconds, train_seconds
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.reproduce.study import Input, Row, Study, counts, fit, points, relative, times


@dataclass(frozen=True, slots=True)
class Bench:
    """One row of prime-rl's table: 8 GPUs, one micro-batch of one sequence on each."""

    model: str
    gpu: str
    length: int
    lora: bool
    mfu: float
    tokens_s: float

    @property
    def name(self) -> str:
        """As the rows are called."""
        return f"{self.model}, {self.length // 1024}k, {'LoRA' if self.lora else 'full'}, {self.gpu}"


BENCHES = (
    Bench("Qwen3-4B", "H100", 16_384, False, 0.139, 26_030),
    Bench("Qwen3-4B", "H100", 65_536, False, 0.354, 28_970),
    Bench("Qwen3-30B-A3B", "H200", 65_536, False, 0.154, 12_750),
    Bench("Qwen3-30B-A3B", "H100", 16_384, True, 0.153, 33_100),
    Bench("Qwen3-30B-A3B", "H100", 16_384, False, 0.029, 6_110),
    Bench("GLM-4.5-Air", "H200", 65_536, True, 0.251, 9_760),
)
BENCH_GPUS = 8


def trained_s(bench: Bench, gpus: int = BENCH_GPUS) -> float:
    """Seconds of a step of one micro-batch a GPU. LoRA has no gradients of the weights, and next to no optimizer."""
    model, length = model_of(bench.model), bench.length
    matrices = (4 if bench.lora else 6) * model.matmul_params * length
    seconds = train_seconds(
        gpus * (matrices + 3 * model.mixing_flops(length)),
        GPUS[bench.gpu],
        gpus,
        experts=model.experts > 0,
        host_state=0.0 if bench.lora else 16.0 * model.params,
        efficiency=SETS["prime-rl"],
    )
    return seconds.value


def at_mfu(bench: Bench) -> float:
    """Tokens a second that the published MFU means, FLOP counted as the page counts them."""
    model = model_of(bench.model)
    counted = (4 if bench.lora else 6) * model.active_params + 12 * model.layers * model.hidden * bench.length
    return bench.mfu * BENCH_GPUS * GPUS[bench.gpu].bf16_flops / counted


def _prime() -> Mapping[str, float]:
    found = {}
    for bench in BENCHES:
        found[bench.name] = BENCH_GPUS * bench.length / trained_s(bench)
        found[f"{bench.name}, at its MFU"] = at_mfu(bench)
    return found


PRIME = Study(
    id="train-mfu-prime",
    source="prime-rl, benchmarks/results/BENCHMARKS.md",
    setting="8 GPUs, FSDP2, FlashAttention 3; tokens/s",
    inputs=(
        Input(
            "set prime-rl",
            "38.5 % of peak dense, 31 % with experts, 1.8 s a micro-batch, host optimizer at 27.5 GB/s a node",
            "a fit to ten rows of the page, these six among them",
            "6 of 12 rows, 4 constants",
        ),
        Input(
            "full training", "the optimizer goes through 16 bytes a parameter in host memory", "the page's peak memory"
        ),
        Input(
            "FLOP as the page counts them",
            "6 a parameter (LoRA 4) and 12 x layers x hidden size x length",
            "torchtitan's get_num_flop_per_token; its dense rows follow from it within 0.3 %",
        ),
        Input("INTELLECT-3", "GLM-4.5-Air", "the model it is trained from"),
    ),
    predict=_prime,
    tolerance="+-15 %",
    rows=tuple(
        row
        for bench in BENCHES
        for row in (
            fit(relative(bench.name, bench.tokens_s, 0.15)),
            counts(relative(f"{bench.name}, at its MFU", bench.tokens_s, 0.15)),
        )
    ),
    says="Fitted: four constants, to all rows of tokens/s. Arithmetic: tokens/s from a published MFU, which "
    "takes counts only. Our own FLOP are others: attention is causal and over heads x head size, not hidden size. "
    "The page's other rows are in prime-rl-others.",
)

SKYRL_SAMPLES, SKYRL_BAND = 512 * 5, 1.5
SKYRL = {
    "3B FSDP": ("Qwen2.5-3B", 8, 658, 8, 8, 42.0, 28.0),
    "7B FSDP": ("Qwen2.5-7B", 8, 834, 8, 4, 100.0, 33.0),
    "7B Megatron": ("Qwen2.5-7B", 8, 819, 8, 4, 93.0, 46.0),
    "30B-A3B Megatron": ("Qwen3-30B-A3B", 32, 1158, 16, 1, 189.0, 145.0),
}
"""Model, GPUs, tokens a sample, data-parallel ranks, samples of a micro-batch; training and forward seconds."""


def _skyrl() -> Mapping[str, float]:
    efficiency, found = SETS["skyrl"], {}
    for name, (model_name, gpus, tokens, dp, micro, _, _) in SKYRL.items():
        model = model_of(model_name)
        flops = SKYRL_SAMPLES * model.forward_flops(tokens)
        count = -(-SKYRL_SAMPLES // (dp * micro))
        experts = model.experts > 0
        found[f"training, {name}"] = train_seconds(
            3 * flops, GPUS["H100"], gpus, experts=experts, micro_batches=count, efficiency=efficiency
        ).value
        once = forward_seconds(flops, GPUS["H100"], gpus, efficiency=efficiency).value
        found[f"forward, {name}"] = 2 * (once + count / 2 * efficiency.micro_batch_s / 3)
    return found


SKYRL_FITTED = ("3B FSDP", "7B Megatron")


def _trained(name: str, seconds: float) -> Row:
    row = times(f"training, {name}", seconds, SKYRL_BAND)
    return fit(row) if name in SKYRL_FITTED else row


_FORWARD = "its forward took nearly as long as training with a backward pass: what it waits for is not FLOP"

SKYRL_STUDY = Study(
    id="train-skyrl-7b",
    source="SkyRL docs, examples/megatron.mdx",
    setting="Search-R1, 512 x 5 samples of 658 to 1,158 tokens, 8 and 32 H100; seconds",
    inputs=(
        Input(
            "set skyrl",
            "0.8 s a micro-batch; shares of peak as by default",
            "a fit to the 7B on Megatron",
            "1 of 8 rows, 1 constant",
        ),
        Input("samples a prompt", "5", "the repository's script run_search_megatron.sh"),
        Input(
            "samples of a micro-batch",
            "8 (3B), 4 (7B), 1 (30B-A3B); twice as many without a backward pass",
            "30B: the script; the page says: as large as fits, dense ones chosen so",
            "1 of 8 rows: training of the 3B",
        ),
        Input(
            "forward", "of the policy and of a reference; a third of a micro-batch's cost", "the script has a KL loss"
        ),
    ),
    predict=_skyrl,
    tolerance=f"trend; taken as a factor of {SKYRL_BAND:g}",
    rows=tuple(
        row
        for name, (_, _, _, _, _, train_s, forward_s) in SKYRL.items()
        for row in (
            _trained(name, train_s),
            times(f"forward, {name}", forward_s, SKYRL_BAND, _FORWARD),
        )
    ),
    says="Fitted: what a micro-batch costs and how large the 3B's are, to two rows. Predicted: the others. MFU is "
    "1 to 12 % here.",
)


A3PO_SAMPLES, A3PO_TOKENS, A3PO_GPUS = 256 * 4, 350, 4


def _a3po() -> Mapping[str, float]:
    flops = A3PO_SAMPLES * model_of("Qwen2.5-1.5B").forward_flops(A3PO_TOKENS)
    once = forward_seconds(flops, GPUS["H100"], A3PO_GPUS, efficiency=DEFAULT).value
    train_s = train_seconds(3 * flops, GPUS["H100"], A3PO_GPUS, efficiency=DEFAULT).value
    return {"share of a step saved": once / (once + train_s)}


A3PO = Study(
    id="a3po-prox",
    source="AReaL docs, algorithms/prox_approx.md",
    setting="Qwen2.5-1.5B on GSM8K, 4 + 4 GPUs, staleness 8, 300 steps of 207 or 163 minutes",
    inputs=(
        Input("batch", "256 x 4 of at most 1,024 tokens, 4 GPUs train", "the example's configuration"),
        Input("tokens a sample", f"{A3PO_TOKENS}", "chosen: GSM8K; the share does not depend on it"),
        Input("set default", "forward 41 %, training 40 % of peak", "none is fitted"),
        Input("step", "the trainer's", "staleness 8: rollouts never hold it up"),
    ),
    predict=_a3po,
    tolerance="+-5 points",
    rows=(points("share of a step saved", 1 - 163 / 207, 0.05),),
    says="Predicted: a forward is one of four passes. Data and optimizer make the published share less.",
)

STUDIES = (PRIME, SKYRL_STUDY, A3PO)
