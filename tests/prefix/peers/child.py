"""A process that serves blocks until it is killed: `child.py BLOCKS SIZE`; tells its port."""

from __future__ import annotations

import asyncio
import sys

from tests.prefix.peers import world as w


async def main() -> None:
    blocks, size = map(int, sys.argv[1:])
    source = w.MemorySource(w.chain(blocks), size)
    async with w.a_world() as world:
        peer = await world.peer(w.Sources().add(w.fingerprint(), source))
        print(peer.port, flush=True)
        await peer.server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
