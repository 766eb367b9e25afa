"""`shardtrain train RUN`: train a run, or go on with it."""

from collections.abc import Sequence

from shardtrain.cli.run_options import parse_run


def main(arguments: Sequence[str]) -> int:
    """Train; returns 0, or 128 + the number of the signal that stopped it."""
    run, _ = parse_run("train", arguments)
    from shardtrain.trainer import train  # jax starts here, after the options were read

    trained = train(run)
    return 0 if trained.stopped_by is None else 128 + trained.stopped_by
