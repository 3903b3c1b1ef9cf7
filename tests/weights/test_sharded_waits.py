"""Ranks that wait for rank 0 to publish wait outside of any collective."""

import asyncio
from types import SimpleNamespace

import torch
from torch.distributed import HashStore

from gruppetto.weights.channels import sharded


class Looked(HashStore):
    """Counts how often somebody looks."""

    looks = 0

    def check(self, keys):
        self.looks += 1
        return super().check(keys)


async def test_nobody_is_in_a_collective_before_rank_0_begins(monkeypatch):
    store, told = Looked(), []
    word = torch.tensor([sharded._END])

    def broadcast(tensor, src):
        told.append(int(tensor))
        tensor.copy_(word)

    monkeypatch.setattr(sharded, "_store", lambda: store)
    monkeypatch.setattr(sharded, "dist", SimpleNamespace(broadcast=broadcast, get_rank=lambda: 1))
    monkeypatch.setattr(sharded, "_publishes", iter([0, 0, 1, 1]))  # two ranks in one process
    monkeypatch.setattr(sharded, "_LONGEST_PAUSE_S", 0.01)
    for _ in range(2):
        store.looks, before = 0, len(told)
        waiting = asyncio.ensure_future(sharded.follow([]))
        async with asyncio.timeout(30):
            while store.looks < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert len(told) == before
        assert not waiting.done()
        sharded.Sharded([]).close()
        await asyncio.wait_for(waiting, 30)
        assert len(told) == before + 2
