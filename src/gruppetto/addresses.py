"""Addresses of servers as people write them.

Promise: what passes can be connected to as it stands, as far as that can be told without asking anybody.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def server_address(url: str) -> SplitResult | None:
    """http or https, a host that a name could have, a port that there is, no query; None for anything else."""
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:  # also of a port, and of a host with labels that no name has
        return None
    written = url.isascii() and url.isprintable() and not set(url) & set(' "\\<>')
    return parts if written and parts.scheme in ("http", "https") and host and not parts.query else None
