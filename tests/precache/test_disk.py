"""The store of blocks as its users see it: what goes in comes out, once and whole."""

from pathlib import Path

from tests.fakes import FakeClock
from tests.precache.disk_world import chain_of, opened


async def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    blocks = chain_of(3)
    async with opened(tmp_path) as store:
        for block, payload in blocks:
            assert await store.put(block, payload)
    async with opened(tmp_path, clock=FakeClock()) as store:
        await store.ready()
        assert set(store.ids()) == {block.id for block, _ in blocks}
        for block, payload in blocks:
            assert await store.get(block.id) == (block, payload)
            room = bytearray(len(payload))
            assert await store.read_into(block.id, memoryview(room))
            assert room == payload
