"""Serves an n-gram proposer on a free port, prints the address and waits to be killed."""

import asyncio
import sys

import grpc.aio

from kakeya.decoding.ngram.ngram import NGramProposer
from kakeya.decoding.serve.service import ProposerService
from kakeya.decoding.serve.stream_service import DraftStreamService
from kakeya.v1 import distributed_pb2_grpc as rpc
from kakeya.v1.drafts_pb2_grpc import add_DraftStreamServiceServicer_to_server


async def main() -> None:
    server = grpc.aio.server()
    proposers = ProposerService({"ngram": NGramProposer()})
    rpc.add_ProposerServiceServicer_to_server(proposers, server)
    if "--streams" in sys.argv:
        add_DraftStreamServiceServicer_to_server(DraftStreamService(proposers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


asyncio.run(main())
