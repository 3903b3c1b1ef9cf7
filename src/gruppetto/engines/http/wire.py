"""What an engine's HTTP dialect has to say: requests out, answers in, control calls.

A wire knows paths, bodies and traps of one family of servers, and finds out by trying which routes this server has;
nothing branches on a version. What needs state (the gate, aborts, versions, death) is `engine.HttpEngine`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppetto.engines.base import EngineFinish, GenerateRequest, MemoryTag, PauseMode
from gruppetto.engines.http.account import Told
from gruppetto.engines.http.client import HttpClient
from gruppetto.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. Every call has one of them."""

    call: float = 60.0
    """A control call that asks or tells something small."""
    generate: float = 3600.0
    """From sending a request to its answer."""
    pause: float = 120.0
    """A pause, its requests' return included."""
    abort: float = 30.0
    """From an abort to its request's return; then the connection is dropped, which aborts too."""
    update: float = 900.0
    """A server's reading of new weights."""
    start: float = 900.0
    """From a process's start to its first answer."""
    beat: float = 5.0
    """Between two looks at a server."""
    hang: float = 180.0
    """Requests open, no pause, and not a token more in this time: hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSettings:
    """What a wire is told of the run."""

    temperature: float = 1.0
    truncated: bool = False
    """Sampled with top_p or top_k."""
    keep_kv: bool = False
    """Live rows keep the KV of older weights over an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a server said of itself when it was connected. `context` 0 and `kv_capacity` 0: it does not tell.

    `token_versions`: answers say which weights made which token. Without it a pause ends requests, whatever its mode,
    so that no request has tokens of two versions.
    """

    version: str
    """Label of the weights it serves."""
    server: str
    """Its name and release, for people."""
    context: int = 0
    slots: int = 0
    kv_capacity: int = 0
    token_versions: bool = True


@dataclass(slots=True, kw_only=True)
class Made:
    """What a request has made so far. `spans`: (label, start, end) over `ids`; empty where the server does not say.

    `finish` None: it goes on.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[str, int, int]] = ()
    finish: EngineFinish | None = None
    stop: int | str | None = None
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Ability:
    """One thing that a server was tried for. `says`: the route that does it, or what came instead."""

    name: str
    works: bool
    says: str


@dataclass(slots=True)
class Abilities:
    """Routes that were found there or missing."""

    found: dict[str, Ability] = field(default_factory=dict)

    def note(self, name: str, works: bool, says: str) -> None:
        """The last word on one of them."""
        self.found[name] = Ability(name, works, says)

    def has(self, name: str) -> bool:
        """Whether it was tried and worked."""
        ability = self.found.get(name)
        return ability is not None and ability.works


class Wire(ABC):
    """One server's dialect."""

    kind: str
    resume_route: str
    """POST with an empty JSON object ends a pause."""

    def __init__(self, client: HttpClient, settings: WireSettings, deadlines: Deadlines) -> None:
        self.client, self.settings, self.deadlines = client, settings, deadlines
        self.abilities = Abilities()

    @abstractmethod
    async def alive(self) -> None:
        """Returns when the server's process answers, also while it is paused; raises otherwise."""

    @abstractmethod
    async def connect(self) -> Facts:
        """Finds out what the server is and has. Raises `UserError` for one that cannot be used."""

    @abstractmethod
    async def generate(self, rid: str, request: GenerateRequest, label: str) -> Made:
        """One request to its end. `label`: the weights' as far as is known."""

    @abstractmethod
    def stream(self, rid: str, request: GenerateRequest, label: str) -> AsyncGenerator[Made]:
        """The same as it grows: everything so far, each time."""

    @abstractmethod
    async def abort(self, rids: Sequence[str] | None) -> None:
        """Asks for the end of these requests (None: of all that the server has)."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing is decoded any more. `abort` may leave requests that were on their way then."""

    @abstractmethod
    async def paused(self) -> bool | None:
        """Whether the server says that it is; None where it does not tell."""

    @abstractmethod
    async def resume(self) -> None:
        """Ends a pause; of a server that is not paused too."""

    @abstractmethod
    async def load(self, folder: Path, label: str, mode: PauseMode) -> None:
        """Takes the weights of a model folder, while paused in `mode`, and serves them under `label`. What was cached
        under the weights before is not used again. Raises where it cannot promise that."""

    async def flush(self) -> bool:
        """Forgets cached prefixes; False where it cannot while requests are kept. A wire whose `load` does so, and that
        takes weights by it alone, has nothing left to do."""
        return True

    @abstractmethod
    async def version(self) -> str:
        """Label of what is served now."""

    @abstractmethod
    async def release(self, tags: Sequence[MemoryTag]) -> None:
        """Frees memory; the server is paused and has no requests."""

    @abstractmethod
    async def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Takes it back."""

    @abstractmethod
    async def told(self) -> Told:
        """Its counters, as far as it tells."""

    def has_both(self, made: Made, ids: str, logprobs: str) -> Made:
        """The answer to one token's request, as it is. Raises `UserError` where the field of ids or that of logprobs
        has not come: nothing could be trained on such answers."""
        for field_name, found in ((ids, made.ids), (logprobs, made.logprobs)):
            if len(found) != 1:
                raise UserError(
                    f"the server at {self.client.url} was asked for one token and answered with {len(found)} entries "
                    f"in {field_name}, without which nothing can be trained; where a proxy stands before it that drops "
                    "what it does not know, write the server's own address into engine.urls"
                )
        return made


def parse_metrics(text: str, names: dict[str, str]) -> dict[str, float]:
    """Sums of Prometheus samples, all labels together, by our name for each: `names` maps theirs to ours. A name with a
    label, `tokens{mode="decode"}`, is for the samples that have no other value of it."""
    found: dict[str, float] = {}
    wanted = [(*theirs.rstrip("}").partition("{")[::2], ours) for theirs, ours in names.items()]
    for name, labels, value in _lines(text):
        for theirs, label, ours in wanted:
            key = label.partition("=")[0] + "="
            if name == theirs and (not label or label in labels or key not in labels):
                found[ours] = found.get(ours, 0.0) + float(value)
    return found


def samples(text: str, name: str) -> list[float]:
    """All Prometheus samples of one name, whatever their labels."""
    return [float(value) for found, _, value in _lines(text) if found == name]


def _lines(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, labels, value."""
    for line in text.splitlines():
        if not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            yield name.strip(), labels, value


def whole(found: dict[str, float], name: str) -> int | None:
    """A count, or None where it is missing."""
    return int(found[name]) if name in found else None


def as_object(value: Any) -> dict[str, Any]:
    """A JSON object, empty for anything else."""
    return value if isinstance(value, dict) else {}
