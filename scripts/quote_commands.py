"""Runs the commands that a page quotes and puts their output below them.

    python scripts/quote_commands.py docs/ledger.md            # write the page anew
    python scripts/quote_commands.py docs/ledger.md --check    # exit 1 where the page is not what the commands print

A block that begins with ```console and a line `$ gruppetto …` (which `\\` may continue) is such a quotation.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(\$ gruppetto .*?[^\\])\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def quoted(page: str) -> str:
    """The page with the output of each command as it is now."""
    return _BLOCK.sub(lambda block: f"```console\n{block[1]}\n{output(block[1])}```", page)


def output(command: str) -> str:
    """What a command prints, spaces at line ends cut. A failing one prints its error."""
    words = shlex.split(command.removeprefix("$ ").replace("\\\n", " "))
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
    text = done.stdout if done.returncode == 0 else done.stderr
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def main() -> int:
    path, check = Path(sys.argv[1]), "--check" in sys.argv[2:]
    page = path.read_text("utf-8")
    fresh = quoted(page)
    if not check:
        path.write_text(fresh, "utf-8")
    elif fresh != page:
        print(f"{path} quotes what its commands do not print; run scripts/quote_commands.py {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
