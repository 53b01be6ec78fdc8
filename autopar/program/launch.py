"""Starts a program's ranks on this machine, as `torchrun --standalone` would.

    status = run_ranks(4, ["-m", "autopar", "run", "out/"])

Ranks find each other by the environment that torchrun sets (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, …). torchrun itself
answers every failure with status 1 and a page of traceback; here the failing rank's status and message come through.

Invariants:
- each rank has one thread, unless the caller's environment says otherwise;
- rank 0's output is ours; of the others only the stderr of the one that failed is shown;
- when a rank fails, or this process is interrupted or out of time, no rank is left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.05
GRACE_S = 2.0
"""How long the other ranks may take to end by themselves after a failure, and after being asked to stop."""
TIMED_OUT = 124
STDERR_LINES = 40


def run_ranks(
    num_ranks: int,
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> int:
    """Runs `python COMMAND` (a script or `-m module`, with arguments) on `num_ranks` ranks; returns the exit status.

    That is 0, the status of the rank that failed (1 where a signal ended it), or 124 after `timeout_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            shared = _environment(num_ranks, env)
            ranks += [_start(rank, command, shared, Path(folder)) for rank in range(num_ranks)]
            status = _watch(ranks, timeout_s)
            failed = next((i for i, rank in enumerate(ranks) if _status(rank) == status), 0) if status > 0 else 0
        finally:
            _stop(ranks)
        if failed > 0:
            _show(failed, Path(folder))
        return status


def _environment(num_ranks: int, env: Mapping[str, str] | None) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **(env or {}),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(rank: int, command: Sequence[str], shared: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    arguments = [sys.executable, *command]
    if rank == 0:
        return subprocess.Popen(arguments, env=env)
    with (folder / str(rank)).open("wb") as errors:
        return subprocess.Popen(arguments, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float | None) -> int:
    """Waits until all ranks have ended well, or one hasn't."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        statuses = [_status(rank) for rank in ranks]
        if any(statuses):
            return _verdict(ranks)
        if None not in statuses:
            return 0
        if deadline is not None and time.monotonic() > deadline:
            return TIMED_OUT
        time.sleep(POLL_S)


def _verdict(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The status to report after a failure: its cause, not that of a rank which merely lost its peer (1)."""
    _await(ranks, GRACE_S)
    statuses = [status for rank in ranks if (status := _status(rank))]
    return next((status for status in statuses if status != 1), statuses[0])


def _status(rank: subprocess.Popen[bytes]) -> int | None:
    status = rank.poll()
    return 1 if status is not None and status < 0 else status


def _await(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL_S)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    _await(ranks, GRACE_S)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()


def _show(rank: int, folder: Path) -> None:
    lines = (folder / str(rank)).read_text(errors="replace").splitlines()
    for line in lines[-STDERR_LINES:]:
        print(f"[rank {rank}] {line}", file=sys.stderr)
