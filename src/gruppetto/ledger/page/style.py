"""Style, script and hatchings of the page. Without the script everything is there; it adds quicker tips and curves that
can be hidden."""

from __future__ import annotations

from importlib.resources import files

from gruppetto.ledger.page.colours import BLUE

PATTERNS = (
    '<svg class="defs" aria-hidden="true" width="0" height="0"><defs>'
    '<pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="7" height="7"/><line class="hatch-line" x1="0" y1="0" x2="0" y2="7"/></pattern>'
    '<pattern id="tail" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    f'<rect width="7" height="7" fill="{BLUE}" fill-opacity=".22"/>'
    f'<line x1="0" y1="0" x2="0" y2="7" stroke="{BLUE}" stroke-width="4"/></pattern>'
    '<pattern id="free" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<rect class="hatch-free" width="8" height="8"/></pattern></defs></svg>'
)


def shipped(name: str) -> str:
    """The text of a file that lies beside this one."""
    return files("gruppetto.ledger.page").joinpath(name).read_text("utf-8")
