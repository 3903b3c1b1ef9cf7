"""Parallel layouts: how trainer and engines are laid over GPUs, what each rank then holds, and why a layout is out."""
