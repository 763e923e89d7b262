"""Load reports as they come from a peer: what is counted with is checked first."""

import logging

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kv_transfer.errors import TransferError
from protos.events_pb2 import LoadReport

logger = logging.getLogger(__name__)

_MOST = 1e15  # no number of seconds, or of bytes a second, is more


class LoadCheck:
    """Of the reports of one worker. There are four a second: of each field that cannot be, the
    first is told."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._told: set[str] = set()

    def believes(self, report: LoadReport) -> bool:
        try:
            check_load(report)
        except TransferError as error:
            field = str(error).partition(":")[0]
            if field not in self._told:
                self._told.add(field)
                logger.warning("the reports of %s are not believed: %s", self._address, error)
            return False
        return True


def check_load(report: LoadReport) -> None:
    """TransferError if one of its numbers cannot be: negative, none at all, or without end."""
    _check(report, "load")


def _check(message: Message, name: str) -> None:
    for field, value in message.ListFields():
        where = f"{name}.{field.name}"
        if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            if not 0 <= value <= _MOST:
                raise TransferError(f"{where}: {value}, must be 0 to {_MOST:g}", retryable=False)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for part in (value,) if isinstance(value, Message) else value:
                _check(part, where)
