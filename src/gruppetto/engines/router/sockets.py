"""Open files: each connection is one, two of them a request."""

from __future__ import annotations

import resource


def many_files() -> None:
    """As many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
