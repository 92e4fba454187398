"""The one tree of errors. Each says what was wrong, with which value, and what would be right.

    KakeyaError
      InvalidArgument      the caller's input cannot be meant
      ConfigError          a flag, a file or an environment value is wrong; the start ends with 2
      NotFound             no such model, session, node
        PlacementError     no live node carries a role that a plan needs
      Conflict             another operation holds it now
        PageFreed          these pages hold something else by now, or nothing
      Refused              it could be done, not now
        QueueFull          too many wait already
        CapacityExhausted  no room for another session
        OutOfPages         no such range of pages is free, and none may be taken
        MemoryRefused      no room in memory for a model or a lease
          DrainTimeout     what would have to go is still in use
        LeaseRefused       no leases are given, to nobody or not on these terms
      DeadlineExceeded     the caller's time is up
      Cancelled            the caller left
      Unauthenticated      nobody vouches for the caller
      Denied               the caller is known, and may not do this
      PeerError            another node or a child process
        PeerUnavailable    it does not answer
        PeerProtocol       it answered what no correct peer answers
      LoadFailed           a model could not be loaded; the next request tries again
      StoreFailed          what is shared on disk or in Redis cannot be read or written now
      Unsupported          a parameter that this node does not honour
      InvariantBroken      our own fault; the state behind it is given up

Translated at two borders only: `wire/status.py` (gRPC) and `serving/edge.py` (HTTP).
"""

from __future__ import annotations


class KakeyaError(Exception):
    """Root of the tree.

    `code` is a stable snake_case word for programs, `retryable` says whether the same call may
    succeed later, `retry_after_s` when that is known.
    """

    code = "internal"
    retryable = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidArgument(KakeyaError):
    """The caller's input cannot be meant. `param` names the offending field, if there is one."""

    code = "invalid_argument"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unsupported(InvalidArgument):
    """A parameter that this node does not honour; refused instead of ignored."""

    code = "unsupported_parameter"


class ConfigError(KakeyaError):
    """A flag, a file or an environment value is wrong."""

    code = "config"


class NotFound(KakeyaError):
    """No such model, session or node."""

    code = "not_found"


class PlacementError(NotFound):
    """No live node carries a role that a plan needs; a later card may."""

    code = "no_placement"
    retryable = True


class Conflict(KakeyaError):
    """Another operation holds it now."""

    code = "conflict"
    retryable = True


class PageFreed(Conflict):
    """These pages hold something else by now, or nothing: ask for what you need anew."""

    code = "page_freed"


class Refused(KakeyaError):
    """It could be done, but not now."""

    code = "refused"
    retryable = True


class QueueFull(Refused):
    """Too many wait already."""

    code = "queue_full"


class CapacityExhausted(Refused):
    """No room for another session."""

    code = "capacity_exhausted"


class MemoryRefused(Refused):
    """No room in memory for a model or a lease."""

    code = "memory_refused"


class DrainTimeout(MemoryRefused):
    """What would have to leave memory is still in use."""

    code = "drain_timeout"


class LeaseRefused(Refused):
    """No leases are given now, to nobody or not on these terms."""

    code = "lease_refused"


class StoreFailed(KakeyaError):
    """What processes share on disk or in Redis cannot be read or written now."""

    code = "store_failed"
    retryable = True


class LoadFailed(KakeyaError):
    """A model could not be loaded; the next request tries again."""

    code = "load_failed"
    retryable = True


class OutOfPages(Refused):
    """No range of this size is free, and what is in the way is in use."""

    code = "out_of_pages"


class DeadlineExceeded(KakeyaError):
    """The caller's time is up."""

    code = "deadline_exceeded"
    retryable = True


class Cancelled(KakeyaError):
    """The caller left."""

    code = "cancelled"


class Unauthenticated(KakeyaError):
    """Nobody vouches for the caller: it shows no certificate, or none of this fleet's."""

    code = "unauthenticated"


class Denied(KakeyaError):
    """The caller is known, and may not do this."""

    code = "denied"


class PeerError(KakeyaError):
    """Another node or a child process failed us."""

    code = "peer"


class PeerUnavailable(PeerError):
    """It does not answer."""

    code = "unavailable"
    retryable = True


class PeerProtocol(PeerError):
    """It answered what no correct peer answers."""

    code = "peer_protocol"


class UnknownMethod(PeerProtocol):
    """It does not have the method; another version, or another service."""

    code = "unknown_method"


class InvariantBroken(KakeyaError):
    """Our own fault: a law did not hold. `kind` names the law, `detail` the values."""

    code = "invariant_broken"

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
