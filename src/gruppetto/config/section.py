"""What every table of the schema is, and the ranges that many settings share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""Of things that are all kept at once; more is a slip of the pen that would run for ever."""
Seconds = Annotated[float, Field(ge=0, le=1e6)]
"""A price of the simulator: at most eleven days."""
Share = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A TOML table."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
