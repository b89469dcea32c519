"""The cost outside the target's passes, on the shipped model."""

import pytest
from toy import unchecked

import spot_dlm as spot
from spot_dlm.stats import Counts
from spot_dlm.tasks import load_prompts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_host_share_of_standard_decoding(temperature):
    """Noise, transition and walk take a small share; 20 % is the aim on a quiet machine, the test allows a busy one."""
    target = spot.load_target()
    params = spot.DecodeParams(sampling=spot.Sampling(temperature=temperature), max_new_tokens=48, nodes=1)
    prompts = [p.prompt for p in load_prompts("json", limit=3)]
    with unchecked():
        spot.generate(target, prompts[0], spot.Root(), params)
        runs = [spot.generate(target, p, spot.Root(), params).counts for p in 3 * prompts]
    counts = sum(runs, Counts())
    assert counts.target_s > 0 and counts.total_s >= counts.target_s + counts.draft_s + counts.verify_s
    assert min(run.host_share for run in runs) < 0.45  # of the run that was interrupted least; a pass of the target takes 1.5 ms
