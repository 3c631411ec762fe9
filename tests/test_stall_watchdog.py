"""A host stuck behind a stuck GPU is reported; a host or GPU that makes progress is not."""

import threading

from postlude.world.failure_report import StallWatchdog


def test_host_stuck_behind_a_stuck_gpu_is_reported() -> None:
    noticed = threading.Event()
    watch = StallWatchdog(0.2, lambda seconds: True, noticed.set)
    assert noticed.wait(60)  # this thread stands here
    watch.close()


def test_host_that_waits_for_something_else_is_not_reported() -> None:
    reports, noticed, enough = [], threading.Event(), threading.Event()

    def is_stuck(seconds: float) -> bool:
        reports.append(seconds)
        if len(reports) == 3:
            enough.set()
        return False

    watch = StallWatchdog(0.2, is_stuck, noticed.set)
    assert enough.wait(60)
    watch.close()
    assert not noticed.is_set()


def test_host_that_makes_progress_is_not_checked() -> None:
    times: list[float] = []
    looked, over = threading.Event(), threading.Event()

    def move() -> None:
        watch = StallWatchdog(3600.0, lambda seconds: bool(times.append(seconds)), looked.set)
        looked.set()
        over.wait(60)
        watch.close()

    thread = threading.Thread(target=move)
    thread.start()
    assert looked.wait(60)
    over.set()
    thread.join(60)
    assert not times
