"""The scheduler's rules that a forecast follows, as numbers: the ledger stands alone, so they stand here again.

A test holds each against the scheduler's own.
"""

CHUNK = 2048
"""Tokens that a rollout may make before it is placed again, where admission counts KV."""
HOLD = 0.9
"""Share of the KV that may be filled where rollouts wait for tools."""
FILLED = 0.95
"""The same for rollouts without a context on the engine, where nobody has tools: the others want to grow."""
TIMES_MORE = 3.0
"""What the next in the queue must have to do, of what is left of a rollout that would lose its context by leaving."""
PROBE_ICC = 0.2
"""Probes are worth their delay where siblings are at least so alike; below, rollouts run in the order of launch."""
PESSIMISTIC = 0.97
"""Quantile of the length that a rollout is taken to have, given its siblings."""
TRAINER_SHARE = 0.28
"""Share of a step in which a trainer beside the engines computes, above which rollouts run in the order of launch."""
