"""Pipeline parallelism: schedules as tables of tasks, partitions, programs. Start with `table.py`."""
