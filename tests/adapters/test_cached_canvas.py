"""The cached decoders of full attention are a dense host with frozen keys and values, and speculation changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from toy import unchecked

from spot_dlm.compare import first_divergence, standard_trajectory, trajectory
from spot_dlm.decode import decode_steps
from spot_dlm.drafters import Chain, LeftToRight, Root, build_drafter
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rules import parse_rule
from spot_dlm.sequence import Finished, Pass
from spot_dlm.state import MASKED
from spot_dlm.targets import load_target
from spot_dlm.targets.checkpoints import load_host, read_json
from spot_dlm.targets.families import find_family
from spot_dlm.transition import Sampling
from tests.lossless.test_drafters_never_change_tokens import Adversarial

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("llada", "llada_moe", "a2d")
MASK, LENGTH = 318, 8
PROMPT = [5, 17, 200, 33, 9, 4, 250]


def load(family, cache="exact", layers=None):
    target = load_target(str(GOLDEN / family), device="cpu", mask_token_id=MASK, stop_ids=(), block_length=LENGTH, cache=cache)
    if layers is not None:
        del target._weights.layers[layers:]
    return target


def params(temperature=0.0, rule="standard", nodes=6, tokens=24):
    return DecodeParams(parse_rule(rule), Sampling(temperature=temperature, seed=2), tokens, nodes=nodes)


class Frozen:
    """A dense host whose keys and values outside some rows can be frozen to what they were in the last unfrozen pass."""

    def __init__(self, folder):
        config = read_json(GOLDEN / folder / "config.json", folder)
        self.host = load_host(GOLDEN / folder, config, find_family(config, folder), torch.float32)
        self.kept, self.rows = {}, None
        for index, layer in enumerate(self.host.model.layers):
            for name in ("k_proj", "v_proj"):
                getattr(layer.self_attn, name).register_forward_hook(self._hook(index, name))

    def _hook(self, *key):
        def hook(_module, _inputs, output):
            if self.rows is None:
                self.kept[key] = output.clone()
                return output
            frozen = self.kept[key].clone()
            frozen[:, self.rows] = output[:, self.rows]
            return frozen

        return hook

    @torch.inference_mode()
    def logits(self, ids, rows=None):
        self.rows = rows
        visible = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool)
        return self.host(torch.tensor([ids]), attention_mask=visible, use_cache=False).logits[0]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_is_that_of_the_beginning_of_the_block(family, cache):
    dense, target = Frozen(family), load(family, cache)
    tokens, end, compared, changed = list(PROMPT), len(PROMPT) + 24, 0, 0.0
    for event in decode_steps(target, PROMPT, Root(), params()):
        if not isinstance(event, Pass):
            continue
        (transition,) = event.acceptance.transitions
        before, start = transition.before, len(tokens)
        canvas = np.where(before.canvas == MASKED, MASK, before.canvas).tolist()
        after = [MASK] * (end - start - LENGTH)
        if len(before.masked) == LENGTH:
            dense.logits([*tokens, *[MASK] * LENGTH, *after])
        rows = slice(start, start + LENGTH if cache == "dual" else end)
        expected = dense.logits([*tokens, *canvas, *after], rows)[start + before.masked]
        found = event.logits.of(0)
        keep = torch.isfinite(found)
        assert (found - expected)[keep].abs().max() < 1e-4
        plain = dense.logits([*tokens, *canvas, *after], slice(None))[start + before.masked]  # nothing frozen
        changed = max(changed, float((plain - found)[keep].abs().max()))
        compared += 1
        if transition.state.is_complete:
            tokens += transition.state.canvas.tolist()
    assert compared == 24 and changed > 1e-3  # it is another decoder


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_one_layer_needs_no_refresh(cache):
    """The first layer's keys and values depend on each position's own token only: with one layer the cached decoder is the exact one."""
    exact, cached = load("llada", layers=1), load("llada", cache, layers=1)
    whole = [e for e in decode_steps(exact, PROMPT, Root(), params()) if isinstance(e, Pass)]
    parts = [e for e in decode_steps(cached, PROMPT, Root(), params()) if isinstance(e, Pass)]
    for one, other in zip(whole, parts, strict=True):
        keep = torch.isfinite(one.logits.of(0))
        assert (one.logits.of(0) - other.logits.of(0))[keep].abs().max() < 1e-4
        assert one.acceptance.transitions[0].tokens == other.acceptance.transitions[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_is_lossless_relative_to_the_cached_decoder(family, cache, temperature):
    target = load(family, cache)
    with unchecked():
        for rule in ("standard", "bfloat16", "k=2", "threshold=0.02"):
            settings = params(temperature, rule)
            standard = standard_trajectory(target, PROMPT, settings)
            for drafter in (Chain(), LeftToRight(), Adversarial(1), build_drafter("order")):
                assert first_divergence(standard, trajectory(target, PROMPT, drafter, settings), settings.rule) is None


def test_passes_are_counted():
    """One pass fills the cache, one renews it after every block but the last."""
    (result,) = [e.result for e in decode_steps(load("llada", "dual"), PROMPT, Root(), params()) if isinstance(e, Finished)]
    assert (result.counts.nfe_prefill, result.counts.nfe, result.counts.nfe_commit) == (1, 24, 2)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_the_pass(cache, threads):
    before, rng = torch.get_num_threads(), np.random.default_rng(3)
    torch.set_num_threads(threads)
    try:
        target = load("llada", cache)
        for prompt, length, more in ((0, 8, 0), (1, 4, 3), (5, 8, 24), (40, 16, 47), (130, 32, 64)):
            prefix = target.open_canvas(rng.integers(0, 300, prompt), prompt + length + more)
            other = target.open_canvas(rng.integers(0, 300, 9), 30)
            rows = rng.integers(0, 300, (9, length))
            rows[rng.random(rows.shape) < 0.5] = MASKED
            rows[:, 0] = MASKED
            with unchecked():
                together, _ = target.evaluate_many([(prefix, rows), (other, rows[:3, :4])])
                for count in (1, 2, 5):
                    some = target.evaluate(prefix, rows[:count])
                    assert all(torch.equal(some.of(i), together.of(i)) for i in range(count)), (prompt, length, more, count)
    finally:
        torch.set_num_threads(before)


def test_fingerprints_differ():
    assert len({load("llada", cache).spec.fingerprint for cache in ("exact", "prefix", "dual")}) == 3


@pytest.mark.parametrize(
    ("folder", "cache", "message"),
    [
        ("sdar", "dual", "family sdar has an exact cache already"),
        ("dream", "prefix", "family dream runs whole canvases only"),
        ("llada", "both", "cache='both' is unknown; choose one of exact, prefix, dual"),
    ],
)
def test_refusals(folder, cache, message):
    with pytest.raises(ValueError, match=message):
        load(folder, cache)
