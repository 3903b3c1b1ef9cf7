"""Which composition the scheduling study would pick, from what the user allows and what has been measured.

    k = 0    on-policy: belief order, stream, deferral where prompts are long by nature and their past tells it
             rho > 1.5 and allowed: mask (spread tails), over-provisioned prompts (censors), mask at a small depth
    k >= 1   wait while the longest rollout fits the window (chi <= 2); beyond, mask, or wait where that costs too much
             k >= 4, rho > 2.5: wait at a small depth
    agentic  hold KV for rollouts that wait for a tool; finish first without a KV pool

    chi = CP / ((k + 1) T_flow)

Promises: pure; what is chosen is allowed by the limits (`allowed`), so are its neighbours. Nothing that masks or
censors is chosen before four steps are in: one step does not show whether runaways cluster.

Source: our scheduling study, sections 0 (9), 3 (9) and 4, with its figures (section 10) for the share of tokens that
masking costs where it has not been measured. A prior and a start for the forecast, not a decision: on single workloads
it was up to 28 % behind the best.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

DEPTHS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
"""The notches that depth is tried at."""
ETAS = (1.05, 1.1, 1.25, 1.5)
"""The over-provisions of prompts that are tried. Too small is far worse than too large."""
STEPS_UNBIASED = 4
"""Steps before anything masks or censors."""
STEPS_SMALL_DEPTH = 2
NEIGHBOURS = 8
_USUAL_ETA = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user allows, and what kind of run it is."""

    max_staleness: int = 0
    """k: largest staleness of a trained token."""
    allow_mask: bool = False
    allow_censoring: bool = False
    max_waste: float = 0.35
    """Largest share of generated tokens that may be masked or dropped."""
    agentic: bool = False
    pool: bool = False
    """KV of a stopped rollout is kept outside the engine: a move or a pause costs nothing."""
    disaggregated: bool = False
    """Engines run on while the trainer trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the last steps showed."""

    steps: int
    """Steps measured."""
    rho: float
    """Critical path over area: the longest rollout alone, against all work at the best throughput."""
    critical_path_s: float
    """Seconds of the longest rollout of a batch alone, tools included."""
    flow_s: float
    """T_flow: seconds of a batch's work at the batch size the engines really reach."""
    icc: float
    """Correlation of ln L inside a group."""
    clustered: bool
    """Runaways come in clusters."""
    reliability: float = 0.0
    """How well a prompt's past tells its next group, in [0, 1]."""
    kv_wait_share: float = 0.0
    """Share of the KV capacity held by rollouts that wait for a tool."""
    masked_share: float | None = None
    """Share of tokens that masking would mask, where a forecast or a step has shown it."""
    tail_eta: float | None = None
    """The best over-provision of prompts for the observed maxima (`policies/over_provision.py`)."""
    train_share: float = 0.0
    """Training seconds over step seconds."""

    def chi(self, max_staleness: int) -> float:
        """The longest rollout against the time its window of k + 1 steps would take without it."""
        return self.critical_path_s / ((max_staleness + 1) * self.flow_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One composition, as plain values."""

    depth: float = 1.0
    """phi: groups live or ready, in batches."""
    max_staleness: int = 0
    over_age: Literal["wait", "mask"] = "wait"
    order: str = "probe_then_longest"
    """A name in `policies/order.py`."""
    tail_batch: float | None = None
    """Over-provision of prompts in short rounds (censors); None = no such rounds."""
    defer: bool = False
    """Prompts predicted to be long go to steps of their own, before they are launched."""
    stream: bool = True
    """Gradients of finished groups are accumulated while the tail runs."""
    hold: bool = False
    """New rollouts leave room for the KV of those that wait for a tool."""
    finish_first: bool = False
    """Resumed rollouts go by progress, not by age."""
    why: tuple[str, ...] = field(default=(), compare=False)
    """One sentence a decision."""


def choose(limits: Limits, measured: Measured | None) -> Choice:
    """The rule's choice; None measured = nothing is known yet."""
    choice = _on_policy(limits, measured) if limits.max_staleness == 0 else _bounded(limits, measured)
    return _agentic(choice, limits, measured) if limits.agentic else choice


def allowed(choice: Choice, limits: Limits) -> bool:
    """Whether the limits permit it. What it would waste is for the forecast to say."""
    return (
        choice.max_staleness <= limits.max_staleness
        and (choice.over_age == "mask" or choice.depth <= choice.max_staleness + 1)
        and (choice.over_age == "wait" or limits.allow_mask)
        and (choice.tail_batch is None or limits.allow_censoring)
    )


def neighbours(choice: Choice, limits: Limits, *, history: bool = False) -> list[Choice]:
    """What the forecast tries beside a choice, at most `NEIGHBOURS`: a notch of depth or eta either way, waiting or
    masking, with or without short rounds, and deferral where there is a `history` to defer by."""
    tried = [*_other_depths(choice), *_other_etas(choice), *_other_kinds(choice, history)]
    kept = [one for one in dict.fromkeys(tried) if one != choice and allowed(one, limits)]
    return kept[:NEIGHBOURS]


# -- the table ---------------------------------------------------------------------------------------------------------


def _on_policy(limits: Limits, measured: Measured | None) -> Choice:
    """k = 0."""
    base = Choice(why=("No staleness is allowed, so all N groups are awaited, those believed longest first.",))
    if measured is None:
        return base
    tail = measured.rho > 1.5 and measured.steps >= STEPS_UNBIASED
    concentrated = measured.clustered or measured.icc > 0.6
    if tail and not concentrated and (masked := _masked(limits, measured, base, 1.25, 0.24)):
        return masked
    if tail and limits.allow_censoring:
        eta = measured.tail_eta if measured.tail_eta is not None else _USUAL_ETA
        if eta > 1 and (eta - 1) / eta <= limits.max_waste:
            return _because(
                replace(base, tail_batch=eta),
                f"The longest rollout takes rho = {measured.rho:.1f} times a batch's work and censoring is allowed: "
                f"{eta:g} times the prompts, the longest to rounds of their own.",
            )
    if tail and concentrated:
        typical = 0.40 if measured.clustered else 0.30
        if masked := _masked(limits, measured, base, 1.1, typical):
            return masked
    return _deferred(base, measured)


def _deferred(base: Choice, measured: Measured) -> Choice:
    if measured.rho >= 2 and measured.icc >= 0.6 and measured.reliability >= 0.3:
        return _because(
            replace(base, defer=True),
            f"Prompts are long by nature (ICC {measured.icc:.2f}) and their past tells it (reliability "
            f"{measured.reliability:.2f}): the longest get steps of their own.",
        )
    return base


def _bounded(limits: Limits, measured: Measured | None) -> Choice:
    """k >= 1."""
    k = limits.max_staleness
    base = Choice(max_staleness=k, order="fifo", why=("Age decides the order where tokens may be stale.",))
    floor = 1 + measured.train_share if measured is not None and limits.disaggregated else 1.0

    def wait(depth: float, why: str) -> Choice:
        return _because(replace(base, depth=min(max(depth, floor), k + 1)), why)

    if measured is None or measured.steps < STEPS_SMALL_DEPTH:
        return wait(1.25, "Too little is known: a small depth, and nothing masked.")
    if k >= 4 and measured.rho > 2.5:
        return wait(1.5, f"A bound of {k} catches the tail, so a small depth keeps the mean staleness low.")
    chi = measured.chi(k)
    if chi <= 2:
        depth = 1.25 if measured.rho <= 0.5 else k + 1.0
        return wait(depth, f"The longest rollout nearly fits its window of {k + 1} steps (chi {chi:.1f}): wait for it.")
    if measured.steps >= STEPS_UNBIASED:
        spread = measured.icc < 0.2 and not measured.clustered
        depth, typical = (2.0, 0.23) if spread else (1.5, 0.34)
        if masked := _masked(limits, measured, base, max(depth, floor), typical):
            return masked
    return wait(
        k + 1.0, f"The longest rollout outlasts its window (chi {chi:.1f}), and masking is not to be had: wait."
    )


def _masked(limits: Limits, measured: Measured, base: Choice, depth: float, typical: float) -> Choice | None:
    """Masking at that depth, unless it is not allowed or masks too much. `typical`: the study's share for such a
    workload."""
    share = typical if measured.masked_share is None else measured.masked_share
    if not limits.allow_mask or share > limits.max_waste:
        return None
    return _because(
        replace(base, depth=depth, over_age="mask"),
        f"The longest rollout takes rho = {measured.rho:.1f} times a batch's work: it is consumed whole and its old "
        f"tokens are masked, {share:.0%} of all.",
    )


def _agentic(choice: Choice, limits: Limits, measured: Measured | None) -> Choice:
    """Unknown counts as full: without hold a full cache is computed again 29 times over."""
    if not limits.pool:
        choice = replace(choice, order="fifo")
    if measured is not None and measured.kv_wait_share <= 0.2:
        return choice
    share = "an unknown share" if measured is None else f"{measured.kv_wait_share:.0%}"
    held = _because(
        replace(choice, hold=True, finish_first=not limits.pool),
        f"Rollouts that wait for a tool hold {share} of the KV cache: new ones start only beside it.",
    )
    return held if limits.pool else _because(held, "Without a KV pool those that have come furthest go first.")


# -- what to try beside it ---------------------------------------------------------------------------------------------


def _other_depths(choice: Choice) -> list[Choice]:
    if choice.tail_batch is not None:
        return []
    top = DEPTHS[-1] if choice.over_age == "mask" else choice.max_staleness + 1.0
    ladder = sorted({*(depth for depth in DEPTHS if depth < top), top})
    return [
        replace(choice, depth=depth, why=(f"A depth of {depth:g} instead of {choice.depth:g}.",))
        for depth in _beside(ladder, choice.depth)
    ]


def _other_etas(choice: Choice) -> list[Choice]:
    if choice.tail_batch is None:
        return []
    return [
        replace(choice, tail_batch=eta, why=(f"{eta:g} times the prompts instead of {choice.tail_batch:g}.",))
        for eta in _beside(ETAS, choice.tail_batch)
    ]


def _other_kinds(choice: Choice, history: bool) -> list[Choice]:
    """Each of the other choices turned over."""
    k, plain = choice.max_staleness, replace(choice, tail_batch=None, defer=False)
    waiting = min(choice.depth, k + 1.0)
    others = []
    if choice.over_age == "mask":
        others.append(replace(plain, over_age="wait", depth=waiting, why=("Waiting instead of masking.",)))
    else:
        masking = replace(plain, over_age="mask", depth=max(choice.depth, 1.25), why=("Masking instead of waiting.",))
        others.append(masking)
    if k == 0:
        turned = None if choice.tail_batch is not None else _USUAL_ETA
        why = "No short rounds." if turned is None else f"Short rounds with {turned:g} times the prompts."
        others.append(replace(plain, tail_batch=turned, over_age="wait", depth=waiting, why=(why,)))
    if choice.defer or (history and k <= 1):
        why = "No deferral." if choice.defer else "Long prompts in steps of their own, by their past."
        others.append(replace(plain, defer=not choice.defer, over_age="wait", depth=waiting, why=(why,)))
    return others


def _beside(ladder: list[float] | tuple[float, ...], value: float) -> list[float]:
    """The next lower and the next higher notch."""
    return [*[x for x in ladder if x < value][-1:], *[x for x in ladder if x > value][:1]]


def _because(choice: Choice, why: str) -> Choice:
    return replace(choice, why=(*choice.why, why))
