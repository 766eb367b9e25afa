"""The interface of launchers: a pure function from a job to commands, environment and files.

Each launcher is a file of this package with a `LAUNCHER`; `registry.py` lists them.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain.islands.cluster import Cluster
from shardtrain.launch.hosts import Host
from shardtrain.launch.job import Job
from shardtrain.launch.restarts import Restarts


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The command that starts a job, with its environment and files.

    Args:
      lines: the words of the command, grouped into lines for readers.
      environment: variables of the command, in addition to the environment of this process.
      unset: variables of this process that the command must not see.
      files: path -> text, to be written before the command runs. The first file of a batch system is the
        script, which is the last word of the command.
      log: the file with the output of a batch job, for the user; "" if this process shows the output.
      folder: the folder in which the command runs; None means that of this process.
    """

    lines: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    log: str = ""
    folder: Path | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command."""
        return tuple(word for line in self.lines for word in line)

    def full_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment of the command.

        Args:
          environ: the environment variables of this process.
        """
        return {name: value for name, value in environ.items() if name not in self.unset} | dict(
            self.environment
        )


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A way to start a job from the command line.

    Args:
      summary: one line of help.
      options: dataclass of its options; its docstring is their help.
      launch: (job, options, environment of this process) -> Launch. It starts and writes nothing.
      hosts: options -> the hosts that they name; () if the batch system chooses them.
      restarts: options -> the restarts of a run that fails. None means that `launch` submits to a batch
        system, which keeps the job; otherwise this process waits for the ranks.
      with_cluster: (options, cluster) -> options with the nodes of its islands. None means that the launcher
        uses only the numbers of their processes.
      elastic: (job, options, environment of this process) -> the commands of its elastic islands, or of a
        batch system the one that submits them. None means that it starts no elastic islands.
    """

    summary: str
    options: type
    launch: Callable[[Job, Any, Mapping[str, str]], Launch]
    hosts: Callable[[Any], tuple[Host, ...]] = lambda options: ()
    restarts: Callable[[Any], Restarts] | None = None
    with_cluster: Callable[[Any, Cluster], Any] | None = None
    elastic: Callable[[Job, Any, Mapping[str, str]], tuple[Launch, ...]] | None = None


def shell_text(launch: Launch) -> str:
    """Return a launch as text that can be pasted into a shell.

    >>> print(shell_text(Launch(lines=(("mpiexec", "-n", "2"), ("python", "a b.py")))), end="")
    mpiexec -n 2 \\
      python 'a b.py'
    """
    text = ""
    for path, content in launch.files.items():
        folder = shlex.quote(str(path.parent))
        text += f"mkdir -p {folder} && cat > {shlex.quote(str(path))} <<'END'\n{content}END\n"
    text += f"cd {shlex.quote(str(launch.folder))} && \\\n  " if launch.folder else ""
    lines = [shlex.join(line) for line in launch.lines]
    unset = [word for name in launch.unset for word in ("-u", name)]
    changed = [*unset, *(f"{name}={value}" for name, value in launch.environment.items())]
    if changed:
        lines.insert(0, shlex.join(["env", *changed]))
    return text + " \\\n  ".join(lines) + "\n"
