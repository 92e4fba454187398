"""EngineBackend over real children on real sockets: deaths, hangs, limits, leftovers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import textwrap
import time
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.backends.engine import life
from kakeya.backends.engine.backend import EngineBackend
from kakeya.backends.engine.client import EngineClient
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engine.process import MAX_SOCKET_PATH_BYTES, SocketFolder
from kakeya.backends.engine.restart import RestartPolicy
from kakeya.core.clock import SystemClock
from kakeya.core.errors import (
    ConfigError,
    InvalidArgument,
    MemoryRefused,
    PeerUnavailable,
    QueueFull,
)
from kakeya.generation.facts import EngineStats, ModelState
from kakeya.generation.frames import Done, Progress, StopReason, Tokens
from kakeya.generation.progress import LoadPhase, LoadProgress
from kakeya.generation.request import DecodeRequest, Sampling
from kakeya.wire.channels import Keepalive
from tests.fakes import set_by
from tests.sessions.toy import expected
from tests.waiting import LIMIT_S, until

FAST = EngineOptions(
    start_timeout_s=60.0,
    resume_timeout_s=60.0,
    stop_grace_s=2.0,
    restart=RestartPolicy(backoff_s=(0.0, 0.05)),
)


def toy(*arguments):
    def command(socket: Path):
        return (
            sys.executable,
            "-m",
            "tests.backends.engine.toy_engine",
            "--socket",
            str(socket),
            *map(str, arguments),
        )

    return command


def backend(*arguments, options=FAST, **injected):
    return EngineBackend("toy", toy(*arguments), options=options, **injected)


def request(**changes):
    return replace(
        DecodeRequest(
            token_ids=(1, 2, 3), max_tokens=40, sampling=Sampling(temperature=1.0, seed=7)
        ),
        **changes,
    )


HUNG_AT_TEN = ("--hang-at", 13)
"""The engine of `request` waits after ten tokens to be killed, however late that comes."""


async def collect(model, asked, on_token=None):
    tokens, done = [], None
    async with aclosing(model.decode(asked)) as frames:
        async for frame in frames:
            assert done is None, "no frame follows done"
            match frame:
                case Tokens():
                    tokens.extend(frame.token_ids)
                    if on_token is not None:
                        on_token(len(tokens))
                case Done():
                    done = frame
    assert done is not None
    return tokens, done


def wanted(asked):
    return expected(asked.token_ids, asked.max_tokens, sampling=asked.sampling)[0]


def is_alive(pid):
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # An orphan that init has not reaped yet is dead all the same.
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


async def test_a_decode_streams_progress_then_tokens_then_one_done():
    async with backend() as model:
        facts = await model.ready(60.0)
        assert (facts.model_id, facts.vocab_size, facts.load_s) == ("toy", 97, 0.1)
        frames = []
        async for frame in model.decode(request()):
            frames.append(frame)
        assert isinstance(frames[0], Progress)
        assert [frame.token_ids[0] for frame in frames[1:-1]] == wanted(request())
        assert frames[-1].reason is StopReason.MAX_TOKENS
        assert frames[-1].usage.forwards == 40


async def test_a_killed_engine_is_noticed_at_once_and_streams_continue_with_the_same_tokens():
    """Row 29: the output is that of the run without fault."""
    states = []
    options = (*HUNG_AT_TEN, "--delay-s", 0.01)
    async with backend(*options, on_change=lambda m: states.append(m.state)) as model:
        await model.ready(60.0)
        killed = []

        def kill_at_ten(count):
            if count == 10 and not killed:
                killed.append(model.pid)
                os.kill(model.pid, signal.SIGKILL)

        asked = [request(token_ids=(n, *range(20))) for n in range(3)]
        others = [asyncio.create_task(collect(model, other)) for other in asked]
        tokens, done = await collect(model, request(), kill_at_ten)
        assert tokens == wanted(request())
        assert done.usage.forwards >= 40
        for one, other in zip(asked, others, strict=True):
            assert (await other)[0] == wanted(one)
        assert states == [ModelState.READY, ModelState.RESTARTING, ModelState.READY]
        assert model.restarts == 1
        assert model.last_error == ""


class Group:
    """Other ranks, which are away for some of the tries; the child is killed to lose one."""

    def __init__(self, *tries):
        self.tries = list(tries)
        """Of each try to have them its failure, None = they are there."""

    @asynccontextmanager
    async def form(self):
        if failure := self.tries.pop(0):
            raise failure
        yield self

    def env(self):
        return dict(os.environ)

    async def lost(self):
        await asyncio.Event().wait()


AWAY = PeerUnavailable("mini-2 is away")


async def killed_at_ten(group, options):
    async with backend(*HUNG_AT_TEN, options=options, others=group.form) as model:
        await model.ready(60.0)

        def kill(count):
            if count == 10:
                os.kill(model.pid, signal.SIGKILL)

        return (await collect(model, request(), kill))[0]


async def test_generations_go_on_when_a_lost_rank_is_back_in_time(monkeypatch):
    monkeypatch.setattr(life, "GATHER_EVERY_S", 0.01)
    group = Group(None, AWAY, AWAY, None)
    assert await killed_at_ten(group, FAST) == wanted(request())
    assert not group.tries


async def test_ranks_that_are_lost_again_and_again_open_no_breaker():
    options = replace(FAST, restart=replace(FAST.restart, max_deaths=1))
    assert await killed_at_ten(Group(None, None), options) == wanted(request())


@pytest.mark.parametrize(
    ("failure", "options"),
    [
        pytest.param(AWAY, replace(FAST, gather_s=0.0), id="away for too long"),
        pytest.param(MemoryRefused("mini-2 lends none"), FAST, id="has no memory"),
    ],
)
async def test_generations_are_told_where_a_lost_rank_does_not_come_back(failure, options):
    with pytest.raises(PeerUnavailable, match=f"toy is failed: {failure.message}"):
        await killed_at_ten(Group(None, failure), options)


async def test_an_exit_is_seen_within_fifty_milliseconds():
    """Row 34. The least of several: nothing that we wait for takes longer, busy or not."""
    moved = asyncio.Queue()
    options = replace(FAST, restart=RestartPolicy(backoff_s=(0.0,), max_deaths=99))
    async with backend(
        options=options, on_change=lambda m: moved.put_nowait((m.state, time.monotonic()))
    ) as model:
        noticed_s = []
        while not noticed_s or (min(noticed_s) > 0.05 and len(noticed_s) < 30):
            assert (await asyncio.wait_for(moved.get(), 60))[0] is ModelState.READY
            killed_mono = time.monotonic()
            os.kill(model.pid, signal.SIGKILL)
            state, at_mono = await asyncio.wait_for(moved.get(), 60)
            assert state is ModelState.RESTARTING
            noticed_s.append(at_mono - killed_mono)
    assert min(noticed_s) <= 0.05


async def test_a_client_whose_engine_will_not_come_back_is_told_within_200_milliseconds():
    """Row 34, where nothing can resume; the least of several, as above."""
    options = replace(FAST, restart=RestartPolicy(max_deaths=1))
    told_s = []
    while not told_s or (min(told_s) > 0.2 and len(told_s) < 12):
        async with backend(*HUNG_AT_TEN, options=options) as model:
            await model.ready(60.0)
            killed_mono = []

            def kill_at_ten(count, model=model, killed_mono=killed_mono):
                if count == 10:
                    killed_mono.append(time.monotonic())
                    os.kill(model.pid, signal.SIGKILL)

            with pytest.raises(PeerUnavailable, match="signal SIGKILL"):
                await collect(model, request(), kill_at_ten)
            told_s.append(time.monotonic() - killed_mono[0])
    assert min(told_s) <= 0.2


async def test_two_kills_in_one_generation_are_survived():
    async with backend("--hang-at", 8, 28) as model:
        await model.ready(60.0)

        def kill(count):
            if count in {5, 25}:
                os.kill(model.pid, signal.SIGKILL)

        tokens, _ = await collect(model, request(), kill)
        assert tokens == wanted(request())
        assert model.restarts == 2


async def test_a_death_after_the_last_token_ends_the_generation_properly():
    async with backend("--hang-at", 7) as model:
        await model.ready(60.0)
        asked = request(max_tokens=4)
        tokens, done = await collect(
            model, asked, lambda n: n == 4 and os.kill(model.pid, signal.SIGKILL)
        )
        assert tokens == wanted(asked)
        assert done.reason is StopReason.MAX_TOKENS


async def test_the_breaker_opens_and_names_the_last_exit():
    async with backend("--exit-code", 3, "--say", "no memory") as model:
        await until(lambda: model.state is ModelState.FAILED)
        assert model.last_error == (
            "it died 5 times in 10 minutes, the last time by exit code 3: no memory"
        )
        with pytest.raises(PeerUnavailable, match="is failed: it died 5 times") as failure:
            await model.ready(5.0)
        assert failure.value.retry_after_s is None


async def test_exit_code_two_is_a_configuration_error_and_is_not_retried():
    async with backend("--exit-code", 2, "--say", "no model folder /x") as model:
        await until(lambda: model.state is ModelState.FAILED)
        assert (model.last_error, model.restarts) == ("no model folder /x", 0)


async def test_a_program_that_does_not_exist_fails_with_its_name():
    async with EngineBackend("toy", lambda socket: ["/nowhere/engine"], options=FAST) as model:
        await until(lambda: model.state is ModelState.FAILED)
        assert model.last_error == "/nowhere/engine cannot be run: No such file or directory"


async def test_an_engine_that_dies_after_each_token_still_makes_progress():
    options = replace(FAST, max_losses_in_a_row=2)
    async with backend("--hang-at", 4, 5, 6, options=options) as model:
        asked = request(max_tokens=3)
        tokens, _ = await collect(model, asked, lambda _: os.kill(model.pid, signal.SIGKILL))
        assert tokens == wanted(asked)
        assert model.restarts >= 2


async def test_losses_without_a_token_are_bounded(tmp_path):
    record = tmp_path / "record"
    options = replace(FAST, max_losses_in_a_row=2)
    async with backend("--delay-s", 30, "--record", record, options=options) as model:
        await model.ready(60.0)
        running = asyncio.create_task(collect(model, request()))
        for losses in (1, 2):
            await until(lambda n=losses: str(_lines(record)).count("decode") == n)
            os.kill(model.pid, signal.SIGKILL)
        with pytest.raises(PeerUnavailable, match="lost 2 engines in a row over this request"):
            await running


async def test_losses_of_engines_that_outgrow_their_memory_end_with_that_reason(tmp_path):
    record = tmp_path / "record"
    async with backend("--delay-s", 30, "--record", record) as model:
        await model.ready(20.0)
        running = asyncio.create_task(collect(model, request()))
        for losses in (1, 2):
            await until(lambda n=losses: str(_lines(record)).count("decode") == n)
            model.kill("grew to 900 MiB, beyond its lease of 800 MiB")
        with pytest.raises(
            MemoryRefused, match="the last as the engine grew to 900 MiB"
        ) as refusal:
            await running
        assert refusal.value.retry_after_s is None


async def test_an_engine_that_is_not_back_in_time_is_unavailable_with_a_hint():
    options = replace(
        FAST, resume_timeout_s=0.2, restart=RestartPolicy(backoff_s=(30.0,), max_deaths=9)
    )
    async with backend("--hang-at", 6, options=options) as model:
        await model.ready(60.0)
        with pytest.raises(PeerUnavailable, match="restarting: it ended by signal SIGKILL") as e:
            await collect(model, request(), lambda n: n == 3 and os.kill(model.pid, signal.SIGKILL))
        assert 20.0 < e.value.retry_after_s < 31.0
        with pytest.raises(PeerUnavailable):
            await model.draft([1], 2)
        assert await model.stats() == EngineStats()
        await model.release("gone")


async def test_the_child_dies_with_its_parent_even_when_that_is_killed():
    program = textwrap.dedent(
        """
        import asyncio
        from tests.backends.engine.test_backend import backend

        async def main():
            async with backend() as model:
                await model.ready(60.0)
                print(model.pid, flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    with tempfile.TemporaryDirectory(prefix="kk", dir="/tmp") as sockets:
        parent = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": sockets},
        )
        try:
            child = int(await asyncio.wait_for(parent.stdout.readline(), LIMIT_S))
            assert is_alive(child)
        finally:
            parent.kill()
            await parent.wait()
        await until(lambda: not is_alive(child))


async def test_closing_the_iterator_reaches_the_child(tmp_path):
    """Row 26: the engine's work stops within 0.5 s."""
    record = tmp_path / "record"
    async with backend("--delay-s", 0.01, "--record", record) as model:
        await model.ready(60.0)
        async with aclosing(model.decode(request(max_tokens=9000))) as frames:
            async for frame in frames:
                if isinstance(frame, Tokens):
                    break
        await until(lambda: "cancelled" in _lines(record))
        assert (model.running, model.state) == (0, ModelState.READY)


async def test_cancelling_the_consumer_reaches_the_child_and_stays_a_cancellation(tmp_path):
    record = tmp_path / "record"
    async with backend("--delay-s", 0.01, "--record", record) as model:
        await model.ready(60.0)
        seen = asyncio.Event()
        task = asyncio.create_task(collect(model, request(max_tokens=9000), lambda _: seen.set()))
        await set_by(task, seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: "cancelled" in _lines(record))


async def test_a_stopped_engine_is_found_by_keepalive_and_the_stream_continues():
    """Row 2 at this layer: SIGSTOP is noticed by deadlines, not by TCP."""
    options = replace(
        FAST,
        call_timeout_s=0.5,
        keepalive=Keepalive(interval_s=1.0, timeout_s=0.5),
        probe_interval_s=60.0,
    )
    async with backend(*HUNG_AT_TEN, options=options) as model:
        await model.ready(60.0)
        stopped = []

        def stop(count):
            if count == 10 and not stopped:
                stopped.append(model.pid)
                os.kill(model.pid, signal.SIGSTOP)

        async with asyncio.timeout(60):
            tokens, _ = await collect(model, request(), stop)
        assert tokens == wanted(request())
        assert not is_alive(stopped[0])


async def test_speeds_that_an_idle_engine_measures_later_are_told():
    told = []
    options = replace(FAST, probe_interval_s=0.05)
    async with backend(
        "--measured-at", 3, options=options, on_change=lambda m: told.append(m.facts)
    ) as model:
        facts = await model.ready(60.0)
        assert facts.tokens_per_second == 0
        await until(lambda: model.facts.tokens_per_second == 50)
    assert told[-2].tokens_per_second == 50


async def test_an_idle_engine_that_hangs_is_found_by_probes():
    options = replace(FAST, probe_interval_s=0.1, probe_timeout_s=1.0)
    errors = []
    async with backend(options=options, on_change=lambda m: errors.append(m.last_error)) as model:
        await model.ready(60.0)
        hung = model.pid
        os.kill(hung, signal.SIGSTOP)
        # On a busy machine the next one may be late with an answer, too.
        await until(lambda: model.restarts and model.state is ModelState.READY)
        assert not is_alive(hung)
    assert "it answered no probe within 1 s" in errors[1]


class Hurried(SystemClock):
    """Sleeps for a small part of the time, and keeps the last pause."""

    last_s = 0.0

    async def sleep(self, seconds, wake=None):
        self.last_s = seconds
        await super().sleep(seconds / 500, wake)


async def test_a_child_that_no_task_attends_any_more_is_ended_and_said_so():
    class Faulty(EngineClient):
        async def describe(self, timeout_s):
            raise RuntimeError("a fault of ours")

    def faulty(child):
        return Faulty(child.model_id, child.socket, child.keepalive)

    async with backend(client=faulty) as model:
        await until(lambda: "a fault of ours" in model.last_error)
        with pytest.raises(PeerUnavailable, match="lost its keeper"):
            await model.ready(0.0)


async def test_an_engine_at_rest_is_probed_ever_more_seldom_until_a_request_comes():
    pauses, clock = [], Hurried()

    class Probed(EngineClient):
        async def look(self, timeout_s):
            pauses.append(clock.last_s)
            return await super().look(timeout_s)

    def probed(child):
        return Probed(child.model_id, child.socket, child.keepalive)

    async with backend("--delay-s", 0.01, options=FAST, clock=clock, client=probed) as model:
        await model.ready(60.0)
        await until(lambda: len(pauses) >= 4)
        assert pauses[0] < 20 < pauses[1] < 38 <= pauses[2]
        task = asyncio.create_task(collect(model, request(max_tokens=9000)))
        await until(lambda: pauses[-1] == FAST.probe_interval_s)
        task.cancel()
        await until(lambda: pauses[-1] >= 38)


async def test_after_a_kill_one_sequence_runs_at_a_time_for_a_while(tmp_path, monkeypatch):
    record = tmp_path / "record"
    options = replace(FAST, probe_interval_s=0.02, max_running=9)
    monkeypatch.setattr(life, "CARE_S", 3600.0)
    async with backend("--record", record, options=options) as model:
        await model.ready(60.0)
        os.kill(model.pid, signal.SIGKILL)  # as the system does when memory is short
        await until(lambda: model.restarts == 1 and model.state is ModelState.READY)
        assert _lines(record) == ["limits 1"]
        monkeypatch.setattr(life, "CARE_S", 0.0)
        model.kill("grew")
        await until(lambda: "limits 9" in _lines(record))
        assert _lines(record) == ["limits 1", "limits 1", "limits 9"]


async def test_an_orderly_end_calls_for_no_care(tmp_path):
    record = tmp_path / "record"
    async with backend("--record", record) as model:
        await model.ready(60.0)
        model.end("was too large")
        await until(lambda: model.restarts == 1 and model.state is ModelState.READY)
        assert _lines(record) == []


def scheduling(mode, file=Path()):
    """The real main of an engine, with its scheduler, over a toy model."""

    def command(socket):
        child = (sys.executable, "-m", "tests.engine.child_engine", mode)
        return (*child, "--socket", socket, "--model", file, "--model-id", "toy")

    return command


async def test_streams_that_speak_go_on_whatever_the_deadline_of_their_first_token_was():
    """What was said has to be computed again, which takes this engine, as it counts, 1.5 s. Before
    2000 tokens it waits to be killed."""
    asked = request(max_tokens=2500, deadline_s=1.0, sampling=Sampling())
    async with EngineBackend("toy", scheduling("steady"), options=FAST) as model:
        await model.ready(60.0)
        killed = []

        def kill_when_much_is_said(count):
            if count >= 1500 and not killed:
                killed.append(model.pid)
                os.kill(model.pid, signal.SIGKILL)

        tokens, done = await collect(model, asked, kill_when_much_is_said)
        assert tokens == [(4 + n) % 100 for n in range(2500)]
        assert done.reason is StopReason.MAX_TOKENS
        assert model.restarts == 1


async def test_nobody_waits_for_an_engine_longer_than_for_a_first_token():
    async with backend("--load-s", 60) as model:
        waiting = asyncio.ensure_future(collect(model, request(deadline_s=0.05)))
        with pytest.raises(PeerUnavailable, match="loading"):
            await asyncio.wait_for(waiting, 30)


async def test_a_hung_model_thread_is_found_though_its_process_answers(tmp_path):
    """The stream goes on in the next engine, with the tokens that this one would have given."""
    options = replace(FAST, probe_interval_s=0.1, max_step_s=0.5)
    command = scheduling("hangs", tmp_path / "once")
    errors = []
    async with EngineBackend(
        "toy", command, options=options, on_change=lambda m: errors.append(m.last_error)
    ) as model:
        await model.ready(60.0)
        async with asyncio.timeout(60):
            tokens, done = await collect(model, request(sampling=Sampling()))
        assert tokens == [4 + n for n in range(40)]
        assert done.reason is StopReason.MAX_TOKENS
        assert model.restarts == 1
    assert "it was at one step of its model for" in errors[1]


async def test_a_model_that_never_gets_ready_is_killed_at_its_deadline():
    options = replace(FAST, start_timeout_s=0.5, restart=RestartPolicy(max_deaths=1))
    async with backend("--load-s", 60, options=options) as model:
        await until(lambda: model.state is ModelState.FAILED)
        assert "could not be made ready: it took longer than 0.5 s" in model.last_error


async def test_a_child_that_ignores_sigterm_is_killed_and_nothing_is_left():
    options = replace(FAST, stop_grace_s=0.3)
    with tempfile.TemporaryDirectory(prefix="kk", dir="/tmp") as name:
        parent = Path(name)
        async with backend("--ignore-term", options=options, runtime_dir=parent) as model:
            await model.ready(60.0)
            child = model.pid
            (folder,) = parent.iterdir()
            assert folder.stat().st_mode & 0o777 == 0o700
        assert not is_alive(child)
        assert model.state is ModelState.STOPPED
        assert list(parent.iterdir()) == []


async def test_closing_the_backend_ends_running_decodes_with_unavailable():
    model = backend("--delay-s", 0.01)
    await model.start()
    await model.ready(60.0)
    seen = asyncio.Event()
    task = asyncio.create_task(collect(model, request(max_tokens=9000), lambda _: seen.set()))
    await set_by(task, seen)
    await model.aclose()
    with pytest.raises(PeerUnavailable, match="stopped"):
        await task


async def test_a_socket_path_that_is_too_long_is_a_configuration_error(tmp_path):
    deep = tmp_path / ("d" * MAX_SOCKET_PATH_BYTES)
    deep.mkdir()
    with pytest.raises(ConfigError, match="takes at most 100: choose a shorter"):
        (await asyncio.to_thread(SocketFolder, deep)).next_socket()
    async with backend(runtime_dir=deep) as model:
        await until(lambda: model.state is ModelState.FAILED)
        assert "choose a shorter runtime folder" in model.last_error
    with pytest.raises(ConfigError, match="no folder for engine sockets"):
        await asyncio.to_thread(SocketFolder, tmp_path / "missing")


async def test_decodes_beyond_the_bounds_wait_and_then_are_refused():
    options = replace(FAST, max_running=1, max_waiting=1)
    async with backend("--delay-s", 0.01, options=options) as model:
        await model.ready(60.0)
        first = asyncio.create_task(collect(model, request()))
        await until(lambda: model.running == 1)
        second = asyncio.create_task(collect(model, request(token_ids=(8,))))
        await until(lambda: model.waiting == 1)
        with pytest.raises(QueueFull, match="1 wait"):
            await collect(model, request())
        assert (await first)[0] == wanted(request())
        assert (await second)[0] == wanted(request(token_ids=(8,)))


@pytest.mark.parametrize("users", [1, 4])
async def test_a_client_that_took_all_places_keeps_no_other_out(users):
    options = replace(FAST, max_running=1, max_waiting=3)
    async with backend("--delay-s", 0.01, options=options) as model:
        await model.ready(60.0)
        asked = [request(client="a", user=str(at % users)) for at in range(4)]
        flood = [asyncio.create_task(collect(model, one)) for one in asked]
        await until(lambda: model.running + model.waiting == 4)
        with pytest.raises(QueueFull, match="runs 1 and 3 wait"):
            await collect(model, asked[-1])
        assert (await collect(model, request(client="b")))[0] == wanted(request())
        for one in flood:
            assert (await one)[0] == wanted(request())


async def test_draft_stats_and_release_reach_the_child(tmp_path):
    record = tmp_path / "record"
    async with backend("--record", record) as model:
        await model.ready(60.0)
        drafted = await model.draft([1, 2, 3], 5, seed=7, temperature=1.0)
        assert list(drafted.tokens) == wanted(request(max_tokens=5))
        assert drafted.confidence == (0.5,) * 5
        with pytest.raises(InvalidArgument, match="size of at least 1"):
            await model.draft([], 5)
        assert (await model.stats()).kv_bytes_by_key == {"a": 11}
        await model.release("session")
        assert "release session" in _lines(record)


WAIT = "loading toy, 41 %"


async def test_a_child_says_how_far_its_load_is(caplog):
    logging.getLogger("kakeya").propagate = True
    read = LoadProgress(phase=LoadPhase.READ, done_bytes=41, total_bytes=100).line()
    said = f"{LoadProgress(phase=LoadPhase.FIND).line()}\n{read}\n{read}"
    with caplog.at_level(logging.INFO, logger="kakeya"):
        async with backend("--say", said, "--load-s", 60) as model:
            await until(lambda: (wait := model.waits_for()) and wait.describe() == WAIT)
            assert "loading, 41 %" in model.unavailable().message
    lines = [record for record in caplog.records if record.getMessage() == "model is loading"]
    told = [vars(line)["kakeya_fields"] for line in lines]
    assert [fields["phase"] for fields in told] == [LoadPhase.FIND.value, LoadPhase.READ.value]
    assert model.waits_for() is None


async def test_what_the_child_writes_is_in_the_agents_log_at_its_own_level(caplog):
    logging.getLogger("kakeya").propagate = True
    said = "12:00:01 warning mlx.loader: no BLAS\rweights " + "x" * 9000
    with caplog.at_level(logging.INFO, logger="kakeya"):
        async with backend("--say", said) as model:
            await model.ready(60.0)
    records = {record.getMessage(): record.levelname for record in caplog.records}
    assert records["mlx.loader: no BLAS"] == "WARNING"
    assert any(m.startswith("weights xxx") and len(m) == 2000 for m in records)


def _lines(path):
    return path.read_text().splitlines() if path.exists() else []
