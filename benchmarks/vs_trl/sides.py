"""One run of either side as its own process, and what it did: per step, seconds by part, rewards and lengths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import GROUP, SHARED_ENV, TASKS, Case, Layout

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRL_VENV = ROOT / ".venv-trl"
TRL_PACKAGES = ("torch==2.13.0", "trl==1.16.0")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, from the end of the step before to its own; `cpu_s` is what the process used meanwhile."""

    step_s: float
    cpu_s: float
    generate_s: float
    train_s: float
    rewards: list[float]
    lengths: list[int]

    @property
    def rest_s(self) -> float:
        """What is neither generating nor training."""
        return self.step_s - self.generate_s - self.train_s


def run_gruppetto(case: Case, model: Path, folder: Path, seed: int, scheduler: str, deterministic: bool) -> list[Step]:
    """`gruppetto train` on `case`; the first step has no `step_s` that means something."""
    name = f"{case.name}-{uuid.uuid4().hex[:8]}"
    settings: dict[str, Any] = {
        "run": {
            "name": name, "dir": str(folder), "steps": case.warm + case.steps, "seed": seed,
            "deterministic": deterministic,
        },
        "model": {"path": str(model), "device": "cpu"},
        "data": {"type": "function", "path": f"{HERE / 'task.py'}:rows", "size": TASKS},
        "rollout": {"prompts_per_step": case.prompts, "group_size": GROUP, "max_tokens": case.max_tokens},
        "scheduler": {"type": scheduler},
        "engine": {"slots": case.slots, "context": case.max_tokens + 64},
        "reward": {"type": "function", "path": f"{HERE / 'task.py'}:digit_share"},
        "train": {"lr": case.lr},
        "train.loss": {"aggregation": "seq_mean_token_mean"},
    }  # fmt: skip
    config = folder / f"{name}.toml"
    config.write_text(_toml(settings))
    _run([sys.executable, "-m", "gruppetto", "train", str(config)], folder)
    return _read_run(folder / name)


def run_trl(case: Case, model: Path, folder: Path, seed: int, layout: Layout) -> list[Step]:
    """TRL's GRPOTrainer on `case`."""
    accumulation = case.batch // layout.micro_batch
    settings = {
        "model": str(model),
        "tasks": TASKS,
        "config": {
            "output_dir": str(folder / "trl"),
            "max_steps": case.warm + case.steps,
            "seed": seed,
            "num_generations": GROUP,
            "max_completion_length": case.max_tokens,
            "per_device_train_batch_size": layout.micro_batch,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": layout.generate_batch // layout.micro_batch,
            "learning_rate": case.lr,
            "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0, "max_grad_norm": 1.0,
            "beta": 0.0, "epsilon": 0.2, "loss_type": "grpo", "scale_rewards": "group", "num_iterations": 1,
            "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        },
    }  # fmt: skip
    asked, answered = folder / "trl.json", folder / "trl-result.json"
    asked.write_text(json.dumps(settings))
    _run([str(TRL_VENV / "bin" / "python"), str(HERE / "trl_side.py"), str(asked), str(answered)], folder)
    return [Step(**step) for step in json.loads(answered.read_text())]


def ensure_trl() -> None:
    """Makes the environment that holds TRL where it is missing."""
    if (TRL_VENV / "complete").exists():
        return
    print(f"making {TRL_VENV.name} with {' '.join(TRL_PACKAGES)} (once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(TRL_VENV)], check=True)
    pip = [str(TRL_VENV / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *TRL_PACKAGES]
    subprocess.run(pip, check=True)
    (TRL_VENV / "complete").touch()


def _run(command: list[str], folder: Path) -> None:
    """Raises `RuntimeError` with the end of the output when the command fails."""
    environment = os.environ | SHARED_ENV
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")


def _read_run(run: Path) -> list[Step]:
    """A run folder's steps."""
    ends = [event["t"] for event in _lines(run / "events.jsonl") if event["kind"] == "publish_end"]
    steps, cpu = [], 0.0
    for before, end, metrics in zip([0.0, *ends], ends, _lines(run / "metrics.jsonl"), strict=False):
        rollouts = _lines(run / "rollouts" / f"step_{metrics['step']:06d}.jsonl")
        trained = [rollout for rollout in rollouts if rollout["fate"] == "trained"]
        steps.append(
            Step(
                step_s=end - before,
                cpu_s=metrics["perf/cpu_s_total"] - cpu,
                generate_s=metrics["time/wait_for_batch_s"],
                train_s=metrics["time/train_s"],
                rewards=[rollout["reward"] for rollout in trained],
                lengths=[rollout["tokens"] for rollout in trained],
            )
        )
        cpu = metrics["perf/cpu_s_total"]
    return steps


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of numbers, texts and booleans, which JSON writes as TOML does."""
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) + "\n"
        for name, table in tables.items()
    )
