"""What the trainer's side sees of an engine's weights: in this process, or over HTTP in the engine's own.

Promises: every call ends, with an answer or an `EngineError` that names the engine; an engine's refusal and an engine
that is not there are told apart (`Unreachable`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import aiohttp
import msgspec

from gruppetto.connections import LARGEST, TooLarge, in_words, whole
from gruppetto.errors import EngineError, GruppettoError
from gruppetto.weights.channels.base import Offer, State
from gruppetto.weights.channels.receiver import Receiver

T = TypeVar("T")

ROUTE = "/gruppetto/weights"
"""Under it `state`, `prepare`, `commit`, `drop` and `audit` on the engine's control port."""

_SHOWN = 300
"""Characters of a server's message that are repeated."""
_NO_ROUTE, _NO_KEY = (404, 405, 501), (401, 403)


class Unreachable(EngineError):
    """It does not answer: dead, hung, or behind a broken line."""


class NoRoutes(EngineError):
    """A server without our routes: it takes weights by its own calls only. `why` is its answer."""

    def __init__(self, engine: str, why: str) -> None:
        super().__init__(engine, f"has no {ROUTE}: {why}")
        self.why = why


class Port(Protocol):
    """One engine's weights."""

    name: str

    async def state(self) -> State:
        """Boot, version, manifest."""
        ...

    async def prepare(self, offer: Offer) -> Mapping[str, int]:
        """Takes an offered version without serving it; digests by the engine's own names."""
        ...

    async def commit(self, version: int) -> None:
        """Serves what was prepared."""
        ...

    async def drop(self) -> None:
        """Gives up what was prepared."""
        ...

    async def audit(self) -> Mapping[str, int]:
        """Digests of everything, read back now."""
        ...


@runtime_checkable
class Remote(Protocol):
    """An engine in another process: where its control routes are, and the key for them ("" = none)."""

    name: str
    control_url: str
    control_key: str

    def weights_label(self, version: int) -> str:
        """What the server is to call a version."""
        ...

    def weights_taken(self, version: int) -> None:
        """The server serves it now."""
        ...


class LocalPort(Port):
    """An engine in this process."""

    def __init__(self, name: str, receiver: Receiver) -> None:
        self.name, self._receiver = name, receiver

    async def state(self) -> State:
        return await self._named(self._receiver.state())

    async def prepare(self, offer: Offer) -> Mapping[str, int]:
        return await self._named(self._receiver.prepare(offer))

    async def commit(self, version: int) -> None:
        await self._named(self._receiver.commit(version))

    async def drop(self) -> None:
        await self._named(self._receiver.drop())

    async def audit(self) -> Mapping[str, int]:
        return await self._named(self._receiver.audit())

    async def _named(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except EngineError:
            raise
        except GruppettoError as error:
            raise EngineError(self.name, str(error)) from None


class RemotePort(Port):
    """An engine behind `gruppetto serve`, at the address that it has now: a process that started anew has another."""

    def __init__(self, engine: Remote, *, timeout_s: float = 600.0) -> None:
        self.name, self._engine = engine.name, engine
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)

    async def state(self) -> State:
        return self._read("state", await self._call("state"), State)

    async def prepare(self, offer: Offer) -> Mapping[str, int]:
        return self._read("prepare", await self._call("prepare", msgspec.to_builtins(offer)), dict[str, int])

    async def commit(self, version: int) -> None:
        await self._call("commit", {"version": version, "label": self._engine.weights_label(version)})
        self._engine.weights_taken(version)

    async def drop(self) -> None:
        await self._call("drop")

    async def audit(self) -> Mapping[str, int]:
        return self._read("audit", await self._call("audit"), dict[str, int])

    async def _call(self, what: str, body: Any = None) -> Any:
        """A connection for each call: there are a few in a publish, and none is left to go stale between two."""
        key, url = self._engine.control_key, self._engine.control_url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout, headers=headers) as session,
                session.post(f"{url}{ROUTE}/{what}", data=msgspec.json.encode(body or {})) as response,
            ):
                answer = await whole(response, LARGEST)
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(self.name, f"weights {what} at {url}: {in_words(error)}") from None
        except TooLarge as error:
            raise EngineError(self.name, f"weights {what} at {url}: {error}") from None
        if status in _NO_ROUTE:
            raise NoRoutes(self.name, f"HTTP {status}")
        if status in _NO_KEY:
            raise EngineError(self.name, f"weights {what}: HTTP {status}; put its key into GRUPPETTO_ENGINE_API_KEY")
        if status != 200:
            raise EngineError(self.name, f"weights {what}: {_message(answer, status)}")
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._other(what, error) from None

    def _read(self, what: str, answer: Any, kind: type[T]) -> T:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise self._other(what, error) from None

    def _other(self, what: str, error: Exception) -> EngineError:
        """It answers on our route, and not with what `gruppetto serve` answers there."""
        return EngineError(self.name, f"weights {what}: the answer is none of gruppetto serve's: {error}")


def _message(answer: bytes, status: int) -> str:
    try:
        found = msgspec.json.decode(answer)
        return str(found["error"]["message"])[:_SHOWN]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return f"HTTP {status}"


def port_of(engine: Any) -> Port | None:
    """None for an engine that takes weights by the engine contract only."""
    if isinstance(engine, Remote):
        return RemotePort(engine)
    if hasattr(engine, "open_weights"):
        return LocalPort(engine.name, Receiver(engine))
    return None
