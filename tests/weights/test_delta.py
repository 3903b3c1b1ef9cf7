"""Deltas: what changed, written down shortly, applied only where it belongs, and never half."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import RunError, UserError
from gruppetto.weights.delta import packet
from gruppetto.weights.delta.compare import bits_of, changed
from gruppetto.weights.delta.digest import digest
from gruppetto.weights.delta.held import Held
from gruppetto.weights.delta.packet import Delta, difference, from_bytes, to_bytes
from gruppetto.weights.delta.snapshot import EngineState, Snapshot
from gruppetto.weights.layouts.maps import numpy_dtype
from gruppetto.weights.layouts.spec import Spec

SPECS = {
    "a": Spec("a", (40, 30), "bfloat16"),
    "b": Spec("b", (7,), "float32"),
    "c": Spec("c", (3, 5), "uint8"),
    "d": Spec("d", (0, 4), "bfloat16"),
}
LIMIT = 1 << 20


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    made = {}
    for spec in SPECS.values():
        dtype = numpy_dtype(spec.dtype)
        raw = rng.integers(0, 256, spec.elements * dtype.itemsize, np.uint8)
        made[spec.name] = raw.view(dtype).reshape(spec.shape)
    return made


def copies(of):
    return {name: array.copy() for name, array in of.items()}


def stepped(of, seed=1, count=5):
    """Some elements changed by one bit."""
    rng = np.random.default_rng(seed)
    new = copies(of)
    for name in ("a", "c"):
        flat = new[name].reshape(-1).view(f"u{new[name].dtype.itemsize}")
        flat[rng.choice(flat.size, min(count, flat.size), replace=False)] ^= 1
    return new


def same(one, other):
    return all(one[name].tobytes() == other[name].tobytes() for name in SPECS)


def states(version, *names, boot="1"):
    return {name: EngineState(boot, version) for name in names}


# A delta on its way


def test_a_delta_brings_the_very_bits():
    old = arrays()
    new = stepped(old)
    shards = tuple(
        difference(s, bits_of(s, new[n]), bits_of(s, old[n]), digest(bits_of(s, old[n]))) for n, s in SPECS.items()
    )
    held = Held(4, SPECS, old)
    prepared = held.prepare(from_bytes(to_bytes(Delta(5, 4, shards)), LIMIT))
    before = copies(old)
    assert same(old, before)
    assert held.version == 4
    held.commit(prepared)
    assert same(old, new)
    assert held.version == 5
    assert held.audit() == []
    assert held.digests() == {n: digest(bits_of(s, new[n])) for n, s in SPECS.items()}


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_changed_or_cut_packet_is_refused(data):
    sent = bytearray(to_bytes(delta_of(arrays(), stepped(arrays()))))
    if data.draw(st.booleans()):
        sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del sent[data.draw(st.integers(0, len(sent) - 1)) :]
    with pytest.raises(RunError, match="delta:"):
        from_bytes(bytes(sent), LIMIT)


def delta_of(old, new, version=5, base=4):
    snapshot = Snapshot(SPECS)
    snapshot.propose(base, old, states(None, "e"))
    snapshot.confirmed("e", EngineState("1", base), Held(base, SPECS, copies(old)).digests())
    snapshot.settle()
    return snapshot.propose(version, new, states(base, "e")).delta


def test_a_packet_over_the_limit_is_not_looked_at():
    with pytest.raises(RunError, match="over the limit of 10"):
        from_bytes(to_bytes(delta_of(arrays(), stepped(arrays()))), 10)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"position_bytes": 10**9}, "outside the packet"),
        ({"value_bytes": -1}, "outside the packet"),
        ({"position_bytes": 0}, "belong to no shard"),
        ({"shape": (-1, 4)}, "outside the packet"),
    ],
)
def test_a_made_up_header_is_refused(row, line, monkeypatch):
    whole = packet._Row

    def lying(name, *rest):
        made = dict(zip(whole.__dataclass_fields__, (name, *rest), strict=True))
        return whole(**(made | (row if name == "a" else {})))

    monkeypatch.setattr(packet, "_Row", lying)
    sent = to_bytes(delta_of(arrays(), stepped(arrays())))
    monkeypatch.undo()
    with pytest.raises(RunError, match=line):
        from_bytes(sent, LIMIT)


def test_a_delta_is_refused_on_another_version_other_bits_or_other_shards():
    old, new = arrays(), stepped(arrays())
    delta = delta_of(old, new)
    with pytest.raises(RunError, match="from version 4 to 5, but version 3 is here; send the full"):
        Held(3, SPECS, copies(old)).prepare(delta)
    other = copies(old)
    other["b"][0] += 1
    with pytest.raises(RunError, match="b holds other values"):
        Held(4, SPECS, other).prepare(delta)
    with pytest.raises(RunError, match="1 shards are not held here, the first is d"):
        Held(4, {n: s for n, s in SPECS.items() if n != "d"}, old).prepare(delta)
    more = {**SPECS, "e": Spec("e", (1,), "uint8")}
    with pytest.raises(RunError, match="1 shards are missing, the first is e"):
        Held(4, more, {**old, "e": np.zeros(1, np.uint8)}).prepare(delta)
    with pytest.raises(RunError, match="another order"):
        Held(4, dict(reversed(SPECS.items())), old).prepare(delta)
    wide = {**SPECS, "b": Spec("b", (7, 1), "float32")}
    with pytest.raises(RunError, match="does not fit"):
        Held(4, wide, old).prepare(delta)


def test_values_that_somebody_else_changed_are_noticed_before_anything_is_written():
    old, new = arrays(), stepped(arrays())
    engine = copies(old)
    held = Held(4, SPECS, engine)
    at = changed(new["a"].reshape(-1), old["a"].reshape(-1))[0]
    engine["a"].reshape(-1)[at] ^= 4  # behind the receiver's back: an engine that re-packs its weights
    before = copies(engine)
    with pytest.raises(RunError, match="a would not end at the sender's values"):
        held.prepare(delta_of(old, new))
    assert same(engine, before)
    assert held.audit() == ["a"]


def test_a_full_version_written_into_the_arrays_is_a_base_again():
    engine = arrays()
    held = Held(0, SPECS, engine)
    for name, array in arrays(seed=7).items():
        engine[name][...] = array
    assert held.audit() == ["a", "b", "c"]
    held.loaded(4)
    held.commit(held.prepare(delta_of(arrays(seed=7), stepped(arrays(seed=7)))))
    assert same(engine, stepped(arrays(seed=7)))
    assert held.version == 5


def test_a_delta_prepared_on_an_older_version_is_not_committed():
    old, new = arrays(), stepped(arrays())
    held = Held(4, SPECS, copies(old))
    prepared = held.prepare(delta_of(old, new))
    held.commit(prepared)
    with pytest.raises(RunError, match="prepared on version 4, but version 5 is here"):
        held.commit(prepared)


# The snapshot


def confirm(snapshot, version, digests, *names, boot="1"):
    for name in names:
        snapshot.confirmed(name, EngineState(boot, version), digests)


def settled(*names):
    snapshot = Snapshot(SPECS)
    first = snapshot.propose(0, arrays(), states(None, *names))
    assert first.full == dict.fromkeys(names, "first")
    confirm(snapshot, 0, first.digests, *names)
    snapshot.settle()
    return snapshot


def test_the_snapshot_moves_only_after_every_receipt():
    snapshot = settled("a", "b")
    new = stepped(arrays())
    sent = snapshot.propose(1, new, states(0, "a", "b"))
    assert sent.by_delta == ("a", "b")
    confirm(snapshot, 1, sent.digests, "a")
    with pytest.raises(RunError, match="version 1 is not confirmed by b; the base stays 0"):
        snapshot.settle()
    assert snapshot.version == 0
    with pytest.raises(RunError, match="still on its way"):
        snapshot.propose(2, new, states(0, "a", "b"))
    snapshot.drop()
    again = snapshot.propose(1, new, {**states(1, "a"), **states(0, "b")})
    assert again.full == {"a": "behind: version 1, base 0"}
    assert again.by_delta == ("b",)
    assert again.digests == sent.digests
    held = Held(0, SPECS, engine := arrays())
    held.commit(held.prepare(again.delta))
    assert same(engine, new)


def test_a_receipt_with_other_values_another_version_or_from_nowhere_is_refused():
    snapshot = settled("a")
    sent = snapshot.propose(1, stepped(arrays()), states(0, "a"))
    with pytest.raises(RunError, match="1 shards arrived with other values, the first is c"):
        snapshot.confirmed("a", EngineState("1", 1), {**sent.digests, "c": 1})
    with pytest.raises(RunError, match="answers as"):
        snapshot.confirmed("a", EngineState("1", 0), sent.digests)
    with pytest.raises(RunError, match="answers as"):
        snapshot.confirmed("a", EngineState("2", 1), sent.digests)
    with pytest.raises(RunError, match="engine x was not sent"):
        snapshot.confirmed("x", EngineState("1", 1), sent.digests)
    with pytest.raises(RunError, match="not confirmed by a"):
        snapshot.settle()


def test_a_fenced_engine_is_not_waited_for_and_starts_anew():
    snapshot = settled("a", "b")
    new = stepped(arrays())
    sent = snapshot.propose(1, new, states(0, "a", "b"))
    confirm(snapshot, 1, sent.digests, "a")
    snapshot.gone("b")
    snapshot.settle()
    assert snapshot.version == 1
    then = snapshot.propose(2, stepped(new, seed=2), {**states(1, "a"), **states(None, "b", boot="2")})
    assert then.by_delta == ("a",)
    assert then.full == {"b": "readmitted"}


def test_a_restarted_engine_gets_everything_though_its_version_fits():
    snapshot = settled("a")
    sent = snapshot.propose(1, stepped(arrays()), states(0, "a", boot="2"))
    assert sent.full == {"a": "restarted"}
    assert sent.delta is None


def test_a_delta_that_saves_too_little_is_not_made():
    snapshot = settled("a")
    sent = snapshot.propose(1, arrays(seed=9), states(0, "a"))
    assert sent.delta is None
    assert re.fullmatch(r"density: the delta has \d+\.\d% of all bytes, the limit is 50%", sent.full["a"])
    confirm(snapshot, 1, sent.digests, "a")
    snapshot.settle()
    after = snapshot.propose(2, stepped(arrays(seed=9)), states(1, "a"))
    held = Held(1, SPECS, engine := arrays(seed=9))
    held.commit(held.prepare(after.delta))
    assert same(engine, stepped(arrays(seed=9)))


def test_everything_goes_whole_every_so_many_versions():
    snapshot = Snapshot(SPECS, full_every=3)
    kinds = []
    weights = arrays()
    for version in range(8):
        sent = snapshot.propose(version, weights, states(version - 1 if version else None, "a"))
        kinds.append("delta" if sent.delta else sent.full["a"])
        confirm(snapshot, version, sent.digests, "a")
        snapshot.settle()
        weights = stepped(weights, seed=version)
    third = "turn: every 3 versions"
    assert kinds == ["first", "delta", "delta", third, "delta", "delta", third, "delta"]


def test_settings_out_of_range_are_refused():
    with pytest.raises(UserError, match=r"max_share = 1\.5"):
        Snapshot(SPECS, max_share=1.5)


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["ok", "lost", "dead"])), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_engines_end_at_the_trainers_bits_whatever_gets_lost(rounds):
    """Two engines; in each round an engine may miss its receipt or restart: never is a delta put on other bits."""
    snapshot = Snapshot(SPECS)
    weights = arrays()
    held = {}
    boots = {"a": 0, "b": 0}
    for version, (count, fate) in enumerate(rounds):
        weights = stepped(weights, seed=version, count=count)
        now = {n: EngineState(str(boots[n]), held[n].version if n in held else None) for n in boots}
        sent = snapshot.propose(version, weights, now)
        lost = set()
        for name in boots:
            if name in sent.full:
                held[name] = Held(version, SPECS, copies(weights))
            else:
                held[name].commit(held[name].prepare(from_bytes(to_bytes(sent.delta), LIMIT)))
            if name == "b" and fate == "lost":
                lost.add(name)
            elif name == "b" and fate == "dead":
                held.pop(name)
                boots[name] += 1
                snapshot.gone(name)
            else:
                snapshot.confirmed(name, EngineState(str(boots[name]), version), held[name].digests())
        if lost:
            snapshot.drop()
        else:
            snapshot.settle()
        for engine in held.values():
            assert engine.audit() == []
            assert engine.digests() == sent.digests
