"""Asks a node what the token ids of its proposer mean."""

from __future__ import annotations

import grpc

from kakeya.core.errors import InvalidArgument
from kakeya.v1.distributed_pb2 import CAPABILITY_ROLE_PROPOSER, GetNodeCapabilityRequest
from kakeya.v1.distributed_pb2_grpc import CapabilityServiceStub


class VocabularyMismatch(InvalidArgument):
    """The token ids of two models mean different text, so one cannot draft for the other."""

    code = "vocabulary_mismatch"


def asked_digest(channel: grpc.Channel, model_id: str, timeout_s: float) -> str:
    """The digest of a proposer's vocabulary by its node's card. Blocks.

    "" where that is not known: no answer, a node or a model without a digest, n-grams, which draft
    in any vocabulary, and the proposer "", which the node chooses.
    """
    try:
        answer = CapabilityServiceStub(channel).GetNodeCapability(
            GetNodeCapabilityRequest(), timeout=timeout_s
        )
    except grpc.RpcError:  # the proposer's own calls tell what is wrong with the node
        return ""
    digests = [
        model.vocabulary_digest
        for model in answer.node.models
        if model.model_id == model_id and model.role == CAPABILITY_ROLE_PROPOSER
    ]
    return digests[0] if digests else ""
