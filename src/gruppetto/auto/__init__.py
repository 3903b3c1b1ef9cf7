"""`auto`: measures a run, forecasts its next steps under a few scheduling policies, and takes the best."""
