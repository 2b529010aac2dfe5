"""Messages to tokens, tokens to text.

A checkpoint's own chat template is used. One without a template is rendered as DeepSeek V4.1 writes conversations, by
the library `deepseek-recipe`, which also checks and converts the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from cachesvc.engine.errors import CheckpointError, RequestError
from cachesvc.engine.tokenizer import ChatTokenizer

_UNFINISHED: Final = "�"
"""What a tokenizer writes for bytes that are not yet a character."""


class Chat:
    """The text side of a model. Raises `CheckpointError` when the checkpoint has no tokenizer."""

    def __init__(self, path: Path, model: str) -> None:
        self._model = model
        self._own: ChatTokenizer | None = None
        try:
            self._own = ChatTokenizer(path)
        except CheckpointError:
            if not (path / "tokenizer.json").is_file():
                raise
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def prompt(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat request. Raises `RequestError` for messages that cannot be rendered."""
        if self._own is None:
            return self.encode(_render_deepseek(self._model, body))
        messages = [{"role": str(m["role"]), "content": _text_of(m.get("content"))} for m in body["messages"]]
        try:
            return self.encode(self._own.render(messages))
        except CheckpointError as error:
            raise RequestError(str(error)) from error


class TextStream:
    """An answer's text as its tokens come, up to the first of `stops`, which is not part of it."""

    def __init__(self, chat: Chat, stops: Sequence[str]) -> None:
        self._chat = chat
        self._stops = stops
        self._tokens: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int, *, last: bool) -> str:
        """What can be said now: nothing that may turn out to be the beginning of a stop, or half of a character."""
        self._tokens.append(token)
        text = self._chat.decode(self._tokens)
        if not last:
            text = text.rstrip(_UNFINISHED)
        cuts = [text.find(stop) for stop in self._stops if stop in text]
        if cuts:
            text, self.stopped = text[: min(cuts)], True
        elif not last:
            text = text[: len(text) - self._held_back(text)]
        said, self._sent = text[self._sent :], max(self._sent, len(text))
        return said

    def _held_back(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(1, len(stop)):
                if text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest


def _text_of(content: Any) -> str:
    """The text of a message: a string, or a list of text parts. Raises `RequestError` for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestError("this model takes text only: content must be a string or a list of text parts")


def _render_deepseek(model: str, body: Mapping[str, Any]) -> str:
    try:
        from deepseek_recipe import (
            ChatCompletionRequest,
            ConversionError,
            ConversionOptions,
            DeepseekV41Encoding,
            ModelVersion,
        )
    except ImportError as error:
        raise RequestError(
            f"{model} has no chat template; pip install deepseek-recipe renders chats as DeepSeek V4.1 does"
        ) from error
    options = ConversionOptions().with_model_alias(model, ModelVersion.DeepseekV41Flash)
    try:
        request = ChatCompletionRequest({**body, "model": model}).convert(options)
        return str(DeepseekV41Encoding().render_conversation(request.conversation).prompt)
    except (ConversionError, ValueError, TypeError) as error:
        raise RequestError(f"the messages cannot be converted: {error}") from error
