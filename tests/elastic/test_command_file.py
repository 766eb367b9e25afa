"""The command of an elastic run in its folder."""

import os

import pytest

from shardtrain.elastic.command_file import COMMAND, Command, read_command, write_command


def test_the_newest_one_is_read(tmp_path):
    write_command(tmp_path, ["gpt_text"])
    write_command(tmp_path, ["gpt_text", "--steps", "3"])
    assert read_command(tmp_path) == Command(arguments=("gpt_text", "--steps", "3"), folder=os.getcwd())


def test_other_content_is_refused(tmp_path):
    (tmp_path / COMMAND).write_text('{"arguments": ["a", 1], "folder": "/"}')
    with pytest.raises(ValueError, match=r"command.json.arguments\[1\] must be str, not 1"):
        read_command(tmp_path)
