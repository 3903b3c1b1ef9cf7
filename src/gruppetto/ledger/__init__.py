"""The ledger: what a step costs in FLOPs, bytes, memory and seconds, before anything runs.

`models` counts a model from its config, `machines` knows GPUs and what share of their peaks is reached, `lengths` and
`generation` forecast rollouts with their tail, `layouts` what fits where, `transfers` what moves between trainer and
engines; `plan` puts them together. Promises: the standard library and numpy only; every figure carries its formula, and
every constant its source; what an input does not determine is said, not guessed.
"""
