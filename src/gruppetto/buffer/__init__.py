"""The buffer: from complete groups to the samples of a batch."""
