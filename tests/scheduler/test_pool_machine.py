"""The pool against a second, plain account of it, under every order of transitions that hypothesis can think of."""

import json
from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler.shadow import FINAL, STARTABLE, Shadow, ShadowPool

from gruppetto.scheduler.pool import Pool, TransitionError
from gruppetto.scheduler.snapshot import restore, snapshot
from gruppetto.types import DropReason, FinishReason, RolloutState, Score, Segment, Task, TokenKind

State = RolloutState
ENGINES = (("e0", 3), ("e1", 2), ("e2", 0))
BATCH_GROUPS, GROUP_SIZE = 2, 3
PICK = st.integers(0, 1 << 20)
RUN = st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([TokenKind.MODEL, TokenKind.ENVIRONMENT]))


def fresh_pool():
    return Pool(batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, engines=ENGINES)


def picture(pool):
    """Everything that can be seen of a pool."""
    return {
        "version": pool.version,
        "training": pool.training,
        "running": pool.num_running,
        "census": repr(pool.census),
        "queue": [r.id for r in pool.queue()],
        "ready": list(pool.ready(1000)),
        "seats": [(s.name, s.capacity, s.load) for s in pool._seats.values()],
        "open": [s.name for s in pool.seats()],
        "rollouts": [repr(r) for r in pool.rollouts.values()],
        "groups": [(g.id, g.open, g.oldest, g.ready_order, repr(g.members)) for g in pool.groups.values()],
        "behind": [(pool.num_behind(v), pool.num_ready_behind(v)) for v in range(-1, pool.version + 2)],
    }


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool, self.shadow = fresh_pool(), ShadowPool()
        self.taken = []
        self.now = 0.0
        self.publish(3)
        for prompt in range(3):
            self.launch(prompt)

    # -- candidates ---------------------------------------------------------------------------------------------------

    def pick(self, number, *states):
        names = self.shadow.ids(*states)
        return names[number % len(names)]

    def open_engines(self):
        load = [r.engine for r in self.shadow.rollouts.values() if r.engine]
        return [name for name, size in ENGINES if name not in self.shadow.dead and load.count(name) < size]

    def complete(self):
        return [g for g in self.shadow.live_groups() if g not in self.shadow.ready and not self.shadow.is_open(g)]

    def droppable(self):
        groups = self.shadow.live_groups()
        return [g for g in groups if all(r.state is not State.RUNNING for r in self.shadow.members(g))]

    def drop(self, row, reason):
        row.state, row.reason = State.DROPPED, reason

    # -- a rollout's life ---------------------------------------------------------------------------------------------

    @rule(prompt=st.integers(0, 4))
    def launch(self, prompt):
        group = self.pool.launch(Task(id="t", prompt_ids=range(prompt), extra={"a": 1}))
        for member in group.members:
            self.shadow.rollouts[member.id] = Shadow(group.id, member.member)

    @precondition(lambda self: self.shadow.ids(*STARTABLE) and self.open_engines())
    @rule(number=PICK, seat=PICK)
    def start(self, number, seat):
        name, engines = self.pick(number, *STARTABLE), self.open_engines()
        engine = engines[seat % len(engines)]
        self.pool.start(name, engine, self.now)
        self.shadow.rollouts[name].state, self.shadow.rollouts[name].engine = State.RUNNING, engine

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK, runs=st.lists(RUN, max_size=3))
    def add_tokens(self, number, runs):
        name = self.pick(number, State.RUNNING)
        row = self.shadow.rollouts[name]
        segments = []
        for back, count, kind in runs:
            version = max(0, self.pool.version - back)
            ids, logprobs = array("i", range(count)), array("f", [-0.5]) * count
            segments.append(Segment(kind, version, ids, logprobs))
            if count and kind is TokenKind.MODEL:
                row.tokens += count
                row.oldest = version if row.oldest is None else min(version, row.oldest)
        self.pool.add_tokens(name, segments)

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK)
    def park(self, number):
        name = self.pick(number, State.RUNNING)
        self.pool.park(name, self.now)
        row = self.shadow.rollouts[name]
        row.state, row.engine = State.PARKED if row.tokens else State.QUEUED, None
        row.arrival = self.shadow.tick()

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK, reason=st.sampled_from(FinishReason))
    def finish(self, number, reason):
        name = self.pick(number, State.RUNNING)
        self.pool.finish(name, reason, self.now)
        self.shadow.rollouts[name].state, self.shadow.rollouts[name].engine = State.FINISHED, None

    @precondition(lambda self: self.shadow.ids(State.FINISHED))
    @rule(number=PICK, reward=st.sampled_from([None, 0.0, 1.0, 0.25]))
    def score(self, number, reward):
        name = self.pick(number, State.FINISHED)
        row = self.shadow.rollouts[name]
        group = self.pool.score(name, Score(reward=reward, error=None if reward is not None else "timeout"))
        assert group.id == row.group
        if reward is None:
            self.drop(row, DropReason.FAILED)
        else:
            row.state, row.reward = State.SCORED, reward

    @precondition(lambda self: self.shadow.ids(State.FINISHED, *STARTABLE))
    @rule(number=PICK)
    def fail(self, number):
        name = self.pick(number, State.FINISHED, *STARTABLE)
        self.pool.fail(name, "why")
        self.drop(self.shadow.rollouts[name], DropReason.FAILED)

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK)
    def fail_running(self, number):
        name = self.pick(number, State.RUNNING)
        self.pool.fail_running(name, "why", self.now)
        self.shadow.rollouts[name].engine = None
        self.drop(self.shadow.rollouts[name], DropReason.FAILED)

    @precondition(lambda self: self.shadow.ids(*STARTABLE) and self.open_engines())
    @rule(number=PICK, reward=st.sampled_from([0.0, 1.0]), count=st.integers(0, 2), back=st.integers(0, 3))
    def hurry(self, number, reward, count, back):
        """Brings the startable members of one group to their scores, and it to ready, as far as seats allow."""
        group = self.shadow.rollouts[self.pick(number, *STARTABLE)].group
        for name in [n for n, r in self.shadow.rollouts.items() if r.group == group and r.state in STARTABLE]:
            row = self.shadow.rollouts[name]
            version = max(0, self.pool.version - back)
            self.pool.start(name, self.open_engines()[0], self.now)
            segment = Segment(TokenKind.MODEL, version, array("i", range(count)), array("f", [0.5]) * count)
            self.pool.add_tokens(name, [segment])
            self.pool.finish(name, FinishReason.STOP, self.now)
            self.pool.score(name, Score(reward=reward))
            row.state, row.reward, row.tokens = State.SCORED, reward, row.tokens + count
            if count:
                row.oldest = version if row.oldest is None else min(version, row.oldest)
        if group in self.complete():
            self.become_ready(group)

    @precondition(lambda self: self.open_engines() and len(self.shadow.ids(*STARTABLE)) > 1)
    @rule(number=PICK, count=st.integers(0, 2), back=st.integers(0, 3))
    def touch(self, number, count, back):
        """Starts a rollout, makes a few tokens and parks it, which moves it in the queue."""
        name = self.pick(number, *STARTABLE)
        self.pool.start(name, self.open_engines()[0], self.now)
        row, version = self.shadow.rollouts[name], max(0, self.pool.version - back)
        segment = Segment(TokenKind.MODEL, version, array("i", range(count)), array("f", [0.5]) * count)
        self.pool.add_tokens(name, [segment])
        self.pool.park(name, self.now)
        if count:
            row.oldest = version if row.oldest is None else min(version, row.oldest)
        row.tokens, row.arrival = row.tokens + count, self.shadow.tick()
        row.state = State.PARKED if row.tokens else State.QUEUED

    # -- a group's life -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.complete())
    @rule(number=PICK)
    def make_ready(self, number):
        groups = self.complete()
        self.become_ready(groups[number % len(groups)])

    def become_ready(self, group):
        self.pool.make_ready(group)
        if self.shadow.age(group) is None:
            self.shadow.aged[group] = self.shadow.version
        self.shadow.ready[group] = self.shadow.tick()
        self.move_usable(group, State.READY)

    def move_usable(self, group, state):
        for row in self.shadow.members(group):
            if row.reward is not None:
                row.state = state

    @precondition(lambda self: self.droppable())
    @rule(number=PICK, reason=st.sampled_from([r for r in DropReason if r is not DropReason.FAILED]))
    def drop_group(self, number, reason):
        groups = self.droppable()
        group = groups[number % len(groups)]
        self.pool.drop_group(group, reason)
        self.shadow.ready.pop(group, None)
        self.shadow.gone.add(group)
        for row in self.shadow.members(group):
            if row.state not in FINAL:
                self.drop(row, reason)

    @precondition(lambda self: self.shadow.ready and not self.pool.training)
    @rule(count=st.integers(1, 3), number=PICK)
    def take_batch(self, count, number):
        start = number % len(self.shadow.ready)
        groups = self.shadow.ready_order()[start : start + count]
        self.taken = self.pool.take_batch(groups)
        assert [g.id for g in self.taken] == groups
        self.shadow.out = [self.shadow.ready.pop(group) for group in groups]
        for group in groups:
            self.shadow.gone.add(group)
            self.move_usable(group, State.TRAINED)

    @precondition(lambda self: self.pool.training)
    @rule()
    def give_back(self):
        self.pool.give_back(self.taken)
        for group, order in zip(self.taken, self.shadow.out, strict=True):
            self.shadow.gone.discard(group.id)
            self.shadow.ready[group.id] = order
            self.move_usable(group.id, State.READY)
        self.taken = []

    @rule(more=st.integers(1, 2))
    def publish(self, more):
        self.shadow.version += more
        self.pool.publish(self.shadow.version)
        self.taken = []

    # -- the machine's life -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.shadow.dead) < 1)
    @rule(number=PICK)
    def remove_engine(self, number):
        name = ENGINES[number % len(ENGINES)][0]
        self.pool.remove_engine(name)
        self.shadow.dead.add(name)

    @precondition(lambda self: not self.shadow.ids(State.RUNNING) and not self.pool.training)
    @rule()
    def snapshot_and_restore(self):
        state = json.loads(json.dumps(snapshot(self.pool)))
        before, self.pool = picture(self.pool), fresh_pool()
        restore(self.pool, state)
        assert json.loads(json.dumps(snapshot(self.pool))) == state
        after = picture(self.pool)
        assert {k: after[k] for k in ("version", "queue", "ready", "behind")} == {
            k: before[k] for k in ("version", "queue", "ready", "behind")
        }
        self.shadow.dead.clear()

    @rule(op=st.integers(0, 13), number=PICK, seat=st.sampled_from(["e0", "e1", "e2", "e9"]))
    def illegal(self, op, number, seat):
        """Calls one transition wherever it is not allowed: it is refused and changes nothing."""
        names = (self.shadow.ids(*STARTABLE) if op == 0 else []) or [*self.shadow.rollouts, "g999.0"]
        name = names[number % len(names)]
        group = number % (self.pool.next_group_id + 2)
        row = self.shadow.rollouts.get(name)
        state = row.state if row else None
        calls = [
            (state in STARTABLE and seat in self.open_engines(), lambda: self.pool.start(name, seat, 0.0)),
            (state is State.RUNNING, lambda: self.pool.add_tokens(name, [])),
            (state is State.RUNNING, lambda: self.pool.park(name, 0.0)),
            (state is State.RUNNING, lambda: self.pool.finish(name, FinishReason.STOP, 0.0)),
            (state is State.RUNNING, lambda: self.pool.fail_running(name, "", 0.0)),
            (state is State.FINISHED, lambda: self.pool.score(name, Score(reward=1.0))),
            (state in {State.FINISHED, *STARTABLE}, lambda: self.pool.fail(name, "")),
            (group in self.complete(), lambda: self.pool.make_ready(group)),
            (group in self.droppable(), lambda: self.pool.drop_group(group, DropReason.STALE)),
            (False, lambda: self.pool.take_batch([*self.shadow.ready_order(), group])),
            (not self.shadow.ready, lambda: self.pool.take_batch(2 * self.shadow.ready_order())),
            (self.pool.training, lambda: self.pool.give_back([])),
            (False, lambda: self.pool.publish(self.pool.version)),
            (not (self.pool.num_running or self.pool.training), lambda: snapshot(self.pool)),
        ]
        legal, call = calls[op]
        if not legal:
            before = picture(self.pool)
            with pytest.raises(TransitionError):
                call()
            assert picture(self.pool) == before

    # -- after every rule ---------------------------------------------------------------------------------------------

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
        seen = {n: (r.state, r.tokens, r.oldest, r.engine) for n, r in self.pool.rollouts.items()}
        rows = self.shadow.rollouts.items()
        assert seen == {n: (r.state, r.tokens, r.oldest, r.engine) for n, r in rows if r.state not in FINAL}
        for entry in self.pool.rollouts.values():
            assert sum(len(s) for s in entry.segments if s.kind is TokenKind.MODEL) == entry.tokens
        assert sorted(self.pool.groups) == sorted(self.shadow.live_groups())
        for group in self.pool.groups.values():
            states = [self.shadow.rollouts[m.id].state for m in group.members]
            assert [m.state for m in group.members] == states
            assert (group.open == 0) == (not self.shadow.is_open(group.id))

    @invariant()
    def counts_and_seats_are_right(self):
        pool, shadow = self.pool, self.shadow
        running = shadow.ids(State.RUNNING)
        assert pool.num_running == len(running)
        assert pool.num_ready == len(shadow.ready)
        assert pool.num_live == len(shadow.live_groups()) - len(shadow.ready)
        assert pool.num_queued == len(shadow.queue())
        loads = {name: [shadow.rollouts[n].engine for n in running].count(name) for name, _ in ENGINES}
        assert {s.name: s.load for s in pool._seats.values()} == loads
        assert [s.name for s in pool.seats()] == self.open_engines()
        assert pool.serving == [n for n, size in ENGINES if size and n not in shadow.dead]

    @invariant()
    def orders_and_ages_are_right(self):
        pool, shadow = self.pool, self.shadow
        assert [r.id for r in pool.queue()] == shadow.queue()
        assert list(pool.ready(1000)) == shadow.ready_order()
        assert list(pool.ready(1)) == shadow.ready_order()[:1]
        groups = shadow.live_groups()
        for version in range(-1, shadow.version + 2):
            behind = [g for g in groups if shadow.age_now(g) <= version]
            assert pool.num_behind(version) == len(behind)
            assert pool.num_ready_behind(version) == len([g for g in behind if g in shadow.ready])
            if version < shadow.version:
                assert sorted(pool.groups_behind(version)) == sorted(behind)


TestPoolMachine = PoolMachine.TestCase
