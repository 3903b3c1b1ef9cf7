"""From a config to the limits that `auto` keeps."""

from __future__ import annotations

from gruppetto.auto.chooser import AutoSettings
from gruppetto.config.schema import Config
from gruppetto.scheduler.beliefs.rule import Limits


def auto_settings(config: Config, *, turns: bool, kv_kept: bool, waits: bool) -> AutoSettings:
    """`turns`: rollouts have tool calls; `kv_kept`: KV outlives a publish; `waits`: a decision waits for its forecast.
    Without `max_staleness` it stays strictly on-policy."""
    scheduler = config.scheduler
    disaggregated = config.run.placement == "disaggregated"
    return AutoSettings(
        limits=Limits(
            max_staleness=scheduler.max_staleness or 0,
            allow_mask=scheduler.allow_mask is not False,
            allow_censoring=bool(scheduler.allow_censoring),
            max_waste=0.35 if scheduler.max_waste is None else scheduler.max_waste,
            agentic=turns,
            pool=bool(scheduler.kv_pool),
            disaggregated=disaggregated,
        ),
        turns=turns,
        kv_kept=kv_kept,
        seed=config.run.seed,
        deterministic=waits,
    )
