"""GPUs, the links between them, and what share of their peaks a stage reaches."""
