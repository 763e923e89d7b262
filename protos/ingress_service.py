"""Puts the ingress's service on a server: what a Serve config file names in `grpc_options`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from protos import ingress_pb2

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor

_SERVICE = ingress_pb2.DESCRIPTOR.services_by_name["Generation"]


def add_to_server(servicer: Any, server: Any) -> None:
    """Beside what the generated function does, bytes that are no message reach the servicer, as
    None: where they are an error to gRPC, its answer is UNKNOWN."""
    handlers = {one.name: _handler(one, getattr(servicer, one.name)) for one in _SERVICE.methods}
    generic = grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_registered_method_handlers(_SERVICE.full_name, handlers)


def _handler(method: MethodDescriptor, answer: Any) -> grpc.RpcMethodHandler[Any, Any]:
    streams = method.server_streaming
    make = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    return make(
        answer,
        request_deserializer=partial(_read, GetMessageClass(method.input_type)),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _read(kind: type[Message], data: bytes) -> Message | None:
    try:
        return kind.FromString(data)
    except DecodeError:
        return None
