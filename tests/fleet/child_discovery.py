"""Discovery in a process of its own: prints `ready`, then its sightings after each change.

    child_discovery.py NODE_ID FLEET PORT HOST[,HOST]     its own addresses; 127.0.0.1 = loopback

SIGTERM says goodbye. Lines are `TIME ADDRESS ...`, the time that of the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import signal
import sys
import time

from kakeya.core.clock import SystemClock
from kakeya.core.log import configure
from kakeya.core.tasks import Supervisor
from kakeya.fleet.paths.addresses import AddressPolicy
from kakeya.fleet.paths.discovery import Discovery
from kakeya.fleet.paths.interfaces import policy_for, read_interfaces


def make_policy(hosts: list[str], port: int) -> AddressPolicy:
    own = [f"{host}:{port}" for host in hosts]
    if all(ipaddress.ip_address(host).is_loopback for host in hosts):
        return AddressPolicy(own=frozenset(own), is_on_loopback=True)
    return policy_for(read_interfaces(sys.platform), own=own, typed=())


async def main(node_id: str, fleet: str, port: int, hosts: list[str]) -> None:
    configure()
    clock = SystemClock()
    discovery = Discovery(
        node_id,
        fleet=fleet,
        port=port,
        hosts=hosts,
        policy=make_policy(hosts, port),
        clock=clock,
        rng=random.Random(),
        on_change=lambda: print(time.monotonic(), *sorted(discovery.sightings()), flush=True),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with Supervisor(clock) as tasks:
        discovery.start(tasks)
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")))
