"""A run folder made by hand: three steps of one group each, with metrics, events and rollouts."""

import json

from gruppetto.scheduler.meter import CAUSES

ENGINE_S = dict.fromkeys(CAUSES, 0.0) | {"decode": 30.0, "prefill": 2.0, "tail": 60.0, "sync": 8.0}


def metrics(step, makespan_s=40.0, **fields):
    row = {
        "step": step,
        "time/step_s": makespan_s + 5,
        "schedule/makespan_s": makespan_s,
        "schedule/bound_s": 32.0,
        "schedule/critical_path_s": 32.0,
        "schedule/area_s": 8.0,
        "schedule/rho": 3.0,
        "perf/rho": 4.0,
        "schedule/icc": 0.7,
        "staleness/max": 0,
        "staleness/mean": 0.0,
        "staleness/histogram": [100],
        "bias/length_ks": 0.0,
        "bias/ks_allowance": 0.1,
        "bias/length_ratio": 1.0,
        "bias/p99_ratio": 1.0,
        "bias/censors": False,
        "waste/share": 0.0,
        "waste/dropped_share": 0.0,
        "waste/masked_share": 0.0,
        "masked/by_position": [0.0] * 10,
        "dropped/failed": 0,
        "tokens/dropped/failed": 0,
        "engine_s/total": 100.0,
    }
    return row | {f"engine_s/{cause}": s for cause, s in ENGINE_S.items()} | fields


def events(step, begin, lengths, rate=10.0):
    """One group a step; a member's tokens come at `rate`."""
    lines = [{"t": begin, "kind": "launch", "group": step, "version": step - 1}]
    for member, tokens in enumerate(lengths):
        name = {"rollout": f"g{step}.{member}", "group": step, "tokens": tokens}
        lines.append({"t": begin + tokens / rate, "kind": "finish", "reason": "stop", **name})
    end = begin + max(lengths) / rate
    lines.sort(key=lambda line: line["t"])
    lines += [
        {"t": end, "kind": "close", "groups": [step], "version": step - 1},
        {"t": end, "kind": "train_begin", "step": step, "groups": 1},
        {"t": end + 4, "kind": "train_end", "step": step},
        {"t": end + 5, "kind": "publish_end", "version": step},
    ]
    return lines


def rollout_rows(step, lengths, **fields):
    rows = [{"rollout": f"g{step}.{m}", "group": step, "fate": "trained", "tokens": n} for m, n in enumerate(lengths)]
    return [row | {"finish": "stop", "generate_s": row["tokens"] / 10, "prompt": "p"} | fields for row in rows]


LENGTHS = {1: [10] * 19 + [300], 2: [12] * 19 + [400], 3: [10] * 20}


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def demo_run(tmp_path, scheduler=None):
    """Three steps; the second is the longest. `scheduler`: its table of that name, sync where there is none."""
    folder = tmp_path / "demo"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.resolved.json").write_text(
        json.dumps({"scheduler": scheduler or {"type": "sync"}, "rollout": {}})
    )
    lines(folder / "metrics.jsonl", [metrics(1, 30.0), metrics(2, 40.0), metrics(3, 1.0)])
    timed, begin = [], 0.0
    for step, lengths in LENGTHS.items():
        timed += events(step, begin, lengths)
        begin = timed[-1]["t"]
        lines(folder / "rollouts" / f"step_{step:06d}.jsonl", rollout_rows(step, lengths))
    lines(folder / "events.jsonl", timed)
    return folder
