"""Data: tasks in."""
