"""The page in a real Chromium, over three real nodes: what a person sees, and in how many clicks.

Needs the extra `browser` and a Chromium of the system. KAKEYA_SHOTS=FOLDER keeps screenshots there.
Everything that the page answers has really happened: a model was evicted, a node was stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kakeya.core.ids import ModelId
from kakeya.fleet.cards.cards import CardRole, Offer, OfferedModel
from kakeya.fleet.gossip.round import exchange_once
from kakeya.fleet.view.registry import CapabilityRegistry
from tests.node.nodes import QUICK, VERIFIER, NodeProcess, model_state, run_cli
from tests.waiting import eventually

pytest.importorskip("playwright", reason="needs the extra `browser`")
from playwright.async_api import Browser, Page, Route, async_playwright, expect

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
TOOLS = "kakeya-tiny-tools"
WAIT_MS = 60_000
SETTINGS = """\
[models]
rows = 1

[tasks.titles]
candidates = ["kakeya-tiny"]
"""
DO = ("Load", "Unload")
EVENTS = "/api/v1/events"
GROUP, LEASE, ADAPTER = "shared", "training", f"{VERIFIER}:letter"
TRAINED = Path(__file__).parents[1] / "adapters" / "trained" / "letter"
LONG = "for the memory of a model that " + "waits for the one before it, which " * 12 + "is loading"
CLIPPED = """[...document.querySelectorAll(".scroll, .lead, .reasons li")]
    .filter((one) => one.offsetParent && one.scrollWidth > one.clientWidth + 1)
    .map((one) => one.textContent)"""
LOST = 'data: {"error": {"message": "the node was lost"}}\n\n'
MOST_REQUESTS, FIRST_PAINT_MS, SIMULATED = 10, 1000, 50
AXE = Path(os.environ.get("KAKEYA_AXE", "node_modules/axe-core/axe.min.js"))
"""What `npm install axe-core` brings."""
VIEWS = ("", "requests", "memory", "models", "leases", "events", "settings", "ask/slow", "ask/warm")
VIEWS += ("ask/memory", "ask/news", "ask/link", "chat")


class Shelf:
    """Three nodes, labelled mini-1 to mini-3; the first has two models and room for one."""

    def __init__(self, nodes: list[NodeProcess]) -> None:
        self.nodes = nodes
        self.base = f"http://{nodes[0].http}"

    async def chat(self, model: str = VERIFIER, node: int = 0, **more: object) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "Tell of the sea"}]}
        async with httpx.AsyncClient(timeout=120) as client:
            url = f"http://{self.nodes[node].http}/v1/chat/completions"
            answer = await client.post(url, json={**body, "max_tokens": 24, **more})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shelf]:
    folder = tmp_path_factory.mktemp("shelf")
    async with AsyncExitStack() as stack:
        nodes: list[NodeProcess] = []
        for number in (1, 2, 3):
            flags = ["--label", f"mini-{number}", "--model", VERIFIER, *QUICK]
            flags += ["--peer", nodes[0].grpc] if nodes else []
            if number == 1:
                settings = folder / "one.toml"
                settings.write_text(SETTINGS)
                flags += ["--model", TOOLS, "--memory-budget", "300", "--config"]
                flags.append(str(settings))
            node = NodeProcess(folder / f"mini-{number}", *flags)
            nodes.append(await stack.enter_async_context(node))
        for node in nodes:
            await eventually("ready", lambda n=node: model_state(n, VERIFIER)["state"] == "ready")
        yield Shelf(nodes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        yield await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@asynccontextmanager
async def opened(
    browser: Browser, shelf: Shelf, refusals: int = 0, **how: Any
) -> AsyncIterator[Page]:
    """The page, freshly opened; any error fails the test, but for so many refusals."""
    context = await browser.new_context(viewport={"width": 1440, "height": 900}, **how)
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: line.type == "error" and errors.append(line.text))
    await page.goto(shelf.base)
    await page.locator(".tile").first.wait_for()
    yield page
    assert len(errors) <= refusals, errors
    await context.close()


@asynccontextmanager
async def told(
    browser: Browser, shelf: Shelf, sections: object, of_peer: object = None
) -> AsyncIterator[Page]:
    """The page with sections of its node that are hard to bring about: a long wait, a slow pull;
    and with sections of one peer."""
    async with (
        httpx.AsyncClient() as client,
        client.stream("GET", f"{shelf.base}{EVENTS}") as stream,
    ):
        lines = stream.aiter_lines()
        facts = json.loads((await anext(lines)).removeprefix("data: "))
    (own,) = (one for one in facts["nodes"].values() if one.get("card", {}).get("is_self"))
    own |= sections
    if of_peer is not None:
        (*_, peer) = (one for one in facts["nodes"].values() if one is not own)
        peer |= of_peer

    async def tell(route: Route) -> None:
        body = f"data: {json.dumps(facts)}\n\n"
        await route.fulfill(content_type="text/event-stream", body=body)

    context = await browser.new_context(viewport={"width": 390, "height": 844})
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    await page.route(f"**{EVENTS}", tell)
    await page.goto(shelf.base)
    await page.locator(".tile").first.wait_for()
    yield page
    await context.close()


async def ask(page: Page, question: str) -> str:
    """One click from the first view to the answer of a question."""
    await page.get_by_role("link", name=question).click()
    await page.locator("#answer").wait_for()
    return await page.locator("#answer").inner_text()


async def keep(page: Page, name: str) -> None:
    if folder := os.environ.get("KAKEYA_SHOTS"):
        await page.screenshot(path=Path(folder) / f"{name}.png")


async def test_the_fleet_is_seen_with_labels_links_and_memory(
    browser: Browser, shelf: Shelf
) -> None:
    async with opened(browser, shelf) as page:
        for name in ("mini-1", "mini-2", "mini-3"):
            await expect(page.locator(".tile", has_text=name)).to_contain_text(VERIFIER)
        await expect(page.locator(".bar[role=img]")).to_have_count(3)
        await expect(page.locator(".tag").first).to_contain_text("ms")
        await page.locator(".tile", has_text="mini-2").click()
        await expect(page.locator("main h1")).to_have_text("mini-2")
        await expect(page.locator("main")).to_contain_text("Pressure")
        await keep(page, "node")


async def test_a_chat_streams_and_shows_a_receipt(browser: Browser, shelf: Shelf) -> None:
    async with opened(browser, shelf) as page:
        await page.get_by_label("Model or task").select_option(VERIFIER)
        for turn in (1, 2):
            await page.get_by_label("Message").fill("Tell me about the sea")
            await page.keyboard.press("Enter")
            receipt = page.locator(".receipt").nth(turn - 1)
            await expect(receipt).to_contain_text("on mini-")
            await expect(receipt).to_contain_text("cached")
        await expect(receipt).to_contain_text("waited")
        await keep(page, "chat")
        await page.get_by_label("Model or task").select_option("titles")
        await page.get_by_label("Message").fill("Name it")
        await page.get_by_role("button", name="Send").click()
        await expect(page.locator(".receipt").nth(2)).to_contain_text(f"titles: {VERIFIER}")
        await receipt.get_by_role("link", name="why").click()
        await expect(page.locator("main")).to_contain_text("Prompt computed in")


async def test_a_question_that_failed_is_not_asked_again_with_the_next(
    browser: Browser, shelf: Shelf
) -> None:
    asked: list[list[str]] = []

    async def fail(route: Route) -> None:
        asked.append([one["content"] for one in route.request.post_data_json["messages"]])
        await route.fulfill(content_type="text/event-stream", body=LOST)

    async with opened(browser, shelf) as page:
        await page.route("**/v1/chat/completions", fail)
        for turn in (1, 2):
            await page.get_by_label("Message").fill(f"question {turn}")
            await page.keyboard.press("Enter")
            await expect(page.locator(".talk .error")).to_have_count(turn)
    assert asked == [["question 1"], ["question 2"]]


async def test_a_key_given_anew_opens_no_second_stream(browser: Browser, shelf: Shelf) -> None:
    """A key that was removed is noticed by a call while the stream of facts goes on."""
    is_removed = True

    async def refuse(route: Route) -> None:
        if is_removed:
            await route.fulfill(status=401, json={"error": {"message": "the key was removed"}})
        else:
            await route.continue_()

    context = await browser.new_context()
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    begun: list[str] = []
    ended: list[str] = []
    page.on("request", lambda one: one.url.endswith(EVENTS) and begun.append(one.url))
    page.on("requestfailed", lambda one: one.url.endswith(EVENTS) and ended.append(one.url))
    await page.route("**/api/v1/models", refuse)
    await page.goto(shelf.base)
    await page.locator(".tile").first.wait_for()
    await page.goto(f"{shelf.base}/#/models")
    await page.get_by_label("Admin key").fill("another")
    is_removed = False
    await page.get_by_role("button", name="Open").click()
    await page.locator(".panel", has_text="Served").wait_for()
    while len(begun) < 2 or not ended:
        await page.wait_for_timeout(50)
    assert (len(begun), len(ended)) == (2, 1)
    await page.goto(f"{shelf.base}/#/node/%")
    await expect(page.locator("main h1")).to_have_text("No such node is here now.")
    await context.close()


async def test_is_my_conversation_warm_and_where(browser: Browser, shelf: Shelf) -> None:
    await shelf.chat(conversation_id="the-sea")
    async with opened(browser, shelf) as page:
        await expect(page.locator(".ask", has_text="conversation warm")).to_contain_text("on mini-")
        answer = await ask(page, "Is my conversation warm")
        assert "mini-" in answer
        await expect(page.locator("main table")).to_contain_text("the-sea")


async def test_does_speculation_help(browser: Browser, shelf: Shelf) -> None:
    await shelf.chat(max_tokens=120, messages=[{"role": "user", "content": "sea and " * 40}])
    async with opened(browser, shelf) as page:
        assert "tokens a step" in await ask(page, "Does speculation help")
        await expect(page.locator(".reasons")).to_contain_text("steps of the model")


async def test_what_was_evicted_and_why(browser: Browser, shelf: Shelf) -> None:
    await shelf.chat(TOOLS)
    await shelf.chat()
    async with opened(browser, shelf) as page:
        await expect(page.locator(".ask", has_text="What was evicted")).to_contain_text("mini-1")
        assert "gave" in await ask(page, "What was evicted")
        await expect(page.locator("main table")).to_contain_text(f"to {VERIFIER}")
        await keep(page, "evicted")


async def test_why_does_my_request_wait(browser: Browser, shelf: Shelf) -> None:
    """The engine of a model that only one node has takes one at a time. An answer of many tokens,
    which the schema asks for, makes the others wait for longer than the page looks away."""
    long = {"name": "long", "schema": {"type": "string", "minLength": 3000}}
    format_ = {"type": "json_schema", "json_schema": long}
    async with opened(browser, shelf) as page:
        asked = page.get_by_role("link", name="Why does my request wait")
        await asked.click()

        async def keep_asking() -> None:
            while True:
                await shelf.chat(TOOLS, max_tokens=2000, response_format=format_)

        work = [asyncio.create_task(keep_asking()) for _ in range(4)]
        try:
            await expect(page.locator("#answer")).to_contain_text("for a place")
            await expect(page.locator(".reasons li").first).to_contain_text("so far")
        finally:
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)


async def test_a_long_wait_and_a_download_are_shown_whole(browser: Browser, shelf: Shelf) -> None:
    wait = {"id": "req-1", "client": "an-agent", "model": VERIFIER, "seconds": 7.0}
    wait |= {"waits_for": {"says": LONG, "seconds": 40.0}}
    pull = {"name": "org/a-model-with-a-long-name-4bit", "phase": "fetching", "bytes": 4 << 30}
    pull |= {"done_bytes": 1 << 30, "bytes_per_second": 9e7, "sources": [], "note": ""}
    sections = {"requests": [wait] * 30, "weights": {"pulls": [pull]}}
    async with told(browser, shelf, sections) as page:
        await expect(page.locator(".tile", has_text="mini-1")).to_contain_text("fetching 25 % of")
        await expect(page.locator(".panel", has_text="Downloads")).to_contain_text("1.0 of 4.0 GiB")
        await keep(page, "download")
        await page.goto(f"{shelf.base}/#/requests")
        await expect(page.locator(".panel").first.locator("tbody tr")).to_have_count(30)
        await expect(page.locator("tbody tr").first).to_contain_text(LONG)
        assert await page.evaluate(CLIPPED) == []
        await page.goto(f"{shelf.base}/#/ask/wait")
        await expect(page.locator("#answer")).to_contain_text(LONG)
        assert await page.evaluate(CLIPPED) == []
        await keep(page, "long-wait")


async def test_a_request_is_counted_once(browser: Browser, shelf: Shelf) -> None:
    """An engine counts one whose prompt it reads; one that has just come waits for nothing."""
    one = {"id": "req-1", "client": "an-agent", "model": VERIFIER, "seconds": 0.2}
    read = one | {"waits_for": {"reason": "prompt", "says": LONG, "seconds": None}}
    come = one | {"id": "req-2", "waits_for": None}
    model = {"model_id": VERIFIER, "state": "ready", "role": "verifier", "running": 2, "waiting": 0}
    async with told(browser, shelf, {"requests": [read, come], "models": [model]}) as page:
        tile = page.locator(".tile", has_text="mini-1")
        await expect(tile).to_contain_text("1 answering")
        await expect(tile).to_contain_text("1 waiting")
        await page.goto(f"{shelf.base}/#/requests")
        await expect(page.locator("h1.lead")).to_have_text(
            "1 answer being made, 1 request waiting."
        )


async def test_a_ring_group_and_a_lease(browser: Browser, shelf: Shelf) -> None:
    data = str(shelf.nodes[1].log_file.parent / "data")
    up = ("ring", "up", VERIFIER, "--nodes", "mini-2,mini-3", "--name", GROUP, "--data-dir", data)
    done = await asyncio.to_thread(run_cli, *up)
    assert done.returncode == 0, done.stderr
    lease = [sys.executable, "-m", "kakeya.cli.main", "lease", "run", "--mb", "64", "--name", LEASE]
    job = await asyncio.create_subprocess_exec(*lease, "--data-dir", data, "--", "sleep", "600")
    try:
        async with opened(browser, shelf) as page:
            for rank, name in enumerate(("mini-2", "mini-3")):
                tile = page.locator(".tile", has_text=name)
                await expect(tile).to_contain_text(f"rank {rank} of {GROUP}")
            groups = page.locator(".panel", has_text="Ring groups")
            for text in ("up", "mini-2", "mini-3", "tensor", VERIFIER):
                await expect(groups).to_contain_text(text)
            await expect(page.locator(".tile.member")).to_have_count(2)
            await keep(page, "ring")
            await page.get_by_role("link", name="Leases").click()
            row = page.locator("tr", has_text=LEASE)
            for text in ("mini-2", "granted", "64 MiB"):
                await expect(row).to_contain_text(text)
            await expect(page.locator("main h1")).to_have_text("64 MiB leased to 1 other process.")
            await keep(page, "lease")
            await page.get_by_role("link", name="Memory").click()
            panel = page.locator(".panel", has_text="mini-2")
            for text in (LEASE, "leased", GROUP):
                await expect(panel).to_contain_text(text)
            job.terminate()
            await page.get_by_role("link", name="Leases").click()
            await expect(page.locator("main h1")).to_have_text("No other process leases memory.")
            await asyncio.to_thread(run_cli, "ring", "down", GROUP, "--data-dir", data)
            await page.get_by_role("link", name="Fleet").first.click()
            await expect(groups).to_have_count(0)
    finally:
        if job.returncode is None:
            job.kill()
        await job.wait()


async def test_an_adapter_is_added_and_removed(browser: Browser, shelf: Shelf) -> None:
    async with opened(browser, shelf, refusals=1) as page:
        await page.get_by_role("link", name="Models").click()
        panel = page.locator(".panel", has_text="Adapters")
        await panel.get_by_label("Name").fill("letter")
        await panel.get_by_label("Base of the adapter").select_option(VERIFIER)
        await panel.get_by_label("Folder on").fill("here")
        async with page.expect_response("**/adapters/add"):
            await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("'here' is not a whole path")
        await panel.get_by_label("Folder on").fill(str(TRAINED))
        await panel.get_by_role("button", name="Add").click()
        row = panel.locator("tr", has_text=ADAPTER)
        await expect(row).to_contain_text("int8")
        await keep(page, "adapter")
        choice = page.get_by_label("Model or task")
        await choice.focus()
        await expect(choice.locator(f"option[value='{ADAPTER}']")).to_be_attached()
        assert await choice.input_value() == VERIFIER
        answers = iter((False, True))
        page.on("dialog", lambda one: one.accept() if next(answers) else one.dismiss())
        await row.get_by_role("button", name=f"Remove {ADAPTER}").click()
        await expect(row).to_have_count(1)
        await row.get_by_role("button", name=f"Remove {ADAPTER}").click()
        await expect(row).to_have_count(0)


async def test_who_uses_the_memory(browser: Browser, shelf: Shelf) -> None:
    async with opened(browser, shelf) as page:
        assert "% full" in await ask(page, "Who uses the memory")
        panel = page.locator(".panel", has_text="mini-2")
        await expect(panel).to_contain_text(VERIFIER)
        await expect(panel).to_contain_text("MiB")
        await keep(page, "memory")


async def test_a_model_is_unloaded_and_loaded_by_keyboard(browser: Browser, shelf: Shelf) -> None:
    async with opened(browser, shelf, refusals=1) as page:
        await page.get_by_role("link", name="Models").focus()
        await page.keyboard.press("Enter")
        row = page.locator("tr", has_text=VERIFIER).first
        load, unload = (row.get_by_role("button", name=f"{name} {VERIFIER}") for name in DO)
        await expect(load.or_(unload)).to_be_enabled()
        if await load.count():
            await load.press("Enter")
        await unload.press("Enter")
        await load.press("Enter")
        await expect(unload).to_be_enabled()
        await page.get_by_label("Model to pull").fill("nobody/has-it")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("nobody/has-it")
        await keep(page, "models")


async def test_axe_finds_no_serious_fault(browser: Browser, shelf: Shelf) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not here: npm install axe-core, or KAKEYA_AXE=FILE")
    source = AXE.read_text("utf-8")
    found = {}
    for scheme, width in (("light", 1440), ("dark", 390)):
        async with opened(browser, shelf, color_scheme=scheme, bypass_csp=True) as page:
            await page.set_viewport_size({"width": width, "height": 844})
            for view in VIEWS:
                await page.goto(f"{shelf.base}/#/{view}")
                await page.locator("main h1").wait_for(state="attached")
                await page.evaluate(source)
                told = await page.evaluate("axe.run({ resultTypes: ['violations'] })")
                for fault in told["violations"]:
                    if fault["impact"] in ("serious", "critical"):
                        targets = [one["target"] for one in fault["nodes"]][:3]
                        found[scheme, view, fault["id"]] = targets
    assert found == {}


@pytest.mark.parametrize("odd", [{"models": 5}, {"memory": {"residents": 1}}])
async def test_a_peer_that_tells_nonsense_stops_no_page(
    browser: Browser, shelf: Shelf, odd: dict[str, object]
) -> None:
    async with told(browser, shelf, {}, odd) as page:
        faults: list[str] = []
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        for view in VIEWS:
            await page.goto(f"{shelf.base}/#/{view}")
            await page.locator("main h1").wait_for(state="attached")
        await page.goto(f"{shelf.base}/#/")
        await expect(page.locator(".tile")).to_have_count(3)
        await expect(page.locator(".tile .badge", has_text="unreadable")).to_have_count(1)
        assert faults == []


async def test_it_opens_fast_with_few_requests_in_the_dark_and_on_a_phone(
    browser: Browser, shelf: Shelf
) -> None:
    """With 50 simulated nodes beside the real ones."""
    await simulate(shelf.nodes[0].grpc)
    context = await browser.new_context(color_scheme="dark")
    page = await context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(shelf.base, wait_until="commit")
    await page.locator(".tile").nth(SIMULATED + 2).wait_for(timeout=WAIT_MS)
    paints = "performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)"
    (paint_ms,) = await page.evaluate(paints)
    print(f"first paint {paint_ms:.0f} ms, {len(asked)} requests")
    assert len(asked) <= MOST_REQUESTS, asked
    await keep(page, "dense-dark")
    await page.set_viewport_size({"width": 390, "height": 844})
    await keep(page, "phone")
    for view in VIEWS:
        await page.goto(f"{shelf.base}/#/{view}")
        await page.locator("main h1").wait_for(state="attached")
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert (view, wide) == (view, 390)
        assert (view, await page.evaluate(CLIPPED)) == (view, [])
    await context.close()
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    assert paint_ms < FIRST_PAINT_MS or load > 1, "within a second on a machine that is free"


async def simulate(address: str) -> None:
    """Tell a node the cards of nodes that are no processes."""
    for number in range(SIMULATED):
        models = (OfferedModel(ModelId(VERIFIER), CardRole.VERIFIER, tokens_per_second=40.0),)
        offer = Offer(
            grpc_address=f"127.0.0.1:{20000 + number}",
            label=f"sim-{number + 1}",
            platform="macos-arm64",
            unified_memory_bytes=16 << 30,
            models=models,
        )
        registry = CapabilityRegistry(
            f"sim-{number}", offer, now=time.time(), mono=time.monotonic()
        )
        done = await exchange_once(registry, [address], rng=random.Random(number))
        assert not done.errors


async def test_which_mac_is_slow_and_why(browser: Browser, shelf: Shelf) -> None:
    data = shelf.nodes[1].log_file.parent / "data"
    told = await asyncio.to_thread(run_cli, "pressure", "critical", "--data-dir", str(data))
    assert told.returncode == 0, told.stderr
    async with opened(browser, shelf) as page:
        await expect(page.locator(".tile", has_text="mini-2")).to_contain_text("pressure")
        answer = await ask(page, "Which Mac is slow")
        assert answer != "None is: nothing holds a node up."
        await expect(page.locator(".reasons")).to_contain_text("mini-2: memory pressure")
        await keep(page, "slow")


async def test_is_a_link_degraded_and_what_changed(browser: Browser, shelf: Shelf) -> None:
    """The last test: it stops a node, as a Mac that sleeps does."""
    shelf.nodes[2].send(signal.SIGSTOP)
    try:
        async with opened(browser, shelf) as page:
            link = page.locator(".ask", has_text="Is a link degraded")
            await expect(link).to_contain_text("mini-3")
            assert "mini-3: it does not answer" in await ask(page, "Is a link degraded")
            await keep(page, "link")
            await page.get_by_role("link", name="Fleet").first.click()
            assert "event" in await ask(page, "What changed in the last hour")
            await expect(page.locator(".timeline")).to_contain_text("peer mini-3")
            await keep(page, "news")
    finally:
        shelf.nodes[2].send(signal.SIGCONT)


async def test_a_key_of_role_admin_opens_it_and_no_other(browser: Browser, tmp_path: Path) -> None:
    async with NodeProcess(tmp_path, "--proposer", "ngram", "--http-keys", "always") as node:
        data = ("--data-dir", str(tmp_path / "data"))

        async def key(name: str, role: str) -> str:
            told = await asyncio.to_thread(
                run_cli, "key", "add", name, "--role", role, "--json", *data
            )
            assert told.returncode == 0, told.stderr
            found: str = json.loads(told.stdout)["key"]
            return found

        page = await browser.new_page()
        await page.goto(f"http://{node.http}")
        for given, said in (
            ("wrong", "does not count here"),
            (await key("program", "infer"), "role admin"),
        ):
            await page.get_by_label("Admin key").fill(given)
            await page.get_by_role("button", name="Open").click()
            await expect(page.locator("main .error")).to_contain_text(said, timeout=WAIT_MS)
        await page.get_by_label("Admin key").fill(await key("me", "admin"))
        await page.keyboard.press("Enter")
        await page.locator(".tile").wait_for(timeout=WAIT_MS)
        await page.close()
