"""Scripts of Flux against golden files, and what cannot be asked of it.

Golden files are written anew by `python tests/launch/test_flux.py`.
"""

import sys
from pathlib import Path

import pytest

from shardtrain.launch.flux import Flux, launch, script
from shardtrain.launch.hosts import parse_hosts
from shardtrain.launch.job import Job

GOLDEN = Path(__file__).parent / "golden"
TRAIN = ("train", "examples/gpt_text.py", "--run-dir", "runs/my run")


def job(**changes):
    changes = {"islands": 4, "arguments": TRAIN, **changes}
    return Job(program=("python", "-m", "shardtrain"), **changes)


SCRIPTS = {
    "whole_nodes": (job(), Flux()),
    "gpus": (
        job(processes_per_island=2, time_seconds=3600, stop_seconds=300),
        Flux(queue="pbatch", bank="physics", gpus_per_island=4, cpus_per_island=32, job_name="gpt"),
    ),
    "unequal": (
        job(islands=2, processes_per_island=(1, 3)),
        Flux(
            pmi="pmix", requeue=False, flux=("requires=host:a b", "--urgency=20"),
            setup=("module load openmpi",),
        ),
    ),
}  # fmt: skip


def text_of(name):
    before, sys.executable = sys.executable, "python"
    try:
        return script(*SCRIPTS[name], {})
    finally:
        sys.executable = before


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_as_they_were(name):
    assert text_of(name) == (GOLDEN / f"{name}.flux").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_directives_stand_together_behind_one_sentinel(name):
    """flux-batch(1): it is an error to have other prefixes, or a directive behind the first command."""
    lines = text_of(name).splitlines()
    directives = [number for number, line in enumerate(lines) if "flux:" in line]
    assert directives == list(range(3, 3 + len(directives)))
    assert all(lines[number].startswith(("# flux: --", "# flux: '--")) for number in directives)


def test_submitting_writes_the_script_into_the_log_folder():
    submitted = launch(job(logs=Path("a/logs")), Flux(job_name="gpt"), {})
    assert submitted.command == ("flux", "batch", "a/logs/gpt.flux")
    assert "# flux: --output=a/logs/gpt-{{id.dec}}.log\n" in submitted.files[Path("a/logs/gpt.flux")]


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({}, {"nodes": 3}, "4 ranks cannot be shared evenly by 3 nodes: 4 % 3 = 1. Use 4 or 2 or 1 nodes"),
        ({"hosts": parse_hosts("a,b")}, {}, "Flux chooses them; use --flux requires=host:a,b"),
        (
            {},
            {"gpus_per_island": 2},
            "Flux would give each process one core. Add --cpus-per-island, or leave",
        ),
        ({}, {"queue": "a b"}, "queue 'a b' may have letters"),
        ({}, {"bank": "a\n# flux: -N9"}, "bank 'a\\n# flux: -N9' may have letters"),
        ({}, {"flux": ("x\nrm -r x",)}, "flux option 'x\\nrm -r x' is more than one line"),
        ({"logs": Path("{{id}}")}, {}, "logs '{{id}}': flux takes a path of letters"),
    ],
)
def test_what_flux_cannot_do_is_refused_with_the_fix(changes, options, text):
    with pytest.raises(ValueError) as error:
        script(job(**changes), Flux(**options), {})
    assert str(error.value).startswith("this batch job cannot be written:\n  - ")
    assert text in str(error.value)


if __name__ == "__main__":
    for golden in SCRIPTS:
        (GOLDEN / f"{golden}.flux").write_text(text_of(golden))
