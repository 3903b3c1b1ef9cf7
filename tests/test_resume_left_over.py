"""A resume says what another policy has left too old: once, of the policy in force, and where the record keeps it."""

from dataclasses import asdict

import pytest
from controlled import PARTIAL, Run

from gruppetto.assemble import _resume
from gruppetto.auto.chooser import AutoSettings, Chooser
from gruppetto.clock import run_virtual
from gruppetto.scheduler.beliefs.rule import Choice, Limits
from gruppetto.scheduler.policies.composed import Composed

WAITING = Composed("waiting")
MASKING = Choice(depth=1.25, over_age="mask", order="fifo")


class Folder:
    """Takes away all that was recorded before the resume had ended."""

    def __init__(self, record):
        self._record = record

    def rewind(self, offsets):
        self._record.events.clear()


def said_on_resuming(tmp_path, policy, choice=None):
    """The notices of a run that takes up one without a bound, up to its first step."""
    first = Run(tmp_path, policy=PARTIAL)
    run_virtual(first.controller.run())
    assert first.loop.pool.num_behind(first.controller.version - 1)
    again = Run(tmp_path, policy=policy)
    again.trainer.version = first.controller.version
    if choice is not None:
        again.controller.stages.chooser = Chooser(AutoSettings(limits=Limits(allow_mask=True)), None, again.loop)
        again.controller.stages.chooser.load_state(asdict(choice))
    again.controller.steps = 0

    async def main():
        await _resume(again.controller, Folder(again.record))
        await again.controller.run()

    run_virtual(main())
    return [event["reason"] for event in again.kinds("notice") if "of another scheduling policy" in event["reason"]]


@pytest.mark.parametrize(
    ("policy", "choice", "notices"),
    [(WAITING, None, 1), (PARTIAL, None, 0), (WAITING, Choice(), 1), (WAITING, MASKING, 0)],
)
def test_it_is_said_once_of_what_is_followed(tmp_path, policy, choice, notices):
    said = said_on_resuming(tmp_path, policy, choice)
    assert len(said) == notices
    assert all("have tokens older than max_staleness = 0" in reason for reason in said)
