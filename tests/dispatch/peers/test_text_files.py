"""The text of models travels whole, and of a peer's files only those are kept that it promised."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import pytest

from kakeya.core.errors import PeerProtocol, Refused
from kakeya.core.units import MIB
from kakeya.dispatch.peers import text_files
from kakeya.dispatch.peers.text_files import MOST_BYTES, PART_BYTES, TextFiles

FILES = {
    "tokenizer.json": b"{" + b"x" * PART_BYTES + b"}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"",
    "additional_chat_templates/rag.jinja": b"{{ messages }}",
}
Parts = Iterable[tuple[str, bytes]]


def model(folder: Path, files: Mapping[str, bytes] = FILES) -> str:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(folder)


def read(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def unreadable(path: Path) -> None:
    """Let no one read a file, whoever runs the tests."""
    path.chmod(0)
    if os.access(path, os.R_OK):
        path.unlink()
        path.symlink_to("/proc/self/mem")


async def sent(parts: Parts) -> AsyncIterator[tuple[str, bytes]]:
    for part in parts:
        await asyncio.sleep(0)
        yield part


async def test_files_that_were_sent_are_kept_as_they_were(tmp_path: Path) -> None:
    theirs, ours = TextFiles(tmp_path / "none"), TextFiles(tmp_path / "kept")
    path = model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights are no text")
    digest = await theirs.digest(path)
    assert await ours.find(digest) is None
    folder = await ours.keep(digest, theirs.parts(path))
    assert read(folder) == FILES
    assert await ours.find(digest) == folder
    assert await ours.digest(str(folder)) == digest


async def test_parts_come_file_by_file_and_none_is_too_large_for_a_message(tmp_path: Path) -> None:
    parts = [part async for part in TextFiles(tmp_path).parts(model(tmp_path / "model"))]
    assert [name for name, _ in parts] == [
        *("tokenizer.json", "tokenizer.json"),
        *("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"),
    ]
    assert max(len(data) for _, data in parts) == PART_BYTES


async def test_a_model_without_text_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    texts = TextFiles(tmp_path / "kept")
    assert await texts.digest(str(tmp_path)) == ""
    assert await texts.digest(str(tmp_path / "model.gguf")) == ""
    assert await texts.digest(str(tmp_path / "gone")) == ""


async def test_a_model_without_a_path_has_no_text_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path)
    monkeypatch.chdir(tmp_path)
    texts = TextFiles(tmp_path / "kept")
    assert await texts.digest("") == ""
    assert [part async for part in texts.parts("")] == []


async def test_the_digest_changes_with_the_files(tmp_path: Path) -> None:
    texts, path = TextFiles(tmp_path / "kept"), model(tmp_path / "model")
    before = await texts.digest(path)
    assert await texts.digest(path) == before
    (tmp_path / "model" / "chat_template.jinja").write_bytes(b"{{ bos_token }}")
    assert await texts.digest(path) != before


async def test_files_of_another_digest_are_not_kept(tmp_path: Path) -> None:
    texts = TextFiles(tmp_path / "kept")
    digest = await texts.digest(model(tmp_path / "model"))
    wrong = FILES | {"tokenizer_config.json": b'{"bos_token": "evil"}'}
    with pytest.raises(PeerProtocol, match="not that of the digest"):
        await texts.keep(digest, sent(wrong.items()))
    assert await texts.find(digest) is None


@pytest.mark.parametrize(
    "name",
    [
        *("../tokenizer.json", "/etc/passwd", "..", ".hidden", "", "a/b.json", "a\\b"),
        "additional_chat_templates/../../x.jinja",
        "additional_chat_templates/",
        "tokenizer.json\n",
        "x" * 300,
    ],
)
async def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    texts = TextFiles(tmp_path / "kept")
    with pytest.raises(PeerProtocol, match="the last one called"):
        await texts.keep("0" * 32, sent([(name, b"x")]))
    assert read(tmp_path) == {}


@pytest.mark.parametrize("digest", ["", "..", "../../../../../../../../tmp/xxxxxxxx", "A" * 32])
async def test_what_is_no_digest_is_no_folder(tmp_path: Path, digest: str) -> None:
    with pytest.raises(PeerProtocol, match="is no digest"):
        await TextFiles(tmp_path).find(digest)


async def test_more_than_a_tokenizer_can_have_is_not_taken(tmp_path: Path) -> None:
    texts, taken = TextFiles(tmp_path), 0

    async def endless() -> AsyncIterator[tuple[str, bytes]]:
        nonlocal taken
        while True:
            taken += 16 * MIB
            yield "tokenizer.json", bytes(16 * MIB)

    with pytest.raises(PeerProtocol, match=f"at most 64 of {MOST_BYTES} bytes"):
        await texts.keep("0" * 32, endless())
    assert taken <= MOST_BYTES + 16 * MIB
    with pytest.raises(PeerProtocol, match="65 files"):
        await texts.keep("0" * 32, sent((f"{index}.json", b"") for index in range(100)))
    assert read(tmp_path) == {}


async def test_two_that_keep_the_same_files_at_once_both_have_them(tmp_path: Path) -> None:
    texts, path = TextFiles(tmp_path / "kept"), model(tmp_path / "model")
    digest = await texts.digest(path)
    for _ in range(20):
        folders = await asyncio.gather(*(texts.keep(digest, texts.parts(path)) for _ in range(4)))
        assert len(set(folders)) == 1
        assert read(folders[0]) == FILES
        assert [one.name for one in (tmp_path / "kept").iterdir()] == [digest]
        for name in FILES:
            (folders[0] / name).unlink()
        (folders[0] / "additional_chat_templates").rmdir()
        folders[0].rmdir()


async def test_a_sender_that_is_lost_leaves_nothing(tmp_path: Path) -> None:
    async def lost() -> AsyncIterator[tuple[str, bytes]]:
        yield "tokenizer.json", b"x"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await TextFiles(tmp_path / "kept").keep("0" * 32, lost())
    assert read(tmp_path) == {}


async def test_the_folders_that_were_used_last_stay(tmp_path: Path) -> None:
    texts, digests = TextFiles(tmp_path / "kept"), []
    most = text_files._MOST_FOLDERS
    for index in range(most + 3):
        files = {"tokenizer.json": str(index).encode()}
        digests.append(await texts.digest(model(tmp_path / "model", files)))
        folder = await texts.keep(digests[-1], sent(files.items()))
        os.utime(folder, (index, index))
        assert await texts.find(digests[0]) is not None  # each use counts
    found = [digest for digest in digests if await texts.find(digest) is not None]
    assert found[0] == digests[0]
    assert found[-1] == digests[-1]
    assert most <= len(found) <= most + 1


async def test_files_that_cannot_be_read_are_a_refusal(tmp_path: Path) -> None:
    texts, path = TextFiles(tmp_path / "kept"), model(tmp_path / "model")
    unreadable(tmp_path / "model" / "tokenizer_config.json")
    with pytest.raises(Refused, match="cannot be read"):
        await texts.digest(path)
    with pytest.raises(Refused, match="cannot be read"):
        [part async for part in texts.parts(path)]


async def test_a_folder_that_cannot_be_written_is_an_error_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"a file, no folder")
    texts = TextFiles(tmp_path / "kept")
    digest = await texts.digest(model(tmp_path / "model"))
    assert await texts.find(digest) is None
    with pytest.raises(OSError, match="kept"):
        await texts.keep(digest, sent(FILES.items()))
