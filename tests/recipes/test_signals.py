"""StopSignals: the first signal is recorded, one right after it counts as the same, a later one ends the process."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from postlude.recipes.report.finish import finish_run
from postlude.recipes.report.live import LiveView
from postlude.recipes.run import signals
from postlude.recipes.run.outcome import RunOutcome, read_outcome
from postlude.recipes.run.signals import STOP_SIGNALS, StopSignals
from postlude.world.signals import SignalForwarding


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Restores handlers: background shells ignore SIGINT, and nohup ignores SIGHUP."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_two_signals_in_quick_succession_count_as_one(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS]
    with StopSignals(verbose=True) as heard:
        assert heard.received == 0
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert heard.received == number
    assert [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS] == before
    expected = f"{number.name}: the run ends after this step; another ends it at once."
    assert capfd.readouterr().err.strip() == expected


def test_notice_is_in_the_live_panel_and_else_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with StopSignals(verbose=True) as heard, LiveView(3, console=console, silent=False) as view:
        heard.show_notice = view.show_notice
        signal.raise_signal(signal.SIGINT)
    last_panel = output.getvalue().rpartition("╭")[2]
    assert "SIGINT: the run ends after this step" in last_panel
    assert capfd.readouterr().err == ""
    with StopSignals(verbose=True) as heard, LiveView(3, console=Console(file=io.StringIO()), silent=False) as view:
        heard.show_notice = view.show_notice
        signal.raise_signal(signal.SIGINT)
    assert "SIGINT: the run ends after this step" in capfd.readouterr().err


def test_sighup_stops_the_run_even_if_output_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hung_up(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", hung_up)
    with StopSignals(verbose=True) as heard:
        signal.raise_signal(signal.SIGHUP)
        assert heard.received == signal.SIGHUP
        console = Console(file=io.StringIO())
        monkeypatch.setattr(console, "print", hung_up)
        with LiveView(3, console=console, silent=False) as view:
            view.update(1, {"loss": 1.0})
            view.update(2, {"loss": 1.0})
    monkeypatch.setattr(Console, "print", hung_up)
    finish_run(tmp_path, RunOutcome("interrupted", 2, "SIGHUP ended the run", 129))
    assert read_outcome(tmp_path) == RunOutcome("interrupted", 2, "SIGHUP ended the run", 129)


WITHOUT_READER = """
import sys
from postlude.recipes.report.live import LiveView
with LiveView(2, silent=False) as view:
    for step in (1, 2):
        view.update(step, {"loss": 1.0})
print("went on", file=sys.stderr)
"""


def test_closed_output_pipe_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_READER], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "went on\n")


def test_signals_ignored_by_nohup_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(verbose=False) as heard:
            signal.raise_signal(signal.SIGHUP)
            assert heard.received == 0
        with SignalForwarding(0.0) as forwarding:
            signal.raise_signal(signal.SIGHUP)
        assert not forwarding.received
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_slurms_warning_ends_a_run_as_other_signals_do() -> None:
    with StopSignals(verbose=False) as heard:
        signal.raise_signal(signal.SIGUSR1)
    assert heard.received == signal.SIGUSR1
    with SignalForwarding(0.0) as forwarding:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not forwarding.received:
            time.sleep(0.01)
    assert forwarding.received == [signal.SIGUSR1]


def test_second_signal_has_its_default_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "DUPLICATE_SECONDS", -1.0)
    with StopSignals(verbose=False) as heard:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert heard.received == signal.SIGTERM


def test_rank_without_its_launcher_ends_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with StopSignals(verbose=False) as heard:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert heard.received == 0
    monkeypatch.delenv("RANK")
    with StopSignals(verbose=False) as heard:
        monkeypatch.setattr(os, "getppid", lambda: 2)
        signal.raise_signal(signal.SIGINT)  # of a shell that has ended since, a run knows nothing
        assert heard.received == signal.SIGINT


def test_signals_are_unchanged_in_another_thread() -> None:
    before = [signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS]
    handlers = []

    def enter() -> None:
        with StopSignals(verbose=False):
            handlers.extend(signal.getsignal(stop_signal) for stop_signal in STOP_SIGNALS)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert handlers == before
