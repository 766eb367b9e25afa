"""`python -m shardtrain` is the command `shardtrain`."""

import sys

from shardtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
