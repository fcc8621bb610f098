"""Settings for every test."""

import signal

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # tests run in parallel processes
# A shell starts background jobs with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _engines_are_measured_anew(tmp_path, monkeypatch):
    """Keep the measurements of engines in the folder of the test that makes them."""
    monkeypatch.setattr("fedagrac.engines.choice.cache_folder", lambda: tmp_path)
