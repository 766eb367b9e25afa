"""The events of waves on the disk: one history, whatever was interrupted."""

import pytest

from shardtrain.islands.parameter_shard import Event
from shardtrain.trainer.waves import WaveLog, read_wave_log, wave_file


def test_what_came_after_a_checkpoint_is_dropped_where_a_run_goes_on_from_it(tmp_path):
    log = WaveLog(tmp_path, 1, print)
    log.begin(0)
    events = [Event("push", 0, 2), Event("pull", 0, 2), Event("push", 0, 4), Event("push", 1, 2)]
    for event in events:
        log.write(event)
    log.close()
    # killed while it wrote a line
    with wave_file(tmp_path, 1).open("a") as file:
        file.write('{"step": 4, "pu')
    again = WaveLog(tmp_path, 1, print)
    again.begin(2)
    again.write(Event("push", 1, 4))
    again.close()
    assert read_wave_log(tmp_path, 1, 2) == [*events[:2], events[3], Event("push", 1, 4)]
    with pytest.raises(ValueError, match=r"a run of 2 virtual workers .* or more, and this one has 1"):
        read_wave_log(tmp_path, 1, 1)
    again.begin(0)
    again.close()
    assert read_wave_log(tmp_path, 1, 2) == []


@pytest.mark.parametrize(
    "line", ['{"step": 2}', '{"step": 2, "push": -1}', '{"step": 2, "pull": NaN}', '{"step": 0, "push": 1}']
)
def test_lines_that_are_no_events_are_refused(line, tmp_path):
    path = wave_file(tmp_path, 0)
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match="which is no event of a wave"):
        read_wave_log(tmp_path, 0, 2)


def test_a_replay_of_another_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"shard-1\.jsonl is not there; give the folder of a run in waves"):
        read_wave_log(tmp_path, 1, 2)
