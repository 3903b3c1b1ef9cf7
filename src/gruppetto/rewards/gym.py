"""reasoning-gym's own scorers (extra `gym`).

Promise: an entry is scored by the data set, with the arguments, that made it; both stand in the task's `extra`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from gruppetto.rewards.rules import Ungradable


def gym_verifier(response: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """The data set's score of `response`, in 0..1; raises `Ungradable` for a task that reasoning-gym did not make."""
    metadata = extra.get("metadata")
    name = extra.get("dataset") or (metadata or {}).get("source_dataset")
    if not name or metadata is None:
        raise Ungradable("the task has no reasoning-gym metadata; use data.type = 'reasoning_gym'")
    arguments = json.dumps(extra.get("dataset_args", {}), sort_keys=True)
    entry = {"question": extra.get("question", ""), "answer": answer, "metadata": metadata}
    return float(_dataset(name, arguments).score_answer(response.strip(), entry))


@cache
def _dataset(name: str, arguments: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(arguments))
