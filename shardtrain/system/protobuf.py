"""The dependency boundary to protobuf, which is imported when a message is first parsed. No jax."""

from functools import cache
from importlib import import_module
from typing import Any


def parse_message(schema: str, name: str, data: bytes) -> Any:
    """Parse a protocol buffer.

    Args:
      schema: the text of a `FileDescriptorProto` of the package `shardtrain`, with the fields that are read.
      name: name of the message in it.
      data: the message on the wire.

    Raises:
      ValueError: it is damaged.
    """
    message = _message_type(schema, name)()
    try:
        message.ParseFromString(data)
    except Exception as error:  # its type depends on how protobuf was built
        raise ValueError(f"a message {name} of {len(data):,} bytes is damaged: {error}") from None
    return message


@cache
def _message_type(schema: str, name: str) -> Any:
    protobuf = "google.protobuf."
    return import_module(f"{protobuf}message_factory").GetMessageClass(
        _pool(schema).FindMessageTypeByName(f"shardtrain.{name}")
    )


@cache
def _pool(schema: str) -> Any:
    protobuf = "google.protobuf."
    file = import_module(f"{protobuf}descriptor_pb2").FileDescriptorProto()
    import_module(f"{protobuf}text_format").Parse(schema, file)
    pool = import_module(f"{protobuf}descriptor_pool").DescriptorPool()
    pool.Add(file)
    return pool
