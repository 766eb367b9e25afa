"""Draws docs/pictures: `uv run python docs/draw.py`."""

from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt

from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.simulate import simulate

PICTURES = Path(__file__).parent / "pictures"
COLOURS = {"forward": "#2f6db3", "backward": "#e08a3c", "weight": "#4c956c"}
NUM_STAGES, NUM_MICROBATCHES = 4, 8
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zb_v": 2}


def draw_schedules() -> None:
    """Draw a step of each schedule across islands: a row per stage, a box per task, as long as it takes."""
    figure, all_axes = plt.subplots(len(CHUNKS), sharex=True, figsize=(9, 7), layout="constrained")
    for axes, (name, num_chunks) in zip(all_axes, CHUNKS.items(), strict=True):
        table = make_table(name, NUM_STAGES, NUM_MICROBATCHES, num_chunks)
        seconds = {"forward": 1.0, "backward": 2.0 if table.has_weight else 3.0, "weight": 1.0}
        found = simulate(table, {kind: length / num_chunks for kind, length in seconds.items()})
        rows: defaultdict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
        for task in table.tasks:
            start = found.start[task]
            rows[task.stage, task.chunk, task.kind].append((start, found.end[task] - start))
        for (stage, chunk, kind), boxes in rows.items():
            style = {"facecolor": COLOURS[kind], "alpha": 0.6 + 0.4 * (chunk + 1) / num_chunks}
            axes.broken_barh(boxes, (stage - 0.43, 0.86), edgecolor="white", linewidth=0.5, **style)
        chunks = f", {num_chunks} chunks a stage" if num_chunks > 1 else ""
        title = f"{name}{chunks}: {found.makespan:.0f} forwards, bubble {found.bubble:.1%}"
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(NUM_STAGES), [f"stage {stage}" for stage in range(NUM_STAGES)], fontsize=8)
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    all_axes[-1].set_xlabel("time, in forwards of one stage")
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / "schedules.svg", metadata={"Date": None})


if __name__ == "__main__":
    plt.rcParams.update({"svg.hashsalt": "shardtrain", "svg.fonttype": "none"})
    draw_schedules()
