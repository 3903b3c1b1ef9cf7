"""Hypothesis profiles: the default one is quick, `soak` (HYPOTHESIS_PROFILE=soak, make soak) runs for many minutes."""

import os

from hypothesis import HealthCheck, settings

QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

settings.register_profile("quick", max_examples=60, stateful_step_count=40, derandomize=True, database=None, **QUIET)
settings.register_profile("soak", max_examples=4000, stateful_step_count=150, **QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
