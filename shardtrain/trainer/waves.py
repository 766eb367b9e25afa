"""The waves of islands: their end, as a run asks for it, and after which steps all islands meet.

Next: `train_step/wave_merge.py`, `train_step/meetings.py`.
"""

from shardtrain.islands.parameter_shard import ParameterShard
from shardtrain.pipeline.in_flight import waves_before_meeting
from shardtrain.train_step.meetings import Meetings
from shardtrain.train_step.wave_merge import VirtualWorker, WaveMerge
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import LONG_SECONDS, Coordination
from shardtrain.trainer.evaluation import evaluated_every
from shardtrain.trainer.row_shares import RowShares
from shardtrain.trainer.setup import RunSetup
from shardtrain.trainer.wave_log import WaveLog, read_wave_log


def make_meetings(run: Run) -> Meetings:
    """Say after which steps all islands meet."""
    synchronisation = run.strategy.synchronisation
    others = [each for each in (evaluated_every(run), run.recovery.fingerprint_every) if each is not None]
    if run.strategy.across.shares == "auto" and synchronisation.distance is not None:
        # speeds are exchanged at meetings: once in as many waves as an island may be ahead
        others.append(synchronisation.every * (synchronisation.distance + 1))
    return Meetings(synchronisation, run.steps, run.checkpoints.every_steps, others)


def make_waves(
    run: Run,
    setup: RunSetup,
    coordination: Coordination,
    shares: RowShares,
    meetings: Meetings,
    wave_log: WaveLog,
    worker: VirtualWorker | None = None,
) -> WaveMerge:
    """Make what ends the waves of an island; a collective call of all ranks.

    Args:
      run: the run.
      setup: the setup of this island.
      coordination: the exchange with the other islands.
      shares: the rows of each island.
      meetings: after which steps islands meet.
      wave_log: where the events of this island's shard are written.
      worker: the virtual worker of which this island is a stage; None: it is one itself.

    Raises:
      ValueError: an island has several processes; or the run to replay is not there.
    """
    synchronisation, islands, transfer = (
        run.strategy.synchronisation,
        coordination.islands,
        coordination.transfer,
    )
    assert islands is not None
    assert transfer is not None
    seat, control = islands.seat, islands.control
    if seat.num_islands < control.size:
        raise ValueError(
            f"waves (--clock-distance) need islands of one process each, and these {seat.num_islands} have"
            f" {control.size}: start one process for all devices of an island (--processes-per-island 1), or"
            " use --synchronisation local-sgd"
        )
    from shardtrain.islands.parameter_server import ParameterServer  # importing it starts MPI

    # islands that are stages push to those of the same stage
    stage, replica = (0, seat.island) if setup.seats is None else (setup.seats.stage, setup.seats.replica)
    comm = islands.comm.Split(stage, replica)
    ranks = comm.allgather(control.rank)
    order = [] if run.replay is None else read_wave_log(run.replay, seat.island, len(ranks))
    meetings.repeated = frozenset(event.step for event in order if event.kind == "meeting")
    ahead = waves_before_meeting(run.strategy.pipeline.in_flight, synchronisation.every)
    shard = ParameterShard(len(ranks), wave_log, order, wave_log.report, waves_ahead=ahead)
    names = [control.names[rank] for rank in ranks]
    server = ParameterServer(comm, shard, names, ranks, control.activity, patience_seconds=LONG_SECONDS)
    return WaveMerge(
        synchronisation,
        setup.placement,
        parameters=server,
        meetings=meetings,
        share=shares.own_share,
        transfer=transfer,
        all_gather=coordination.meet,
        end_work=coordination.timer.end,
        last_step=run.steps,
        worker=worker,
    )
