"""Runs the commands that a page quotes and puts their output below them.

    python scripts/quote_commands.py docs/ledger.md            # write the page anew
    python scripts/quote_commands.py docs/ledger.md --check    # exit 1 where the page is not what the commands print

Numbers may differ by 2 %, which is more than another processor's rounding makes and less than a reader would see.

A block that begins with ```console and a line `$ gruppetto …` (which `\\` may continue) is such a quotation.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

TOLERANCE, ROUNDING = 0.02, 0.11
"""Of a number; and of one that is printed with a single decimal."""
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
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


def same(page: str, fresh: str) -> bool:
    """Whether two pages say the same: the same words, and numbers that differ by `TOLERANCE` at most."""
    if _words(page) != _words(fresh):
        return False
    pairs = zip(_NUMBER.findall(page), _NUMBER.findall(fresh), strict=True)
    numbers = ((float(one.replace(",", "")), float(two.replace(",", ""))) for one, two in pairs)
    return all(abs(one - two) <= max(TOLERANCE * abs(one), ROUNDING) for one, two in numbers)


def _words(page: str) -> list[str]:
    """The text without its numbers; spaces align columns and say nothing."""
    return _NUMBER.sub("#", page).split()


def main() -> int:
    path, check = Path(sys.argv[1]), "--check" in sys.argv[2:]
    page = path.read_text("utf-8")
    fresh = quoted(page)
    if not check:
        path.write_text(fresh, "utf-8")
    elif not same(page, fresh):
        print(f"{path} quotes what its commands do not print; run scripts/quote_commands.py {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
