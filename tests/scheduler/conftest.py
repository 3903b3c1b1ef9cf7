"""Hypothesis profiles: the default one is quick; `glance` is for a run beside a whole one; `soak`
(HYPOTHESIS_PROFILE=soak, make soak) takes one core for about two hours: 100,000 whole runs, 2,942 programs of 150 steps
for the pool machine, as many examples of all else."""

import os

from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

settings.register_profile("quick", max_examples=60, stateful_step_count=40, derandomize=True, database=None, **QUIET)
settings.register_profile("glance", max_examples=6, stateful_step_count=40, derandomize=True, database=None, **QUIET)
settings.register_profile("soak", max_examples=2942, stateful_step_count=150, **QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
