"""Where the tensors of a model are gathered while it is counted."""

from __future__ import annotations

from gruppetto.ledger.models.model import Kind, Mixer, Tensor


class Parts:
    """Tensors and mixers so far. Tensors of one name pattern, shape and kind are one row with their number."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, ...], Kind, bool, int], int] = {}
        self.mixers: list[Mixer] = []
        self.unknown: list[str] = []

    def add(self, name: str, shape: tuple[int, ...], kind: Kind, count: int = 1, *, passes: int = 1) -> None:
        """`count` tensors; none where a side or the count is 0."""
        self._put(name, shape, kind, count, False, passes)

    def linear(
        self,
        name: str,
        out: int,
        into: int,
        kind: Kind,
        count: int = 1,
        *,
        bias: bool = False,
        passes: int = 1,
        matrix: bool = True,
    ) -> None:
        """`count` linear layers: a matrix (out, into), which low precision may hold, and its bias."""
        self._put(f"{name}.weight", (out, into), kind, count, matrix, passes)
        if bias:
            self._put(f"{name}.bias", (out,), kind, count, False, passes)

    def matrices(self, name: str, shape: tuple[int, ...], kind: Kind, count: int = 1) -> None:
        """`count` stacks of matrices, (how many, ...) each."""
        self._put(name, shape, kind, count, True, 1)

    def norm(self, name: str, size: int, count: int = 1, *, bias: bool = False, passes: int = 1) -> None:
        """`count` norms over `size` dimensions."""
        self._put(f"{name}.weight", (size,), "norm", count, False, passes)
        if bias:
            self._put(f"{name}.bias", (size,), "norm", count, False, passes)

    def doubt(self, sentence: str) -> None:
        """Something that the config does not determine, said once."""
        if sentence not in self.unknown:
            self.unknown.append(sentence)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(name, shape, count, kind, matrix=matrix, passes=passes)
            for (name, shape, kind, matrix, passes), count in self._counts.items()
        )

    def _put(self, name: str, shape: tuple[int, ...], kind: Kind, count: int, matrix: bool, passes: int) -> None:
        if count > 0 and all(shape):
            key = (name, shape, kind, matrix, passes)
            self._counts[key] = self._counts.get(key, 0) + count
