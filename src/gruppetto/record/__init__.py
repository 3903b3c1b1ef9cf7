"""Records: the run folder is the truth."""
