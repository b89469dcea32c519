"""Muon in float32 is torch's Muon but for the rounding, and reads what torch's wrote."""

import pytest
import torch

from spot_dlm.optimizer import Muon


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96)])
def test_same_update_as_torch_but_for_bfloat16(shape: tuple[int, int]) -> None:
    ours, theirs = (torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    optimizers = Muon([ours], lr=0.02, weight_decay=0.05), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.05)
    start = ours.detach().clone()
    for step in range(5):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1 + step))
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.03 * moved


def test_goes_on_from_the_state_that_torch_wrote() -> None:
    weight = torch.nn.Parameter(torch.eye(8))
    theirs = torch.optim.Muon([weight], lr=0.02)
    weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    theirs.step()
    ours = Muon([weight], lr=0.02)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert torch.isfinite(weight).all()
    assert ours.state[weight]["momentum_buffer"].norm() > 0
