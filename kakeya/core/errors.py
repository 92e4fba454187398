"""The tree of errors. A message says what was wrong, with which value, and what would be right.

    KakeyaError
      InvalidArgument      the caller's input is not valid
        ContextLengthExceeded  prompt and output do not fit into the model's context
      ConfigError          a flag, a file or an environment value is wrong; the start ends with 2
      NotFound             no such model, session, node
        PlacementError     no live node carries a role that a plan needs
      Conflict             another operation holds the thing now
        PageFreed          the pages were freed, and may hold other content
      Refused              the request is legal but cannot be served now
        QueueFull          too many requests wait already
        CapacityExhausted  no room for another session
        OutOfPages         no such range of pages is free, and none may be taken
        MemoryRefused      no room in memory for a model or a lease
          DrainTimeout     a resident that would have to leave is still in use
          KvRefused        no memory for the keys and values of so long a sequence
        LeaseRefused       the lease desk gives no lease now, or none on these terms
      DeadlineExceeded     the caller's time is up
        ModelLoading       its time is too short for a load, which goes on for the next try
      Cancelled            the caller left
      Unauthenticated      the caller shows no certificate, or none of this fleet
      Denied               the caller is known, and may not do this
      PeerError            another node or a child process
        PeerUnavailable    the peer does not answer
        PeerProtocol       the peer sent an answer that no correct peer sends
      LoadFailed           a model could not be loaded; the next request tries again
      StoreFailed          state shared on disk or in Redis cannot be read or written now
      Unsupported          a parameter that this node does not support
      InvariantBroken      a fault of this program; the state behind it is given up

Two borders translate errors: `wire/status.py` (gRPC) and `gateway/http/edge.py` (HTTP).
"""

from __future__ import annotations


class KakeyaError(Exception):
    """Root of the tree.

    `code` is a stable snake_case word; `retryable`: the same call may succeed in `retry_after_s`.
    """

    code = "internal"
    retryable = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidArgument(KakeyaError):
    """The caller's input is not valid. `param` names the field at fault, if there is one."""

    code = "invalid_argument"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidArgument):
    """Prompt and output do not fit into the model's context."""

    code = "context_length_exceeded"


class Unsupported(InvalidArgument):
    """A parameter that this node does not support; the request is refused, not answered without."""

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
    """Another operation holds the thing now."""

    code = "conflict"
    retryable = True


class PageFreed(Conflict):
    """The pages were freed, and may hold other content; the caller must ask for new ones."""

    code = "page_freed"


class Refused(KakeyaError):
    """The request is legal but cannot be served now."""

    code = "refused"
    retryable = True


class QueueFull(Refused):
    """Too many requests wait already."""

    code = "queue_full"


class CapacityExhausted(Refused):
    """No room for another session."""

    code = "capacity_exhausted"


class MemoryRefused(Refused):
    """No room in memory for a model or a lease."""

    code = "memory_refused"


class DrainTimeout(MemoryRefused):
    """A resident that would have to leave memory is still in use."""

    code = "drain_timeout"


class KvRefused(MemoryRefused):
    """No memory for the keys and values of so long a sequence: now, or with `retry_after_s` None
    ever."""

    code = "kv_refused"


class LeaseRefused(Refused):
    """The lease desk gives no lease now, or none on these terms."""

    code = "lease_refused"


class StoreFailed(KakeyaError):
    """State that processes share on disk or in Redis cannot be read or written now."""

    code = "store_failed"
    retryable = True


class LoadFailed(KakeyaError):
    """A model could not be loaded; the next request tries again."""

    code = "load_failed"
    retryable = True


class OutOfPages(Refused):
    """No range of this size is free, and the blocks in its place are in use."""

    code = "out_of_pages"


class DeadlineExceeded(KakeyaError):
    """The caller's time is up."""

    code = "deadline_exceeded"
    retryable = True


class ModelLoading(DeadlineExceeded):
    """A request has no time for the load of its model, which goes on for `retry_after_s`."""

    code = "model_loading"


class Cancelled(KakeyaError):
    """The caller left."""

    code = "cancelled"


class Unauthenticated(KakeyaError):
    """The caller shows no certificate, or none of this fleet."""

    code = "unauthenticated"


class Denied(KakeyaError):
    """The caller is known, and may not do this."""

    code = "denied"


class PeerError(KakeyaError):
    """Another node or a child process failed us."""

    code = "peer"


class PeerUnavailable(PeerError):
    """The peer does not answer, or leaves: `moved_to`, if known, is the HOST:PORT to ask then."""

    code = "unavailable"
    retryable = True
    moved_to = ""


class PeerProtocol(PeerError):
    """The peer sent an answer that no correct peer sends."""

    code = "peer_protocol"


class UnknownMethod(PeerProtocol):
    """The peer lacks the method: it runs another version, or another service."""

    code = "unknown_method"


class InvariantBroken(KakeyaError):
    """A fault of this program: a law did not hold. `kind` names the law, `detail` the values."""

    code = "invariant_broken"

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
