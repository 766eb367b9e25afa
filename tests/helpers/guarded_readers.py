"""Crafted and mutated files; `guarded` calls a reader and checks what it may do. See `test_fuzz.py`."""

import copy
import itertools
import random
import resource
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_SECONDS = 10
MOST_BYTES = 1 << 25
"""That an input of a few kilobytes may make a reader allocate; beyond 1 GiB every allocation fails."""

TRACED = 11
"""Of one call in so many every allocation is counted, which makes it several times slower."""

CODE = (
    "__import__('os').system('touch proof')",
    "4 if open('proof', 'w') else 4",
    '"""\nopen("proof", "w")\n"""',
    "{open('proof', 'w')}",
    "!!python/object/apply:os.system ['touch proof']",
)
EVIL: tuple[Any, ...] = (
    *CODE,
    *(
        "",
        "../../outside/secret",
        "/dev/zero",
        "/dev/stdin",
        "fifo",
        "a\x1b[2J\nb",
        "\ud800",
        "a" * 10_000,
        "a\0b",
    ),
    *("O", "V8", "<f4", "|O", "object", "nan", "9" * 5000, "[MASK]", "step_00000001"),
    *(
        True,
        False,
        None,
        0,
        -1,
        1.5,
        -0.0,
        1e300,
        2**31,
        2**32,
        2**63,
        2**64,
        10**9,
        10**12,
        10**18,
        -(10**18),
    ),
    *([], {}, [[]], [0] * 1000, [-1], [10**11], [0], {"a": {}}, [1] * 40, [2**31, 2**31, 2**31]),
    *(float("nan"), float("inf"), -float("inf")),
)


class Hung(BaseException):
    """More than `MOST_SECONDS` are gone; no `except Exception` may hide it."""


@pytest.fixture
def guarded(tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Calls a reader with an input, and checks what it may do: return, or raise ValueError or OSError."""
    outside, here = tmp_path / "outside", tmp_path / "here"
    outside.mkdir()
    here.mkdir()
    (outside / "secret").write_text("secret")
    (outside / "step_00000001").mkdir()
    (outside / "step_00000001" / "manifest.json").write_text("{}")
    monkeypatch.chdir(here)

    def alarm(number: int, frame: object) -> None:
        raise Hung

    counted = itertools.count()

    def call(reader: Callable[[], Any]) -> Any:
        if is_traced := next(counted) % TRACED == 0:
            tracemalloc.start()
        signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
        try:
            return reader()
        except (ValueError, OSError) as error:
            return error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if is_traced:
                peak_bytes = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak_bytes < MOST_BYTES

    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, alarm)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), limits[1]))
    looked = _look(outside)
    try:
        yield call
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)
    assert _look(outside) == looked
    assert not list(tmp_path.rglob("proof"))


def _look(folder: Path) -> dict[str, Any]:
    return {
        str(path): (
            path.stat().st_mtime_ns,
            path.stat().st_mode,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [folder, *folder.rglob("*")]
    }


def _nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _nodes(each, (*path, key))


def spoilt(value: Any, rng: random.Random) -> Any:
    """JSON with one to three nodes replaced, removed, renamed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        *parents, last = rng.choice(list(_nodes(value))[1:] or [()]) or (None,)
        if last is None:
            return rng.choice(EVIL)
        owner = value
        for key in parents:
            owner = owner[key]
        action = rng.random()
        if action < 0.7:
            owner[last] = copy.deepcopy(rng.choice(EVIL))
        elif action < 0.8:
            del owner[last]
        elif isinstance(owner, dict):
            owner[str(rng.choice(EVIL))] = owner.pop(last)
        else:
            owner += owner[: rng.randint(0, 300)]
    return value


def garbled(data: bytes, rng: random.Random) -> bytes:
    """Bytes cut off, flipped, doubled, or with something between them."""
    garbage = bytearray(data)
    at = rng.randrange(len(garbage) + 1)
    what = rng.choice(
        (
            b"[" * 5000,
            b"9" * 6000,
            b"NaN",
            b"1e999",
            b'"a":1,"a":2,',
            b"\0",
            b"\xff\xfe",
            b"\x1b]0;x\x07",
            b"\\ud800",
        )
    )
    match rng.randrange(4):
        case 0:
            del garbage[at:]
        case 1:
            for _ in range(rng.randint(1, 8)):
                garbage[rng.randrange(len(garbage))] = rng.randrange(256)
        case 2:
            garbage[at:at] = what
        case _:
            garbage[at:at] = garbage[: rng.randrange(len(garbage) + 1)]
    return bytes(garbage)
