"""`kakeya connect`: what it prints and writes, and that --undo leaves no trace."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from kakeya.cli.connect.clients import CLIENTS, NodeTarget
from kakeya.cli.main import main
from tests.gateway.toy import ToyModel, make_folder, serving

MINE = {
    "claude-code": '{"theme": "dark",\n "env": {"ANTHROPIC_MODEL": "opus", "A": "b"}}',
    "codex": '# mine\nmodel = "gpt-5"\n\n[projects."/a"]\ntrust_level = "trusted"',
    "opencode": '{"provider": {"other": {}}, "model": "other/x"}\n',
    "continue": "name: mine\nmodels:\n  - name: a # keep\n    provider: ollama\n    model: b\n",
    "aider": "# mine\nmodel: gpt-5\r\ndark-mode: true",
}
REMOTE = ("--node", "https://127.0.0.1:9", "--model", "coder", "--key", "kakeya-1")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def file_of(name: str, home: Path) -> Path:
    return CLIENTS[name].config_file(home, {})


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("mine", [True, False])
def test_undo_gives_back_every_byte(name: str, mine: bool, tmp_path: Path) -> None:
    file = file_of(name, tmp_path)
    if mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(MINE[name].encode())
        file.chmod(0o644)
    before = files_in(tmp_path)
    at = ("connect", name, "--home", str(tmp_path))
    assert main([*at, *REMOTE, "--print"]) == 0
    assert files_in(tmp_path) == before
    assert main([*at, *REMOTE]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == (0o644 if mine else 0o600)
    once = file.read_bytes()
    assert b"https://127.0.0.1:9" in once
    assert b"kakeya-1" in once
    assert main([*at, "--node", "https://127.0.0.1:7", "--model", "other"]) == 0
    assert b"https://127.0.0.1:9" not in file.read_bytes()
    assert len(files_in(tmp_path)) == 2
    assert main([*at, *REMOTE]) == 0
    assert file.read_bytes() == once
    assert main([*at, "--undo"]) == 0
    assert files_in(tmp_path) == before
    assert main([*at, "--undo"]) == 1


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("claude-code", '"theme"', '"added": 1, "theme"'),
        ("codex", "[projects.", "[added]\n[projects."),
        ("continue", "name: mine", "name: added"),
    ],
)
def test_undo_keeps_what_changed_since(name: str, old: str, new: str, tmp_path: Path) -> None:
    file = file_of(name, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_bytes(MINE[name].encode())
    assert main(["connect", name, "--home", str(tmp_path), *REMOTE]) == 0
    file.write_bytes(file.read_bytes().decode().replace(old, new).encode())
    assert main(["connect", name, "--home", str(tmp_path), "--undo"]) == 0
    text = file.read_bytes().decode()
    assert "added" in text
    assert "kakeya" not in text
    assert "127.0.0.1" not in text


def test_what_does_not_parse_stays_and_the_refusal_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_of("claude-code", tmp_path)
    file.parent.mkdir()
    file.write_text('{"env": }')
    assert main(["connect", "claude-code", "--home", str(tmp_path), *REMOTE]) == 1
    said = capsys.readouterr().err
    assert f"{file} cannot be changed: it is no JSON" in said
    assert "--print" in said
    assert files_in(tmp_path) == {".claude/settings.json": b'{"env": }'}


def test_a_link_stays_one(tmp_path: Path) -> None:
    kept = tmp_path / "dotfiles.yml"
    kept.write_text("dark-mode: true\n")
    file_of("aider", tmp_path).symlink_to(kept)
    assert main(["connect", "aider", "--home", str(tmp_path), *REMOTE]) == 0
    assert file_of("aider", tmp_path).is_symlink()
    assert "127.0.0.1:9" in kept.read_text()


@pytest.mark.parametrize(
    ("context", "told"), [(0, None), (8192, None), (32_768, "32768"), (262_144, "262144")]
)
def test_claude_code_is_told_of_a_context_that_holds_its_own_prompt(
    context: int, told: str | None
) -> None:
    target = NodeTarget(url="http://127.0.0.1:9", model="coder", key="", context_tokens=context)
    env = CLIENTS["claude-code"].values(target)["env"]
    assert isinstance(env, dict)
    assert env.get("CLAUDE_CODE_MAX_CONTEXT_TOKENS") == told


async def test_a_node_is_asked_for_its_model_and_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(ToyModel(make_folder(tmp_path / "toy"), "toy")) as served:
        at = ("--node", f"127.0.0.1:{served.port}", "--home", str(tmp_path))

        async def run(*words: str) -> int:
            return await asyncio.to_thread(main, ["connect", *words, *at])

        assert await run("codex") == 0
        assert "model_context_window = 512\n" in file_of("codex", tmp_path).read_text()
        assert await run("claude-code") == 0
        env = json.loads(file_of("claude-code", tmp_path).read_text())["env"]
        assert env["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{served.port}"
        assert env["ANTHROPIC_MODEL"] == "toy"
        assert await run("codex", "--model", "none") == 1
        assert "does not serve 'none'; it serves toy" in capsys.readouterr().err
        assert await run("openai") == 0
    port = served.port
    assert f"export OPENAI_BASE_URL=http://127.0.0.1:{port}/v1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--node", "https://127.0.0.1:9"), "no node answers HTTP at 127.0.0.1:9"),
        ((*REMOTE[:4], "--key", "a\nb"), "the key has a character"),
        ((*REMOTE, "--home", "/nowhere"), "there is no folder /nowhere"),
    ],
)
def test_a_wrong_line_is_refused_and_writes_nothing(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "codex", "--home", str(tmp_path), *words]) != 0
    assert says in capsys.readouterr().err
    assert files_in(tmp_path) == {}


def test_help_names_the_clients_and_the_way_back_names_the_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["connect", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(CLIENTS)}, openai" in said
    assert main(["connect", "codex", "--home", str(tmp_path), *REMOTE]) == 0
    _, _, back = capsys.readouterr().out.partition("take it back: kakeya ")
    assert main(back.split()) == 0
    assert files_in(tmp_path) == {}
