"""The small model that benchmarks run on, and the thread settings that make their figures mean something.

Import this first: OpenMP reads its settings when torch is loaded, and its default spinning makes two threads on a busy
machine twenty times slower than one.
"""

from __future__ import annotations

import os

for key, value in {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}.items():
    os.environ.setdefault(key, value)

from gruppetto.demo.model import make_tiny_model  # noqa: E402

__all__ = ["make_tiny_model"]
