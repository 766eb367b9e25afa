"""Find the address on which jax listens: loopback on one host, the interface of the job on several.

MPI reads its own variables, see `launch/job.py`. No jax, no MPI.
"""

import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence

INTERFACE = "SHARDTRAIN_INTERFACE"
"""Variable with the name of the interface, which `launch` sets."""

ADDRESS = "SHARDTRAIN_ADDRESS"
"""Variable with the address at which others reach an elastic island; by default of the default route."""

LOOPBACK = "lo"
LOOPBACK_ADDRESS = "127.0.0.1"
SIOCGIFADDR = 0x8915


def find_listening_address(hosts: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the address on which a process of an island listens; None means all addresses.

    Args:
      hosts: the hosts of the island's processes.
      environ: the environment.

    Raises:
      ValueError: the interface does not exist, or has no address.

    >>> find_listening_address(["a", "a"], {}), find_listening_address(["a", "b"], {})
    ('127.0.0.1', None)
    """
    if len(set(hosts)) == 1:
        return LOOPBACK_ADDRESS
    name = environ.get(INTERFACE)
    return find_address(name) if name else None


PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables of proxies that gRPC, and so jax.distributed, uses for connections to other hosts."""


def exempt_from_proxies(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that exempt connections between hosts of a run from proxies.

    Args:
      hosts: names and addresses.
      environ: the environment.

    >>> exempt_from_proxies(["a", "a", "10.0.0.7"], {"http_proxy": "http://p:8", "NO_PROXY": "b,a"})
    {'no_proxy': 'b,a,10.0.0.7'}
    >>> exempt_from_proxies(["a"], {})
    {}
    """
    if not any(environ.get(name) for name in PROXIES):
        return {}
    found = {}
    # gRPC reads the first of the two that is set
    for name in ("no_grpc_proxy", "no_proxy"):
        before = environ.get(name) or (environ.get("NO_PROXY", "") if name == "no_proxy" else "")
        if before or name == "no_proxy":
            entries = [entry.strip() for entry in before.split(",") if entry.strip()]
            found[name] = ",".join(dict.fromkeys([*entries, *hosts]))
    return found


def find_address(interface: str) -> str:
    """Return the IPv4 address of an interface.

    Raises:
      ValueError: it does not exist, or has none; the message lists all interfaces.

    >>> find_address("lo")
    '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"interface {interface!r} has no IPv4 address here ({error.strerror}); use one of {names}"
            ) from error
    return socket.inet_ntoa(found[20:24])
