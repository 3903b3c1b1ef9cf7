"""What is imported inside vLLM's own processes, from a Python that has vLLM and not this package."""
