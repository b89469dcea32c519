"""Bit by bit, as test_row_invariance: rows that pass through mixtures of experts, and heads that turn in part."""

import numpy as np
import pytest
import torch

from tests.lossless.test_row_invariance import assert_invariant, bits, random_canvases, two_threads
from tests.tiny_hosts import build

__all__ = ["two_threads"]

SIZES = {"vocab_size": 320, "hidden_size": 64, "head_dim": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GROUPED = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "first_k_dense_replace": 1}
HOSTS = {
    "softmax": ("Qwen3Moe", SIZES | {"num_experts": 8, "norm_topk_prob": True}),
    "many-experts": ("Qwen3Moe", SIZES | {"num_experts": 60, "num_experts_per_tok": 8, "norm_topk_prob": False}),
    "odd": ("Qwen3Moe", SIZES | {"num_experts": 7, "hidden_size": 72, "moe_intermediate_size": 29, "norm_topk_prob": True}),
    "grouped-half-rotary": ("Glm4Moe", SIZES | GROUPED | {"partial_rotary_factor": 0.5}),
    "wide": ("Glm4Moe", SIZES | GROUPED | {"hidden_size": 544, "moe_intermediate_size": 520, "num_hidden_layers": 2}),
    "half-rotary": ("Glm4Moe", SIZES | GROUPED | {"first_k_dense_replace": 9, "head_dim": 24, "use_qk_norm": False}),
}


@pytest.fixture(scope="module")
def targets():
    return {name: build(*host)[0] for name, host in HOSTS.items()}


@pytest.mark.parametrize("length", [1, 5, 32])
@pytest.mark.parametrize("name", ["softmax", "many-experts", "odd", "grouped-half-rotary", "half-rotary"])
def test_rows_do_not_depend_on_the_pass(targets, name, length):
    assert_invariant(targets[name], length, probes=1)


@pytest.mark.parametrize("name", ["odd", "grouped-half-rotary"])
def test_rows_do_not_depend_on_the_pass_with_two_threads(two_threads, targets, name):
    assert_invariant(targets[name], 16, probes=1)


@pytest.mark.parametrize("name", HOSTS)
def test_rows_alone_and_in_a_large_pass(targets, name):
    """Some hundred rows to an expert against a few, and sums over more than 512 inputs."""
    target, rng = targets[name], np.random.default_rng(0)
    prefix, canvas = target.prefill(rng.integers(0, 300, 64), 16), random_canvases(rng, 64, 16)
    found = target.evaluate(prefix, canvas)
    for row in (0, 5, 63):
        assert torch.equal(bits(found.of(row)), bits(target.evaluate(prefix, canvas[[row]]).of(0)))
