"""What every test runs under: one thread, no network, the same random examples each time, GPU tests only on a GPU."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# A compile takes seconds, so no example has a deadline. `--hypothesis-profile=full` looks further, and at random.
settings.register_profile("stable", derandomize=True, deadline=None, database=None)
settings.register_profile("full", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
