"""RunStatus: the state of a run, read from its directory alone: on any machine, while it runs and after it ended.

`postlude status` prints it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from postlude.recipes.report.formatting import format_duration, format_number
from postlude.recipes.report.metrics import labelled_values
from postlude.recipes.run.files import CONFIG, METRICS, JSONLinesFile, read_record
from postlude.recipes.run.outcome import read_outcome
from postlude.recipes.run.progress import STEP
from postlude.recipes.run.status import WRITTEN, is_alive, status_path

MISSED = 6  # heartbeats after which a rank is taken for lost
STALLED_SECONDS, STALLED_TIMES = 60.0, 10  # an activity stalls after both: seconds, and times its longest so far
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
KILLED, UNRESPONSIVE, STALLED, UNKNOWN = "killed", "unresponsive", "stalled", "unknown"
WELL = (RUNNING, FINISHED, INTERRUPTED)
SHOWN_RANKS = 8  # places of ranks that are printed


@dataclass(frozen=True)
class RankPlace:
    """Where a rank was when it last wrote its file."""

    rank: int
    host: str
    pid: int
    step: int
    """Finished steps."""
    place: str
    """What it does: "train", "evaluation", …"""
    seconds: float
    """How long it has done so."""
    heartbeat_seconds: float
    """Seconds since it wrote its file."""
    alive: bool | None
    """Whether its process runs; None if that is not known, such as of another machine."""
    lost: bool
    """Whether it has ended, or written nothing for too long."""


@dataclass(frozen=True)
class RunStatus:
    """The state of a run."""

    run: str
    state: str
    """"running", "stalled", "unresponsive", "killed", "finished", "interrupted", "failed" or "unknown"."""
    explanation: str
    """What the state says, or why the run ended; empty if it runs."""
    title: str = ""
    unit: str = STEP
    step: int = 0
    """Finished steps."""
    total: int = 0
    phase: str = ""
    place: str = ""
    """What rank 0 does."""
    place_seconds: float = 0.0
    activity: str = ""
    activity_seconds: float = 0.0
    """How long the current step, evaluation or checkpoint has taken."""
    elapsed_seconds: float = 0.0
    """Seconds since the process started, or until it ended."""
    remaining_seconds: float | None = None
    metrics: Mapping[str, float] | None = None
    """The numbers of the last logged step."""
    warnings: int = 0
    """Warnings since the process started."""
    last_warning: str = ""
    last_warning_seconds: float | None = None
    """How long ago it came."""
    ranks: Sequence[RankPlace] = ()
    resume_command: str = ""

    @property
    def well(self) -> bool:
        """Whether nobody has to look at it: it runs, or has ended as it was asked to."""
        return self.state in WELL

    def as_json(self) -> str:
        values = asdict(self)
        values["metrics"] = {name: value for name, value in (self.metrics or {}).items() if math.isfinite(value)}
        return json.dumps(values, ensure_ascii=False, indent=2)


def read_status(run: Path, now: float | None = None) -> RunStatus:
    """Returns the state of the run in a directory. Raises FileNotFoundError if there is none."""
    now = time.time() if now is None else now
    if not (run / CONFIG).is_file():
        raise FileNotFoundError(
            f"{run} has no {CONFIG}, so it is not the directory of a run, or of one that still loads its model. Give "
            "the directory that the run was given (--run)."
        )
    line = JSONLinesFile(run / METRICS).read_last()
    metrics = {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    command = (read_record(run).get("starts") or [{}])[-1].get("command", "")
    common: dict[str, Any] = {"run": str(run), "metrics": metrics, "resume_command": command}
    entries = _read_entries(run)
    if not entries:
        return _without_files(run, int(line.get("step", 0)), common)
    first = entries[0]
    known = {entry["rank"]: _place(entry, now) for entry in entries}
    ranks = [known.get(rank) or _unknown_place(rank, first, now) for rank in range(first["ranks"])]
    state, explanation = _state(first, ranks, now)
    end = first["heartbeat"] if ranks[0].lost or first["ended"] else now
    return RunStatus(
        **common,
        state=state,
        explanation=explanation,
        **{name: first[name] for name in ("title", "unit", "step", "total", "phase", "activity", "warnings")},
        place=ranks[0].place,
        place_seconds=end - first["part_began"],
        activity_seconds=end - first["activity_began"],
        elapsed_seconds=end - first["began"],
        remaining_seconds=first["remaining_seconds"],
        last_warning=first["last_warning"],
        last_warning_seconds=now - first["last_warning_time"] if first["last_warning"] else None,
        ranks=ranks,
    )


def _without_files(run: Path, step: int, common: Mapping[str, Any]) -> RunStatus:
    outcome = read_outcome(run)
    if outcome is None:
        why = f"{status_path(run, 0)} is missing, or of another version of Postlude than this one."
        return RunStatus(**common, state=UNKNOWN, explanation=why, step=step)
    return RunStatus(**common, state=outcome.status, explanation=outcome.message, step=outcome.step)


def _read_entries(run: Path) -> list[dict[str, Any]]:
    """Returns the files of the ranks, rank 0 first; without a readable one of rank 0, none."""
    first = _read_entry(run, 0)
    if first is None:
        return []
    others = (_read_entry(run, rank) for rank in range(1, first["ranks"]))
    return [first, *(entry for entry in others if entry is not None)]


def _read_entry(run: Path, rank: int) -> dict[str, Any] | None:
    try:
        entry = json.loads(status_path(run, rank).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a loss of power may leave it empty
        return None
    return entry if isinstance(entry, dict) and entry.keys() >= WRITTEN else None  # else another version wrote it


def _place(entry: Mapping[str, Any], now: float) -> RankPlace:
    part = entry["part"] if entry["in_part"] or not entry["part"] else f"after {entry['part']}"
    place = part or entry["activity"] or "between steps"
    silent = now - entry["heartbeat"]
    alive = None if entry["ended"] else is_alive(entry)
    lost = not entry["ended"] and (alive is False or silent > MISSED * entry["every"])
    seconds = (entry["heartbeat"] if lost or entry["ended"] else now) - entry["part_began"]
    return RankPlace(entry["rank"], entry["host"], entry["pid"], entry["step"], place, seconds, silent, alive, lost)


def _unknown_place(rank: int, first: Mapping[str, Any], now: float) -> RankPlace:
    silent = now - first["began"]
    lost = not first["ended"] and silent > MISSED * first["every"]
    return RankPlace(rank, "an unknown host", 0, 0, "an unknown place", silent, silent, None, lost)


def _state(first: Mapping[str, Any], ranks: Sequence[RankPlace], now: float) -> tuple[str, str]:
    if first["ended"]:
        return first["outcome"] or FAILED, first["error"]
    silent = f"it wrote its last heartbeat {format_duration(max(ranks[0].heartbeat_seconds, 0.0))} ago"
    process = f"process {first['pid']} on {first['host']}"
    if ranks[0].alive is False:
        return (
            KILLED,
            f"{process} ended without a word: it was killed, or its disk was full. {silent[0].upper()}{silent[1:]}.",
        )
    if ranks[0].lost:
        runs = "runs, but" if ranks[0].alive else "is not of this machine, and"
        why = "is stopped, or cannot write" if ranks[0].alive else "was killed, lost its machine, or cannot write"
        return UNRESPONSIVE, f"{process} {runs} {silent}: it {why} to the directory."
    lost = [rank for rank in ranks if rank.lost]
    if lost:
        which = ", ".join(f"{rank.rank} ({rank.host}, process {rank.pid})" for rank in lost[:SHOWN_RANKS])
        more = f" and {len(lost) - SHOWN_RANKS} more" if len(lost) > SHOWN_RANKS else ""
        silent = format_duration(lost[0].heartbeat_seconds)
        return UNRESPONSIVE, f"rank {which}{more} has given no sign of life for {silent}."
    activity, seconds = first["activity"], now - first["activity_began"]
    longest = first["longest"].get(activity)
    if longest is not None and seconds > max(STALLED_SECONDS, STALLED_TIMES * longest):
        name = activity if activity != STEP else first["unit"]
        return STALLED, (
            f"this {name} has taken {format_duration(seconds)}, and none before took more than "
            f"{format_duration(longest)}. Rank 0 is in {ranks[0].place}."
        )
    return RUNNING, ""


def status_lines(status: RunStatus) -> list[tuple[str, str]]:
    lines = [("run", f"{status.run} ({status.title})" if status.title else status.run), ("state", status.state)]
    if status.explanation:
        lines.append(("", status.explanation))
    done = f"{status.step:,} of {status.total:,}" if status.total else f"{status.step:,}"
    ended = status.state in (FINISHED, INTERRUPTED, FAILED, UNKNOWN)
    if not ended:
        parts = [status.phase, status.place if status.place != status.activity else ""]
        if status.activity:
            activity = status.activity if status.activity != STEP else status.unit
            parts.append(f"{format_duration(status.activity_seconds)} into this {activity}")
        done += f" · {', '.join(dict.fromkeys(part for part in parts if part))}"
    lines.append((status.unit, done))
    if status.total:
        left = status.remaining_seconds
        eta = f" · eta {format_duration(left)}" if left is not None and status.state == RUNNING and left else ""
        lines.append(("time", f"{format_duration(status.elapsed_seconds)}{eta}"))
    values = [f"{label} {format_number(value)}" for label, value in labelled_values(status.metrics or {})]
    if values:
        lines.append(("last step", "  ".join(values)))
    if status.warnings:
        assert status.last_warning_seconds is not None
        ago = format_duration(max(status.last_warning_seconds, 0.0))
        lines.append(("warnings", f"{status.warnings}, the last {ago} ago: {status.last_warning}"))
    if status.ranks:
        lines.append(("ranks", _ranks_line(status.ranks, ended)))
    if status.state in (INTERRUPTED, FAILED, KILLED, UNRESPONSIVE) and status.resume_command:
        lines.append(("resume", status.resume_command))
    return lines


def _ranks_line(ranks: Sequence[RankPlace], ended: bool) -> str:
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    on = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
    if ended:
        return f"{len(ranks)} on {on}"
    by_place: dict[str, list[int]] = {}
    for rank in ranks:
        by_place.setdefault("lost" if rank.lost else f"in {rank.place}", []).append(rank.rank)
    places = [f"{_numbers(numbers)} {place.replace('in after', 'after')}" for place, numbers in by_place.items()]
    return f"{len(ranks)} on {on}: {'; '.join(places[:SHOWN_RANKS])}"


def _numbers(numbers: Sequence[int]) -> str:
    """Returns numbers as "0, 2-7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
