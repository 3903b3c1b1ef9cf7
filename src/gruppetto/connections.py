"""A connection to a server: what became of it, in words, and how much of an answer is taken.

Promises: one line that fits behind an address, without numbers of errors, types or texts of a library; an answer that
has no end does not fill this machine's memory.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

import aiohttp

ENDED = "the connection broke off before the whole answer had come"
LARGEST = 256 << 20
"""Bytes of an answer, or of one event of a stream. The largest that an engine can mean is a rollout of a million
tokens, each with its id, log-probability and text: some 60 MB."""
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_WORDS = {
    errno.ECONNREFUSED: "nobody listens there",
    errno.ETIMEDOUT: "it answers to no connection",
    errno.EMFILE: "this process may open no more files, which a connection is; raise ulimit -n",
    errno.ENFILE: "this machine has no file left to open, which a connection is",
    errno.EADDRNOTAVAIL: "this machine has no address towards it, or no free port",
}
_WORDS |= dict.fromkeys((errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ESHUTDOWN), ENDED)
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_WORDS |= dict.fromkeys(_NO_WAY, "there is no way to it from here")


class TooLarge(Exception):
    """An answer, or an event of one, of at least `size` bytes where `most` are taken."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(f"it answers with {size} bytes or more, the limit of one answer is {most}")


async def whole(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises `TooLarge` as soon as that is known, with no more than that in memory."""
    if (told := answer.content_length or 0) > most:
        raise TooLarge(told, most)
    pieces, size = [], 0
    async for piece in answer.content.iter_any():  # unpacked already, so that what was packed counts as it is
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise TooLarge(size, most)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def in_words(error: BaseException) -> str:
    """Why there was no answer, or no whole one."""
    error = getattr(error, "os_error", error)  # aiohttp's, around the system's
    found = _of_http(error) or _of_tls(error) or _of_name(error)
    if found:
        return found
    numbers = _numbers(error)
    if len(numbers) > 1 or numbers.keys() & _WORDS.keys():
        words = dict.fromkeys(_WORDS.get(number) or os.strerror(number) for number in numbers)
        return "; another address of it: ".join(words)
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return ENDED
    if isinstance(error, TimeoutError):
        return "no answer came in time"
    said = getattr(error, "strerror", None) or str(error) or "it failed"
    return " ".join(str(said).split())


def nobody_listens(error: BaseException) -> bool:
    """Whether every address of the host refused the connection: whatever was there has ended."""
    return _numbers(getattr(error, "os_error", error)).keys() == {errno.ECONNREFUSED}


def _of_http(error: BaseException) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection came about in time"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer did not come whole, or cannot be decoded"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what came is no HTTP answer"
    return ENDED if isinstance(error, aiohttp.ServerDisconnectedError) else ""


def _of_tls(error: BaseException) -> str:
    certificate = getattr(error, "certificate_error", error)
    if isinstance(certificate, ssl.SSLCertVerificationError):
        return f"its certificate does not hold: {certificate.verify_message or 'it is not for this host'}"
    return "it does not speak TLS; write http:// instead of https://" if isinstance(error, ssl.SSLError) else ""


def _of_name(error: BaseException) -> str:
    if not isinstance(error, socket.gaierror):
        return ""
    later = error.errno == socket.EAI_AGAIN
    return "its name cannot be looked up now" if later else "no host has that name"


def _numbers(error: BaseException) -> dict[int, None]:
    """The system's, each once, in order; where several addresses were tried, those of all."""
    number = getattr(error, "errno", None)
    return dict.fromkeys([number] if isinstance(number, int) else map(int, _NUMBER.findall(str(error))))
