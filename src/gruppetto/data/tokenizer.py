"""A Hugging Face tokenizer (extra `train`), from a model folder.

Promises: the folder is complete and its sizes fit (a vocabulary smaller than the tokenizer's is refused, because its
ids would index past the embedding); decoding changes no space; every end token that the folder names ends a rollout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppetto.data.base import Messages
from gruppetto.errors import UserError
from gruppetto.extras import needs
from gruppetto.imports import one_line


class HFTokenizer:
    """Implements `data.base.Tokenizer` over `transformers.AutoTokenizer`; nothing is fetched from a hub."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._tokenizer = _load(self.folder)
        config = _json(self.folder / "config.json")
        self.vocab_size: int = len(self._tokenizer)
        self.model_ids = _check_vocabulary(config, self._largest_id() + 1, self.folder)
        self.eos_ids: tuple[int, ...] = self._end_tokens(config)
        self.has_chat_template: bool = bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a plain prompt, with the begin token where this tokenizer puts one; `special=False` leaves it out."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=special))
        return ids[:-1] if special and len(ids) > 1 and ids[-1] in self.eos_ids else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Special tokens and closing end tokens are left out unless `skip_special=False`.

        Bytes that are no whole character (a rollout cut inside one) become U+FFFD.
        """
        kept = list(ids)
        while skip_special and kept and kept[-1] in self.eos_ids:
            kept.pop()
        text = self._tokenizer.decode(kept, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return str(text)

    def render(self, messages: Messages) -> list[int]:
        """Chat messages to ids by the tokenizer's template, generation prompt included.

        Raises `UserError` without a template, or when the template refuses the messages.
        """
        if not self.has_chat_template:
            raise UserError(
                f"the tokenizer in {self.folder} has no chat template, but the data has chat messages; "
                f"write data.chat_template = 'never' or put chat_template.jinja into the folder"
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program: any error in it is the input's
            raise UserError(f"the chat template in {self.folder} refuses the messages: {one_line(error)}") from error
        return list(ids)

    def _largest_id(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=0)

    def _end_tokens(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """All of them: chat models stop on a turn's end and on the text's end, and name them in different files."""
        named = (
            _json(self.folder / "generation_config.json").get("eos_token_id"),
            config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id")),
            self._tokenizer.eos_token_id,
        )
        flat = [i for value in named for i in (value if isinstance(value, list) else [value]) if i is not None]
        if not flat:
            raise UserError(f"the model folder {self.folder} names no end token; write eos_token_id into config.json")
        return tuple(dict.fromkeys(flat))


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise UserError(f"model.path = {str(folder)!r} is not a folder; write the path of a Hugging Face model folder")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(needs("tokenizing", "transformers")) from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the library raises OSError, ValueError, KeyError … for a broken folder
        raise UserError(f"model.path = {str(folder)!r} has no usable tokenizer: {one_line(error)}") from error


def _check_vocabulary(config: Mapping[str, Any], needed: int, folder: Path) -> int:
    """Ids that the model has, of which a tokenizer may name fewer."""
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if size is not None and size < needed:
        raise UserError(
            f"model {folder}: config.json has vocab_size = {size}, but the tokenizer's largest id is {needed - 1}; "
            f"resize the embeddings to {needed} or use the tokenizer that belongs to this model"
        )
    return needed if size is None else int(size)


def _json(path: Path) -> dict[str, Any]:
    """The object in the file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds a {type(data).__name__}; write a JSON object")
    return data
