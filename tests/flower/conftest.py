"""Fixtures of the tests of federations."""

import pytest


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Enter a Flower task, inside which messages must be made."""
    pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
