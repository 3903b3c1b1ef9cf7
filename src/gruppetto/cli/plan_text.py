"""A plan on a terminal: the answer first, then what it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gruppetto.cli.plan_words import in_options
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.plan.advice import Sweep, flips
from gruppetto.ledger.plan.losses import losses
from gruppetto.ledger.plan.plan import Plan, assumptions
from gruppetto.ledger.plan.sandboxes import account
from gruppetto.ledger.units import show_binary, show_flops, show_seconds, show_share, show_size, show_tokens

if TYPE_CHECKING:
    from rich.table import Table

    from gruppetto.ledger.plan.placements import Placed
    from gruppetto.ledger.transfers.sync import Sync

WIDTH = 150
"""Columns where there is no terminal to ask."""
LEGEND = (
    "ideal: a step without tail and waits; attained: GPU-seconds that the stages need at the assumed efficiency, over "
    "all of the step; ceiling: the same, over the ideal step; MFU: useful FLOP over the peak; stale: versions at most."
)


def show(plan: Plan, *, why: bool = False) -> None:
    """Prints the plan."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    for part in _parts(plan, why=why):
        console.print(part)


def show_simulated(plan: Plan) -> None:
    """Prints what the simulator makes of the placements, beside the forecast."""
    from rich.console import Console

    table = _table("placement", "ideal", "step", "simulated", "+-", "over the forecast")
    for name, seen in plan.simulated.items():
        one = plan.placed[name]
        over, error_s = f"{seen.mean_s / one.step_s.value - 1:+.1%}", seen.error_s
        if error_s is not None:
            over += f" +- {error_s / one.step_s.value:.1%}"
        ours = (show_seconds(seconds) for seconds in (one.ideal_s.value, one.step_s.value, seen.mean_s))
        table.add_row(name, *ours, "" if error_s is None else show_seconds(error_s), over)
    print()
    Console(highlight=False, markup=False).print(table)
    if counts := sorted({len(seen.steps_s) for seen in plan.simulated.values()}):
        print(
            f"simulated: the mean of {counts[-1]} steps after those of the warm-up; +-: its standard error, from the "
            "spread of those steps. What is\nless than twice that from the forecast may be chance."
        )


def _parts(plan: Plan, *, why: bool) -> Iterator[str | Table]:
    yield from _asked(plan)
    yield ""
    yield _stages(plan)
    yield ""
    yield _placements(plan)
    yield LEGEND
    yield ""
    yield f"Take {plan.recommendation.reason}."
    yield _cost(plan)
    for sweep in plan.sweeps:
        yield ""
        yield _sweep(sweep)
        yield from (f"  {flip.says}" for flip in flips(sweep))
        yield from (f"  {sweep.axis} = {_at(at)} is left out: {in_options(reason)}" for at, reason in sweep.left_out)
    yield ""
    yield from _moved(plan)
    yield from _sandboxes(plan)
    yield ""
    yield "Assumed:"
    left_out, sentences = len(plan.refused), list(assumptions(plan))  # which come first, with what was refused
    yield from (f"  {in_options(sentence)}" for sentence in sentences[:left_out])
    yield from (f"  {sentence}" for sentence in sentences[left_out:])
    if plan.unmoved:
        yield "Without effect:"
        yield from (f"  {sentence}" for sentence in plan.unmoved)
    if why:
        yield from _why(plan)
    else:
        yield "Each figure with its arithmetic: --why. Charts: --html plan.html. A config to run: --write run.toml."


def _cost(plan: Plan) -> str:
    """What a step of the chosen placement takes of the machines, to be multiplied by a price."""
    one = plan.chosen
    return (
        f"A step is {one.gpu_hours:,.3g} GPU-hours on {one.gpus:,} GPUs, for {show_tokens(one.tokens)} tokens of "
        f"responses: {one.tokens / (3600 * one.gpu_hours):,.0f} a GPU-second."
    )


def _asked(plan: Plan) -> Iterator[str]:
    ask, model, chosen = plan.ask, plan.ask.model, plan.chosen
    rollouts = ask.rollouts
    dtype = f"as published, in {model.stored}" if ask.serve_dtype == "stored" else f"in {ask.serve_dtype}"
    active = f", {model.active_params / 1e9:.3g} B active" if model.experts else ""
    yield (
        f"{model.name}: {model.params:,} parameters{active}; {show_size(model.weight_bytes(ask.serve_dtype))} of "
        f"weights {dtype}; KV {_kv_words(plan)}"
    )
    longest = ask.lengths.longest(ask.groups, ask.group_size)
    yield (
        f"{ask.groups:,} prompts x {ask.group_size} = {rollouts.count:,} rollouts; mean {ask.lengths.mean:,.0f} tokens "
        f"(CV {ask.lengths.cv:.2f}, 99 % below {ask.lengths.quantile(0.99):,.0f}, longest of a step {longest:,.0f}); "
        f"{show_tokens(rollouts.tokens)} tokens a step"
    )
    kv = chosen.generate.memory_bytes.value
    side = chosen.rollout
    takes = "no KV"
    if side.kv_tokens is not None:
        takes = f"{side.kv_tokens:,} tokens of KV each"
    elif (rollouts_each := side.kv_rollouts(ask.sequence(ask.lengths.mean))) is not None:
        takes = f"the KV of {rollouts_each:,.0f} rollouts each"
    yield (
        f"{ask.gpus} x {ask.gpu.name}: {side.count} engines of {side.layout.gpus} GPUs take {takes}; all "
        f"rollouts at their mean length hold {show_size(kv)} ({show_binary(kv)}) = "
        f"{chosen.forecast.kv_waves.value:.1f} waves"
    )


def _kv_words(plan: Plan) -> str:
    from gruppetto.ledger.machines.storage import kv_element_bytes

    model, element = plan.ask.model, kv_element_bytes(plan.ask.kv_dtype)
    words = [f"{model.kv_bytes_per_token(element):,.0f} bytes a token"]
    if model.window_bytes(element):
        words.append(f"windows of {show_size(model.window_bytes(element))} a sequence")
    if model.state_bytes():
        words.append(f"state of {show_size(model.state_bytes())} a sequence")
    return ", ".join(words)


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return table


def _stages(plan: Plan) -> Table:
    ask, chosen = plan.ask, plan.chosen
    table = _table("stage", "FLOP", "bytes", "GPU-seconds", "MFU", "memory", f"on {chosen.name}")
    rows = [(chosen.generate, chosen.forecast.rollout_s.value), *chosen.trainer.stages]
    for stage, seconds in rows:
        mfu = stage.flops.value / (stage.gpu_s.value * ask.gpu.bf16_flops)
        table.add_row(
            stage.name,
            show_flops(stage.flops.value),
            show_size(stage.bytes.value),
            f"{stage.gpu_s.value:,.0f}",
            show_share(mfu),
            show_size(stage.memory_bytes.value),
            show_seconds(seconds),
        )
    for cost in chosen.trainer.costs:
        gpu_s = f"{cost.seconds.value * chosen.trainer.used:,.0f}"
        table.add_row(cost.name, "", "", gpu_s, "", "", show_seconds(cost.seconds.value))
    one = chosen.sync
    gpu_s = f"{one.expected.value * chosen.gpus:,.0f}"
    table.add_row("sync", "", show_size(one.total.value), gpu_s, "", show_size(one.sender_memory.value),
                  show_seconds(one.expected.value))  # fmt: skip
    if chosen.switch is not None:
        moved = chosen.switch.moved * chosen.handing
        gpu_s = f"{chosen.switch.seconds.value * chosen.handing:,.0f}"
        table.add_row("hand-over", "", show_size(moved), gpu_s, "", "", show_seconds(chosen.switch.seconds.value))
    return table


def _placements(plan: Plan) -> Table:
    table = _table(
        "placement", "step", "ideal", "attained", "ceiling", "MFU", "rollout:train", "engines", "trainer",
        "stale", "loses most by",
    )  # fmt: skip
    for one in plan.placed.values():
        table.add_row(
            one.name,
            show_seconds(one.step_s.value),
            show_seconds(one.ideal_s.value),
            show_share(one.utilization.value),
            show_share(one.ceiling.value),
            show_share(losses(one, plan.ask.gpu.bf16_flops)[0].share),
            "shared" if one.colocated else f"{one.rollout.used}:{one.trainer.used}",
            _serve_words(one),
            _train_words(one),
            f"<= {one.staleness.value:.0f}" if one.staleness.value else "0",
            _lost(one, plan.ask.gpu.bf16_flops),
        )
    for number, column in enumerate(table.columns):  # a narrow terminal breaks words, and the answer last
        column.no_wrap = number < 5
        if column.no_wrap:
            column.min_width = max(len(str(cell)) for cell in (column.header, *column.cells))
    return table


def _lost(placed: Placed, peak: float) -> str:
    """The largest loss that is not work below the peak."""
    items = [item for item in losses(placed, peak)[1:] if "below peak" not in item.name]
    if not items:
        return ""
    most = max(items, key=lambda item: item.share)
    return f"{most.name} {show_share(most.share)}"


def _serve_words(placed: Placed) -> str:
    layout = placed.rollout.layout
    words = [f"tp{layout.tp}"] + [f"{name}{size}" for name, size in (("ep", layout.ep), ("dp", layout.dp)) if size > 1]
    return f"{placed.rollout.count} x {' '.join(words)}"


def _train_words(placed: Placed) -> str:
    layout = placed.trainer.layout
    sizes = (("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp), ("ep", layout.ep), ("dp", layout.dp))
    words = [f"{name}{size}" for name, size in sizes if size > 1] or ["dp1"]
    shard = {"full": "FSDP", "optimizer": "ZeRO-1", "none": ""}[layout.shard]
    return " ".join(filter(None, [*words, shard, "offload" if layout.offload else ""]))


def _sweep(sweep: Sweep) -> Table:
    names = list(dict.fromkeys(name for point in sweep.points for name in point.placed))
    table = _table(sweep.axis, *(f"{name}\nstep" for name in names), *(f"{name}\nattained" for name in names))
    for point in sweep.points:
        found = [point.placed.get(name) for name in names]
        table.add_row(
            _at(point.at),
            *(show_seconds(one.step_s.value) if one else "does not fit" for one in found),
            *(show_share(one.utilization.value) if one else "" for one in found),
        )
    return table


def _at(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.9g}"


def _moved(plan: Plan) -> Iterator[str]:
    chosen, less = plan.chosen, plan.delta()
    one = chosen.sync
    yield (
        f"Weight sync ({one.how} over {one.link.name}): {show_size(one.total.value)} in {one.buckets.value:,.0f} "
        "buckets, "
        f"{_seconds_words(one)} expected, {show_seconds(one.bound.value)} at least, "
        f"{one.share_of(chosen.step_s.value):.1%} of the step; as a delta of {plan.ask.changed * 100:.3g} % of the "
        f"weights {show_size(less.payload.value)}, {show_seconds(less.expected.value)}"
        + (", slower than the full one" if less.saved.value < 0 else "")
    )
    if chosen.switch is not None:
        share = chosen.switch.share_of(chosen.step_s.value)
        yield f"Hand-over: {show_seconds(chosen.switch.seconds.value)}, {share:.1%} of the step"
        for each in chosen.switch.hand_overs:
            yield (
                f"  {each.what}, {each.when}: {show_size(each.bytes.value)} a GPU, {each.route}, "
                f"{show_seconds(each.seconds.value)}"
            )


def _seconds_words(one: Sync) -> str:
    """Expected seconds, and between what they lie where the rate of joining is assumed."""
    if not one.joined_s:
        return show_seconds(one.expected.value)
    fast, slow = one.between
    return f"{show_seconds(one.expected.value)} ({show_seconds(fast)} to {show_seconds(slow)})"


def _sandboxes(plan: Plan) -> Iterator[str]:
    found = account(plan.ask, plan.chosen)
    if found is None:
        return
    yield (
        f"Sandboxes: {found['executions'].value:,.0f} executions, {found['cpu_hours'].value:,.1f} CPU-hours; at least "
        f"{found['busy'].value:,.0f} busy at a time, {found['live'].value:,.0f} live where a rollout keeps its own"
    )
    if "image_bytes" in found:
        yield f"  images: {show_size(found['image_bytes'].value)} a step"
    if "gpu_idle_s" in found:
        yield f"  with the sandboxes there are, GPUs wait {found['gpu_idle_s'].value:,.0f} GPU-s a step"


def _why(plan: Plan) -> Iterator[str]:
    """Every figure as `name = value: arithmetic (source)`."""
    chosen = plan.chosen
    for stage in (chosen.generate, *(stage for stage, _ in chosen.trainer.stages)):
        yield f"\n{stage.name}"
        parts = {"FLOP": stage.flops, "bytes": stage.bytes, "GPU-seconds": stage.gpu_s, "memory": stage.memory_bytes}
        yield from _figures(parts)
    for one in plan.placed.values():
        yield f"\n{one.name}"
        found = one.forecast
        yield from _figures(
            {
                "step": one.step_s, "rollouts": found.rollout_s, "training left": found.train_s,
                "trainer": one.trainer.total, "ideal": one.ideal_s,
                "critical path": found.critical_s, "rho": found.rho, "waves of KV": found.kv_waves,
                "attained": one.utilization, "ceiling": one.ceiling, "staleness": one.staleness,
            }
        )  # fmt: skip
        for item in losses(one, plan.ask.gpu.bf16_flops):
            yield f"  {show_share(item.share):>5}  {item.name}: {item.formula}"
        for side, search in (("engine", one.rollout.search), ("trainer", one.trainer.search)):
            if search is not None:
                yield f"  {side}: {search.best.reason}"
                yield from (f"    not {count} x ({kind}): {reason}" for kind, count, reason in search.grouped())
    yield f"\nweight sync ({chosen.sync.how}, {chosen.sync.route})"
    yield from (f"  {step.name}: {step.what}" for step in chosen.sync.steps)
    yield from _figures({"expected": chosen.sync.expected, "at least": chosen.sync.bound})
    yield from (f"    {_value(part)}: {part.formula}{_from(part)}" for part in chosen.sync.parts)
    if (found_sandboxes := account(plan.ask, chosen)) is not None:
        yield "\nsandboxes"
        yield from _figures(found_sandboxes)


def _figures(found: dict[str, Figure]) -> Iterator[str]:
    for name, figure in found.items():
        yield f"  {name} = {_value(figure)}: {figure.formula}{_from(figure)}"


def _value(figure: Figure) -> str:
    shown = {"bytes": show_size, "FLOP": show_flops, "s": show_seconds}
    if figure.unit in shown:
        return shown[figure.unit](figure.value)
    return f"{figure.value:,.6g} {figure.unit}".rstrip()


def _from(figure: Figure) -> str:
    return f"  [{figure.source}]" if figure.source else ""
