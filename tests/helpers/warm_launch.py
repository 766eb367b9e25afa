"""`shardtrain`, whose launched ranks are forked from a process that has imported everything.

Arguments: the socket of `warm_python.py`, and then those of `shardtrain`.
"""

import sys
from pathlib import Path
from typing import Any

from shardtrain import cli
from shardtrain.launch.job import Job

if __name__ == "__main__":
    program = str(Path(__file__).with_name("warm_python.py"))
    warm_python = (sys.executable, "-S", "-I", program, sys.argv.pop(1))
    init: Any = Job.__init__
    init.__kwdefaults__["program"] = (*warm_python, "-m", "shardtrain")
    sys.exit(cli.main(sys.argv[1:]))
