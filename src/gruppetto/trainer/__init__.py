"""Trainers: from samples to new weights."""
