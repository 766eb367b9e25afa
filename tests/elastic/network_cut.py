"""Cut the network between islands of an elastic run, and heal it: one side continues, one writes nothing.

    sudo python tests/elastic/network_cut.py

Four islands of the toy in two network namespaces, joined by a bridge in a third; all share the run folder.
First halves are cut, of which the one with the oldest island continues; then the chief alone is cut off. It
needs root and the command `ip`.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from chaos import Run  # adds the folder of programs
from elastic_island import PATIENCE_SECONDS, train_alone

from shardtrain.elastic.history import read_history
from shardtrain.elastic.ledger import is_valid_checkpoint
from shardtrain.elastic.run_files import list_checkpoints

STEPS, SECONDS_PER_SLOT = 3000, 0.004
BRIDGE = f"bridge{os.getpid()}"
SIDES = [f"side{os.getpid()}{letter}" for letter in "ab"]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def make_network():
    """Make the namespaces, with a port of the bridge for each side."""
    try:
        for name in (BRIDGE, *SIDES):
            ip("netns", "add", name)
        ip("-n", BRIDGE, "link", "add", "bridge", "type", "bridge")
        ip("-n", BRIDGE, "link", "set", "bridge", "up")
        for side, address in zip(SIDES, ADDRESSES, strict=True):
            ip("-n", BRIDGE, "link", "add", side, "type", "veth", "peer", "name", "eth0", "netns", side)
            ip("-n", BRIDGE, "link", "set", side, "master", "bridge", "up")
            ip("-n", side, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", side, "link", "set", device, "up")
        yield
    finally:
        for name in (BRIDGE, *SIDES):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start(run, side):
    run.python = ["ip", "netns", "exec", SIDES[side], "env", f"SHARDTRAIN_ADDRESS={ADDRESSES[side]}"]
    run.python.append(sys.executable)
    return run.start()


def find_loss(epochs, before):
    """Return the first later epoch in which islands were lost, in a list; [] if there is none."""
    return [epoch for epoch in epochs[before.number :] if "lost" in epoch.why][:1]


def cut_and_heal(folder, sides):
    """Cut a run of four islands, oldest first, each on side 0 or 1; return a line about what happened."""
    run = Run([], folder, STEPS, SECONDS_PER_SLOT)
    try:
        for side in sides:
            island = start(run, side)
            run.wait_for(lambda island=island: island.is_member)
        before = read_history(folder).epochs[-1]
        assert len(before.names) == 4, before
        # the larger side continues, of halves the one with the oldest island
        stays = sides[0] if sides.count(0) == sides.count(1) else max(sides, key=sides.count)
        # the bridge forgets a port: packets vanish, and no end of a connection notices
        ip("-n", BRIDGE, "link", "set", SIDES[1], "nomaster")
        cut_at = time.monotonic()
        run.wait_for(lambda: find_loss(read_history(folder).epochs, before))
        waited = time.monotonic() - cut_at
        time.sleep(3 * PATIENCE_SECONDS)
        ip("-n", BRIDGE, "link", "set", SIDES[1], "master", "bridge")
        lost = [each for each, side in zip(run.processes, sides, strict=True) if side != stays]
        run.wait_for(lambda: all(each.outcome for each in lost))
        epochs = run.finish()
        (after,) = find_loss(epochs, before)
        names = [name for name, side in zip(before.names, sides, strict=True) if side == stays]
        assert list(after.names) == names, (before, after)
        for each in lost:
            outcome, steps, total = each.outcome.rsplit(" ", 2)
            assert (outcome, int(total)) == ("excluded", train_alone(int(steps))), each.outcome
            assert int(steps) <= after.step, (each.outcome, after)
        saved = list_checkpoints(folder / "elastic")
        assert all(is_valid_checkpoint(epochs, each.step, each.epoch) for each in saved), saved
        steps = sorted(int(each.outcome.split()[1]) for each in lost)
        return (
            f"{sides.count(stays)} of 4 islands continued {waited:.1f} s after the cut, from step"
            f" {after.step}; the others had applied {steps} steps, and ended"
        )
    finally:
        run.end()


def main():
    # what the toy prints of its computation in this process is no matter
    with tempfile.TemporaryDirectory() as folder, make_network():
        for number, sides in enumerate(([0, 0, 1, 1], [0, 1, 1, 1])):
            (own := Path(folder, str(number))).mkdir()
            sys.stderr.write(f"{cut_and_heal(own, sides)}\n")


if __name__ == "__main__":
    try:
        main()
    except (FileNotFoundError, OSError) as error:
        if not any(word in str(error) for word in ("ip ", "'ip'")):
            raise
        sys.exit(f"this machine makes no network namespaces, so nothing was checked: {error}. Run it as root")
