"""The size budget: no file over 400 lines, no function over 60. Prints what is over and fails."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

MAX_FILE = 400
MAX_FUNCTION = 60


def tracked() -> list[Path]:
    """Python files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return [path for path in map(Path, names) if path.exists()]


def over_budget(path: Path) -> list[str]:
    """One line for the file and each of its functions that is too long."""
    text = path.read_text()
    lines = len(text.splitlines())
    found = [f"{path}: {lines} lines (at most {MAX_FILE})"] if lines > MAX_FILE else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines (at most {MAX_FUNCTION})")
    return found


def main() -> int:
    """Checks every file; returns the exit code."""
    files = tracked()
    found = [line for path in files for line in over_budget(path)]
    print("\n".join(found) or f"sizes: {len(files)} files within {MAX_FILE} lines, functions within {MAX_FUNCTION}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
