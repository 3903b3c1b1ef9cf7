"""What every table of the schema is, and the ranges that many settings share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A TOML table."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
