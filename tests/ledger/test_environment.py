"""The account of environments: the figures worked by hand, and what must hold whatever the numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.environment import Environment

SWE = Environment(tasks=500, group_size=8, turns=20, execution_s=30)


def test_500_tasks_of_8_rollouts_with_20_test_runs() -> None:
    assert SWE.executions().value == 80_000
    assert SWE.cpu_hours().value == pytest.approx(666.67, abs=0.01)
    assert SWE.busy(1800).value == 1334
    live = Environment(tasks=500, group_size=8, turns=20, execution_s=30, model_s=400)
    assert live.rollout_s().value == 1000
    assert live.live(1800).value == 2222
    assert live.needed(1800).value == 2222
    assert live.live(1800).formula == "4,000 rollouts x 1,000 s / 1,800 s"


def test_a_stateless_environment_needs_only_the_busy_ones() -> None:
    stateless = Environment(tasks=500, group_size=8, turns=20, execution_s=30, model_s=400, stateful=False)
    assert stateless.needed(1800).value == 1334


def test_images_are_pulled_by_every_host_that_runs_them() -> None:
    env = Environment(
        tasks=500, group_size=8, turns=1, execution_s=1, image_bytes=2e9, images=500, hosts=4, cache_hits=0.9
    )
    assert env.image_traffic().value == pytest.approx(2e9 * 500 * 4 * 0.1)
    many = Environment(tasks=500, group_size=8, turns=1, execution_s=1, image_bytes=2e9, images=500, hosts=100)
    assert many.image_traffic().value == pytest.approx(2e9 * 500 * 8), (
        "an image is no more often used than rollouts are"
    )


def test_too_few_sandboxes_keep_the_gpus_waiting() -> None:
    env = Environment(tasks=500, group_size=8, turns=20, execution_s=30, model_s=400)
    assert env.wall_s(2222).value == pytest.approx(1800, rel=0.001)
    assert env.idle_gpu_s(2222, 1900, 64).value == 0
    assert env.idle_gpu_s(1111, 1800, 64).value == pytest.approx((4000 * 1000 / 1111 - 1800) * 64)


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(UserError, match="write 600 s or more"):
        SWE.busy(300)
    with pytest.raises(UserError, match="write 1 or more"):
        SWE.wall_s(0)
    with pytest.raises(UserError, match="cache_hits = 2"):
        Environment(tasks=1, group_size=1, turns=1, execution_s=1, cache_hits=2)
    with pytest.raises(UserError, match="tasks = 0"):
        Environment(tasks=0, group_size=1, turns=1, execution_s=1)


@given(
    tasks=st.integers(1, 1000),
    group=st.integers(1, 64),
    turns=st.floats(1, 100),
    each=st.floats(0.1, 600),
    model=st.floats(0, 5000),
    slack=st.floats(1, 50),
)
def test_enough_sandboxes_meet_the_wall_time_and_more_are_never_slower(
    tasks: int, group: int, turns: float, each: float, model: float, slack: float
) -> None:
    env = Environment(tasks=tasks, group_size=group, turns=turns, execution_s=each, model_s=model)
    wall = env.rollout_s().value * slack
    wanted = env.live(wall).value
    assert env.busy(wall).value <= wanted + 1
    found = env.wall_s(int(wanted) + 1).value
    assert found <= wall * 1.001
    assert env.wall_s(int(wanted) + 2).value <= found
    assert env.wall_s(max(1, int(wanted) // 2)).value >= found
