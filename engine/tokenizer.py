"""Text to tokens and back, from `tokenizer.json` and the checkpoint's chat template (no transformers)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from cachesvc.engine.errors import CheckpointError

Message = Mapping[str, str]
"""`{"role": ..., "content": ...}`"""


class ChatTokenizer:
    """The tokenizer of a checkpoint directory. Raises `CheckpointError` when files are missing or damaged.

    A template comes with the weights, from wherever they came: it runs in Jinja's sandbox and can call nothing.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist; the checkpoint has no fast tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # The binding raises plain Exception for any malformed file.
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        config = _read_config(path / "tokenizer_config.json")
        self._special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name in ("bos_token", "eos_token", "pad_token", "unk_token") and value is not None
        }
        source = path / "chat_template.jinja"
        text = source.read_text(encoding="utf-8") if source.is_file() else config.get("chat_template")
        if not isinstance(text, str):
            raise CheckpointError(f"{path} has no chat template; use an instruction-tuned checkpoint")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise CheckpointError(f"the chat template of {path} is not valid: {error}") from error

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token, if there is one."""
        return self.token_id(self._special.get("eos_token", ""))

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact text, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The chat template applied to `messages`. Raises `CheckpointError` when the template refuses them."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except TemplateError as error:
            raise CheckpointError(f"the chat template refuses the messages: {error}") from error


class Conversation:
    """A chat as a growing sequence of tokens: what was sent or generated once is never tokenised again.

    That keeps every turn's prompt an exact extension of the turn before, the model's own answers included, whatever
    ids those have. Re-tokenising the text could cut it differently and would lose the cached prefix.
    """

    _ANSWER = "ANSWER"
    """Stands for the model's answers when the template is rendered; only the text around them is used."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] = []
        self._rendered = ""
        self.tokens: list[int] = []

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """Appends messages and the start of an answer; returns all tokens so far, the prompt of this turn."""
        self._messages.extend(messages)
        text = self._tokenizer.render(self._messages)
        if not text.startswith(self._rendered):
            raise CheckpointError("the chat template changes earlier messages; turns would not extend each other")
        added, self._rendered = text[len(self._rendered) :], text
        new = self._tokenizer.encode(added)
        if self.tokens and new and new[0] == self.tokens[-1] == self._tokenizer.eos_token_id:
            del new[0]  # The model ended its answer itself.
        self.tokens += new
        return list(self.tokens)

    def answer(self, tokens: Sequence[int]) -> None:
        """Appends the model's own answer, as the ids that it generated."""
        self._messages.append({"role": "assistant", "content": self._ANSWER})
        self._rendered += self._ANSWER
        self.tokens += tokens


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    return config if isinstance(config, dict) else {}


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
