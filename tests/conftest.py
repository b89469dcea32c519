"""Settings of the whole test run: one torch thread, so that rounding and running time do not depend on the machine's load.

Measured cost profiles go to a temporary folder, never into the user's cache.
"""

import os

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what the commands measure out of the user's cache; subprocesses inherit it."""
    os.environ["SPOT_CACHE"] = str(tmp_path_factory.mktemp("cache"))
