"""Options of `shardtrain plan`, and checks of its output paths.

Next: `plan.py`, which makes the plan.
"""

from dataclasses import dataclass
from pathlib import Path

from shardtrain.cli.arguments import list_too_small
from shardtrain.cli.compilation import CompileOptions
from shardtrain.errors.messages import refuse
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.plan.batch_size import GOALS
from shardtrain.report.step_trace import is_trace
from shardtrain.system.untrusted_files import read_bytes
from shardtrain.trainer.strategy import read_strategy


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CompileOptions):
    """Options of plan; --cluster or --devices and --device describe the machine.

    Args:
      devices: number of devices.
      device: name of the devices in the table of known devices, such as "NVIDIA A100-SXM4-80GB". Other
        devices, and measured rates, are given in a cluster file.
      batch: number of examples in a step; or "max", the largest that fits with the run's microbatches, or
        "fastest", the smallest whose examples per second are within 3 % of the most. By default, the run's.
      per_node: number of devices of a node. By default, all devices are on one node.
      link: gigabytes per second that a device sends to others of its node. By default, sending takes no time.
      node_link: gigabytes per second that a node sends to others; needed if there are more devices than
        --per-node.
      fixed: axis sizes that are not searched, such as tensor=8. The axis context is searched for sequences
        of 8,192 positions or more, or if it is named, as in context=-1; expert is searched for models with
        experts.
      most: number of layouts to show.
      advise: show the time of the best layout on more devices and on faster links, and the memory and
        time of each remat policy.
      explain: show every term of the best way's prediction with its formula.
      compile: compile the step of the best way for these devices, and compare the compiler's memory, flops
        and bytes by mesh axes with the prediction: cpu (with --cpu-devices), or h100, a100, or a topology of
        TPUs such as v5e:4x4, which this machine need not have.
      frontier: draw memory against step time of all layouts to this .png or .svg file, and mark the layouts
        that no other beats in both. Each kind of islands has a file.
      output: write the best way as a strategy file, for shardtrain train RUN --strategy FILE; for several
        islands also a cluster file beside it (strategy_cluster.toml) with those that are used.
      operators: search a sharding for each operator separately; the best is a row of the table of layouts.
      trace: write the tasks of a step of the best layout, or of --strategy, as a trace that ui.perfetto.dev
        shows, with a row for each device and link.
    """

    devices: int | None = None
    device: str | None = None
    batch: int | str | None = None
    per_node: int | None = None
    link: float | None = None
    node_link: float | None = None
    fixed: str = ""
    most: int = 10
    advise: bool = False
    explain: bool = False
    compile: str | None = None
    frontier: Path | None = None
    output: Path | None = None
    operators: bool = False
    trace: Path | None = None

    def cluster(self, given: Cluster | None) -> Cluster:
        """Return the given cluster, or else the cluster that these options describe.

        Raises:
          ValueError: both or neither describe the machine, or a number is out of range.
        """
        names = ("devices", "device", "per_node", "link", "node_link")
        here = [name for name in names if getattr(self, name)]
        problems = list_too_small({"most": self.most, "devices": self.devices})
        if isinstance(self.batch, str) and self.batch not in GOALS:
            problems.append(f"--batch is {self.batch!r}; use {', '.join(GOALS)} or a number")
        if self.operators and given is not None and len(given.of_islands) > 1:
            problems.append(
                f"--operators is for devices of one island, and the cluster has {len(given.of_islands)}; give"
                " a file with one of them"
            )
        if given is not None and here:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in here)
            problems.append(f"{options} and --cluster are given; change the cluster file, or leave it out")
        if given is None and (self.devices is None or self.device is None):
            problems.append(
                "nothing describes the machine; give --cluster FILE, or --devices 64 --device"
                ' "NVIDIA A100-SXM4-80GB"'
            )
        refuse("this cannot be planned", problems)
        if given is not None:
            return given
        device = ClusterDevice(
            name=self.device,
            per_node=self.per_node,
            link_gb_per_second=self.link,
            node_link_gb_per_second=self.node_link,
        )
        return Cluster(islands=(IslandKind(kind="devices", devices=self.devices, device=device),))


CLUSTER_HEADER = "# the islands that shardtrain plan uses, for launch --cluster\n"


def cluster_path(output: Path) -> Path:
    """Return the path of the cluster file that is written beside a strategy file.

    >>> cluster_path(Path("runs/strategy.toml")).as_posix()
    'runs/strategy_cluster.toml'
    """
    return output.with_stem(f"{output.stem}_cluster")


def check_output(path: Path, *, several: bool) -> None:
    """Refuse to replace a file that is not a strategy file, or a cluster file that no plan wrote.

    Args:
      path: path of the strategy file.
      several: whether there are several islands, so that a cluster file is written too.

    Raises:
      ValueError: such a file exists, or the folder does not exist.
    """
    _check_folder("output", path)
    if path.exists():
        try:
            read_strategy(path)
        except ValueError as error:
            raise ValueError(
                f"--output is {path}, which exists and is not a strategy file; give another name"
            ) from error
    cluster = cluster_path(path)
    header = CLUSTER_HEADER.encode()
    is_own = not cluster.exists() or (cluster.is_file() and read_bytes(cluster).startswith(header))
    if several and not is_own:
        raise ValueError(
            f"--output is {path}, beside which {cluster} would be written, and that exists and is not from"
            " shardtrain plan; give another name"
        )


def check_trace(path: Path) -> None:
    """Refuse to replace a file that is not a trace.

    Raises:
      ValueError: the file exists and is not a trace, or its folder does not exist.
    """
    _check_folder("trace", path)
    if path.exists() and not (path.is_file() and is_trace(path)):
        raise ValueError(f"--trace is {path}, which exists and is not a trace; give another name")


def _check_folder(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"--{option} is {path}, and there is no folder {path.parent}; make it first")
