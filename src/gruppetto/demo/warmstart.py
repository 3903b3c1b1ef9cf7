"""The demo's starting point: a random model taught the form of an answer by sloppy demonstrations. Made once, cached.

Promise: what is cached is keyed by everything that made it; a half-written cache is never used.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from gruppetto.demo import task

SHAPE = {"layers": 2, "hidden": 192, "intermediate": 640, "heads": 6, "kv_heads": 2, "head_dim": 32, "context": 512}
STEPS, BATCH, LR = 350, 32, 2e-3


def cached_folder(seed: int) -> Path:
    """Where the warm-started model of this seed is or will be."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    recipe = repr((SHAPE, STEPS, BATCH, LR, seed)) + inspect.getsource(task)
    return root / "gruppetto" / f"demo-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def warm_start(seed: int, folder: Path) -> None:
    """Trains the model and writes it to `folder`, whole or not at all. Blocks for about a quarter of a minute."""
    from gruppetto.demo.model import make_tiny_model
    from gruppetto.model_folder import device_for
    from gruppetto.trainer.embedded.model import load_model, write_folder
    from gruppetto.trainer.embedded.supervised import fit

    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    random_model = make_tiny_model(aside / "random", seed=seed, **SHAPE)
    model = load_model(random_model, device_for("cpu"))
    fit(model, _examples(seed, random_model), steps=STEPS, batch_size=BATCH, lr=LR, warmup_steps=20, micro_tokens=2048)
    write_folder(model, random_model, aside / "warm")
    shutil.rmtree(folder, ignore_errors=True)
    (aside / "warm").rename(folder)
    shutil.rmtree(aside)


def _examples(seed: int, folder: Path) -> Iterator[tuple[list[int], list[int]]]:
    """(token ids, loss mask): the answer and the end token carry loss."""
    from gruppetto.data.tokenizer import HFTokenizer

    tokenizer = HFTokenizer(folder)
    end = tokenizer.eos_ids[0]
    for prompt, answer in task.demonstrations(seed):
        asked, said = tokenizer.encode(prompt), [*tokenizer.encode(answer), end]
        yield asked + said, [0] * len(asked) + [1] * len(said)
