"""Fixtures of the data tests: a byte tokenizer without transformers, and the sample files."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gruppetto.data.base import Messages
from gruppetto.errors import UserError


class ByteTokenizer:
    """One token a byte; 256 ends. Without a template, messages are refused as the contract says."""

    vocab_size = 257
    eos_ids = (256,)

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def render(self, messages: Messages) -> list[int]:
        if not self.has_chat_template:
            raise UserError("no chat template")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self.encode(text + "<assistant>")


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def base_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(has_chat_template=False)


@pytest.fixture(scope="session")
def samples() -> Path:
    """The folder of sample files: data/ and bad/."""
    folder = os.environ.get("GRUPPETTO_SAMPLES")
    if not folder:
        pytest.skip("GRUPPETTO_SAMPLES does not name the folder of sample files")
    return Path(folder)


@pytest.fixture(scope="session")
def tokenizer_class() -> type[ByteTokenizer]:
    return ByteTokenizer
