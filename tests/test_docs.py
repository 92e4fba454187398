"""Programs of the documentation run as they are printed, and its commands are commands.

Each line of a fenced block `sh` is read as a shell would read it: its programs are known ones, and
those of this package take the flags and arguments that stand there.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kakeya import MemoryArbiter
from kakeya.cli.main import parser
from kakeya.config.config import SETTINGS
from kakeya.config.reader import parse_flags
from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
OTHERS = {
    *(
        "base64",
        "brew",
        "cd",
        "chmod",
        "curl",
        "cut",
        "eval",
        "export",
        "git",
        "head",
        "jq",
        "mkdir",
        "mlx_lm.lora",
        "pip",
        "rm",
        "scp",
        "tee",
        "yes",
    ),
    *("promtool", "python", "python3", "sed", "shasum", "ssh", "tar"),
}
"""Programs that are not ours."""
ENDS = set("|&;()")


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


async def test_a_program_takes_a_lease_as_the_page_of_leases_says(tmp_path: Path) -> None:
    (program,) = await asyncio.to_thread(programs, "leases.md")
    held = program.replace("4 * GIB", "1024").replace("...", 'print("held")')
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", held),
        env={**os.environ, "KAKEYA_HOME": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await child.communicate()
    assert (said, child.returncode) == (b"held\n", 0)


async def test_a_plug_in_and_its_caller_work_as_the_page_of_memory_says() -> None:
    plugin, caller = await asyncio.to_thread(programs, "memory-arbiter.md")

    async def read_weights(model_key: str) -> memoryview:
        return memoryview(model_key.encode())

    async def score(backend: memoryview, payload: str) -> list[str]:
        return [bytes(backend).decode(), payload]

    names = {"read_weights": read_weights, "score": score, "SIZES": {"small": 1000}}
    lines = f"{caller}\nreturn answer, leave"
    header = "async def call(arbiter, question, questions):\n"
    exec(plugin + header + textwrap.indent(lines, "    "), names)
    async with MemoryArbiter(budget=10**6, clock=SystemClock(), grace_s=0) as arbiter:
        arbiter.register(names["capability"]())  # type: ignore[operator]
        answer, leave = await names["call"](arbiter, "which?", ["one?", "two?"])  # type: ignore[operator]
        leave()
    assert answer == ["small", "which?"]


def shell_blocks(page: str) -> list[str]:
    """Its fenced blocks of shell commands, also those within a list."""
    return [textwrap.dedent(one[1]) for one in re.findall(r"( *)```sh\n(.*?)```", page, re.DOTALL)]


def shell_lines(block: str) -> Iterator[str]:
    """Its lines, each with those that a quotation or a backslash adds to it."""
    line = ""
    for part in block.replace("\\\n", " ").splitlines():
        line += part
        try:
            shlex.split(line, comments=True)
        except ValueError:
            line += "\n"
        else:
            yield line
            line = ""
    assert not line, f"a quotation has no end: {line}"


def commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a line, those of `$(...)` included, without variables before them."""
    for inner in re.findall(r"\$\(([^()]*)\)", line):
        yield from commands(inner)
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    found: list[str] = []
    for word in (*words, ";"):
        if set(word) <= ENDS:
            while found and re.match(r"\w+=", found[0]):
                found = found[1:]
            if found:
                yield found
            found = []
        else:
            found.append(word)


def check_command(command: list[str]) -> None:
    """Raises ConfigError or SystemExit for a flag or an argument that the program does not take."""
    path, *arguments = command[command[0] == "sudo" :]
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    match path.rpartition("/")[2]:
        case "kakeya":
            parser().parse_args(arguments)
        case "kakeya-node":
            parse_flags(SETTINGS.values(), arguments)
        case "ssh" if "kakeya" in arguments[1]:
            check_command(arguments[1:])
        case program if path.startswith("./scripts/"):
            assert (ROOT / "scripts" / program).exists(), path
        case program:
            assert program in OTHERS, f"{program} is not known here"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_are_commands(page: Path) -> None:
    for block in shell_blocks(page.read_text()):
        for line in shell_lines(block):
            for command in commands(line):
                try:
                    check_command(command)
                except SystemExit as wrong:
                    pytest.fail(f"{page.name}: {line}: {wrong}")


@pytest.mark.parametrize(
    "line",
    [
        "kakeya statos",
        "kakeya status --jsn",
        'eval "$(kakeya connect opnai)"',
        "cat x | kakeya generate --promt x",
        "KAKEYA_TTL=60 ./scripts/kakeya drain --patience long",
        "ssh mini-1 .kakeya/bin/kakeya ca --pem > x",
        "kakeya-node --modle x &",
        "kakya status",
        "./scripts/tset",
    ],
)
def test_a_command_that_is_none_is_found(line: str) -> None:
    found = list(commands(line))
    with pytest.raises((AssertionError, SystemExit, ConfigError)):
        list(map(check_command, found))


def test_each_page_has_its_place_on_the_site() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    _home, *parts = nav
    assert [name for part in parts for name in part] == [
        *("Tutorial", "How to", "Reference", "Explanations")
    ]
    listed = re.findall(r"[\w/-]+\.md", yaml.dump(nav))
    assert len(listed) == len(set(listed))
    made = {name for name in listed if name.startswith("reference/")}
    assert set(listed) - made == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
