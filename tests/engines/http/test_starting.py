"""What a run says of its servers before its first step."""

import asyncio
import re

import pytest

from gruppetto import starting
from gruppetto.config.schema import Config
from gruppetto.errors import EngineError
from gruppetto.starting import said_when_late, tell_kv_pool, tell_slots


class Events:
    def __init__(self):
        self.notices = []

    def event(self, kind, at, **fields):
        assert kind == "notice"
        self.notices.append(fields)


@pytest.mark.parametrize(("wanted", "told"), [(8, []), (4, []), (9, ["small"]), (64, ["small", "large"])])
async def test_a_server_with_fewer_slots_is_named(open_scripted, connect, wanted, told):
    engines = [await connect(await open_scripted(slots=n), name=name) for name, n in (("small", 8), ("large", 16))]
    config, events = Config.model_validate({"engine": {"type": "sglang", "slots": wanted}}), Events()
    tell_slots(config, engines, events)
    assert [name for notice in events.notices for name in notice["engines"]] == told
    for notice in events.notices:
        assert f"engine.slots = {wanted}, but small runs 8" in notice["reason"]
        assert "write engine.slots = 8," in notice["reason"]


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        ({"type": "divided"}, "scheduler.kv_pool = true (preset divided) takes it"),
        ({"type": "layered", "kv_pool": True}, "scheduler.kv_pool = true takes it"),
        ({"type": "auto", "kv_pool": True}, "scheduler.kv_pool = true takes it"),
        ({"type": "divided", "kv_pool": False}, None),
        ({"type": "auto"}, None),
        ({}, None),
    ],
)
def test_a_kv_pool_that_no_engine_has_is_told_of(scheduler, said):
    events = Events()
    tell_kv_pool(Config.model_validate({"scheduler": scheduler}), events)
    assert [notice["reason"].startswith(said) for notice in events.notices] == ([] if said is None else [True])
    assert all("write scheduler.kv_pool = false" in notice["reason"] for notice in events.notices)


async def test_who_waits_is_told_for_what(capsys, monkeypatch):
    with said_when_late("waiting for a"):
        await asyncio.sleep(0)
    monkeypatch.setattr(starting, "PATIENCE_S", 0.0)
    for line in ("waiting for b", ""):
        with said_when_late(line):
            await asyncio.sleep(0.01)
    assert capsys.readouterr().out == "waiting for b\n"


async def test_a_server_that_has_gone_is_told_of_in_one_line(open_scripted, connect):
    server = await open_scripted()
    engine = await connect(server)
    await server.close()
    async with asyncio.timeout(60):
        while engine._dead is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    path = r"GET /\w+"
    assert re.fullmatch(
        rf"engine e: 3 looks without an answer: {path} at {server.url}: nobody listens there", str(engine._dead)
    )


async def test_a_server_that_was_never_there_is_told_of_in_one_line(open_scripted, connect):
    server = await open_scripted()
    await server.close()
    with pytest.raises(EngineError) as failed:
        await connect(server, deadlines={"start": 0.5})
    said = rf"engine e: did not answer at {server.url} within 0.5 s: GET /\w+ at {server.url}: nobody listens there"
    assert re.fullmatch(said, str(failed.value))
