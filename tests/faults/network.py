"""Hosts as network namespaces: as a program it makes N of them, joined by a bridge, until its input ends.

It prints the process that holds each host's namespaces. Then it does what it reads, a line each: `down 1`
cuts the link of host 1, `up 1` joins it again, `limit 1 100` lets 100 Mbit/s through to host 1. `Hosts` is
the same for a test.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

NEW_USER, NEW_NET, NEW_UTS = 0x10000000, 0x40000000, 0x04000000
KINDS = {"user": NEW_USER, "net": NEW_NET, "uts": NEW_UTS}


def unshare(kinds):
    if ctypes.CDLL(None, use_errno=True).unshare(kinds):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")


def enter(pid, *names):
    """Join namespaces of another process."""
    for name in names:
        with open(f"/proc/{pid}/ns/{name}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), KINDS[name]):
                raise OSError(ctypes.get_errno(), f"setns {name} of {pid}")


def address(host):
    return f"10.231.7.{host + 1}"


def name(host):
    return f"n{host}"


def main(num_hosts):
    try:
        if os.geteuid():
            user, group = os.geteuid(), os.getegid()
            unshare(NEW_USER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        unshare(NEW_NET)
        children = dict(holder(host) for host in range(num_hosts))
        switches = switch(children)
    except OSError as error:
        print("forbidden", error, flush=True)
        return
    for pid, (ready, go) in children.items():
        os.write(go, b".")
        assert os.read(ready, 1) == b".", pid
    print("ready", *children, flush=True)
    for line in sys.stdin:
        what, host, *megabits = line.split()
        switches(int(host), what, *map(int, megabits))
        print("done", flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def holder(host):
    """A process in namespaces of its own; (pid, (its pipe to here, the pipe to it))."""
    (ready, tell), (wait, go) = os.pipe(), os.pipe()
    if pid := os.fork():
        assert os.read(ready, 1) == b"."
        return pid, (ready, go)
    unshare(NEW_NET | NEW_UTS)
    socket.sethostname(name(host))
    os.write(tell, b".")
    os.read(wait, 1)
    own_address(host)
    os.write(tell, b".")
    while True:
        signal.pause()


def own_address(host):
    from pyroute2 import IPRoute

    route: Any
    with IPRoute() as route:
        for link in ("lo", "eth0"):
            route.link("set", index=route.link_lookup(ifname=link)[0], state="up")
        route.addr("add", index=route.link_lookup(ifname="eth0")[0], address=address(host), prefixlen=24)


def switch(children):
    """A bridge with a link to each host; returns (host, "up", "down" or "limit", megabits) -> None."""
    from pyroute2 import IPRoute

    route: Any = IPRoute()
    route.link("add", ifname="br0", kind="bridge")
    bridge = route.link_lookup(ifname="br0")[0]
    route.link("set", index=bridge, state="up")
    for host, pid in enumerate(children):
        peer = {"ifname": "eth0", "net_ns_pid": pid}
        route.link("add", ifname=f"host{host}", kind="veth", peer=peer)
        index = route.link_lookup(ifname=f"host{host}")[0]
        route.link("set", index=index, master=bridge, state="up")

    def turn(host, what, megabits=0):
        index = route.link_lookup(ifname=f"host{host}")[0]
        if what == "limit":
            # a packet of the host's own stack has up to 64 KB
            route.tc("add", "tbf", index, rate=f"{megabits}mbit", latency="100ms", burst=1 << 17)
        else:
            route.link("set", index=index, state=what)

    return turn


class Hosts:
    """Namespaces while this is entered.

    Args:
      num_hosts: how many.
      folder: for the program by which mpiexec reaches them.
    """

    def __init__(self, num_hosts, folder):
        self.names = [address(host) for host in range(num_hosts)]
        self._folder = folder
        self.forbidden = None

    def __enter__(self):
        words = [sys.executable, __file__, str(len(self.names))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        word, *self.pids = self._line().split() or ["the program ended"]
        if word != "ready":
            self.forbidden = " ".join([word, *self.pids])
            return self
        path = self._folder / "remote"
        reach = [sys.executable, __file__, "enter"]
        hosts = dict(zip(self.names, self.pids, strict=True))
        # as mpiexec calls ssh: [options] host "command"
        path.write_text(
            "#!" + sys.executable + "\nimport os, sys\n"
            f"hosts, reach = {hosts!r}, {reach!r}\n"
            "words = sys.argv[1:]\n"
            "while words[0].startswith('-'): words.pop(0)\n"
            "host, *command = words\n"
            "os.execv(reach[0], [*reach, hosts[host], 'sh', '-c', 'exec ' + ' '.join(command)])\n"
        )
        path.chmod(0o755)
        self.remote = path
        return self

    def __exit__(self, *exception):
        self._process.communicate(timeout=300)

    def command(self, host, words):
        """What runs a command on a host."""
        return [sys.executable, __file__, "enter", self.pids[host], *words]

    def turn(self, host, state, megabits=""):
        """Cut a host's link ("down"), join it ("up"), or "limit" what comes to it to megabits a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{state} {host} {megabits}\n")
        self._process.stdin.flush()
        assert self._line() == "done\n"

    def _line(self):
        assert self._process.stdout is not None
        return self._process.stdout.readline()


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        enter(sys.argv[2], *(() if os.geteuid() == 0 else ("user",)), "net", "uts")
        os.execvp(sys.argv[3], sys.argv[3:])
    main(int(sys.argv[1]))
