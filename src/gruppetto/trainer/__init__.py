"""Trainers: from samples to new weights. `base` is the contract, `advantages` and `losses` the maths."""
