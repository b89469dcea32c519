"""The trained targets of zoo/targets: in their authors' layout, within their size, and decoded losslessly by every drafter."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from toy import unchecked

from spot_dlm.compare import first_divergence, standard_trajectory, trajectory
from spot_dlm.drafters import Chain, LeftToRight, build_drafter
from spot_dlm.interfaces import DecodeParams
from spot_dlm.rules import parse_rule
from spot_dlm.targets import load_target
from spot_dlm.tasks import load_prompts
from spot_dlm.transition import Sampling
from tests.lossless.test_drafters_never_change_tokens import Adversarial
from zoo.recipes import RECIPES

TARGETS = Path(__file__).parents[2] / "zoo" / "targets"
NAMES = [name for name in RECIPES if name != "shipped"]
MIB = 2**20


@pytest.mark.parametrize("name", NAMES)
def test_layout_and_size(name: str) -> None:
    """As the issue asks: at least 1.5 million parameters, float16, at most 6 MiB, another shape for each, recognised without help."""
    folder, config = TARGETS / name, RECIPES[name].config
    weights = load_file(folder / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) >= 1_500_000
    assert {str(w.dtype) for w in weights.values()} == {"torch.float16"}
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 6 * MIB
    assert load_target(str(folder)).spec.family == RECIPES[name].family
    assert sum(RECIPES[n].config == config for n in NAMES) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_speculation_changes_nothing(name: str, temperature: float) -> None:
    target = load_target(str(TARGETS / name))
    drafters = [Chain(), LeftToRight(), Adversarial(3), build_drafter("order")]
    with unchecked():
        for index, task in enumerate(("json", "arithmetic")):
            prompt = load_prompts(task, limit=1)[0].prompt
            rule = parse_rule(("standard", "bfloat16")[index])
            params = DecodeParams(rule, Sampling(temperature=temperature), 32, nodes=8)
            standard = standard_trajectory(target, prompt, params)
            for drafter in drafters:
                assert first_divergence(standard, trajectory(target, prompt, drafter, params), rule) is None
            assert len(standard.result.token_ids) > 4
