from __future__ import annotations

import hashlib
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from cachesvc.keys import Namespace, PrefixHasher, canonical_json, self_test_vector, token_bytes, unpack_keys

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text())


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    namespace = Namespace(**case["namespace"])
    assert namespace.canonical_json() == case["namespace_json"]
    assert namespace.digest.hex() == case["digest"]
    hasher = PrefixHasher(
        namespace,
        salt=bytes.fromhex(case["salt"]),
        adapter=bytes.fromhex(case["adapter"]),
        extra={int(k): bytes.fromhex(v) for k, v in case["extra"].items()},
    )
    hasher.extend(range(case["first_token"], case["first_token"] + case["tokens"]))
    assert [key.hex() for key in hasher.keys] == case["keys"]


def test_the_self_test_vector_is_the_published_one() -> None:
    assert self_test_vector().hex() == VECTORS["self_test_vector"]


def test_the_rule_written_out_by_hand() -> None:
    namespace = Namespace(model="m", revision="r", dtype="float32")
    digest = hashlib.sha256(namespace.canonical_json().encode()).digest()
    root = hashlib.sha256(b"cachesvc.root.v1\0" + digest + struct.pack("<I", 2) + b"ss" + struct.pack("<I", 0)).digest()
    tokens = struct.pack("<128i", *range(128))
    first = hashlib.sha256(b"cachesvc.block.v1\0" + root + tokens + struct.pack("<I", 0)).digest()
    hasher = PrefixHasher(namespace, salt=b"ss")
    hasher.extend(range(128))
    assert hasher.keys == [first[:16]]


def test_all_vectors_name_different_blocks() -> None:
    keys = [key for case in VECTORS["cases"] for key in case["keys"]]
    assert len(set(keys)) == len(keys) - 1  # block 0 of "plain" and of "extra in block 1" are the same prefix


def test_buffers_and_lists_hash_alike() -> None:
    ids = list(range(1000, 1300))
    assert token_bytes(array("i", ids)) == token_bytes(memoryview(array("i", ids))) == token_bytes(ids)


@pytest.mark.parametrize("bad", [[-1], [2**31], ["a"], [1.5], array("q", [1]), memoryview(b"abcd")])
def test_what_is_no_token_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"token"):
        token_bytes(bad)


def test_a_late_extra_is_refused() -> None:
    hasher = PrefixHasher(Namespace(model="m", revision="r", dtype="float32"))
    hasher.extend(range(128))
    with pytest.raises(ValueError, match="block 0"):
        hasher.add_extra({0: b"x"})


def test_an_unknown_hash_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="sha256, xxh3_128"):
        Namespace(model="m", revision="r", dtype="float32", key_hash="md5")


def test_packed_keys_of_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        unpack_keys(b"x" * 17)


def test_canonical_json_refuses_what_json_has_no_word_for() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})
