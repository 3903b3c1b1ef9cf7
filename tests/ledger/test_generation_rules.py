"""The forecast follows the scheduler's rules: the numbers that stand in both are the same."""

from gruppetto.ledger.generation import rules
from gruppetto.presets import CHUNK
from gruppetto.routing.rules import Rules
from gruppetto.scheduler.beliefs.posterior import PESSIMISTIC
from gruppetto.scheduler.policies.order import PROBE_ICC, TRAINER_SHARE
from gruppetto.scheduler.policies.placing import FILLED, TIMES_MORE


def test_rules_of_the_forecast_are_the_schedulers():
    ours = {name: value for name, value in vars(rules).items() if name.isupper()}
    assert ours == {
        "CHUNK": CHUNK,
        "HOLD": Rules().hold,
        "FILLED": FILLED,
        "TIMES_MORE": TIMES_MORE,
        "PROBE_ICC": PROBE_ICC,
        "PESSIMISTIC": PESSIMISTIC,
        "TRAINER_SHARE": TRAINER_SHARE,
    }
