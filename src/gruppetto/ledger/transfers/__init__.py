"""What moves between trainer and engines: a weight sync, and the hand-over of memory where they share GPUs."""
