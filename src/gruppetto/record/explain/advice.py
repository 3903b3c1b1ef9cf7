"""What to change in run.toml, from what was measured: the rules of the scheduling study, in words and lines.

Promises: a suggestion names the rule's figures, the exact lines to write, and what they cost (staleness, gradient, bias
or another batch size); nothing that censors is ever suggested, nothing that the run has already, and no more staleness
where the trainer is the bottleneck. Rules are a prior: a simulation of the run decides.
Source: our scheduling study, sections 3 to 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gruppetto.record.explain.engines import kv_limited
from gruppetto.record.explain.policy import Policy
from gruppetto.record.explain.trainer import IDLE, WAITS, Trainer

MORE_TRAINER = "more machines for the trainer, or faster ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the rules look at. `shares` of the engine-seconds by cause; None where the run does not say."""

    rho: float | None = None
    icc: float | None = None
    excess: float | None = None
    masked: float = 0.0
    p99_ratio: float | None = None
    so_far: str = ""
    """Of which steps that is, in words, where it is of more than the others."""
    censored: bool = False
    failed: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    trainer: Trainer | None = None

    def share(self, cause: str) -> float:
        return self.shares.get(cause, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change: why, the table of run.toml and its lines (none where no setting does it), and the price."""

    why: str
    lines: tuple[str, ...]
    price: str
    weight: float = 0.0
    """Share of the engine-seconds that it is about; above 1 for what makes the run something else than it claims."""
    saves: int = 0
    """Engines that do as well without; what it gains is then no more tokens."""


def advise(measured: Measured, config: Mapping[str, Any], policy: Policy) -> list[Advice]:
    """The changes that the rules suggest, the weightiest first; empty where nothing is worth changing. What the run has
    already is none."""
    found = [
        *(replace(advice, weight=2.0) for advice in _bias(measured, config)),
        *(replace(advice, weight=measured.share("tail")) for advice in _tail(measured, policy)),
        *_other_causes(measured, config, policy),
    ]
    weighty = sorted(found, key=lambda advice: -advice.weight)
    first = {advice.lines or (advice.why,): advice for advice in reversed(weighty)}  # the same lines once
    return [advice for advice in weighty if advice in first.values() and not policy.has(advice.lines, config)]


def _lines(table: str, **settings: object) -> tuple[str, ...]:
    return (f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in settings.items()))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _bias(measured: Measured, config: Mapping[str, Any]) -> Iterator[Advice]:
    """A policy that loses long answers comes first: the run is not what it claims to be. Where the distance of lengths
    is explained, long answers are only late."""
    scheduler = config.get("scheduler", {})
    if measured.p99_ratio is None or measured.p99_ratio >= 0.8 or not measured.censored:
        return
    why = f"the longest 1 % of answers are trained on{measured.so_far} at {measured.p99_ratio:.2f} of their share"
    if scheduler.get("over_age") == "drop":
        price = "their old tokens stay in the context without gradient; nothing is censored any more"
        yield Advice(
            why=f"{why}, because groups over age are dropped", lines=_lines("scheduler", over_age="mask"), price=price
        )
    elif scheduler.get("type") == "tail_batch":
        yield Advice(
            why=f"{why}, because short rounds give up what is unfinished",
            lines=_lines("scheduler", type="layered", max_staleness=1, over_age="mask", depth=1.5),
            price="tokens more than one version old carry no gradient; nothing is censored any more",
        )
    elif measured.failed:
        yield Advice(
            why=f"{why}, and {measured.failed} rollouts failed: long ones run into a deadline",
            lines=_lines("rollout", timeout_s=2.0 * float(config.get("rollout", {}).get("timeout_s", 600.0))),
            price="a rollout that hangs is noticed later",
        )


def _tail(measured: Measured, policy: Policy) -> Iterator[Advice]:
    """The slowest rollouts: what helps depends on rho and on the staleness that is allowed already."""
    rho = measured.rho
    if measured.trainer is not None and measured.trainer.binds:
        return
    if (
        rho is None
        or measured.share("tail") < 0.05
        or (measured.excess is not None and measured.excess < 0.03 and rho < 1)
    ):
        return
    k = policy.bound or 0
    chi = rho / (k + 1)
    if policy.on_policy:
        yield from _on_policy(measured, rho, policy)
    if chi > 2:
        yield _mask(measured, k or 1, chi)
        if not policy.allows_staleness:
            yield _wide_window(rho)
    elif policy.on_policy:
        depth = 1.25 if rho <= 0.65 else 2.0
        yield Advice(
            why=f"at rho {rho:.2f} one step of staleness lets the next batch fill the slots that the tail leaves empty",
            lines=_lines("scheduler", type="layered", max_staleness=1, over_age="wait", depth=depth),
            price="some tokens are one version old (3 to 30 % at depth 1.25); nothing is dropped or masked",
        )
    elif policy.settings.get("over_age") == "mask" and measured.masked > 0.1:
        waits = {"type": "layered", "max_staleness": k} if policy.settings.get("type") == "async_bounded" else {}
        yield Advice(
            why=f"rho / (k + 1) is {chi:.1f}: waiting loses little, and {measured.masked:.0%} of the tokens are masked",
            lines=_lines("scheduler", **waits, over_age="wait", depth=1.25 if rho <= 0.5 else float(k + 1)),
            price="a batch may close a little later; nothing is masked any more",
        )


def _wide_window(rho: float) -> Advice:
    return Advice(
        why=f"a wide window lets the slowest rollouts (rho {rho:.1f}) span several steps, with nothing masked",
        lines=_lines("scheduler", type="layered", max_staleness=4, over_age="wait", depth=1.5),
        price="tokens of the slowest rollouts are up to that many versions old; depth keeps most of them at 0 or 1",
    )


def _on_policy(measured: Measured, rho: float, policy: Policy) -> Iterator[Advice]:
    """What helps without any staleness."""
    icc = measured.icc or 0.0
    if rho >= 2 and icc >= 0.6:
        yield Advice(
            why=f"ICC {icc:.2f}: a prompt's lengths are alike, so from the second epoch on the long ones are known "
            "beforehand and can run together in a step of their own",
            lines=_lines("scheduler", type="layered", defer_steps=10),
            price="strictly on-policy, nothing dropped; prompts that are long come in the order of their lengths",
        )
    elif rho < 2 and icc >= 0.2 and policy.settings.get("type") == "sync":
        yield Advice(
            why=f"ICC {icc:.2f}: the first finished rollout of a group tells how long the others are, and the longest "
            "can start first",
            lines=_lines("scheduler", type="layered", max_staleness=0),
            price="none: strictly on-policy, nothing dropped",
        )


def _mask(measured: Measured, k: int, chi: float) -> Advice:
    depth = 2.0 if (measured.icc or 0.0) < 0.2 else 1.5
    return Advice(
        why=f"the slowest rollout alone takes {chi:.1f} times what all work takes of as many steps "
        "as it may span: no order of the queue can be faster than it, only not waiting for it",
        lines=_lines("scheduler", type="layered", max_staleness=k, over_age="mask", depth=depth),
        price="tokens over that age carry no gradient (17 to 47 % of all in our study); whole rollouts are still "
        "consumed, so lengths and rewards are not censored",
    )


def _other_causes(measured: Measured, config: Mapping[str, Any], policy: Policy) -> Iterator[Advice]:
    """What else engine-seconds went to, where it is worth a change."""
    share = measured.share
    reward, engine = config.get("reward", {}), config.get("engine", {})
    if share("tool") >= 0.1:
        yield Advice(
            why=f"{share('tool'):.0%} of the engine-seconds: slots of rollouts that were in a tool call",
            lines=_lines("scheduler", type="layered", kv="hold", max_staleness=max(1, policy.bound or 0), depth=1.25),
            price="other rollouts use the slots; some tokens are one version old",
            weight=share("tool"),
        )
    if share("reward") >= 0.05:
        yield Advice(
            why=f"{share('reward'):.0%} of the engine-seconds: nothing ran, the last rewards were awaited",
            lines=_lines("reward", processes=max(2, 2 * int(reward.get("processes", 1)))),
            price="more CPU for verifiers",
            weight=share("reward"),
        )
    if share("queue") >= 0.05 and int(engine.get("admit_batch", 1)) > 1:
        yield Advice(
            why=f"{share('queue'):.0%} of the engine-seconds: something was there and the engine was not decoding it",
            lines=_lines("engine", admit_batch=1),
            price="more, smaller prefills",
            weight=share("queue"),
        )
    yield from _kv(share("kv_full"), share("prefill") if kv_limited(config) else 0.0)
    yield from _trainer(measured, config, policy)


def _kv(full: float, prefill: float) -> Iterator[Advice]:
    """KV that is short shows as free slots, or as contexts that are read in again and again."""
    whys = [f"{full:.0%} of the engine-seconds: slots were free and KV was not"] if full >= 0.1 else []
    if prefill >= 0.2:
        whys.append(f"{prefill:.0%} of the engine-seconds: contexts read in, again where their KV was pushed out")
    if whys:
        yield Advice(
            why="; ".join(whys),
            lines=_lines("scheduler", kv="hold"),
            price="new rollouts start later, so that those that have begun keep their KV",
            weight=full + prefill,
        )


def _trainer(measured: Measured, config: Mapping[str, Any], policy: Policy) -> Iterator[Advice]:
    """Engines that wait for the trainer: what helps depends on whether the trainer waits for them too."""
    trainer, share = measured.trainer, measured.share("trainer")
    if trainer is not None and trainer.binds:
        yield _fewer_engines(trainer, config, share)
    elif share >= 0.2:
        yield from _in_turns(measured, trainer, policy)
    between = measured.share("sync") + measured.share("switch")
    if between >= 0.1:
        groups = int(config.get("rollout", {}).get("prompts_per_step", 16))
        memory = " and memory changing hands" if measured.share("switch") else ""
        yield Advice(
            why=f"{between:.0%} of the engine-seconds: weights on their way{memory}",
            lines=_lines("rollout", prompts_per_step=2 * groups),
            price="another batch size: half as many optimizer steps for the same rollouts",
            weight=between,
        )


def _fewer_engines(trainer: Trainer, config: Mapping[str, Any], share: float) -> Advice:
    engine = config.get("engine", {})
    count = int(engine.get("count", 1))
    enough = trainer.engines_enough(count)
    faster = f"a trainer {trainer.times_faster:.1f} times as fast would still have batches to train on"
    if trainer.engines_waited < IDLE:
        faster = "only a faster trainer makes these steps shorter"
    if enough == count or engine.get("urls"):
        return Advice(why=faster, lines=(), price=MORE_TRAINER, weight=share)
    return Advice(
        why=f"{faster}; at the speed that it has, {enough} of {count} engines are enough",
        lines=_lines("engine", count=enough),
        price="as many trained tokens a second from fewer engines, for as long as the trainer is no faster",
        weight=share,
        saves=count - enough,
    )


def _in_turns(measured: Measured, trainer: Trainer | None, policy: Policy) -> Iterator[Advice]:
    """Engines and trainer wait for each other."""
    share, said = measured.share("trainer"), f"{measured.share('trainer'):.0%} of the engine-seconds"
    beside = trainer is not None and not trainer.colocated
    has_time = trainer is not None and trainer.waited > WAITS if beside else measured.share("tail") >= 0.05
    none = "none" if beside else "engines that are done change hands one by one"
    if policy.known and not policy.settings.get("stream") and has_time:
        yield Advice(
            why=f"{said}: the engines waited for the trainer, which had waited for the last rollouts of the batch",
            lines=_lines("scheduler", stream=True),
            price=f"{none}: gradients of finished groups are summed while the tail runs, one optimizer step at the end",
            weight=share,
        )
    if beside and policy.on_policy:
        yield Advice(
            why=f"{said}: the engines waited for the trainer, though it has machines of its own; one step of staleness "
            "lets both run at once",
            lines=_lines("scheduler", type="layered", max_staleness=1, over_age="wait", depth=2.0),
            price="some tokens are one version old; nothing is dropped or masked",
            weight=share,
        )
    if trainer is not None and trainer.colocated:
        yield Advice(
            why=f"{said}: the engines waited for the trainer; one twice as fast would make a step "
            f"{trainer.computed / 2:.0%} shorter, and no scheduling policy makes that part shorter",
            lines=(),
            price=MORE_TRAINER,
            weight=share,
        )
