"""Signals that ask to stop: recorded once something can be saved, and obeyed at once before that."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardtrain.system import stop_signals
from shardtrain.system.stop_signals import STOPPING, StopSignals, select_handled


@pytest.fixture
def ended():
    """What would have ended the process: the signal, and the name of the thread that came first."""
    return []


@pytest.fixture
def stop(ended):
    def end(number):
        ended.append((number, threading.current_thread().name))

    with StopSignals(end) as stop:
        yield stop


def send(number):
    os.kill(os.getpid(), number)


def test_once_a_step_is_done_it_is_asked_and_ended_by_a_second_ctrl_c(stop, ended, capfd):
    stop.can_save = True
    send(signal.SIGTERM)
    assert (stop.asked(), ended) == (signal.SIGTERM, [])
    assert "SIGTERM: stopping after this step" in capfd.readouterr().err
    send(signal.SIGINT)
    assert [each for each, _ in ended] == [signal.SIGINT]


@pytest.mark.parametrize(("can_save", "signals"), [(False, 1), (True, 2)])
def test_while_the_main_thread_is_in_a_library_another_ends_the_process(can_save, signals, monkeypatch):
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0)
    read, write = os.pipe()
    ended, is_over = [], threading.Event()

    def end(number):
        ended.append((number, threading.current_thread().name))
        is_over.set()
        os.write(write, b".")

    def press():
        # until the main thread is in the library
        while f" {read:#x} " not in Path(f"/proc/self/task/{os.getpid()}/syscall").read_text():
            time.sleep(0.01)
        for _ in range(signals):
            # received by this thread: that of the library is not interrupted
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not is_over.wait(60):
            os.write(write, b".")

    with StopSignals(end) as stop:
        stop.can_save = can_save
        thread = threading.Thread(target=press)
        thread.start()
        # C, where no handler of Python's runs
        ctypes.CDLL(None).read(read, ctypes.create_string_buffer(1), 1)
        thread.join()
    os.close(read)
    os.close(write)
    assert ended == [(signal.SIGINT, "stop signals")]


def test_a_ctrl_c_that_arrives_twice_is_one(stop, ended, monkeypatch):
    """As below `uv run`, when a program interrupts the process group: uv passes on what the run has too."""
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 60)
    stop.can_save = True
    send(signal.SIGINT)
    send(signal.SIGINT)
    assert (stop.asked(), ended) == (signal.SIGINT, [])
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0)
    send(signal.SIGINT)
    assert [each for each, _ in ended] == [signal.SIGINT]


def test_in_a_program_of_ones_own_the_second_ctrl_c_is_pythons(monkeypatch):
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0)
    with StopSignals() as stop:
        send(signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_to_a_forked_worker_is_its_own():
    program = """
import os, signal, sys, time
from shardtrain.system.stop_signals import StopSignals
read, write = os.pipe()
with StopSignals(lambda number: os._exit(99)) as stop:
    worker = os.fork()
    if not worker:
        os.write(write, b".")
        time.sleep(60)
    os.read(read, 1)
    os.kill(worker, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    time.sleep(0.2)
    sys.exit(code != -signal.SIGTERM)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=False).returncode == 0


def test_after_nohup_the_end_of_the_terminal_is_no_signal():
    assert select_handled(STOPPING) == list(STOPPING)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in select_handled(STOPPING)
        with StopSignals() as stop:
            send(signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
