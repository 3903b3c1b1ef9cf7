"""Rewards: from a finished rollout to a number, or to the reason there is none."""
