"""Simulated stages on a virtual clock: one more set of implementations of the same contracts."""
