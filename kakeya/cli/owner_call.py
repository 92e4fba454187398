"""Owner commands to the node that runs in a data directory, over the node's socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import grpc

from kakeya.core.errors import DeadlineExceeded, PeerUnavailable
from kakeya.node.control import control_socket
from kakeya.node.datadir import find_running
from kakeya.wire.channels import open_sync_channel
from kakeya.wire.status import error_from_rpc, is_answer

Stub = TypeVar("Stub")
Answer = TypeVar("Answer")
_ANSWER_BYTES = 64 << 20
"""The limit of a message: a list of many adapters is long."""


def ask_node(
    folder: Path,
    stub: Callable[[grpc.Channel], Stub],
    call: Callable[[Stub], Answer],
    *,
    timeout_s: float,
) -> Answer:
    """Call the node that runs in a folder; `call` gets the stub and waits for `timeout_s`.

    Raises the node's refusal without a prefix, PeerUnavailable, DeadlineExceeded. Blocks.
    """
    running = find_running(folder)
    if running is None:
        raise PeerUnavailable(
            f"no node runs in {folder}; start kakeya-node there, or name its folder with --data-dir"
        )
    address = f"unix:{control_socket(folder)}"
    options = (("grpc.max_receive_message_length", _ANSWER_BYTES),)
    with open_sync_channel(address, options) as channel:
        try:
            return call(stub(channel))
        except grpc.RpcError as failure:
            refusal = error_from_rpc(failure, address)
            refusal.__cause__ = failure
            if isinstance(refusal, PeerUnavailable) and not is_answer(refusal):
                raise PeerUnavailable(
                    f"the node in {folder} does not answer on {address}; start it again"
                ) from failure
            if isinstance(refusal, DeadlineExceeded) and not is_answer(refusal):
                raise DeadlineExceeded(
                    f"the node in {folder} (pid {running.pid}) did not answer for "
                    f"{timeout_s:g} s: it is stopped or very busy; look at it with "
                    "`kakeya status`, then run the same command again"
                ) from failure
            # The owner knows which node was asked, so the sentence needs no address.
            refusal.message = refusal.message.removeprefix(f"{address}: ")
            refusal.args = (refusal.message,)
            raise refusal from failure
