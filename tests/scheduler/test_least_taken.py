"""The order of engines by what is taken: after any changes that of a look at all of them, without one."""

from hypothesis import given
from hypothesis import strategies as st

from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.least_taken import LeastTaken
from gruppetto.scheduler.policies import board
from gruppetto.scheduler.policies.board import taken_by

changes = st.tuples(
    st.integers(0, 4),
    st.fixed_dictionaries(
        {},
        optional={
            "load": st.integers(0, 4),
            "capacity": st.integers(0, 4),
            "expected": st.integers(0, 50),
            "kv_running": st.integers(0, 90),
            "kv_held": st.integers(0, 10),
            "slowness": st.sampled_from([1.0, 1.5]),
            "slow": st.booleans(),
            "updating": st.booleans(),
        },
    ),
)


@given(st.lists(st.tuples(changes, st.sampled_from([None, 10.0, 20.0])), max_size=60), st.sampled_from([0, 100]))
def test_the_order_is_that_of_a_look_at_all(steps, kv_capacity):
    seats = [EngineSeat(f"e{i}", i, 4, 4, kv_capacity) for i in range(5)]
    least = LeastTaken(seats)
    for (index, fields), mean in steps:
        for name, value in fields.items():
            setattr(seats[index], name, value)
        least.changed(seats[index])
        if mean is not None:
            room = [seat for seat in seats if seat.load < seat.capacity and not seat.updating]
            assert list(least.order(mean)) == sorted((taken_by(seat, mean), seat.index, seat) for seat in room)


def test_only_what_changed_is_looked_at_again(monkeypatch):
    seats = [EngineSeat(f"e{i}", i, 8, 8) for i in range(500)]
    least, looks = LeastTaken(seats), []
    monkeypatch.setattr(
        "gruppetto.scheduler.least_taken.taken_by", lambda seat, mean: looks.append(seat) or board.taken_by(seat, mean)
    )
    next(least.order(10.0))
    assert len(looks) == 500
    for _ in range(300):
        _, _, seat = next(least.order(10.0))
        seat.expected += 10
        least.changed(seat)
    assert len(looks) == 500 + 299
    assert [seat.expected for seat in seats] == [10] * 300 + [0] * 200
