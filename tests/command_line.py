"""The command `fedagrac`, run in this process or in one of its own."""

import subprocess
import sys

import pytest

from fedagrac.cli.app import main


def command(*arguments, capsys):
    """Run the entry point; return (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def process(*arguments, **options):
    """Run a real process; return how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "fedagrac", *arguments], capture_output=True, text=True, check=False, **options
    )
