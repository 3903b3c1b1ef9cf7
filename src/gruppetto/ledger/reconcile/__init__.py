"""Forecast beside measured: what a run's stages took (`measured`), what the ledger's prices say of the same work
(`forecast`), the two side by side with what was off (`compare`), and where its machine-seconds went (`losses`)."""
