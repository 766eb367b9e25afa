"""A peer of `tests/elastic/test_sockets.py`: print events as JSON, send or receive as the test says."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardtrain.elastic.frames import Lost
from shardtrain.elastic.run_files import RunFiles
from shardtrain.elastic.sockets import Transport
from shardtrain.system.host import peak_resident_bytes


class Address(NamedTuple):
    name: str
    address: str


def main(folder: str, name: str, patience_seconds: str) -> None:
    def expect(peer, header):
        return [np.empty(header["num_bytes"], np.uint8)] if "num_bytes" in header else ()

    transport = Transport(
        name,
        RunFiles(Path(folder)),
        expect,
        host="127.0.0.1",
        patience_seconds=float(patience_seconds),
    )
    peer = {"name": name, "address": transport.address}
    print(json.dumps(peer), flush=True)
    transport.connect([Address(**each) for each in json.loads(sys.stdin.readline())])
    before = peak_resident_bytes()
    while True:
        for event in transport.receive(10.0):
            if isinstance(event, Lost):
                print(json.dumps({"lost": event.peer, "reason": event.reason}), flush=True)
                return
            peak = peak_resident_bytes() - before
            answer = {"sum": sum(int(x.sum(dtype=np.int64)) for x in event.buffers), "peak": peak}
            transport.send(event.peer, {"from": name, **answer})


if __name__ == "__main__":
    main(*sys.argv[1:])
