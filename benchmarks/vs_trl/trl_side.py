"""The TRL side, run by the environment that holds TRL: `python trl_side.py SETTINGS.json RESULT.json`.

GRPOTrainer without vLLM. Result: per step the seconds since the end of the step before, of generation and of the
update, and every rollout's reward and length.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from task import digit_share, rows
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Sums the seconds of wrapped calls, and closes a row at every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._sums: dict[str, float] = {}
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def wrap(self, owner: object, method: str, name: str) -> None:
        """Counts the seconds spent in `owner.method` under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._sums[name] = self._sums.get(name, 0.0) + time.perf_counter() - begin

        setattr(owner, method, timed)

    def reward(self, completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        """The reward function, which also keeps what it sees."""
        rewards = [digit_share(text) for text in completions]
        self._rewards += rewards
        self._lengths += map(len, completion_ids)
        return rewards

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        prepare, generate = self._sums.get("prepare", 0.0), self._sums.get("generate", 0.0)
        step = now - self._last
        self.steps.append({
            "step_s": step,
            "cpu_s": cpu - self._last_cpu,
            "generate_s": generate,
            "train_s": step - prepare,
            "rewards": self._rewards,
            "lengths": self._lengths,
        })  # fmt: skip
        self._sums, self._rewards, self._lengths = {}, [], []
        self._last, self._last_cpu = now, cpu


def main() -> None:
    """Trains as the settings say and writes the result."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    config = GRPOConfig(
        **settings["config"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=clock.reward,
        args=config,
        train_dataset=Dataset.from_list(rows(0, settings["tasks"])),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.wrap(trainer, "_prepare_inputs", "prepare")
    clock.wrap(trainer, "_generate_single_turn", "generate")
    trainer.train()
    Path(sys.argv[2]).write_text(json.dumps(clock.steps))


if __name__ == "__main__":
    main()
