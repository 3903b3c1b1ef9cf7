"""gruppetto: RL post-training in which nobody waits for the slowest rollout."""

__version__ = "0.1.0"
