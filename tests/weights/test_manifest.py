from __future__ import annotations

import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kakeya.core.errors import InvalidArgument, PeerProtocol
from kakeya.v1 import weights_pb2 as pb
from kakeya.weights.manifest import (
    PIECE_BYTES,
    WeightsFile,
    WeightsManifest,
    check_file_name,
    check_model_name,
    checked_manifest,
    spans,
)
from kakeya.weights.wire import held_from_wire, held_to_wire, manifest_from_wire, manifest_to_wire

HASH = hashlib.sha256(b"").digest()


def file_of(name: str, size: int) -> WeightsFile:
    return WeightsFile(name, size, HASH, tuple(HASH for _ in spans(size)))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../a.json",
            "/a.json",
            "a/../b.json",
            "a//b.json",
            ".a.json",
            "a/.git/b.json",
            "~a.json",
        ),
        *("a\\b.json", "a\0.json", "a\nb.json", "a.py", "a", "", "a/", "é" * 150 + ".json"),
        *("a/b/c/d/e.json", "\ud800.json", "a.json\u202e"),
    ],
)
def test_no_file_of_a_model_has_such_a_name(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_file_name(name)


@pytest.mark.parametrize("name", ["a.json", "tokenizer.model", "模型.safetensors", "a/b c/d.JSON"])
def test_a_file_may_have_such_a_name(name: str) -> None:
    check_file_name(name)


@given(st.text())
def test_a_name_that_is_let_in_stays_in_its_folder(name: str) -> None:
    for check in (check_file_name, check_model_name):
        try:
            check(name)
        except InvalidArgument:
            continue
        assert os.path.normpath(f"/models/{name}") == f"/models/{name}"


@pytest.mark.parametrize("name", ["a:b", "a=b", "..", "a/../b", "", "/etc"])
def test_no_model_has_such_a_name(name: str) -> None:
    with pytest.raises(InvalidArgument):
        check_model_name(name)


def test_a_manifest_crosses_the_wire_and_keeps_its_digest() -> None:
    made = WeightsManifest(
        (file_of("a.json", 3), file_of("b.safetensors", 2 * PIECE_BYTES + 1), file_of("c.txt", 0))
    )
    told = pb.WeightsManifest.FromString(manifest_to_wire(made).SerializeToString())
    assert manifest_from_wire(told, made.digest, "peer") == made
    assert [piece.size for piece in made.pieces] == [3, PIECE_BYTES, PIECE_BYTES, 1]
    with pytest.raises(PeerProtocol, match="which was asked for"):
        manifest_from_wire(told, "0" * 64, "peer")


@pytest.mark.parametrize(
    "files",
    [
        [],
        [file_of("b.json", 1), file_of("a.json", 1)],
        [file_of("A.json", 1), file_of("a.json", 1)],
        [file_of("\u00e9.json", 1), file_of("e\u0301.json", 1)],
        [WeightsFile("a.json", 1, HASH, ())],
        [WeightsFile("a.json", 1, HASH, (HASH, HASH))],
        [WeightsFile("a.json", 1, b"", (HASH,))],
        [WeightsFile("a.json", 1 << 60, HASH, (HASH,))],
    ],
)
def test_a_manifest_that_no_correct_node_makes_is_refused(files: list[WeightsFile]) -> None:
    with pytest.raises(InvalidArgument):
        checked_manifest(sorted(files, key=lambda one: one.name) if len(files) == 1 else files, "")


@given(st.sets(st.integers(0, 99)), st.integers(0, 100))
def test_the_pieces_that_are_held_cross_the_wire(held: set[int], count: int) -> None:
    told = held_to_wire(held, 100)
    assert held_from_wire(told, 100) == held
    assert held_from_wire(told, count) == {piece for piece in held if piece < count}
