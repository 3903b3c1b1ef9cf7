"""Agents whose contexts grow until all of them together are twice what the KV holds."""

from types import SimpleNamespace

from scheduler.fleet import Source
from scheduler.stages import Tool
from scheduler.test_loop import run_steps

from gruppetto.agents.base import Observation
from gruppetto.clock import run_virtual
from gruppetto.engines.base import Sampling
from gruppetto.ledger.engine import EngineModel
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimReward
from gruppetto.types import NO_VERSION, Score, Segment, TokenKind

AGENTS, TURNS, TURN, SAID, PROMPT, POOL = 64, 32, 80, 20, 8, 100_000


def grown(placing):
    """A step of agents that grow by 100 tokens a turn: the tokens that were prefilled more than once."""

    async def main():
        model = EngineModel(slots=AGENTS, base_s=0.01, row_s=1e-4, prefill_token_s=1e-4, kv_capacity=POOL)
        engine = SimEngine("e0", length_of=lambda r: r.made + TURN, model=model, context=PROMPT + TURNS * 100 + 50)
        settings = LoopSettings(
            batch_groups=AGENTS // 8,
            group_size=8,
            max_tokens=TURNS * TURN,
            context=PROMPT + TURNS * 100 + 50,
            sampling=Sampling(max_tokens=1),
            timeout_s=1e6,
            stall_s=1e7,
        )
        said = Segment(TokenKind.ENVIRONMENT, NO_VERSION, range(SAID), [0.0] * SAID)
        source = Source(SimpleNamespace(limit=None, tasks=1 << 30, prompt=lambda task: PROMPT))
        reward = SimReward(lambda rollout: Score(reward=float(rollout.member)))
        tool = Tool(lambda rollout: Observation((said,), False, 0.5))
        policy = Composed("grown", placing=placing)
        loop = RolloutLoop(settings, policy, [engine], reward, source, NullRecorder(), tool)
        await engine.start()
        (batch,) = await run_steps(loop, [engine], 1)
        assert {m.tokens for group in batch for m in group.members} == {TURNS * TURN}
        return engine.stats().prefill_tokens_total

    return run_virtual(main()) - AGENTS * (PROMPT + (TURNS - 1) * SAID)


def test_holding_room_for_those_in_a_tool_call_saves_most_of_what_is_computed_twice():
    left_to_the_engine = grown(Placing())
    held = grown(Placing(count_kv=True, hold=True))
    assert left_to_the_engine > 4 * AGENTS * TURNS * TURN  # each context several times over
    assert held < 0.4 * left_to_the_engine
