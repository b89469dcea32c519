"""On a CUDA device: the noise has the CPU's bits, and standard and speculative decoding agree where every pass has one shape."""

import numpy as np
import pytest
import torch

from spot_dlm.decode import generate
from spot_dlm.drafters import Chain, Root
from spot_dlm.interfaces import DecodeParams
from spot_dlm.noise import CoupledNoise
from spot_dlm.targets import load_target
from spot_dlm.transition import Sampling, UnmaskRule
from tests.tiny_checkpoints import write_sdar

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_noise_has_the_bits_of_the_cpu(seed):
    positions = np.array([0, 3, 4, 31])
    for block, step in ((0, 0), (7, 2), (10**6, 31)):
        cpu = CoupledNoise(seed, 3).rows(block, step, positions, 5000)
        cuda = CoupledNoise(seed, 3, device=torch.device("cuda")).rows(block, step, positions, 5000)
        assert torch.equal(cpu.view(torch.int32), cuda.cpu().view(torch.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_root_and_chain_agree_with_padded_rows(tmp_path, temperature, dtype):
    write_sdar(tmp_path)
    target = load_target(str(tmp_path), device="cuda", dtype=dtype, padded_rows=8)

    def decode(drafter, nodes):
        params = DecodeParams(UnmaskRule(), Sampling(temperature), max_new_tokens=64, nodes=nodes, block_length=8)
        result = generate(target, [5, 7, 11, 200, 31], drafter, params)
        return [(c.position, c.token, c.block, c.step) for c in result.order], result.token_ids

    standard = decode(Root(), 1)
    for nodes in (2, 4, 8):
        assert decode(Chain(), nodes) == standard
