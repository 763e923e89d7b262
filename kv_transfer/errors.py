"""What can go wrong between two workers."""

from protos.generation_pb2 import Failure
from protos.limits import shortened


class TransferError(Exception):
    """A transfer, or the link under it, failed; nothing of it writes any more.

    `retryable`: the same may succeed later, or with another peer.
    """

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class Unreachable(TransferError):
    """There is no link to the peer, so nothing was asked of it. There may be one soon."""


class LinkLost(TransferError):
    """The link broke while the peer was being asked. The peer may be there all the same."""


class OneSidedRefused(TransferError):
    """The peer is there and cannot, or must not, be read in this way; another connector must."""


class ConnectorUnavailable(TransferError):
    """This process cannot use the connector: a library or a setting is missing."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class IncompatiblePeer(TransferError):
    """Two workers that do not fit together; `field` names what differs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", retryable=False)
        self.field = field


FINAL = (Failure.KIND_INVALID, Failure.KIND_INCOMPATIBLE, Failure.KIND_TIMED_OUT)


class Refused(TransferError):
    """The peer, or we, said no in so many words."""

    def __init__(self, failure: Failure) -> None:
        where = f"{shortened(failure.field)}: " if failure.field else ""
        retryable = failure.kind not in FINAL
        super().__init__(f"{where}{shortened(failure.message)}", retryable=retryable)
        self.failure = failure
