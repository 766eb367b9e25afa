"""What any layout saved, any other restores: the same bits, the same samples ahead, the same losses next."""

import json
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "programs" / "restore_matrix.py"


KINDS = {"islands": "islands", "stages": "stages", "pipeline": "pipeline"}


def kinds(pair):
    """The kinds of two layouts: (of the one that saved, of the one that restored)."""
    return tuple(next((KINDS[word] for word in KINDS if word in name), "mesh") for name in pair.split(" -> "))


def test_every_layout_restores_what_every_other_saved(mpiexec, tmp_path, pytestconfig):
    full = pytestconfig.getoption("--full")
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder in (one, two, three):
        folder.mkdir()
    pairs: dict[str, list[str]] = {}
    third = [(3, 1, three, [one, two, three])] if full else []
    for num_ranks, devices, folder, sources in (
        (1, 8, one, []),
        (2, 2, two, [one, two]),
        *third,
        # and back: meshes restore what they and islands and stages saved
        (1, 8, one, [one, two, three]),
    ):
        words = ("full" if full else "half", folder, *sources)
        texts = mpiexec(num_ranks, PROGRAM, *words, devices=devices)
        told = [json.loads(text) for text in texts]
        for found in told:
            assert found.keys() == told[0].keys()
            assert not any(found.values()), {pair: problems for pair, problems in found.items() if problems}
        assert not pairs.keys() & told[0].keys()
        pairs |= told[0]
    every = 6 * (6 + 2 + 2) + 2 * (6 + 2) + 2 * (6 + 2 + 2)
    assert len(pairs) == (every if full else 16)
    assert len({kinds(pair) for pair in pairs}) == 4 * 4
