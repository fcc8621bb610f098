"""Settings for every test."""

import hypothesis
import torch

torch.set_num_threads(1)  # tests run in parallel processes

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")
