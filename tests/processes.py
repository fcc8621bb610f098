"""Wait for processes by their progress: a busy machine makes a test slow, only a stuck process makes it fail."""

import subprocess
import time

import psutil

STALL_SECONDS = 300
"""A process is stuck when one look a second has shown no change for so long."""

IDLE_SECONDS = 3
"""Processes that only wait for one another use less CPU time than this in STALL_SECONDS."""


def descendants(pid):
    """Return the processes that a process started, directly or not."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_all(processes):
    """Kill processes, some of which may have ended."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def processor_seconds(pid):
    """Return the CPU seconds that a process and its descendants have used."""
    total = 0.0
    for one in [pid, *(process.pid for process in descendants(pid))]:
        try:
            times = psutil.Process(one).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def work_of(process):
    """Return a function whose value changes while a process or its descendants compute."""
    return lambda: processor_seconds(process.pid) // IDLE_SECONDS


def contents_of(folder, *patterns):
    """Return a function whose value changes while the files in a folder that match some patterns change."""

    def observe():
        sizes = {}
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            sizes[path] = status.st_size, status.st_mtime_ns
        return sizes

    return observe


def wait_until(condition, observe, explain=lambda: "", pause=0.02):
    """Wait until a condition holds; fail when `observe()` returns the same value for STALL_SECONDS.

    Only looks count, not the clock: time in which the test itself does not run is no sign of a stuck process.
    """
    last, same, next_look = observe(), 0, time.monotonic() + 1
    while not condition():
        time.sleep(pause)
        if time.monotonic() < next_look:
            continue
        seen, next_look = observe(), time.monotonic() + 1
        same = same + 1 if seen == last else 0
        last = seen
        if same >= STALL_SECONDS:
            raise AssertionError(f"nothing has changed for {STALL_SECONDS} seconds {explain()}")


def wait_while_running(condition, process):
    """Wait until a condition holds; fail when the process ends before that or is stuck."""
    wait_until(lambda: condition() or process.poll() is not None, work_of(process))
    if not condition():
        raise AssertionError(f"the process ended with {process.returncode}: {process.communicate()}")


def finish(process):
    """Wait for a process to end and return its stdout and stderr; kill it and fail when it is stuck."""
    output = []

    def ended():
        try:
            output.append(process.communicate(timeout=1))
        except subprocess.TimeoutExpired:
            return False
        return True

    try:
        wait_until(ended, work_of(process), pause=0)
    finally:
        if process.poll() is None:
            started = descendants(process.pid)
            process.kill()
            kill_all(started)
    return output[0]


def run(command, **options):
    """Run a command to its end and return its exit code, stdout and stderr; kill it and fail when it is stuck."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], **{**output, **options})
    printed, errors = finish(process)
    return process.returncode, printed, errors
