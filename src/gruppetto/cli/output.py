"""Where a command writes: the standard streams, and the files of `--json` and its kin.

Promises: a target that cannot be written is refused before any work is done; what a terminal cannot show is written as
an escape, never an error; JSON stays JSON whatever the terminal can show, and a file of it is UTF-8.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from io import TextIOWrapper

from gruppetto.errors import UserError

_USUAL = "out.json"
_ERRORS = "gruppetto.shown"
_SHOWN = 200
"""Characters of a target that a message quotes."""


def open_streams() -> None:
    """Streams that are closed lead nowhere, and none refuses a character."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (it is open as long as the process lives)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _instead(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of a file name that is no text as they are, an escape for any other character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character, end = error.object[error.start], error.start + 1
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), end
    return character.encode("ascii", "backslashreplace"), end


codecs.register_error(_ERRORS, _instead)


def check_json(target: str | None) -> None:
    """Raises `UserError` where `--json target` could not be written."""
    if target is not None and target != "-":
        check_file(target, "--json", _USUAL)


def check_file(target: str, option: str, usual: str) -> None:
    """Raises `UserError` where `option target` could not be written; `usual` is a name that could be."""
    if not target or target == "-" or "\0" in target:
        raise UserError(f"{option} {target[:_SHOWN]!r}: no name of a file; write {option} {usual}")
    if why := obstacle(target):
        raise UserError(
            f"{option} {target[:_SHOWN]} cannot be written: {why}; write another path, such as {option} {usual}"
        )


def obstacle(target: str) -> str:
    """Why a file cannot be written there; empty where it can."""
    folder = os.path.dirname(target) or "."
    try:
        os.stat(folder)
        if os.path.isdir(target):
            return "it is a folder"
        if not os.path.isdir(folder):
            return f"{folder} is no folder"
        os.stat(target)
    except FileNotFoundError as error:
        if error.filename == folder:
            return f"no folder {folder}"
        return "" if os.access(folder, os.W_OK) else f"nothing may be written in {folder}"
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(target, os.W_OK) else "it may not be written"


def write_json(text: str, target: str, option: str = "--json") -> None:
    """A JSON document to standard output (`-`) or to a file. Raises `UserError` where that fails."""
    if target == "-":
        print(_as_shown(text), end="")
    else:
        write_file(text, target, option)


def write_file(text: str, target: str, option: str) -> None:
    """A text to the file that `option` names. Raises `UserError` where that fails."""
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{option} {target[:_SHOWN]} cannot be written: {why}; write another path") from None


def _as_shown(text: str) -> str:
    """With JSON's own escapes where standard output cannot show what is outside ASCII."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return re.sub(r"[^\x00-\x7f]", _escaped, text)
    return text


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))
