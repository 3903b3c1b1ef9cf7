"""The limits that `auto` keeps where the config names none, and where it does."""

import pytest

from gruppetto.auto.settings import auto_settings
from gruppetto.config.loader import load
from gruppetto.scheduler.beliefs.rule import Limits


def limits(*overrides, turns=False):
    config = load(["sim/family-b"], ["run.dir=unused", "scheduler.type=auto", *overrides]).config
    return auto_settings(config, turns=turns, kv_kept=False, waits=True).limits


def test_by_itself_it_is_on_policy_masks_and_does_not_censor():
    assert limits() == Limits(max_staleness=0, allow_mask=True, allow_censoring=False, max_waste=0.35)


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("scheduler.max_staleness=3", "max_staleness", 3),
        ("scheduler.allow_mask=false", "allow_mask", False),
        ("scheduler.allow_censoring=true", "allow_censoring", True),
        ("scheduler.max_waste=0.1", "max_waste", 0.1),
        ("scheduler.kv_pool=true", "pool", True),
        ("run.placement=disaggregated", "disaggregated", True),
    ],
)
def test_a_limit_of_the_user_stands(setting, name, value):
    assert getattr(limits(setting), name) == value
    assert getattr(limits(), name) != value


def test_with_tool_calls_it_is_an_agentic_run():
    assert limits(turns=True).agentic
