"""The demo: a small model learns a task whose answers have heavy-tailed lengths, in about a minute on a laptop."""
