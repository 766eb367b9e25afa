"""The GPUs of this host, and those visible to this process: from device files and nvidia-smi.

It does not import jax: `devices.py` compares these facts with the devices that jax sees.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from shardtrain.doctor.check import Facts
from shardtrain.islands.launcher_variables import NODE_GPUS, STEP_GPUS
from shardtrain.system.host import driver
from shardtrain.system.untrusted_data import parse_count

QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
SMI_SECONDS = 20.0


def visible_gpu_facts(environ: Mapping[str, str]) -> Facts:
    """Collect the GPUs that this process may use.

    Returns:
      `nodes`: number of GPUs whose device file can be opened; `closed`: of those that cannot; `gpus`: as
      nvidia-smi lists them; `visible`: by `CUDA_VISIBLE_DEVICES`, None where it is not set; `slurm`: how
      many Slurm gave, None likewise; `driver`; `plugin`: the CUDA plugin of jax and its version;
      `smi_error`.
    """
    files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    openable = [path for path in files if os.access(path, os.R_OK | os.W_OK)]
    gpus, error = _nvidia_smi() if files else ([], None)
    return {
        "nodes": len(openable),
        "closed": len(files) - len(openable),
        "gpus": gpus,
        "smi_error": error,
        "visible": visible(environ),
        "slurm": slurm_gpus(environ),
        "driver": driver(),
        "plugin": plugin(),
        "cpu_wanted": environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu",
    }


def gpus_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether there is a GPU, and jax is not set to use the CPU."""
    has_gpu = num_device_files() > 0 and visible(environ) != []
    return has_gpu and environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu"


def num_device_files() -> int:
    """Return the number of GPUs with a device file."""
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of `CUDA_VISIBLE_DEVICES`; CUDA ignores all entries after an invalid one.

    >>> visible({"CUDA_VISIBLE_DEVICES": "0,2"}), visible({"CUDA_VISIBLE_DEVICES": ""}), visible({})
    (['0', '2'], [], None)
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    end = next((i for i, word in enumerate(words) if word in ("", "-1", "NoDevFiles")), len(words))
    return words[:end]


def slurm_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that Slurm allocated on this host; None: not known.

    >>> slurm_gpus({"SLURM_STEP_GPUS": "0,1"}), slurm_gpus({"SLURM_GPUS_ON_NODE": "4"}), slurm_gpus({})
    (2, 4, None)
    """
    if step := environ.get(STEP_GPUS):
        return len(step.split(","))
    match = re.search(r"(\d+)$", environ.get(NODE_GPUS, ""))
    return parse_count(match[1]) if match else None


def read_gpus(text: str) -> list[Facts]:
    """Parse the CSV output of nvidia-smi.

    >>> read_gpus("0, GPU-1, NVIDIA L4, 23034, 5, 550.54\\n")[0]["used_bytes"]
    5242880
    """
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY):
            index, uuid, name, total, used, _ = cells
            sizes = {"memory_bytes": _mebibytes(total), "used_bytes": _mebibytes(used)}
            gpus.append({"index": index, "uuid": uuid, "name": name, **sizes})
    return gpus


def _mebibytes(cell: str) -> int:
    return (parse_count(cell) or 0) * 2**20


def _nvidia_smi() -> tuple[list[Facts], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "there is no nvidia-smi"
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not end within {SMI_SECONDS:.0f} s"
    if done.returncode:
        return [], (done.stdout + done.stderr).strip().splitlines()[-1][:200]
    return read_gpus(done.stdout), None


def plugin() -> str | None:
    """Return the installed CUDA plugin of jax and its version; None for none."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def uuids(facts: Mapping, names: Sequence[str] | None) -> list[str]:
    """Return the UUIDs of the GPUs in `CUDA_VISIBLE_DEVICES`, which are the same in every container."""
    gpus = facts["gpus"]
    if names is None:
        return [gpu["uuid"] for gpu in gpus]
    by_word = {gpu["index"]: gpu["uuid"] for gpu in gpus}
    listed = [
        by_word.get(word) or next((g["uuid"] for g in gpus if g["uuid"].startswith(word)), "")
        for word in names
    ]
    return [uuid for uuid in listed if uuid]
