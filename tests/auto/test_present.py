"""Where a forecast begins: a pool filled from another's state has what scheduling policies see of it."""

from gruppetto.auto.present import fill, take
from gruppetto.clock import run_virtual
from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.pool import Pool
from gruppetto.types import FinishReason, Score, Segment, Task, TokenKind


def pool_of():
    return Pool(batch_groups=2, group_size=3, engines=[EngineSeat("e0", 0, 8, 8)], max_tokens=100)


def finish(pool, rollout, tokens, version):
    pool.start(rollout, "e0", 0.0)
    pool.add_tokens(rollout, [Segment(TokenKind.MODEL, version, range(tokens), range(tokens))])
    pool.finish(rollout, FinishReason.STOP, 1.0)
    pool.score(rollout, Score(reward=1.0))


def test_a_filled_pool_is_the_one_it_was_taken_from():
    pool = pool_of()
    first, second, third = (pool.launch(Task(id=f"t{i}", prompt_ids=range(4))) for i in range(3))
    for member, tokens in enumerate((10, 20, 30)):
        finish(pool, f"g1.{member}", tokens, 0)
    pool.make_ready(second.id)
    finish(pool, "g0.1", 40, 0)
    pool.start("g0.2", "e0", 0.0)
    pool.add_tokens("g0.2", [Segment(TokenKind.MODEL, 0, range(5), range(5))])
    pool.park("g0.2", 1.0)
    pool.put_off(Task(id="late", prompt_ids=range(4)))
    pool.publish(3)

    async def taken():
        return take(pool, 0.0)

    present = run_virtual(taken())
    other = pool_of()
    fill(other, present, lambda gid, live: Task(id=f"now:{gid}", prompt_ids=range(live.prompt)))

    def seen(one):
        return sorted(
            (g.finished, round(g.log_sum, 9), g.longest, g.open, g.oldest or 0, [m.tokens for m in g.members])
            for g in one.groups.values()
        )

    assert other.version == 3
    assert (first.finished, first.longest) == (1, 40)
    assert seen(other) == seen(pool)
    assert (other.num_ready, present.deferred) == (1, 1)
    assert [entry.tokens for entry in other.queue()] == [entry.tokens for entry in pool.queue()]
    assert third.finished == 0
