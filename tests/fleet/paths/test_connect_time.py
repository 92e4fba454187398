"""Round trips by the time that TCP takes to connect."""

from __future__ import annotations

import socket

from kakeya.fleet.paths.connect_time import connect_rtt_s


def test_an_address_that_listens_has_a_round_trip_and_another_has_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = connect_rtt_s(address)
    assert found is not None
    assert found > 0
    assert connect_rtt_s(address) is None
