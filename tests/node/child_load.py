"""Clients that keep a node generating, until they are killed. Arguments: its address, how many.

Prints a line once all of them have had a token.
"""

from __future__ import annotations

import asyncio
import sys

from kakeya.sessions.client import Client

PROMPT = [5, 6, 7] * 20
TOKENS = 4000


async def generate_for_ever(client: Client, begun: asyncio.Event) -> None:
    while True:
        async with await client.create_session() as session:
            await session.append(PROMPT)
            async for _ in session.generate(TOKENS, draft_policy="off"):
                begun.set()


async def main(address: str, count: int) -> None:
    async with Client(address) as client, asyncio.TaskGroup() as group:
        all_begun = [asyncio.Event() for _ in range(count)]
        for begun in all_begun:
            group.create_task(generate_for_ever(client, begun))
        for begun in all_begun:
            await begun.wait()
        print("generating", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
