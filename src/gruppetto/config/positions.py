"""How many tokens a model folder has positions for, by its config.json."""

from __future__ import annotations

import json
from pathlib import Path


def positions(folder: Path) -> int | None:
    """max_position_embeddings of the (text) model; None where the folder does not say."""
    try:
        model = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None  # said when the model is loaded
    found = model.get("text_config", model) if isinstance(model, dict) else None
    number = found.get("max_position_embeddings") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None
