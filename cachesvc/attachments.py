"""What clients registered at Attach: whose blocks they speak of, and how large those are."""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass

from cachesvc.errors import InvalidCall, KeySchemeMismatch, StaleAttachment
from cachesvc.keys import KEY_SCHEME_VERSION, canonical_json, namespace_digest, self_test_vector
from cachesvc.limits import (
    MAX_ATTACHMENTS,
    MAX_CLIENT_NAME_BYTES,
    MAX_MODEL_NAME_BYTES,
    MAX_NAMESPACE_BYTES,
    MAX_SHARDS,
)
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.segments.format import Shape, shape_of


@dataclass(frozen=True)
class Attachment:
    model: str
    block_tokens: int
    shapes: tuple[Shape, ...]
    """By shard."""
    checkpoints: int = 0
    """How many of them, the last, are stored at checkpoints only."""

    @property
    def namespace(self) -> str:
        """Namespace digest, hex."""
        return self.shapes[0].namespace


class Attachments:
    """Attachments by number, valid for this boot. Thread-safe. Past `MAX_ATTACHMENTS` the least recently used goes."""

    def __init__(self, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._self_test = self_test_vector()
        self._lock = threading.Lock()
        self._by_number: OrderedDict[int, Attachment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_number)

    def add(self, request: pb.AttachRequest) -> tuple[int, Attachment]:
        """The number of an attachment, the same for the same content. Raises `InvalidCall`, `KeySchemeMismatch`."""
        if request.key_scheme != KEY_SCHEME_VERSION or request.self_test_vector != self._self_test:
            raise KeySchemeMismatch(
                f"client names blocks by scheme {request.key_scheme} (self-test {request.self_test_vector.hex()}), "
                f"this daemon by {KEY_SCHEME_VERSION} ({self._self_test.hex()}); run the same release on both ends"
            )
        new = self._parse(request)
        with self._lock:
            for other in self._by_number.values():
                if other.namespace == new.namespace and other != new:
                    raise InvalidCall(
                        f"payload sizes {_sizes(new)} ({new.checkpoints} for checkpoints) differ from {_sizes(other)} "
                        f"({other.checkpoints}), with which another client attached the same namespace; put the layout "
                        "into the namespace"
                    )
            number = next((i for i, known in self._by_number.items() if known == new), 0) or secrets.randbits(63) | 1
            self._by_number[number] = new
            self._by_number.move_to_end(number)
            if len(self._by_number) > MAX_ATTACHMENTS:
                self._by_number.popitem(last=False)
        return number, new

    def get(self, number: int) -> Attachment:
        """Raises `StaleAttachment`."""
        with self._lock:
            found = self._by_number.get(number)
            if found is None:
                raise StaleAttachment(f"attachment {number} is not of this boot of the daemon; attach again")
            self._by_number.move_to_end(number)
            return found

    def _parse(self, request: pb.AttachRequest) -> Attachment:
        text = request.namespace_json
        if len(text) > MAX_NAMESPACE_BYTES or len(request.client.encode()) > MAX_CLIENT_NAME_BYTES:
            raise InvalidCall(
                f"namespace_json has {len(text)} characters (limit {MAX_NAMESPACE_BYTES}) or the client's name is over "
                f"{MAX_CLIENT_NAME_BYTES} bytes"
            )
        try:
            fields = json.loads(text)
            canonical = canonical_json(fields)
            model, block_tokens, shards = fields["model"], fields["block_tokens"], fields["shards"]
            if type(model) is not str or len(model.encode()) > MAX_MODEL_NAME_BYTES or not model.isprintable():
                raise ValueError(f"model must be a printable text of at most {MAX_MODEL_NAME_BYTES} bytes")
            if type(block_tokens) is not int or type(shards) is not int:
                raise ValueError(f"block_tokens ({block_tokens!r}) and shards ({shards!r}) must be integers")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidCall(f"namespace_json is not the JSON of a namespace: {error!r}") from error
        if canonical != text or not 0 < shards <= MAX_SHARDS or not 0 < block_tokens <= 1 << 20:
            raise InvalidCall(
                f"namespace_json must be canonical (sorted keys, no spaces), with 1 to {MAX_SHARDS} shards (has "
                f"{shards}) and positive block_tokens (has {block_tokens})"
            )
        sizes = tuple(request.payload_bytes)
        if len(sizes) != shards or not all(0 < size <= self._max_payload_bytes for size in sizes):
            raise InvalidCall(
                f"payload_bytes is {list(sizes[:8])}; it must name a size from 1 to {self._max_payload_bytes} (the "
                f"limit of this daemon's arena) for each of {shards} shards"
            )
        if request.checkpoint_shards >= shards:
            raise InvalidCall(f"checkpoint_shards is {request.checkpoint_shards}; it must be less than all {shards}")
        digest = namespace_digest(text).hex()
        shapes = tuple(shape_of(digest, size) for size in sizes)
        return Attachment(model, block_tokens, shapes, request.checkpoint_shards)


def _sizes(attachment: Attachment) -> list[int]:
    return [shape.payload_bytes for shape in attachment.shapes]
