"""A delta that is none: whichever reason an engine gets all of the weights for, the record has it."""

import re

import pytest
from weights.test_publish import engines, model, ordered, step

from gruppetto.errors import EngineError

__all__ = ["engines", "model"]  # fixtures


async def held_back(channel, model, engines, monkeypatch):
    """`a` has version 1 and refuses the delta to 2."""
    (a,) = await engines("a")
    await channel.publish(1, model.state_dict().items(), [a])
    port = channel.channel._ports["a"][1]
    prepare = port.prepare

    async def choosy(offer):
        if offer.kind == "delta":
            raise EngineError("a", "its base is another one")
        return await prepare(offer)

    monkeypatch.setattr(port, "prepare", choosy)
    return [a], {"a": "refused: its base is another one"}


async def too_dense(channel, model, engines, monkeypatch):
    (a,) = await engines("a")
    await channel.publish(1, model.state_dict().items(), [a])
    step(model, 7, share=1.0)
    return [a], {"a": r"density: the delta has \d+\.\d% of all bytes, the limit is 50%"}


async def not_there_before(channel, model, engines, monkeypatch):
    (a,) = await engines("a")
    await channel.publish(1, model.state_dict().items(), [a])
    return [a, *await engines("b")], {"b": "new engine"}


async def let_in_again(channel, model, engines, monkeypatch):
    pair = await engines("a", "b")
    await channel.publish(1, model.state_dict().items(), pair)
    channel.readmit("b")
    return pair, {"b": "readmitted"}


async def of_two_types(channel, model, engines, monkeypatch):
    pair = [*await engines("a"), *await engines("b", dtype="bfloat16")]
    await channel.publish(1, model.state_dict().items(), pair)
    return pair, dict.fromkeys("ab", "kinds: engines have 2 different sets of tensors")


async def of_another_type(channel, model, engines, monkeypatch):
    await channel.publish(1, model.state_dict().items(), await engines("a"))
    return await engines("b", dtype="bfloat16"), {"b": r"tensors: (\d+) of \1 have another name, shape or type"}


@pytest.mark.parametrize(
    "arrange", [held_back, too_dense, not_there_before, let_in_again, of_two_types, of_another_type]
)
async def test_a_delta_that_is_none_says_why_in_the_record(arrange, engines, model, tmp_path, monkeypatch):
    """A word, and behind a colon its figures; of those engines only that did not get one."""
    told = []
    channel = ordered("shm", tmp_path, None, tell=lambda kind, **fields: told.append(fields), mode="delta")
    those, why = await arrange(channel, model, engines, monkeypatch)
    channel.take_counts()
    step(model, 2, share=0.01)
    await channel.publish(2, model.state_dict().items(), those)
    row = told[-1]
    assert row["why_full"].keys() == why.keys()
    assert all(re.fullmatch(why[name], said) for name, said in row["why_full"].items())
    assert row["kinds"] == {engine.name: "full" if engine.name in why else "delta" for engine in those}
    counts = channel.take_counts()
    assert (counts["publish/full_engines"], counts["publish/delta_engines"]) == (len(why), len(those) - len(why))
    assert counts["publish/bytes"] == row["bytes"] > 0
    assert set(channel.take_counts().values()) == {0}
    if arrange is too_dense or arrange is of_two_types:
        return
    step(model, 3, share=0.01)
    monkeypatch.undo()
    await channel.publish(3, model.state_dict().items(), those)
    assert "why_full" not in told[-1]
    assert set(told[-1]["kinds"].values()) == {"delta"}
    assert channel.take_counts()["publish/full_engines"] == 0


async def test_a_run_that_asks_for_no_delta_has_nothing_to_say(engines, model, tmp_path):
    told = []
    channel = ordered("shm", tmp_path, None, tell=lambda kind, **fields: told.append(fields))
    await channel.publish(1, model.state_dict().items(), await engines("a"))
    assert "why_full" not in told[0]
    assert channel.take_counts() == {}
