"""Whether two runs are the same run: metrics.jsonl bitwise equal, fields that depend on the clock aside.

    gruppetto demo --out a; gruppetto demo --out b; python benchmarks/same_metrics.py a/demo b/demo

Prints the first difference, and exits 1 when there is one. `--json FILE` writes `same` and `steps`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def timeless(line: str) -> dict[str, Any]:
    """A metrics line without what the clock decides: names that end in `_s` or begin with `perf/`."""
    row = json.loads(line)
    return {key: value for key, value in row.items() if not key.endswith("_s") and not key.startswith("perf/")}


def first_difference(a: Path, b: Path) -> str | None:
    """Where two runs part, in words."""
    rows = [[timeless(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (a, b)]
    if len(rows[0]) != len(rows[1]):
        return f"{len(rows[0])} steps against {len(rows[1])}"
    for left, right in zip(*rows, strict=True):
        for key in left | right:
            if left.get(key) != right.get(key):
                return f"step {left['step']}: {key} = {left.get(key)} against {right.get(key)}"
    return None


def main() -> int:
    """Compares two run folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    difference = first_difference(*args.runs)
    steps = len((args.runs[0] / "metrics.jsonl").read_text().splitlines())
    print(difference or f"the same, bit for bit, over {steps} steps")
    if args.json:
        args.json.write_text(json.dumps({"same": difference is None, "steps": steps}))
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
