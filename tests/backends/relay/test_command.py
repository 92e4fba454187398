"""Commands as real programs: their answers, their failures, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from kakeya.backends.relay.backend import Finished
from kakeya.backends.relay.config import CommandSettings
from kakeya.backends.request import CompletionRequest, SamplingWish, ToolChoice
from kakeya.core.errors import DeadlineExceeded, PeerError, QueueFull, Unsupported
from kakeya.text.tools.answer import Said, ToolCall
from tests.backends.relay.upstream import answered, chat, text_of
from tests.waiting import eventually

ASKED = chat("c")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@asynccontextmanager
async def command(*argv: str, **settings):
    backend = CommandSettings(argv=argv, **settings).open("c")
    await backend.start()
    yield backend
    await backend.stop()


def shell(script: str, **settings):
    return command("sh", "-c", script, **settings)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that init has not reaped yet is dead all the same.
    state = subprocess.run(("ps", "-o", "stat=", "-p", str(pid)), capture_output=True, check=False)
    return not state.stdout.startswith(b"Z") and bool(state.stdout)


async def test_a_program_reads_the_prompt_and_prints_the_answer():
    async with command("cat") as backend:
        assert await answered(backend.handle(ASKED)) == [Said("Hello!"), Finished(reason="stop")]
        long = chat("c", "日本語 " * 200_000)
        assert text_of(await answered(backend.handle(long))) == "日本語 " * 200_000
        prompt = CompletionRequest(params=ASKED.params, prompts=("Once",))
        assert text_of(await answered(backend.handle(prompt))) == "Once"


async def test_the_answer_streams_as_it_comes_and_its_last_line_end_is_no_part(tmp_path):
    goes_on = tmp_path / "goes_on"
    wait = f"while [ ! -e {goes_on} ]; do sleep 0.01; done"
    async with shell(f"printf 'one\\n'; read x; {wait}; printf 'two\\n\\n'") as backend:
        async with aclosing(backend.handle(chat("c", "go\n"))) as parts:
            assert await anext(parts) == Said("one")
            await asyncio.to_thread(goes_on.touch)
            assert [part async for part in parts] == [Said("\ntwo"), Finished(reason="stop")]


async def test_a_stop_string_ends_the_program():
    async with shell("echo $$ END; sleep 600") as backend:
        said, end = await answered(backend.handle(chat("c", stop=("END",))))
        assert end == Finished(reason="stop", stop_string="END")
        await eventually("it is gone", lambda: not is_alive(int(said.text)))


async def test_a_call_is_read_where_tools_are_shown():
    asked = replace(ASKED, chat=replace(ASKED.chat, tools=(TOOL,)))
    says = 'I look. <tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
    script = f"grep -q '^You may call tools' && echo '{says}'"
    async with shell(script) as backend:
        said, called, end = await answered(backend.handle(asked))
    assert (said, called) == (Said("I look."), ToolCall(0, "look", '{"at": "sea"}', ""))
    assert end == Finished(reason="tool_calls")


async def test_a_program_that_fails_is_told_with_its_last_line():
    async with shell("echo half; echo first >&2; echo ' the  last ' >&2; exit 3") as backend:
        with pytest.raises(PeerError, match="the command c ended with 3: the last"):
            await answered(backend.handle(ASKED))
    async with shell("kill -9 $$") as backend:
        with pytest.raises(PeerError, match="the command c was ended by signal 9"):
            await answered(backend.handle(ASKED))


async def test_a_program_that_is_not_there_is_known_from_the_start(tmp_path):
    program = tmp_path / "later"
    async with command(str(program)) as backend:
        assert "there is no program" in backend.health()
        with pytest.raises(PeerError, match=r"cannot be started: .*No such file"):
            await answered(backend.handle(ASKED))
        await asyncio.to_thread(program.symlink_to, "/bin/cat")
        assert text_of(await answered(backend.handle(ASKED))) == "Hello!"
        assert backend.health() == ""


async def test_a_program_that_takes_too_long_is_killed_with_its_children():
    pids: list[int] = []

    async def run(backend):
        async for part in backend.handle(ASKED):
            pids.extend(map(int, part.text.split()))

    for timeout_s in (0.5, 2, 8, 32):
        async with shell("sleep 600 & echo $$ $!; wait", timeout_s=timeout_s) as backend:
            with pytest.raises(
                DeadlineExceeded, match=f"the command c took more than {timeout_s} s"
            ):
                await run(backend)
        if pids:  # else the limit was over before the program had begun
            break
    assert len(pids) == 2
    for pid in pids:
        await eventually("it is gone", lambda of=pid: not is_alive(of))


async def test_a_client_that_leaves_ends_the_program_and_its_children():
    async with shell("sleep 600 & echo $$ $!; wait") as backend:
        async with aclosing(backend.handle(ASKED)) as parts:
            pids = [int(pid) for pid in (await anext(parts)).text.split()]
            assert await asyncio.to_thread(lambda: all(map(is_alive, pids)))
        for pid in pids:
            await eventually("it is gone", lambda of=pid: not is_alive(of))


async def test_a_program_that_leaves_a_child_behind_ends_its_answer():
    async with shell("sleep 600 & echo $!") as backend:
        said, _ = await answered(backend.handle(ASKED))
        await eventually("it is gone", lambda: not is_alive(int(said.text)))


async def test_as_many_run_as_may():
    async with shell("echo on; sleep 600", at_once=1) as backend:
        async with aclosing(backend.handle(ASKED)) as parts:
            await anext(parts)
            with pytest.raises(QueueFull, match="the command c runs 1 times"):
                await answered(backend.handle(ASKED))
        async with aclosing(backend.handle(ASKED)) as parts:
            await anext(parts)


async def test_a_request_that_is_cancelled_at_once_leaves_no_program(tmp_path):
    started = tmp_path / "started"
    await asyncio.to_thread(started.touch)
    async with shell(f"echo $$ >> {started}; sleep 600", at_once=20) as backend:
        for turns in range(12):
            running = asyncio.create_task(answered(backend.handle(ASKED)))
            for _ in range(turns):
                await asyncio.sleep(0.002)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        def gone() -> bool:
            return not any(is_alive(int(pid)) for pid in started.read_text().split())

        await eventually("none is left", gone)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": ToolChoice(mode="required")}, "tool_choice"),
        ({"answer_schema": {"type": "object"}}, "response_format"),
        ({"params": replace(ASKED.params, top_logprobs=2)}, "logprobs"),
    ],
)
def test_what_a_program_cannot_promise_is_refused(changes, param):
    backend = CommandSettings(argv=(sys.executable,)).open("c")
    with pytest.raises(Unsupported, match=param) as fault:
        backend.check(replace(ASKED, **changes))
    assert fault.value.param == param
    with pytest.raises(Unsupported, match="token ids"):
        backend.check(CompletionRequest(params=ASKED.params, prompts=((1, 2),)))


def test_what_a_program_does_not_follow_is_named():
    backend = CommandSettings(argv=("cat",)).open("c")
    asked = chat("c", max_tokens=4, sampling=SamplingWish(top_p=0.5, seed=1))
    assert backend.check(asked) == ["top_p", "seed", "max_tokens"]
    assert backend.check(ASKED) == []
