"""The census: started = trained + dropped(by reason) + live, for rollouts and for tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gruppetto.types import DropReason


@dataclass(slots=True)
class Census:
    """Counts since the run began. Tokens are model tokens."""

    started: int = 0
    trained: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    tokens_made: int = 0
    tokens_trained: int = 0
    tokens_dropped: Counter[DropReason] = field(default_factory=Counter)
    live_tokens: int = 0

    @property
    def live(self) -> int:
        """Rollouts that are neither trained nor dropped, by the account."""
        return self.started - self.trained - sum(self.dropped.values())

    def train(self, tokens: int) -> None:
        """One rollout became final by being trained on."""
        self.trained += 1
        self.tokens_trained += tokens
        self.live_tokens -= tokens

    def untrain(self, tokens: int) -> None:
        """Undoes `train`: the optimizer step did not happen."""
        self.trained -= 1
        self.tokens_trained -= tokens
        self.live_tokens += tokens

    def drop(self, reason: DropReason, tokens: int) -> None:
        """One rollout became final by being dropped."""
        self.dropped[reason] += 1
        self.tokens_dropped[reason] += tokens
        self.live_tokens -= tokens

    def balanced(self, live_rollouts: int, live_tokens: int) -> bool:
        """Whether the account agrees with a recount of what is really live."""
        tokens_final = self.tokens_trained + sum(self.tokens_dropped.values())
        return (
            self.live == live_rollouts
            and self.live_tokens == live_tokens
            and self.tokens_made == tokens_final + live_tokens
        )
