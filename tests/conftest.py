"""Settings of the whole test run: one torch thread, so that rounding and running time do not depend on the machine's load.

Automatic budgets come from one profile, made up, except in the tests of measuring; nothing is kept in the user's cache.
"""

import os

import pytest
import torch

from spot_dlm.budget import CostProfile

torch.set_num_threads(1)

PROFILE = CostProfile(
    rows=(1, 4, 64), prefixes=(0, 512), pass_ms=((2.0, 3.0, 16.0), (2.5, 4.0, 24.0)), host_ms=0.3, draft_ms=((2, 0.2), (32, 0.6))
)
"""Of a machine on which a few guesses pay."""


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what the commands measure out of the user's cache; subprocesses inherit it."""
    os.environ["SPOT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def no_measuring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give `nodes="auto"` the profile instead of measuring for seconds."""
    if "tune" not in request.module.__name__:
        monkeypatch.setattr("spot_dlm.tune.measure", lambda *_, **__: PROFILE)
