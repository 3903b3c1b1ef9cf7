"""Turns: what answers a model between two calls of it. `base` is the contract."""
