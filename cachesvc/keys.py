"""Names of KV blocks: namespaces and chain keys (a leaf module: standard library and xxhash only).

A chain key names a block *and its whole prefix*::

    key_0 = H(tag_root  ‖ namespace_digest ‖ len(salt) ‖ salt ‖ len(adapter) ‖ adapter)
    key_i = H(tag_block ‖ key_{i-1} ‖ tokens_i as little-endian int32 ‖ len(extra_i) ‖ extra_i)

Lengths are little-endian uint32, so that no two different inputs are encoded alike. The chain is kept at full digest
width; only the 16 bytes that travel are cut. `H` is sha256 unless the namespace says ``xxh3_128``, which is for
trusted single-tenant use: a chosen collision there would hand out another prompt's KV.

Both ends compute `SELF_TEST_VECTOR` with their own code and compare it when a client attaches, so that two builds that
disagree never exchange a block. Golden values live in ``tests/vectors/keys.json``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import xxhash

BLOCK_TOKENS: Final = 128
KEY_BYTES: Final = 16
TENANT_BYTES: Final = 8
DIGEST_BYTES: Final = 32
KEY_SCHEME_VERSION: Final = 1

_ROOT_TAG: Final = b"cachesvc.root.v1\0"
_BLOCK_TAG: Final = b"cachesvc.block.v1\0"

_HASHES: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": lambda data: xxhash.xxh3_128_digest(data),
}

Tokens = Sequence[int] | memoryview | array  # type: ignore[type-arg]
"""Token ids: any sequence of ints in [0, 2**31), or a buffer of native int32 (which is not copied item by item)."""


@dataclass(frozen=True)
class Namespace:
    """Everything that must match for KV to be interchangeable between two engines.

    `model` is a name for people; `revision` must change with the weights (a digest of the weight files' index is a good
    choice). `layout` is the canonical description of a block's payload (see `cachesvc.connector.layout`), of which
    `shards` pieces make one block, each owned by one rank. Raises `ValueError` for an unknown `key_hash`.
    """

    model: str
    revision: str
    dtype: str
    quantization: str = "none"
    block_tokens: int = BLOCK_TOKENS
    layout: Mapping[str, Any] = field(default_factory=dict)
    shards: int = 1
    key_hash: str = "sha256"

    def __post_init__(self) -> None:
        if self.key_hash not in _HASHES:
            raise ValueError(f"key_hash is {self.key_hash!r}; use one of {', '.join(sorted(_HASHES))}")
        if self.block_tokens <= 0 or self.shards <= 0:
            raise ValueError(f"block_tokens ({self.block_tokens}) and shards ({self.shards}) must be positive")

    def canonical_json(self) -> str:
        """The text that is hashed and shown to operators: sorted keys, no spaces, ASCII."""
        return canonical_json(asdict(self))

    @property
    def digest(self) -> bytes:
        """sha256 of `canonical_json` (32 bytes)."""
        return namespace_digest(self.canonical_json())


def canonical_json(value: Mapping[str, Any]) -> str:
    """`value` as JSON with sorted keys, no white space, ASCII only. Raises `ValueError` for NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def namespace_digest(text: str) -> bytes:
    """sha256 (32 bytes) of a namespace's canonical JSON."""
    return hashlib.sha256(text.encode("ascii")).digest()


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as little-endian int32. Raises `ValueError` for an id outside [0, 2**31)."""
    if isinstance(tokens, memoryview | array):
        view = memoryview(tokens)
        if view.itemsize != 4 or view.format not in ("i", "l"):
            raise ValueError(f"token buffer has format {view.format!r}; it must hold native int32 ('i')")
        packed = array("i", view.tobytes())
    else:
        try:
            packed = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers in [0, 2**31): {error}") from error
    if packed and min(packed) < 0:
        raise ValueError(f"token id {min(packed)} is negative")
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class PrefixHasher:
    """The chain of one prompt, grown as the prompt grows: a turn that extends it hashes only the new tokens.

    `keys` holds the 16-byte key of every full block so far; `num_tokens` counts all tokens, the unfinished last block
    included. `extra` maps a block's index to the digests of images or audio whose tokens lie in it; it must be given
    no later than the tokens that complete that block.
    """

    def __init__(
        self, namespace: Namespace, *, salt: bytes = b"", adapter: bytes = b"", extra: Mapping[int, bytes] | None = None
    ) -> None:
        self._hash = _HASHES[namespace.key_hash]
        self._block_bytes = 4 * namespace.block_tokens
        self._extra: dict[int, bytes] = dict(extra or {})
        self._chain = self._hash(
            _ROOT_TAG
            + namespace.digest
            + struct.pack("<I", len(salt))
            + salt
            + struct.pack("<I", len(adapter))
            + adapter
        )
        self._tail = b""
        self.keys: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return (len(self.keys) * self._block_bytes + len(self._tail)) // 4

    def add_extra(self, extra: Mapping[int, bytes]) -> None:
        """Names content behind tokens still to come. Raises `ValueError` for a block that is already hashed."""
        late = [index for index in extra if index < len(self.keys)]
        if late:
            raise ValueError(f"extra for block {late[0]} came after its key was made")
        self._extra.update(extra)

    def extend(self, tokens: Tokens) -> None:
        """Appends tokens and makes the keys of the blocks that they complete. Raises `ValueError` as `token_bytes`."""
        self.extend_bytes(token_bytes(tokens))

    def copy(self) -> PrefixHasher:
        """The same chain at the same place, to be grown apart from this one."""
        twin = copy.copy(self)
        twin.keys = self.keys[:]
        twin._extra = self._extra.copy()
        return twin

    def extend_bytes(self, tokens: bytes) -> None:
        """`extend` for what `token_bytes` made."""
        data = self._tail + tokens
        whole = len(data) - len(data) % self._block_bytes
        for start in range(0, whole, self._block_bytes):
            extra = self._extra.get(len(self.keys), b"")
            self._chain = self._hash(
                b"".join(
                    (
                        _BLOCK_TAG,
                        self._chain,
                        data[start : start + self._block_bytes],
                        struct.pack("<I", len(extra)),
                        extra,
                    )
                )
            )
            self.keys.append(self._chain[:KEY_BYTES])
        self._tail = data[whole:]


def chain_keys(namespace: Namespace, tokens: Tokens, *, salt: bytes = b"", adapter: bytes = b"") -> list[bytes]:
    """Keys (16 bytes each) of the full blocks of `tokens`, in prefix order."""
    hasher = PrefixHasher(namespace, salt=salt, adapter=adapter)
    hasher.extend(tokens)
    return hasher.keys


def tenant_id(salt: bytes) -> bytes:
    """8 bytes that tell tenants apart without telling their salt; empty for the empty salt."""
    return hashlib.sha256(b"cachesvc tenant\0" + salt).digest()[:TENANT_BYTES] if salt else b""


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys as the one `bytes` field that travels."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """The reverse of `pack_keys`. Raises `ValueError` when the length is not a multiple of 16."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"keys field has {len(packed)} bytes, not a multiple of {KEY_BYTES}")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def self_test_vector() -> bytes:
    """16 bytes that any build with these rules computes alike: both hashes, salt, adapter, extra, a partial block."""
    total = hashlib.sha256()
    for name in sorted(_HASHES):
        namespace = Namespace("self-test", "0", "uint8", layout={"a": [1, 2]}, key_hash=name)
        hasher = PrefixHasher(namespace, salt=b"salt", adapter=b"adapter", extra={1: b"image"})
        hasher.extend(range(3 * BLOCK_TOKENS + 7))
        total.update(pack_keys(hasher.keys))
    return total.digest()[:KEY_BYTES]
