"""What holds of the pool after every transition, counted anew from the plain second account of it."""

from hypothesis.stateful import invariant
from scheduler.shadow import FINAL

from gruppetto.scheduler.policies.board import taken_by
from gruppetto.types import RolloutState, TokenKind

State = RolloutState
MEAN = 100.0
ENGINES = {"e0": (3, 3), "e1": (2, 3), "e2": (2, 0)}
"""Name to (slots, rollouts it may hold)."""


def seats_of(pool):
    return [pool.seating[name] for name in ENGINES]


def facts(entry):
    return (entry.id, *(getattr(entry, name) for name in entry.__slots__ if name not in ("id", "group", "queue_key")))


def picture(pool):
    """Everything that can be seen of a pool."""
    return {
        "version": pool.version,
        "training": pool.training,
        "committed": [g.id for g in pool.committed],
        "deferred": [(len(d.task.prompt_ids), d.since) for d in pool.deferred],
        "counts": (pool.num_running, pool.num_waiting, pool.num_long, pool.num_live, pool.num_ready),
        "census": repr(pool.census),
        "queue": [r.id for r in pool.queue()],
        "chunked": [r.id for r in pool.chunked()],
        "ready": list(pool.ready(1000)),
        "seats": [repr(seat) for seat in seats_of(pool)],
        "open": [s.name for s in pool.seats()],
        "rollouts": [repr(facts(r)) for r in pool.rollouts.values()],
        "groups": [(g.id, g.open, g.oldest, g.ready_order, g.finished, g.log_sum) for g in pool.groups.values()],
        "behind": [(pool.num_behind(v), pool.num_ready_behind(v)) for v in range(-1, pool.version + 2)],
    }


class HeldToTheShadow:
    """Invariants of a machine that has a `pool` and its `shadow`."""

    @invariant()
    def census_is_balanced(self):
        census = self.pool.census
        started, trained, dropped, live = self.shadow.count(lambda row: 1)
        assert (census.started, census.trained, +census.dropped, census.live) == (started, trained, dropped, live)
        made, trained, dropped, live = self.shadow.count(lambda row: row.tokens)
        assert (census.tokens_made, census.tokens_trained, +census.tokens_dropped) == (made, trained, dropped)
        assert census.live_tokens == live
        entries = self.pool.rollouts.values()
        assert census.balanced(len(entries), sum(r.tokens for r in entries))

    @invariant()
    def every_rollout_is_where_it_should_be(self):
        def seen(r):
            return r.state, r.tokens, r.others, r.oldest, r.engine, r.home, r.reserved, r.doomed

        rows = self.shadow.rollouts.items()
        assert {n: seen(r) for n, r in self.pool.rollouts.items()} == {
            n: seen(r) for n, r in rows if r.state not in FINAL
        }
        for entry in self.pool.rollouts.values():
            assert sum(len(s) for s in entry.segments if s.kind is TokenKind.MODEL) == entry.tokens
        assert sorted(self.pool.groups) == sorted(self.shadow.live_groups())
        known = self.shadow.finished()
        for group in self.pool.groups.values():
            states = [self.shadow.rollouts[m.id].state for m in group.members]
            assert [m.state for m in group.members] == states
            assert (group.open == 0) == (not self.shadow.is_open(group.id))
            assert group.finished >= len(known[group.id])
            assert group.longest >= max(known[group.id], default=0)

    @invariant()
    def counts_and_seats_are_right(self):
        pool, shadow = self.pool, self.shadow
        running = [n for n, r in shadow.rollouts.items() if r.state is State.RUNNING]
        waiting = [n for n, r in shadow.rollouts.items() if r.state is State.WAITING]
        assert (pool.num_running, pool.num_waiting) == (len(running), len(waiting))
        assert pool.num_ready == len(shadow.ready)
        assert pool.num_live == len(shadow.live_groups()) - len(shadow.ready)
        assert pool.num_long == len(shadow.long & set(shadow.live_groups()))
        assert pool.num_committed == len(shadow.out)
        assert pool.num_queued == len(shadow.queue())
        assert [(len(d.task.prompt_ids), d.since) for d in pool.deferred] == shadow.deferred
        for seat in seats_of(pool):
            assert (seat.load, seat.kv_running, seat.kv_held) == (shadow.load(seat.name), *shadow.kv(seat.name))
        assert pool.seating.free_slots == shadow.free_slots()
        assert [s.name for s in pool.seats()] == shadow.open_engines()
        assert pool.serving == shadow.serving()

    @invariant()
    def the_order_of_engines_is_that_of_a_look_at_all(self):
        pool = self.pool
        seats = sorted((taken_by(seat, MEAN), seat.index, seat) for seat in pool.seats())
        assert list(pool.least_taken(MEAN)) == seats
        assert pool.num_seats == len(seats)

    @invariant()
    def orders_and_ages_are_right(self):
        pool, shadow = self.pool, self.shadow
        assert [r.id for r in pool.queue()] == shadow.queue()
        assert [r.id for r in pool.chunked()] == sorted(shadow.at_chunk(), key=[r.id for r in pool.chunked()].index)
        assert list(pool.ready(1000)) == shadow.ready_order()
        assert list(pool.ready(1)) == shadow.ready_order()[:1]
        groups = shadow.live_groups()
        for group in pool.groups.values():
            ages = [m.oldest for m in group.members if m.oldest is not None and m.state is not State.DROPPED]
            assert group.oldest == shadow.ages.get(group.id)
            assert group.oldest is not None or not ages
            assert all(group.oldest <= m.oldest for m in group.members if m.oldest is not None and m.score)
        for version in range(-1, shadow.version + 2):
            behind = [g for g in groups if shadow.age_now(g) <= version]
            assert pool.num_behind(version) == len(behind)
            assert pool.num_ready_behind(version) == len([g for g in behind if g in shadow.ready])
            if version < shadow.version:
                assert sorted(pool.groups_behind(version)) == sorted(behind)
