"""The embedded trainer: in this process, on a thread of its own, CPU or CUDA, without padding."""

from gruppetto.trainer.embedded.trainer import EmbeddedTrainer

__all__ = ["EmbeddedTrainer"]
