"""Settings for every test."""

import os
import signal

import hypothesis
import pytest
import torch

from fedagrac.engines import choice

torch.set_num_threads(1)  # tests run in parallel processes
os.environ["OMP_NUM_THREADS"] = "1"  # and so do the processes that they start
# A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # it measures how busy the machine is
)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _measurements_of_this_test(tmp_path, monkeypatch):
    """Keep the measurements of engines in the folder of the test that makes them."""
    monkeypatch.setattr(choice, "measurements_folder", lambda: tmp_path / "engines")
