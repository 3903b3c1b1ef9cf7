"""The scheduler's state as plain JSON, and back: every live group with its tokens, scores and order, and the census.

Taken only while no rollout is on an engine, none is being scored and no batch is out. Promise: a pool restored from it
decides exactly what the original would have with engines that hold nothing, as they do after a restart.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from gruppetto.scheduler.entries import Deferred, GroupEntry, RolloutEntry
from gruppetto.scheduler.memory import LengthMemory
from gruppetto.scheduler.pool import Pool, TransitionError
from gruppetto.types import DropReason, FinishReason, RolloutState, Score, Segment, Task, TokenKind

COUNTS = ("parks", "losses", "chunks", "turns", "moves", "started_version", "tool_seconds", "seconds")
"""Fields of a member that are numbers and go as they are."""


def snapshot(pool: Pool) -> dict[str, Any]:
    """JSON-able state of the pool."""
    if pool.num_running:
        raise TransitionError(f"{pool.num_running} rollouts are on engines; park them before a snapshot")
    if pool.chunked() or any(entry.doomed for entry in pool.rollouts.values()):
        raise TransitionError("rollouts are at the end of a chunk or given up; settle them before a snapshot")
    if pool.training or pool.committed:
        raise TransitionError("a batch is being trained on; publish its weights or give it back before a snapshot")
    ready = sorted((g for g in pool.groups.values() if g.ready_order is not None), key=lambda g: g.ready_order or 0)
    return {
        "version": pool.version,
        "next_group_id": pool.next_group_id,
        "exhausted": pool.exhausted,
        "census": msgspec.to_builtins(pool.census, str_keys=True),
        "groups": [_group(group) for group in pool.groups.values()],
        "ready": [group.id for group in ready],
        "queue": [[entry.id, pool.line.resumed(entry)] for entry in pool.line.without_kv()],
        "deferred": [[_task(deferred.task), deferred.since] for deferred in pool.deferred],
    }


def restore(pool: Pool, state: Mapping[str, Any], memory: LengthMemory) -> None:
    """Fills an empty pool. The order of the ready groups is as it was, that of the queue as it was without KV."""
    groups = {item["id"]: _read_group(item, memory) for item in state["groups"]}
    pool.version, pool.exhausted = state["version"], state["exhausted"]
    pool.next_group_id = state["next_group_id"]
    for group in groups.values():
        pool.insert(group)
    pool.reorder_queue(state["queue"])
    for group_id in state["ready"]:
        pool.make_ready(group_id)
    pool.deferred.extend(Deferred(Task(**task), since) for task, since in state["deferred"])
    pool.num_waiting = sum(entry.state is RolloutState.WAITING for entry in pool.rollouts.values())
    _read_census(pool, state["census"])


def _group(group: GroupEntry) -> dict[str, Any]:
    return {
        "id": group.id,
        "born": group.born,
        "oldest": group.oldest,
        "open": group.open,
        "needed": group.needed,
        "long": group.long,
        "finished": group.finished,
        "log_sum": group.log_sum,
        "longest": group.longest,
        "task": _task(group.task),
        "members": [_member(entry) for entry in group.members],
    }


def _task(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "prompt_ids": list(task.prompt_ids),
        "prompt": task.prompt,
        "answer": task.answer,
        "source": task.source,
        "extra": dict(task.extra),
    }


def _member(entry: RolloutEntry) -> dict[str, Any]:
    return {
        "state": entry.state,
        "tokens": entry.tokens,
        "others": entry.others,
        "oldest": entry.oldest,
        "segments": [[s.kind, s.version, list(s.token_ids), list(s.logprobs)] for s in entry.segments],
        "finish": entry.finish,
        "reward": entry.score.reward if entry.score else None,
        "failure": entry.failure,
        **{name: getattr(entry, name) for name in COUNTS},
    }


def _read_group(item: Mapping[str, Any], memory: LengthMemory) -> GroupEntry:
    task = Task(**item["task"])
    group = GroupEntry(
        id=item["id"],
        task=task,
        needed=item["needed"],
        born=item["born"],
        open=item["open"],
        oldest=item["oldest"],
        long=item["long"],
        finished=item["finished"],
        log_sum=item["log_sum"],
        longest=item["longest"],
        history=memory.evidence(task),
    )
    group.members = [_read_member(group, i, member) for i, member in enumerate(item["members"])]
    return group


def _read_member(group: GroupEntry, member: int, item: Mapping[str, Any]) -> RolloutEntry:
    state, reward = RolloutState(item["state"]), item["reward"]
    return RolloutEntry(
        id=f"g{group.id}.{member}",
        group=group,
        member=member,
        state=RolloutState.SCORED if state is RolloutState.READY else state,
        tokens=item["tokens"],
        others=item["others"],
        oldest=item["oldest"],
        segments=[
            Segment(TokenKind(kind), version, array("i", ids), array("f", logprobs))
            for kind, version, ids, logprobs in item["segments"]
        ],
        finish=FinishReason(item["finish"]) if item["finish"] else None,
        score=None if reward is None else Score(reward=reward),
        failure=item["failure"],
        **{name: item[name] for name in COUNTS},
    )


def _read_census(pool: Pool, item: Mapping[str, Any]) -> None:
    census = pool.census
    census.started, census.trained = item["started"], item["trained"]
    census.tokens_made, census.tokens_trained = item["tokens_made"], item["tokens_trained"]
    census.live_tokens = item["live_tokens"]
    census.dropped = Counter({DropReason(reason): count for reason, count in item["dropped"].items()})
    census.tokens_dropped = Counter({DropReason(reason): count for reason, count in item["tokens_dropped"].items()})
