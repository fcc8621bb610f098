"""A SuperNode that kills itself in the middle of an upload, once the file ATTACK_MARK exists."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from flwr.supernode import start_client_internal as node
from flwr.supernode.cli import flower_supernode

push_all = node.push_object_contents_from_iterable


def push_and_die(contents: Any, push_object_fn: Any, **options: Any) -> None:
    """Push all objects, or one and no more."""
    if Path(os.environ["ATTACK_MARK"]).exists():
        push_object_fn(*next(iter(contents)))
        os.kill(os.getpid(), signal.SIGKILL)
    push_all(contents, push_object_fn, **options)


if __name__ == "__main__":
    node.push_object_contents_from_iterable = push_and_die
    sys.exit(flower_supernode())
