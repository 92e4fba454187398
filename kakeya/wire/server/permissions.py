"""The permissions of every method of every service of a node, an engine and a join server.

No caller may call a method outside the table. Members are the nodes, clients send prompts, admins
run the fleet; an admin may call everything but the methods by which nodes gossip, hold copies of
their clients' answers and their sessions, and form ring groups.
"""

from __future__ import annotations

from collections.abc import Mapping

from kakeya.wire.security import CertRole
from kakeya.wire.server.authorization import NOBODY, Permission
from kakeya.wire.server.caller_limits import Budget

_NODES = frozenset({CertRole.MEMBER})
_FLEET = frozenset({CertRole.MEMBER, CertRole.ADMIN})
_USERS = frozenset({CertRole.CLIENT, CertRole.ADMIN})
_ALL = frozenset(CertRole)

_EXCHANGE = Permission(roles=_NODES, budget=Budget.EXCHANGE)
_GOSSIP = Permission(roles=_FLEET, budget=Budget.GOSSIP)
_MEMBERS = Permission(roles=_FLEET)
_COPIES = Permission(roles=_NODES)
_RUNTIME = Permission(roles=_USERS)
_OPEN_TO_ALL = Permission(roles=_ALL)
# Only the owner may mint invites: other users of this machine lack the owner's key, and cannot
# open the socket in the data directory.
_CONTROL = Permission(roles=frozenset({CertRole.ADMIN}), loopback=False, open=False)

_SERVICES: Mapping[str, Mapping[str, Permission]] = {
    "kakeya.v1.CapabilityService": {
        "ExchangeCapabilities": _EXCHANGE,
        "GetNodeCapability": _GOSSIP,
    },
    "kakeya.v1.GossipService": {"Sync": _EXCHANGE, "Push": _EXCHANGE, "Probe": _GOSSIP},
    "kakeya.v1.FleetService": {"Watch": _OPEN_TO_ALL},
    "kakeya.v1.MembershipService": {"Renew": _GOSSIP},
    "kakeya.v1.DoctorService": {"CheckBack": _GOSSIP},
    "kakeya.v1.ProposerService": {"ProposeBlock": _MEMBERS},
    "kakeya.v1.DraftStreamService": {"DraftStream": _MEMBERS},
    "kakeya.v1.PrefillCacheService": {
        "GetCacheSummary": _MEMBERS,
        "LookupPrefix": _MEMBERS,
        "FetchBlocks": _MEMBERS,
        "PublishBlock": _MEMBERS,
    },
    "kakeya.v1.PrefillWorkerService": {
        "SubmitPrefillJob": _MEMBERS,
        "GetPrefillJobStatus": _MEMBERS,
        "CancelPrefillJob": _MEMBERS,
    },
    "kakeya.v1.DFlashProposerService": {
        "Restore": _MEMBERS,
        "SeedContext": _MEMBERS,
        "DraftBlock": _MEMBERS,
        "ExtendContext": _MEMBERS,
        "CloseSession": _MEMBERS,
    },
    "kakeya.v1.ServingService": {
        "DescribeModel": _MEMBERS,
        "ListServedAdapters": _MEMBERS,
        "Quote": _MEMBERS,
        "ReadTextFiles": _MEMBERS,
        "Decode": _MEMBERS,
        "ReleaseKv": _MEMBERS,
        "WarmTurn": _MEMBERS,
        "KeepWarm": _MEMBERS,
        "EmbedTexts": _MEMBERS,
        "HoldAnswer": _COPIES,
        "FindAnswer": _COPIES,
        "DescribeShare": _MEMBERS,
        "WatchNode": _MEMBERS,
    },
    "kakeya.v1.SessionMoveService": {
        "GiveSession": _COPIES,
        "WarmSession": _COPIES,
        "TakeSession": _COPIES,
    },
    "kakeya.v1.WeightsService": {
        "ListWeights": _MEMBERS,
        "GetManifest": _MEMBERS,
        "WatchPieces": _MEMBERS,
        "ReadPiece": _MEMBERS,
    },
    "kakeya.v1.RelayService": {
        "CheckRelayed": _MEMBERS,
        "AnswerRelayed": _MEMBERS,
        "DrawImages": _MEMBERS,
    },
    "kakeya.v1.RingService": {
        "HostRank": _COPIES,
        "StartRank": _COPIES,
        "EndRank": _COPIES,
        "RaiseGroup": _COPIES,
        "EndGroup": _COPIES,
        "ListGroups": _COPIES,
    },
    "kakeya.v1.RuntimeService": {
        "CreateSession": _RUNTIME,
        "AppendTokens": _RUNTIME,
        "Generate": _RUNTIME,
        "CloseSession": _RUNTIME,
        "GetSessionInfo": _RUNTIME,
    },
    "kakeya.v1.PrecacheService": {"Warm": _RUNTIME, "Wipe": _CONTROL},
    "kakeya.v1.ControlService": {
        "Invite": _CONTROL,
        "Revoke": _CONTROL,
        "Examine": _CONTROL,
        "DispatchPressure": _CONTROL,
        "Drain": _CONTROL,
    },
    "kakeya.v1.AdapterService": {
        "RegisterAdapter": _CONTROL,
        "ListAdapters": _CONTROL,
        "RemoveAdapter": _CONTROL,
    },
    "kakeya.v1.ModelFilesService": {
        "ListModels": _CONTROL,
        "PullModel": _CONTROL,
        "RemoveModel": _CONTROL,
    },
    # Served on a port of its own while an invite is valid, to machines without a certificate.
    "kakeya.v1.JoinService": {"Join": NOBODY},
    # Served by engine children on their own sockets.
    "kakeya.v1.EngineService": {
        "Describe": NOBODY,
        "Decode": NOBODY,
        "Draft": NOBODY,
        "Embed": NOBODY,
        "Release": NOBODY,
        "Stats": NOBODY,
        "SetLimits": NOBODY,
        "Shrink": NOBODY,
        "LendPages": NOBODY,
        "LoadAdapters": NOBODY,
        "UnloadAdapter": NOBODY,
    },
    "grpc.health.v1.Health": {
        "Check": _OPEN_TO_ALL,
        "List": _OPEN_TO_ALL,
        "Watch": _OPEN_TO_ALL,
    },
}
PERMISSIONS: Mapping[str, Permission] = {
    f"/{service}/{method}": permission
    for service, methods in _SERVICES.items()
    for method, permission in methods.items()
}
"""By the path of the call, `/SERVICE/METHOD`."""
