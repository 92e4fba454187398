"""Which models that pulls brought are served, beside those of the configuration and ring groups."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kakeya.backends.added.pulled import PulledModels
from kakeya.backends.engine.engine import EngineOptions
from kakeya.backends.engines import engine_command
from kakeya.backends.ring.spec import RingSeat, RingSpec
from kakeya.backends.ring.weights import estimate_of, rank_size
from kakeya.config import config
from kakeya.core.clock import SystemClock
from kakeya.core.errors import ConfigError, Conflict
from kakeya.core.tasks import Supervisor
from kakeya.generation.facts import ModelState
from kakeya.generation.spec import EMBEDDED_FOLDER, ModelRole, parse_model
from kakeya.node.memory import EngineSetup, NodeMemory
from kakeya.weights.found import PullRecord, find_models, write_record
from tests.waiting import until

TINY = EMBEDDED_FOLDER / "kakeya-tiny"


@dataclass
class Node:
    """The models of a node, and what pulls brought to its disk."""

    folder: Path
    memory: NodeMemory
    pulled: PulledModels
    weights: Any
    home: Any

    @property
    def served(self) -> list[str]:
        return [spec.model_id for spec, _ in self.memory.engines.models()]

    async def bring(self, name: str, source: Path = TINY) -> Path:
        path = self.folder / name
        record = PullRecord(name=name, digest="", keep=False, source="here", pulled_at=0.0)

        def write() -> None:
            shutil.copytree(source, path)
            write_record(path, record)

        await asyncio.to_thread(write)
        await self.weights.changed()
        return path


@asynccontextmanager
async def node(tmp_path: Path, *models: str, budget_mb: int = 4000) -> AsyncIterator[Node]:
    folder = tmp_path / "models"

    def made() -> NodeMemory:
        folder.mkdir(parents=True)
        flags = ("--data-dir", str(tmp_path), "--memory-budget", str(budget_mb))
        return NodeMemory(
            config.load(flags, {}).memory,
            [parse_model(one) for one in models],
            EngineSetup(command=engine_command("text"), options=EngineOptions(), sockets=None),
            data_dir=tmp_path,
            clock=SystemClock(),
            rng=random.Random(1),
            on_change=lambda: None,
        )

    async def found(*, anew: bool) -> Any:
        return await asyncio.to_thread(find_models, folder, None, {})

    weights: Any = SimpleNamespace(index=SimpleNamespace(models=found))
    async with await asyncio.to_thread(made) as memory:
        home = memory.model_home()
        pulled = PulledModels(home, weights)
        await pulled.open()
        yield Node(folder, memory, pulled, weights, home)


async def test_what_is_on_the_disk_is_served_and_waits_for_a_request(tmp_path: Path) -> None:
    async with node(tmp_path, "kakeya-tiny") as here:
        path = await here.bring("org/copy")
        assert here.served == ["kakeya-tiny", "org/copy"]
        model = here.memory.engines.get("org/copy")
        assert model.state is ModelState.UNLOADED
        assert model.can_serve
        assert not model.may_come_back
        assert "org/copy" not in here.memory.engines.lasting_sources
        await asyncio.to_thread(shutil.rmtree, path)
        await here.weights.changed()
        assert here.served == ["kakeya-tiny"]


async def test_a_model_of_the_configuration_is_not_served_twice(tmp_path: Path) -> None:
    async with node(tmp_path, "kakeya-tiny") as here:
        await here.bring("kakeya-tiny")
        assert here.served == ["kakeya-tiny"]
        assert "serves a model 'kakeya-tiny' already" in here.weights.unserved("kakeya-tiny")


async def test_what_cannot_be_served_says_why_and_hinders_nothing(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        await here.bring("dlm", EMBEDDED_FOLDER / "kakeya-tiny-dlm")
        await here.bring("copy")
        assert here.served == ["copy"]
        assert "only drafts for others" in here.weights.unserved("dlm")
    async with node(tmp_path / "small", budget_mb=16) as here:
        await here.bring("copy")
        assert here.served == []
        assert "the memory budget is 16" in here.weights.unserved("copy")


async def test_a_file_that_no_node_can_read_hinders_nothing(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        odd = tmp_path / "odd"

        def make() -> None:
            shutil.copytree(TINY, odd)
            counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 3)
            sizes = dict.fromkeys(("hidden_size", "head_dim"), 10**4000)
            told = {"model_type": "llama", "num_key_value_heads": 3} | counts | sizes
            (odd / "config.json").write_text(json.dumps(told))

        await asyncio.to_thread(make)
        await here.bring("odd", odd)
        await here.bring("copy")
        assert here.served == ["copy"]
        assert "its files are none that a node can read" in here.weights.unserved("odd")


async def test_what_has_no_name_for_a_card_is_not_served(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        for name in ("ngram", f"{'a' * 200}/{'b' * 100}"):
            await here.bring(name)
            assert here.served == []
            assert "has a name of at most 256 bytes, not ngram" in here.weights.unserved(name)


async def test_a_model_whose_removal_is_given_up_is_served_again(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        await here.bring("copy")
        opened: list[str] = []
        here.home.opened = lambda model: opened.append(model.model_id)
        began, may_end, end = asyncio.Event(), asyncio.Event(), here.home._end

        async def slow_end(*models: Any) -> None:
            began.set()
            await may_end.wait()
            await end(*models)

        here.home._end = slow_end
        found = cast("Any", SimpleNamespace(name="copy"))
        leaving = asyncio.create_task(here.weights.leaves(found, is_forced=False))
        await began.wait()
        leaving.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert here.served == opened == ["copy"]


async def test_a_model_that_made_way_for_a_ring_group_in_vain_comes_back(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        path = await here.bring("big")
        seats = (RingSeat(node="left"), RingSeat(node="right"))
        spec = RingSpec(name="big", source="nothing here", split="tensor", seats=seats)
        whole = await asyncio.to_thread(estimate_of, path)
        async with Supervisor(SystemClock()) as tasks:
            here.pulled.start(tasks)
            with pytest.raises(ConfigError):
                await here.home.add_group(spec.model(), None, rank_size(spec, 0, whole), whole)
            await until(lambda: here.served == ["big"], "it is served alone again")


async def test_an_encoder_makes_embeddings(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        encoder = tmp_path / "encoder"

        def make() -> None:
            shutil.copytree(TINY, encoder)
            told = '{"model_type": "bert", "hidden_size": 8, "intermediate_size": 8}'
            (encoder / "config.json").write_text(told)

        await asyncio.to_thread(make)
        await here.bring("encoder", encoder)
        assert here.memory.engines.get("encoder").role is ModelRole.EMBEDDER


async def test_a_ring_group_takes_the_name_and_leaves_it(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        path = await here.bring("big")
        seats = (RingSeat(node="left"), RingSeat(node="right"))
        spec = RingSpec(name="big", source=str(path), split="tensor", seats=seats)
        whole = await asyncio.to_thread(estimate_of, path)
        alone = here.memory.engines.get("big")

        def others() -> Any:
            raise AssertionError("not brought up")

        async with Supervisor(SystemClock()) as tasks:
            here.pulled.start(tasks)
            sized = rank_size(spec, 0, whole)
            group = await here.home.add_group(spec.model(), others, sized, whole)
            assert here.memory.engines.get("big") is group is not alone
            await here.weights.changed()
            assert here.memory.engines.get("big") is group
            await here.home.remove_group(group)
            await until(lambda: here.served == ["big"], "it is served alone again")
            assert here.memory.engines.get("big").is_on_demand


async def test_a_ring_group_does_not_take_a_model_from_its_requests(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        path = await here.bring("big")
        seats = (RingSeat(node="left"), RingSeat(node="right"))
        spec = RingSpec(name="big", source=str(path), split="tensor", seats=seats)
        whole = await asyncio.to_thread(estimate_of, path)
        async with here.memory.engines.get("big").lend():
            with pytest.raises(Conflict, match="big is in use on this node"):
                await here.home.add_group(spec.model(), None, rank_size(spec, 0, whole), whole)
            assert here.served == ["big"]
