"""Tests that fail in a run of several processes are run once more alone; those that then pass are flaky."""

import subprocess
import sys

import pytest

MOST = 10
"""Failures that are retried; where there are more, load is not the cause."""


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RetryAlone(config))


class RetryAlone:
    """What the process that hands out tests does: all failures come here, also crashes of the others."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.failed: dict[str, list[pytest.TestReport]] = {}
        self.flaky: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)  # the other processes have ended
    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus != pytest.ExitCode.TESTS_FAILED or session.shouldfail or session.shouldstop:
            return
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        assert terminal is not None
        terminal.ensure_newline()
        if len(self.failed) > MOST:
            terminal.write_line(f"{len(self.failed)} tests failed, more than {MOST}: none is run again")
            return
        full = ["--full"] if self.config.getoption("full", False) else []
        command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *full]
        for name in self.failed:
            terminal.write_line(f"runs once more alone: {name}")
            again = subprocess.run(
                [*command, name], cwd=self.config.rootpath, stdout=subprocess.DEVNULL, check=False
            )
            if again.returncode == 0:
                self.flaky.append(name)
        # what stays counted as failed: these tests failed twice, or could not be collected
        for outcome in ("failed", "error"):
            reports = terminal.stats.pop(outcome, [])
            if kept := [report for report in reports if report.nodeid not in self.flaky]:
                terminal.stats[outcome] = kept
        if self.flaky:
            terminal.stats["flaky"] = [self.failed[name][0] for name in self.flaky]
        if not terminal.stats.keys() & {"failed", "error"}:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter):
        if self.flaky:
            terminalreporter.section("failed beside other tests, passed alone")
        for name in self.flaky:
            for report in self.failed[name]:
                terminalreporter.write_line(report.longreprtext)
            terminalreporter.write_line(f"flaky: {name}")
