"""A trainer whose first forward waits for the test."""

import threading


def held_in_its_first_micro_batch(trainer):
    """(event that it has begun, event to go on)."""
    begun, hold = threading.Event(), threading.Event()

    def forward(*_):
        begun.set()
        assert hold.wait(60)

    trainer._model.model.register_forward_pre_hook(forward)
    return begun, hold
