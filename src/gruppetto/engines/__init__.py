"""Engines: where tokens are sampled. `base` is the contract; each implementation stands beside it."""
