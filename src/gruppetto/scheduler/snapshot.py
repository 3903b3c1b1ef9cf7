"""The scheduler's state as plain JSON, and back: every live group with its tokens, scores and order, and the census.

Taken only while no rollout is on an engine, none is being scored and no batch is out. Promise: a pool restored from it
decides exactly what the original would have.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from gruppetto.scheduler.pool import GroupEntry, Pool, RolloutEntry, TransitionError
from gruppetto.types import DropReason, FinishReason, RolloutState, Score, Segment, Task, TokenKind


def snapshot(pool: Pool) -> dict[str, Any]:
    """JSON-able state of the pool."""
    if pool.num_running:
        raise TransitionError(f"{pool.num_running} rollouts are on engines; park them before a snapshot")
    if pool.training:
        raise TransitionError("a batch is being trained on; publish its weights or give it back before a snapshot")
    ready = sorted((g for g in pool.groups.values() if g.ready_order is not None), key=lambda g: g.ready_order or 0)
    return {
        "version": pool.version,
        "next_group_id": pool.next_group_id,
        "exhausted": pool.exhausted,
        "census": msgspec.to_builtins(pool.census, str_keys=True),
        "groups": [_group(group) for group in pool.groups.values()],
        "ready": [group.id for group in ready],
        "queue": [entry.id for entry in pool.queue()],
    }


def restore(pool: Pool, state: Mapping[str, Any]) -> None:
    """Fills an empty pool. The order of the queue and of the ready groups is as it was."""
    groups = {item["id"]: _read_group(item) for item in state["groups"]}
    pool.version, pool.exhausted = state["version"], state["exhausted"]
    pool.next_group_id = state["next_group_id"]
    for group in groups.values():
        pool.insert(group)
    pool.reorder_queue(state["queue"])
    for group_id in state["ready"]:
        pool.make_ready(group_id)
    _read_census(pool, state["census"])


def _group(group: GroupEntry) -> dict[str, Any]:
    task = group.task
    return {
        "id": group.id,
        "born": group.born,
        "oldest": group.oldest,
        "open": group.open,
        "task": {
            "id": task.id,
            "prompt_ids": list(task.prompt_ids),
            "prompt": task.prompt,
            "answer": task.answer,
            "source": task.source,
            "extra": dict(task.extra),
        },
        "members": [_member(entry) for entry in group.members],
    }


def _member(entry: RolloutEntry) -> dict[str, Any]:
    return {
        "state": entry.state,
        "tokens": entry.tokens,
        "oldest": entry.oldest,
        "segments": [[s.kind, s.version, list(s.token_ids), list(s.logprobs)] for s in entry.segments],
        "finish": entry.finish,
        "reward": entry.score.reward if entry.score else None,
        "failure": entry.failure,
        "parks": entry.parks,
        "losses": entry.losses,
        "seconds": entry.seconds,
    }


def _read_group(item: Mapping[str, Any]) -> GroupEntry:
    members = [_read_member(item["id"], i, member) for i, member in enumerate(item["members"])]
    return GroupEntry(
        id=item["id"],
        task=Task(**item["task"]),
        members=members,
        born=item["born"],
        open=item["open"],
        oldest=item["oldest"],
    )


def _read_member(group_id: int, member: int, item: Mapping[str, Any]) -> RolloutEntry:
    state, reward = RolloutState(item["state"]), item["reward"]
    return RolloutEntry(
        id=f"g{group_id}.{member}",
        group_id=group_id,
        member=member,
        state=RolloutState.SCORED if state is RolloutState.READY else state,
        tokens=item["tokens"],
        oldest=item["oldest"],
        segments=[
            Segment(TokenKind(kind), version, array("i", ids), array("f", logprobs))
            for kind, version, ids, logprobs in item["segments"]
        ],
        finish=FinishReason(item["finish"]) if item["finish"] else None,
        score=None if reward is None else Score(reward=reward),
        failure=item["failure"],
        parks=item["parks"],
        losses=item["losses"],
        seconds=item["seconds"],
    )


def _read_census(pool: Pool, item: Mapping[str, Any]) -> None:
    census = pool.census
    census.started, census.trained = item["started"], item["trained"]
    census.tokens_made, census.tokens_trained = item["tokens_made"], item["tokens_trained"]
    census.live_tokens = item["live_tokens"]
    census.dropped = Counter({DropReason(reason): count for reason, count in item["dropped"].items()})
    census.tokens_dropped = Counter({DropReason(reason): count for reason, count in item["tokens_dropped"].items()})
