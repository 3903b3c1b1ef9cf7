"""The pool against a second, plain account of it, under every order of transitions that hypothesis can think of."""

import json
from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from scheduler.pool_checks import ENGINES, HeldToTheShadow, picture
from scheduler.shadow import AWAY, FINAL, STARTABLE, Shadow, ShadowPool

from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.memory import LengthMemory
from gruppetto.scheduler.pool import Pool, TransitionError
from gruppetto.scheduler.snapshot import restore, snapshot
from gruppetto.types import NO_VERSION, DropReason, FinishReason, RolloutState, Score, Segment, Task, TokenKind

pytestmark = pytest.mark.timeout(14400)
State, BATCH_GROUPS, GROUP_SIZE = RolloutState, 2, 3
PICK = st.integers(0, 1 << 20)
KIND = st.sampled_from([TokenKind.MODEL, TokenKind.ENVIRONMENT])
RUN = st.tuples(st.integers(0, 3), st.integers(0, 9), KIND)
GIVEN_UP = st.sampled_from([r for r in DropReason if r is not DropReason.FAILED])


def fresh_pool():
    seats = [EngineSeat(n, i, slots, size, 500) for i, (n, (slots, size)) in enumerate(ENGINES.items())]
    return Pool(batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, engines=seats)


def task(prompt):
    return Task(id="t", prompt_ids=range(prompt), extra={"a": 1})


def segment(kind, version, count):
    return Segment(
        kind, version if kind is TokenKind.MODEL else NO_VERSION, array("i", range(count)), array("f", [-0.5]) * count
    )


class PoolMachine(HeldToTheShadow, RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool, self.shadow = fresh_pool(), ShadowPool(needed=GROUP_SIZE)
        self.fresh_engines()
        self.now = 0.0
        self.publish(3)
        for prompt in range(3):
            self.launch(prompt, 0, False)

    def fresh_engines(self):
        self.shadow.slots = {name: slots for name, (slots, _) in ENGINES.items()}
        self.shadow.capacity = {name: size for name, (_, size) in ENGINES.items()}
        self.shadow.kept_out = set()

    def pick(self, number, *states):
        names = self.shadow.ids(*states)
        return names[number % len(names)], self.shadow.rollouts[names[number % len(names)]]

    def requeue(self, row, resumed):
        row.state, row.resumed = State.PARKED if row.tokens else State.QUEUED, resumed
        row.arrival, row.at_chunk = self.shadow.tick(), False

    # -- a rollout's life ---------------------------------------------------------------------------------------------

    @rule(prompt=st.integers(0, 4), extra=st.sampled_from([0, 0, 1, 2]), long=st.booleans())
    def launch(self, prompt, extra, long):
        group = self.pool.launch(task(prompt), extra=extra, long=long)
        self.shadow.long |= {group.id} if long else set()
        for member in group.members:
            self.shadow.rollouts[member.id] = Shadow(group.id, member.member, prompt)

    def begin(self, name, engine, may_make=0):
        row = self.shadow.rollouts[name]
        self.pool.start(name, engine, self.now, may_make)
        row.state, row.engine, row.home, row.at_chunk = State.RUNNING, engine, None, False
        row.reserved, row.started = row.context + may_make, self.shadow.version
        self.shadow.age(row.group, self.shadow.version)

    @precondition(lambda self: self.shadow.ids(*STARTABLE) and self.shadow.open_engines())
    @rule(number=PICK, seat=PICK, may_make=st.integers(0, 90))
    def start(self, number, seat, may_make):
        engines = self.shadow.open_engines()
        self.begin(self.pick(number, *STARTABLE)[0], engines[seat % len(engines)], may_make)

    @precondition(lambda self: self.shadow.ids(State.RUNNING) or self.shadow.ids(State.RUNNING, doomed=True))
    @rule(number=PICK, runs=st.lists(RUN, max_size=3))
    def add_tokens(self, number, runs):
        names = self.shadow.ids(State.RUNNING) + self.shadow.ids(State.RUNNING, doomed=True)
        self.made(names[number % len(names)], runs)

    def made(self, name, runs):
        row, segments = self.shadow.rollouts[name], []
        for back, count, kind in runs:
            version = max(0, self.pool.version - back)
            segments.append(segment(kind, version, count))
            if kind is not TokenKind.MODEL:
                row.others += count
            elif count:
                row.tokens += count
                row.oldest = version if row.oldest is None else min(version, row.oldest)
                if row.doomed is None:
                    self.shadow.age(row.group, version)
        self.pool.add_tokens(name, segments)

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK, keeps_kv=st.booleans())
    def park(self, number, keeps_kv):
        name, row = self.pick(number, State.RUNNING)
        self.pool.park(name, self.now, keeps_kv=keeps_kv)
        self.shadow.leave(row, keeps_kv=keeps_kv)
        self.requeue(row, row.tokens > 0)

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK)
    def lose(self, number):
        name, row = self.pick(number, State.RUNNING)
        self.pool.lose(name, self.now)
        self.shadow.leave(row)
        self.requeue(row, row.tokens > 0)

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK)
    def end_chunk(self, number):
        name, row = self.pick(number, State.RUNNING)
        self.pool.end_chunk(name, self.now)
        self.shadow.leave(row, keeps_kv=True)
        row.state, row.at_chunk = State.PARKED if row.tokens else State.QUEUED, True

    @precondition(lambda self: self.shadow.at_chunk())
    @rule(number=PICK)
    def yield_(self, number):
        names = self.shadow.at_chunk()
        name = names[number % len(names)]
        self.give_up_slot(name, self.shadow.rollouts[name])

    def give_up_slot(self, name, row):
        """What it left behind may be kept for it or let go; the engines' account must say which."""
        self.pool.yield_(name)
        kept = self.pool.rollouts[name].reserved
        assert kept in (0, row.reserved)
        row.reserved = kept
        self.requeue(row, row.oldest is not None and row.oldest < self.shadow.version)

    @precondition(lambda self: self.shadow.ids(State.RUNNING))
    @rule(number=PICK)
    def wait(self, number):
        name, row = self.pick(number, State.RUNNING)
        self.pool.wait(name, self.now)
        self.shadow.leave(row, keeps_kv=True)
        row.state = State.WAITING

    @precondition(lambda self: self.shadow.ids(State.WAITING))
    @rule(number=PICK, count=st.integers(0, 9))
    def answered(self, number, count):
        name, row = self.pick(number, State.WAITING)
        self.pool.answered(name, [segment(TokenKind.ENVIRONMENT, 0, count)], 1.0)
        row.others += count
        self.requeue(row, True)

    @precondition(lambda self: self.shadow.ids(*AWAY))
    @rule(number=PICK, reason=st.sampled_from(FinishReason))
    def finish(self, number, reason):
        name, row = self.pick(number, *AWAY)
        self.pool.finish(name, reason, self.now)
        row.state, row.engine, row.home, row.reserved = State.FINISHED, None, None, 0

    @precondition(lambda self: self.shadow.ids(State.FINISHED))
    @rule(number=PICK, reward=st.sampled_from([None, 0.0, 1.0, 0.25]))
    def score(self, number, reward):
        name, row = self.pick(number, State.FINISHED)
        group = self.pool.score(name, Score(reward=reward, error=None if reward is not None else "timeout"))
        assert group.id == row.group
        if reward is None:
            self.shadow.drop(row, DropReason.FAILED)
        else:
            row.state, row.reward = State.SCORED, reward

    @precondition(lambda self: self.shadow.ids(State.FINISHED, *AWAY, *STARTABLE))
    @rule(number=PICK)
    def fail(self, number):
        name, row = self.pick(number, State.FINISHED, *AWAY, *STARTABLE)
        self.pool.fail(name, "why", self.now)
        self.shadow.drop(row, DropReason.FAILED)

    @precondition(lambda self: self.shadow.all_doomed())
    @rule(number=PICK)
    def bury(self, number):
        names = self.shadow.all_doomed()
        name = names[number % len(names)]
        self.pool.bury(name, self.now)
        row = self.shadow.rollouts[name]
        self.shadow.drop(row, row.doomed)

    @precondition(lambda self: self.shadow.ids(*STARTABLE) and self.shadow.open_engines())
    @rule(number=PICK, reward=st.sampled_from([0.0, 1.0]), count=st.integers(0, 2), back=st.integers(0, 3))
    def hurry(self, number, reward, count, back):
        """Brings the startable members of one group to their scores, and it to ready, as far as seats allow."""
        group = self.pick(number, *STARTABLE)[1].group
        for name in [n for n, r in self.shadow.rollouts.items() if r.group == group and r.state in STARTABLE]:
            self.begin(name, self.shadow.open_engines()[0])
            self.made(name, [(back, count, TokenKind.MODEL)])
            self.pool.finish(name, FinishReason.STOP, self.now)
            self.pool.score(name, Score(reward=reward))
            row = self.shadow.rollouts[name]
            row.state, row.reward, row.engine, row.reserved = State.SCORED, reward, None, 0
        if group in self.shadow.complete():
            self.become_ready(group)

    @precondition(lambda self: self.shadow.open_engines() and len(self.shadow.ids(*STARTABLE)) > 1)
    @rule(number=PICK, count=st.integers(0, 2), back=st.integers(0, 3))
    def touch(self, number, count, back):
        """Starts a rollout, makes a few tokens and parks it, which moves it in the queue."""
        name, row = self.pick(number, *STARTABLE)
        self.begin(name, self.shadow.open_engines()[0])
        self.made(name, [(back, count, TokenKind.MODEL)])
        self.pool.park(name, self.now)
        self.shadow.leave(row)
        self.requeue(row, row.tokens > 0)

    @precondition(lambda self: self.shadow.open_engines() and len(self.shadow.ids(*STARTABLE)) > 1)
    @rule(number=PICK, count=st.integers(0, 2), back=st.integers(0, 1))
    def make_a_chunk(self, number, count, back):
        """Starts a rollout, which makes a chunk and gives its slot up."""
        name, row = self.pick(number, *STARTABLE)
        self.begin(name, self.shadow.open_engines()[0])
        self.made(name, [(back, count, TokenKind.MODEL)])
        self.pool.end_chunk(name, self.now)
        self.shadow.leave(row, keeps_kv=True)
        self.give_up_slot(name, row)

    # -- a group's life -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.shadow.trimmable())
    @rule(number=PICK, then_ready=st.booleans())
    def trim(self, number, then_ready):
        groups = self.shadow.trimmable()
        group = groups[number % len(groups)]
        rows = [r for r in self.shadow.members(group) if r.state not in (State.SCORED, *FINAL)]
        away = self.pool.trim(group)
        assert sorted(m.member for m in away) == sorted(r.member for r in rows if r.state in AWAY)
        self.shadow.doom(rows, DropReason.SURPLUS)
        self.shadow.trimmed.add(group)
        if then_ready:
            self.become_ready(group)

    @precondition(lambda self: self.shadow.complete())
    @rule(number=PICK)
    def make_ready(self, number):
        groups = self.shadow.complete()
        self.become_ready(groups[number % len(groups)])

    def become_ready(self, group):
        self.pool.make_ready(group)
        self.shadow.age(group, self.shadow.age_now(group))
        self.shadow.ready[group] = self.shadow.tick()
        self.move_usable(group, State.READY)

    def move_usable(self, group, state):
        for row in self.shadow.members(group):
            if row.reward is not None:
                row.state = state

    @precondition(lambda self: self.shadow.live_groups())
    @rule(number=PICK, reason=GIVEN_UP)
    def drop_group(self, number, reason):
        groups = self.shadow.live_groups()
        group = groups[number % len(groups)]
        dropped, away = self.pool.drop_group(group, reason)
        rows = self.shadow.members(group)
        assert dropped.id == group
        assert sorted(m.member for m in away) == sorted(r.member for r in rows if r.state in AWAY)
        self.shadow.ready.pop(group, None)
        self.shadow.gone.add(group)
        self.shadow.doom(rows, reason)

    @precondition(lambda self: self.shadow.ready and not self.pool.training)
    @rule(count=st.integers(1, 3), number=PICK, close=st.booleans())
    def commit_or_close(self, count, number, close):
        start = number % len(self.shadow.ready)
        groups = self.shadow.ready_order()[start : start + count]
        taken = (self.pool.take_batch if close else self.pool.commit)(groups)
        assert [g.id for g in taken] == groups
        assert self.pool.training == close
        for group in groups:
            self.shadow.out[group] = self.shadow.ready.pop(group)
            self.shadow.gone.add(group)
            self.move_usable(group, State.TRAINED)

    @precondition(lambda self: self.shadow.out)
    @rule(number=PICK)
    def give_back(self, number):
        """A part, or all that is with the trainer."""
        groups = self.pool.committed[: number % len(self.pool.committed) + 1]
        self.pool.give_back(groups)
        for group in groups:
            self.shadow.gone.discard(group.id)
            self.shadow.ready[group.id] = self.shadow.out.pop(group.id)
            self.move_usable(group.id, State.READY)

    @rule(more=st.integers(1, 2))
    def publish(self, more):
        self.shadow.version += more
        self.pool.publish(self.shadow.version)
        self.shadow.out = {}
        for row in [self.shadow.rollouts[name] for name in self.shadow.queue()]:
            if row.tokens and not row.resumed:
                self.requeue(row, True)  # it has tokens of older weights: no longer among the new ones

    @rule(count=st.integers(1, 2))
    def put_off(self, count):
        for _ in range(count):
            self.pool.put_off(task(count))
            self.shadow.deferred.append((count, self.shadow.version))

    # -- the machine's life -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.shadow.serving()) > 1)
    @rule(number=PICK)
    def remove_engine(self, number):
        name = list(ENGINES)[number % len(ENGINES)]
        self.pool.seating.remove(name)
        self.shadow.capacity[name] = 0

    @rule(number=PICK, size=st.integers(2, 4))
    def restore_engine(self, number, size):
        name = list(ENGINES)[number % len(ENGINES)]
        self.pool.seating.restore(name, size)
        self.shadow.capacity[name] = size

    @rule(number=PICK, out=st.booleans())
    def keep_out(self, number, out):
        name = list(ENGINES)[number % len(ENGINES)]
        self.pool.seating.keep_out(name, out)
        (self.shadow.kept_out.add if out else self.shadow.kept_out.discard)(name)

    @rule()
    def forget_kv(self):
        self.pool.forget_kv()
        for row in self.shadow.rollouts.values():
            if row.home is not None:
                row.home, row.reserved = None, 0

    def at_rest(self):
        shadow = self.shadow
        return not (shadow.ids(State.RUNNING) or shadow.all_doomed() or shadow.at_chunk() or shadow.out)

    @precondition(lambda self: self.at_rest() and not self.pool.training)
    @rule()
    def snapshot_and_restore(self):
        state = json.loads(json.dumps(snapshot(self.pool)))
        self.pool.forget_kv()  # what is restored finds engines that hold nothing
        before, self.pool = picture(self.pool), fresh_pool()
        restore(self.pool, state, LengthMemory(1000, 4))
        assert json.loads(json.dumps(snapshot(self.pool))) == state
        after = picture(self.pool)
        for part in ("version", "queue", "ready", "behind", "counts", "deferred", "census"):
            assert after[part] == before[part], part
        self.fresh_engines()
        for row in self.shadow.rollouts.values():
            row.home, row.reserved = None, 0

    @rule(op=st.integers(0, 18), number=PICK, seat=st.sampled_from(["e0", "e1", "e2", "e9"]))
    def illegal(self, op, number, seat):
        """Calls one transition wherever it is not allowed: it is refused and changes nothing."""
        shadow, pool = self.shadow, self.pool
        names = (shadow.ids(*STARTABLE) if op == 0 else []) or [*shadow.rollouts, "g999.0"]
        name, group = names[number % len(names)], number % (pool.next_group_id + 2)
        row = shadow.rollouts.get(name)
        state = row.state if row else None
        calls = [
            (state in STARTABLE and seat in shadow.open_engines(), lambda: pool.start(name, seat, 0.0)),
            (state in AWAY, lambda: pool.add_tokens(name, [])),
            (state is State.RUNNING, lambda: pool.park(name, 0.0)),
            (state is State.RUNNING, lambda: pool.lose(name, 0.0)),
            (state is State.RUNNING, lambda: pool.end_chunk(name, 0.0)),
            (state is State.RUNNING, lambda: pool.wait(name, 0.0)),
            (state is State.WAITING, lambda: pool.answered(name, [], 0.0)),
            (bool(row and row.at_chunk), lambda: pool.yield_(name)),
            (state in AWAY, lambda: pool.finish(name, FinishReason.STOP, 0.0)),
            (state is State.FINISHED, lambda: pool.score(name, Score(reward=1.0))),
            (state in {State.FINISHED, *AWAY, *STARTABLE}, lambda: pool.fail(name, "")),
            (bool(row and row.doomed), lambda: pool.bury(name, 0.0)),
            (group in shadow.complete(), lambda: pool.make_ready(group)),
            (group in shadow.live_groups(), lambda: pool.drop_group(group, DropReason.STALE)),
            (False, lambda: pool.take_batch([*shadow.ready_order(), group])),
            (pool.training or not shadow.ready, lambda: pool.commit(2 * shadow.ready_order())),
            (not pool.groups, lambda: pool.give_back(list(pool.groups.values())[:1])),
            (False, lambda: pool.publish(pool.version)),
            (self.at_rest() and not pool.training, lambda: snapshot(pool)),
        ]
        legal, call = calls[op]
        if not legal:
            before = picture(pool)
            with pytest.raises(TransitionError):
                call()
            assert picture(pool) == before


TestPoolMachine = PoolMachine.TestCase
