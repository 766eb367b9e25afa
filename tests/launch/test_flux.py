"""What only Flux has: the form of its directives, and its own refusals. The rest is in `test_batch.py`."""

from pathlib import Path

import pytest

from shardtrain.launch.flux import Flux, write_script
from shardtrain.launch.hosts import parse_hosts
from shardtrain.launch.job import Job

SCRIPTS = sorted((Path(__file__).parent / "golden").glob("*.flux"))


def job(**changes):
    return Job(**{"islands": 4, "program": ("python",), "arguments": ("train", "run.py"), **changes})


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_directives_stand_together_behind_one_sentinel(path):
    """flux-batch(1): it is an error to have other prefixes, or a directive behind the first command."""
    lines = path.read_text().splitlines()
    directives = [number for number, line in enumerate(lines) if "flux:" in line]
    assert directives == list(range(3, 3 + len(directives)))
    assert all(lines[number].startswith(("# flux: --", "# flux: '--")) for number in directives)


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"hosts": parse_hosts("a,b")}, {}, "Flux chooses them; use --flux requires=host:a,b"),
        (
            {},
            {"gpus_per_island": 2},
            "Flux would give each process one core. Add --cpus-per-island, or leave",
        ),
        ({}, {"queue": "a b"}, "queue 'a b' may have letters"),
        ({}, {"flux": ("x\nrm -r x",)}, "flux option 'x\\nrm -r x' is more than one line"),
        ({"logs": Path("{{id}}")}, {}, "logs '{{id}}': flux takes a path of letters"),
    ],
)
def test_what_flux_cannot_do_is_refused_with_the_fix(changes, options, text):
    with pytest.raises(ValueError) as error:
        write_script(job(**changes), Flux(**options), {})
    assert text in str(error.value)
