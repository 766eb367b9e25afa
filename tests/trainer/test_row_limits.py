"""Limits of the rows that islands get: by option, and by the memory of the step's program."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardtrain.cli.run_options import parse_run
from shardtrain.islands.options import Across
from shardtrain.report.quantities import bytes_text
from shardtrain.report.sinks.json_lines import read_jsonl

PROGRAM = Path(__file__).parents[1] / "programs" / "row_limits.py"
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "own_model.py")


@pytest.mark.full
def test_what_is_above_a_limit_goes_to_the_others_and_losses_stay(mpiexec, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(np.random.default_rng(0).integers(97, 123, 60 * 8 + 20, np.uint8).tobytes())
    first, second = (json.loads(each) for each in mpiexec(2, PROGRAM, tmp_path, text))
    rows = {name: [first[name][0], second[name][0]] for name in first if name != "least"}
    assert rows == {
        "given": [[5], [11]],
        # the two are equally fast by their devices
        "measured": [[5], [11]],
        "too few": [[], []],
        "too many": [[], []],
        "enough": [[12], [4]],
        "little": [[6], [10]],
        # the second batch is twice the first, in twice the microbatches; the third ends the epoch
        "grown": [[6, 10, 12], [0, 10, 20]],
        "grown freely": [[10, 12, 24], [0, 4, 8]],
        "none": [[], []],
    }
    # held-out batches are computed in the same shares, by auto too
    for name, expected in {"given": [[5], [11]], "enough": [[12], [4]], "little": [[6], [10]]}.items():
        assert [first[name][2], second[name][2]] == expected
    losses = [
        [line["train/loss"] for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("given", "measured", "enough", "little", "grown", "grown freely")
    ]
    for other in losses[1:4]:
        assert other == pytest.approx(losses[0], rel=2e-5)
    assert losses[4] == pytest.approx(losses[5], rel=2e-5)
    assert "most rows that fit the memory of each island, of 16: 6, 16\n" in first["little"][1]
    assert "most rows" not in first["enough"][1]
    assert first["too few"][1] == (
        "a batch of 16 rows does not fit the islands: they may have at most 5, 8 rows, 13 together. Use a"
        " batch of 13 rows or less, more islands, or larger limits"
    )
    assert first["too many"][1] == "share_limits has 3 numbers, and there are 2 islands; give one each"
    least = first["least"]
    has, need = bytes_text(least - 1), bytes_text(least)
    assert first["none"][1].splitlines() == [
        "the model does not fit every island:",
        f"  - island 0 has {has} a device, and the fewest rows need {need}; use more devices or --zero 3"
        " there, --remat full, a smaller model, or leave it out",
    ]


def test_limits_that_cannot_be_are_refused():
    with pytest.raises(ValueError) as error:
        Across(share_limits=(3, 0))
    assert "share_limits is (3, 0); give each island a number from 1" in str(error.value)
    with pytest.raises(ValueError) as error:
        Across(axis="pipeline", share_limits="auto")
    assert "use --stage-memory, by which the model is cut" in str(error.value)


@pytest.mark.parametrize(("word", "value"), [("24,64", (24, 64)), ("auto", "auto")])
def test_the_command_line_takes_numbers_and_auto(word, value):
    run, _ = parse_run("train", [EXAMPLE, "--share-limits", word])
    assert run.strategy.across.share_limits == value


def test_the_command_line_says_what_it_takes():
    with pytest.raises(ValueError, match="'24,x' cannot be read; give whole numbers, as in 24,64, or auto"):
        parse_run("train", [EXAMPLE, "--share-limits", "24,x"])
