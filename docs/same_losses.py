"""Draw the losses of one run in four layouts on top of each other: docs/pictures/same_losses.svg.

    uv run python docs/same_losses.py       # about five minutes on two cores

The run is `examples/gpt_text.py` in a small size; the layouts are one device, a mesh of 2 x 2 x 2 devices,
two unequal islands and a pipeline of four stages. Prints the largest difference from one device.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from shardtrain.report.plots.figure import GRID, INK, QUIET_INK, make_figure, save_figure
from shardtrain.report.plots.loss_curve import select_series
from shardtrain.report.sinks.json_lines import read_jsonl

SIZE = (
    "examples/gpt_text.py --steps 200 --batch 12 --log-every 2 --evaluate-every None --sinks jsonl"
    " --model.embed 64 --model.mlp 256"
)
LAYOUTS = {
    "one device": f"train {SIZE} --cpu-devices 1",
    "a mesh: data=2, fsdp=2, tensor=2": f"train {SIZE} --cpu-devices 8 --mesh data=2,fsdp=2,tensor=2",
    "two islands of 2 and 1 devices": f"launch --islands 2 -- train {SIZE} --cpu-devices 2,1 --mesh data=-1",
    "a pipeline of 4 stages": f"train {SIZE} --cpu-devices 4 --mesh pipeline=4 --accumulate 4",
}
COLOURS = ("#c9d6e6", "#2f6db3", "#d1495b", "#22262b")
WIDTHS = (9.0, 5.0, 2.5, 0.8)


def main() -> None:
    losses = {}
    with TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(LAYOUTS.items()):
            run = Path(folder) / str(number)
            command = [sys.executable, "-m", "shardtrain", *words.split(), "--run-dir", str(run)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            losses[name] = select_series(read_jsonl(run / "metrics.jsonl"), "train/loss")
    figure = make_figure("the picture", (9, 4))
    axes = figure.add_axes((0.07, 0.13, 0.91, 0.7))
    reference = losses["one device"][1]
    apart = max(float(abs(values / reference - 1).max()) for _, values in losses.values())
    for (name, (steps, values)), colour, width in zip(losses.items(), COLOURS, WIDTHS, strict=True):
        axes.plot(steps, values, color=colour, linewidth=width, label=name, solid_capstyle="round")
    axes.grid(color=GRID)
    axes.set_xlabel("step", color=QUIET_INK)
    axes.legend(frameon=False, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.07, 0.92, "Training loss of one run in four layouts", fontsize=14, color=INK)
    figure.text(0.07, 0.86, f"largest relative difference: {apart:.0e}", fontsize=10, color=QUIET_INK)
    save_figure(figure, Path(__file__).parent / "pictures/same_losses.svg")
    print(f"{len(reference)} losses each, at most {apart:.1e} apart (relative)")


main()
