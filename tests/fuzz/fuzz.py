"""Random models and layouts against one device: `python tests/fuzz/fuzz.py --cases 1500 --seed 7 --jobs 2`.

Each case runs in a child with a time limit, and ends as right, refused, wrong, abort, hang or error. With
`--log FILE` each end is a line of JSON, and the same command continues. `--case 'kind=...'` runs one.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "helpers"), str(HERE.parents[1])]

from quick_compilation import QUICK_COMPILATION

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(QUICK_COMPILATION)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import checked  # noqa: F401 - children inherit what it imports
import warm_python
from case import Case, read_case
from drawing import KINDS, draw_case
from forked import FAULTS, run_case, run_cases
from operator_drawing import draw_operator_case
from shrinking import shrink

Ends = list[tuple[Case, dict[str, Any]]]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of all cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kinds", default="", help=f"kinds of models, of {','.join(KINDS)}; all by default")
    parser.add_argument("--options", action="store_true", help="draw more options of layouts")
    parser.add_argument("--operators", action="store_true", help="shard each operator by itself")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--log", type=Path, help="file of the ends, one JSON line each, which is continued")
    parser.add_argument("--case", help="run this case alone")
    parser.add_argument("--shrink", action="store_true", help="make failing cases smaller")
    return parser.parse_args(words)


def say(*texts: str) -> None:
    """Print a line at once: a run of many cases is watched."""
    sys.stdout.write(" ".join(texts) + "\n")
    sys.stdout.flush()


def command(case: Case) -> str:
    """Return the command that runs a case again."""
    return f"python tests/fuzz/fuzz.py --case '{case}'"


def read_log(path: Path | None) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what a log has: (seed, number) -> its line."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["seed"], line["number"]): line for line in lines}


def mesh_text(case: Case) -> str:
    """Return the axes of a mesh in one word."""
    return "x".join(sorted(case.mesh)) or "one"


def summary(ends: Ends) -> str:
    """Format counts of ends, also by kind of model and by axes of the mesh."""
    order = ("right", "refused", *FAULTS)
    lines = []
    for title, key in (("", lambda case: "all"), ("kind", lambda case: case.kind), ("mesh", mesh_text)):
        counts: dict[str, Counter[str]] = {}
        for case, found in ends:
            counts.setdefault(key(case), Counter())[found["end"]] += 1
        for name, count in sorted(counts.items(), key=lambda item: -sum(item[1].values())):
            each = ", ".join(f"{count[end]} {end}" for end in order if count[end])
            lines.append(f"{title:5}{name:32} {sum(count.values()):5}: {each}")
    cpu = sum(found["cpu"] for _, found in ends) / max(1, len(ends))
    return "\n".join([*lines, f"{cpu:.1f} s of a processor for each case"])


def run_one(text: str, shrinks: bool) -> int:
    """Run a case that was given in words; return the exit code."""
    case = read_case(text)
    found = run_case(case)
    if shrinks and found["end"] in FAULTS:
        case, found = shrink(case, found["end"])
        say(command(case))
    say(found.pop("traceback", ""), json.dumps(found, indent=1))
    return int(found["end"] in FAULTS)


def main(words: list[str] | None = None) -> int:
    """Run the cases that the command line asks for; return 1 if any failed."""
    asked = parse(words)
    if asked.case:
        return run_one(asked.case, asked.shrink)
    warm_python.trace_a_step()
    kinds = tuple(filter(None, asked.kinds.split(",")))
    done, ends, began = read_log(asked.log), [], time.monotonic()
    numbers = range(asked.first, asked.first + asked.cases)

    def waiting():
        for number in numbers:
            case = draw_case(asked.seed, number, kinds, asked.options)
            case = draw_operator_case(case, number) if asked.operators else case
            line = done.get((asked.seed, number))
            if line is not None and line["case"] == str(case):
                ends.append((case, line))
            elif time.monotonic() - began < asked.seconds:
                yield number, case

    for number, case, found in run_cases(waiting(), asked.jobs):
        failed = found["end"] in FAULTS
        if failed and asked.shrink:
            small, found = shrink(case, found["end"])
            found["shrunk"] = str(small)
        ends.append((case, found))
        if asked.log:
            with asked.log.open("a") as file:
                file.write(
                    json.dumps({"seed": asked.seed, "number": number, "case": str(case), **found}) + "\n"
                )
        if failed:
            again = read_case(found.get("shrunk", str(case)))
            say(f"{asked.seed}-{number} {found['end']}: {found['text']}\n  {command(again)}")
    say(summary(ends))
    return int(any(found["end"] in FAULTS for _, found in ends))


if __name__ == "__main__":
    sys.exit(main())
