"""Options of `shardtrain plan`, and checks of the files that it writes. Next: `plan.py`."""

from dataclasses import dataclass
from pathlib import Path

from shardtrain.cli.compilation import CompileOptions
from shardtrain.errors.messages import problems_error
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.report.step_trace import is_trace
from shardtrain.trainer.strategy import read_strategy


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CompileOptions):
    """Options of plan; what the machine is, is said by --cluster, or by these.

    Args:
      devices: number of devices.
      device: their name in the table of known devices, such as "NVIDIA A100-SXM4-80GB"; other devices, and
        measured rates, are given in a cluster file.
      per_node: number of devices of a node; by default all of them.
      link: gigabytes a second that a device sends to others of its node; by default at once.
      node_link: gigabytes a second that a node sends to others; by default at once.
      fixed: axis sizes that are not searched, such as tensor=8. The axis context is searched for sequences
        of 8,192 positions or more, or if it is named, as in context=-1; expert for models with experts.
      most: number of ways to show.
      advise: show how the best way scales with devices and links, and what each recomputation needs.
      explain: show every term of the best way, with its formula.
      compile: compile the step of the best way for these devices (cpu with --cpu-devices; h100, a100, or a
        topology of TPUs such as v5e:4x4, which this machine need not have), and show the compiler's memory,
        flops and bytes by mesh axes beside the prediction.
      frontier: draw memory against time of a step of all ways, and of those that no other beats in both, to
        this file, .png or .svg; of several kinds of islands a file each.
      layers: show how each layer is best split by the batch or by features, between unequal devices too,
        beside data parallelism, one weird trick, HyPar and Megatron's way, and which mesh runs that.
      output: write the best as a strategy file, for: shardtrain train RUN --strategy FILE.
      operators: search a sharding for each operator by itself, beside the best that rules give; an analysis,
        as a run shards dims by name.
      proposals: changes that --operators tries from each of its three starts.
      trace: write the tasks of a step, of the best way or of that of --strategy, as a trace that
        ui.perfetto.dev shows: a row for each device and link.
    """

    devices: int | None = None
    device: str | None = None
    per_node: int | None = None
    link: float | None = None
    node_link: float | None = None
    fixed: str = ""
    most: int = 10
    advise: bool = False
    explain: bool = False
    compile: str | None = None
    frontier: Path | None = None
    layers: bool = False
    output: Path | None = None
    operators: bool = False
    proposals: int = 1000
    trace: Path | None = None

    def cluster(self, given: Cluster | None) -> Cluster:
        """Return the cluster of these options, or the given one.

        Raises:
          ValueError: both or neither say what the machine is, or a number is out of range.
        """
        here = [
            name for name in ("devices", "device", "per_node", "link", "node_link") if getattr(self, name)
        ]
        problems = [] if self.most >= 1 else [f"--most is {self.most}; use 1 or more"]
        if self.proposals < 0:
            problems.append(f"--proposals is {self.proposals}; use 0 or more")
        if self.operators and given is not None and len(given.of_islands) > 1:
            problems.append(
                f"--operators is for devices of one island, and the cluster has {len(given.of_islands)}; give"
                " a file with one of them"
            )
        if given is not None and here:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in here)
            problems.append(f"{options} beside --cluster; change the cluster file, or leave it out")
        if given is None and (self.devices is None or self.device is None):
            problems.append(
                "nothing says what the machine is; give --cluster FILE, or --devices 64 --device"
                ' "NVIDIA A100-SXM4-80GB"'
            )
        if self.devices is not None and self.devices < 1:
            problems.append(f"--devices is {self.devices}; use 1 or more")
        if problems:
            raise problems_error("this cannot be planned", problems)
        if given is not None:
            return given
        device = ClusterDevice(
            name=self.device,
            per_node=self.per_node,
            link_gb_per_second=self.link,
            node_link_gb_per_second=self.node_link,
        )
        return Cluster(islands=(IslandKind(kind="devices", devices=self.devices, device=device),))


def check_output(path: Path) -> None:
    """Refuse to replace a file that is no strategy, before the work begins.

    Raises:
      ValueError: it is there and is no strategy file, or its folder is not there.
    """
    _check_folder("output", path)
    if path.exists():
        try:
            read_strategy(path)
        except ValueError as error:
            raise ValueError(
                f"--output is {path}, which is there and is no strategy file; give another name"
            ) from error


def check_trace(path: Path) -> None:
    """Refuse to replace a file that is no trace, before the work begins.

    Raises:
      ValueError: it is there and is no trace, or its folder is not there.
    """
    _check_folder("trace", path)
    if path.exists() and not (path.is_file() and is_trace(path)):
        raise ValueError(f"--trace is {path}, which is there and is no trace; give another name")


def _check_folder(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"--{option} is {path}, and there is no folder {path.parent}; make it first")
