"""Scheduling policies: pure rules `decide(view, now) -> actions`, composed of independent parts."""
