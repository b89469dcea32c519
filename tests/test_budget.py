"""Budgets: profiles, which guesses are evaluated, when the drafter is run, and what that is worth (simulated decoding)."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from budget_simulation import CURVES, ROWS, Guesses, Machine, simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import unchecked

from spot_dlm.budget import Account, AutoBudget, Budget, CostProfile, FixedBudget, isotonic
from spot_dlm.draft_graph import DraftGraph, GraphBuilder
from spot_dlm.state import BlockState

PROFILE = CostProfile(
    rows=(1, 2, 4, 8, 16),
    prefixes=(0, 512),
    pass_ms=((4.0, 5.0, 7.0, 11.0, 19.0), (6.0, 7.0, 9.0, 13.0, 21.0)),
    host_ms=0.5,
    draft_ms=((2, 0.2), (8, 0.8)),
    steps_per_pass=((2, 1.5), (8, 2.5)),
    reached=(0.8, 0.5),
)


def chain(*reach: float) -> DraftGraph:
    """A chain whose guesses are reached so often."""
    root = BlockState.initial(0, [], 40)
    builder, state = GraphBuilder(root, 40), root
    for i, (before, now) in enumerate(zip([1.0, *reach], reach, strict=False)):
        state = state.commit(np.array([i]), np.array([1]))
        builder.add(i, state, now / before)
    return builder.build()


def limits(budget: Budget, *roots: tuple[int, bool]) -> list[int]:
    """What a budget offers to prompts with so many masked positions, and whether they may cross the block's end."""
    with unchecked():
        states = [SimpleNamespace(masked=np.arange(m), canvas=np.arange(m), block=0) for m, _ in roots]
        return budget.limits([SimpleNamespace(root=root, crosses=c) for root, (_, c) in zip(states, roots, strict=True)])


# --- profiles ---------------------------------------------------------------------------------------------------------------------


def test_cost_between_and_beyond_what_was_measured() -> None:
    assert [PROFILE.cost(r, 0) for r in (1, 3, 16, 24)] == [4, 6, 19, 27]
    assert [PROFILE.cost(1, p) for p in (0, 256, 512, 1024)] == [4, 5, 6, 8]
    assert PROFILE.cost(24, 1024) == 31
    assert [PROFILE.drafting(n) for n in (1, 2, 5, 8, 32)] == pytest.approx([0.2, 0.2, 0.5, 0.8, 0.8])
    single = CostProfile((1,), (64,), ((3.0,),))
    assert single.cost(8, 0) == single.cost(1, 5000) == 3.0 and single.drafting(4) == 0.0


def test_noise_never_makes_more_rows_or_a_longer_prefix_cheaper() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        noisy = rng.uniform(1, 10, (3, len(ROWS)))
        profile = CostProfile(ROWS, (0, 512, 2048), tuple(map(tuple, noisy.tolist())))
        curves = np.array([profile.between(profile.curves(200), p) for p in (0, 100, 512, 1000, 2048, 9000)])
        assert (np.diff(curves, axis=1) >= -1e-9).all() and (np.diff(curves, axis=0) >= -1e-9).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_isotonic_rises_and_keeps_the_mean_and_what_rises_already(values: list[float]) -> None:
    found = isotonic(values)
    assert (np.diff(found) >= -1e-9).all() and found.mean() == pytest.approx(np.mean(values), abs=1e-9)
    assert isotonic(sorted(values)).tolist() == sorted(values)


def test_profile_as_json() -> None:
    document = json.loads(json.dumps(PROFILE.to_dict() | {"another": 1}))
    assert CostProfile.from_dict(document) == PROFILE
    for broken in ({"rows": [2, 4, 5, 6, 7]}, {"pass_ms": [[1]]}, {"host_ms": -1}, {"prefixes": [512, 0]}, {"draft_ms": [["a", 1]]},
                   {"pass_ms": [[0] * 5] * 2}, {"pass_ms": "x"}, {"host_ms": None}, {"draft_ms": 3}, {"rows": None}):  # fmt: skip
        with pytest.raises(ValueError, match="cost profile"):
            CostProfile.from_dict(document | broken)
    with pytest.raises(ValueError, match="missing"):
        CostProfile.from_dict({k: v for k, v in document.items() if k != "rows"})


# --- which guesses are evaluated --------------------------------------------------------------------------------------------------


def test_fixed_budget_evaluates_everything() -> None:
    budget: Budget = FixedBudget(5)
    assert limits(budget, (1, False), (9, False)) == [5, 5]
    assert budget.allot([chain(0.5), chain()], [0, 0]) == [2, 1]
    budget.observe([chain(0.5)], [1])
    with pytest.raises(ValueError, match="nodes=0"):
        FixedBudget(0)
    with pytest.raises(ValueError, match="most=0"):
        AutoBudget(PROFILE, most=0)
    assert isinstance(AutoBudget(PROFILE), Budget)


def fresh(curve: list[float], gain: float = 1.0, most: int = 32) -> AutoBudget:
    """A budget that trusts reach and believes that decoding gains so much, with these milliseconds for 1, 2, ... rows."""
    rows = tuple(range(1, len(curve) + 1))
    budget = AutoBudget(CostProfile(rows, (0,), (tuple(curve),)), most, Account(gain, curve[0], curve[0], measured=True))
    budget.calibration._overall = 1.0
    return budget


def test_guesses_that_bring_more_than_their_time_is_worth() -> None:
    reach = [0.9, 0.6, 0.4, 0.2, 0.1]
    for step, gain in product((0.05, 0.15, 0.3, 0.5, 0.95), (1.0, 1.5)):
        budget = fresh([1 + step * i for i in range(12)], gain)
        assert budget.allot([chain(*reach)], [0]) == [1 + sum(r > step * gain for r in reach)]


def test_all_of_a_curve_with_steps_is_looked_at() -> None:
    # the second row doubles the cost, the third to eighth are free
    budget = fresh([1.0] + [2.0] * 7 + [5.0] * 8)
    assert budget.allot([chain(0.5, 0.2)], [0]) == [1]
    assert budget.allot([chain(*[0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.04, 0.03])], [0]) == [8]


def test_guesses_of_all_prompts_compete_for_the_rows() -> None:
    budget = fresh([1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5])  # two prompts: a guess must bring 2 * 0.25
    assert budget.allot([chain(0.9, 0.8, 0.7), chain(0.2, 0.1)], [0, 0]) == [4, 1]
    assert budget.allot([chain(0.4), chain(0.6, 0.55)], [0, 0]) == [1, 3]
    assert budget.allot([chain(), chain()], [0, 0]) == [1, 1]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_other_choice_of_first_nodes_is_worth_more(data: st.DataObject) -> None:
    """With rows of equal cost, best first over all graphs is the best of all choices."""
    shares = st.lists(st.floats(0.05, 0.99), max_size=4)
    graphs = [chain(*np.cumprod(data.draw(shares)).tolist()) for _ in range(data.draw(st.integers(1, 3)))]
    step = data.draw(st.floats(0.0, 1.0))
    budget = fresh([1 + step * i for i in range(16)], data.draw(st.floats(1, 2)))
    kept = budget.allot(graphs, [0] * len(graphs))
    rate = budget.account.expected_gain * len(graphs) / (1 + step * (len(graphs) - 1))

    def worth(counts: tuple[int, ...]) -> float:
        return sum(float(g.reach[:n].sum()) for g, n in zip(graphs, counts, strict=True)) - rate * step * sum(counts)

    best = max(map(worth, product(*(range(1, len(g) + 1) for g in graphs))))
    assert worth(tuple(kept)) == pytest.approx(best, abs=1e-9)


def test_complete_blocks_cost_two_rows() -> None:
    root = BlockState.initial(0, [5], 3)
    builder = GraphBuilder(root, 8, crosses=True)
    half = root.commit(np.array([1]), np.array([1]))
    whole = half.commit(np.array([2]), np.array([1]))
    builder.add(0, half, 0.9)
    builder.add(1, whole, 0.6)
    graph = builder.build()
    assert graph.rows.tolist() == [1, 1, 2]
    assert fresh([1 + 0.25 * i for i in range(8)]).allot([graph], [0]) == [3]  # 0.54 for 0.5
    assert fresh([1 + 0.3 * i for i in range(8)]).allot([graph], [0]) == [2]  # 0.54 for 0.6
    after = DraftGraph.root_only(whole)
    budget = fresh([1.0, 3.0, 4.0])
    assert budget.allot([after], [0]) == [1] and budget._base_ms == 3.0


def test_a_good_guess_behind_a_poor_one_takes_both() -> None:
    root = BlockState.initial(0, [], 4)
    states = [root]
    for i in range(4):
        states.append(states[-1].commit(np.array([i]), np.array([1])))
    canvases = np.stack([s.canvas for s in (states[0], states[1], states[2])])
    odd = DraftGraph(0, canvases, np.array([0, 1, 2]), np.array([1.0, 0.3, 0.9]), np.array([[0, 1], [1, 2]]))
    budget = fresh([1.0, 1.0, 1.25, 1.5, 1.75, 2.0])
    assert budget.allot([odd, chain(0.4)], [0, 0]) == [3, 1], "together they bring 0.6 a row"


# --- whether the drafter is run ---------------------------------------------------------------------------------------------------


def test_nothing_is_drafted_where_nothing_can_be_guessed() -> None:
    budget = AutoBudget(Machine(CURVES["flat"]).profile())
    assert limits(budget, (1, False), (0, True)) == [1, 1]
    none, two, across = limits(budget, (1, False), (2, False), (1, True))
    assert none == 1 and two == across > 1
    assert limits(budget) == []


def test_no_more_is_offered_than_pays_if_every_guess_is_right() -> None:
    steep = AutoBudget(CostProfile((1, 4, 5, 64), (0,), ((1.0, 1.2, 5.0, 900.0),)))
    assert limits(steep, (32, False)) == [4]
    assert limits(AutoBudget(Machine(CURVES["flat"]).profile(), most=3), (32, False)) == [3]


def test_useless_drafts_are_tried_ever_less_often() -> None:
    guesses, machine = Guesses((0.5,), truth=(0.0,)), Machine(CURVES["flat"], own=0.1)
    budget, rng, drafted = AutoBudget(machine.profile()), np.random.default_rng(0), []
    for _ in range(1500):
        (limit,) = limits(budget, (32, False))
        (kept,) = budget.allot([guesses.first(limit)], [64])
        budget.observe([guesses.first(kept)], [guesses.walk(rng, kept)])
        drafted.append(limit > 1)
    first, second, last = np.array(drafted).reshape(3, 500).mean(axis=1)
    assert 0.15 > first > max(second, last) and 0.08 > min(second, last) > 0, (first, second, last)
    waits = np.diff(np.flatnonzero(drafted))
    assert 64 <= waits.max() <= 65


def test_the_account_pays_for_tries() -> None:
    """Whatever a draft costs, failed ones take two passes at the start and a hundredth of the time."""
    account = Account(1.2, 1.0, 1.0, measured=False)
    lost = 0.0
    for _ in range(4000):
        drafted = account.pays or account.is_due
        account.book(drafted, drafted, steps=1.0, expected=1.0, pass_ms=4.0 if drafted else 1.0, base_ms=1.0)
        lost += 3 * drafted
    assert 0.005 * 4000 < lost < 0.01 * 4000 + 2 + 3


# --- what it is worth -------------------------------------------------------------------------------------------------------------

CLAIMS = {"0": ((0.5, 0.2), (0.0, 0.0)), "0.3": ((0.3,), (0.3,)), "0.6 or 0.2": ((0.6, 0.2), (0.6, 0.2)), "0.9": ((0.9,), (0.9,))}


@pytest.mark.parametrize("curve", CURVES)
def test_never_slower_and_near_the_best_fixed_number(curve: str) -> None:
    found = {}
    with unchecked():
        for (claim, (claimed, truth)), own, bias in product(CLAIMS.items(), (0.0, 0.1, 3.0), (0.5, 1.0, 2.0)):
            if bias != 1.0 and own == 0.1:
                continue
            guesses, machine = Guesses(claimed, bias, truth), Machine(CURVES[curve], own)
            rates = [simulate(AutoBudget(machine.profile(guesses)), machine, lambda *_, g=guesses: g, 1500, seed=s) for s in range(2)]
            standard, best = machine.fixed([guesses], 1), machine.best_fixed([guesses])
            found[claim, own, bias] = min(rates) / standard, float(np.mean(rates)) / best
    assert min(slow for slow, _ in found.values()) >= 0.98, found
    cheap = [best for (_, own, _), (_, best) in found.items() if own < 1 and curve in ("flat", "cpu", "stepped", "one dearer")]
    assert not cheap or (min(cheap) >= 0.95 and np.mean(cheap) >= 0.98), found


GOOD, FAIR, USELESS = Guesses((0.9,)), Guesses((0.5, 0.3)), Guesses((0.9,), truth=(0.0,))


@pytest.mark.parametrize("curve", ["flat", "cpu", "stepped", "one cheaper"])
def test_better_than_any_fixed_number_where_passes_differ(curve: str) -> None:
    """A fixed number spends as much on a state of which little is known as on one that is clear."""
    machine, kinds = Machine(CURVES[curve], own=0.1), [Guesses((0.95,)), FAIR, Guesses((0.15, 0.1))]
    with unchecked():
        rate = simulate(AutoBudget(machine.profile(FAIR)), machine, lambda _, rng: kinds[rng.integers(3)], steps=3000)
    assert rate > (0.98 if curve == "flat" else 1.1) * machine.best_fixed(kinds), rate / machine.best_fixed(kinds)


@pytest.mark.parametrize("own", [0.1, 1.0])
def test_a_drafter_that_turns_good_or_bad_halfway(own: float) -> None:
    machine = Machine(CURVES["cpu"], own)
    standard, best = machine.fixed([GOOD], 1), machine.best_fixed([GOOD])
    known = 2 / (1 / standard + 1 / best)  # standard decoding in the bad half, the best number in the good one
    with unchecked():
        falling = simulate(AutoBudget(machine.profile(GOOD)), machine, lambda done, _: GOOD if done < 1500 else USELESS, steps=3000)
        rising = simulate(AutoBudget(machine.profile(USELESS)), machine, lambda done, _: USELESS if done < 1500 else GOOD, steps=3000)
        never = simulate(AutoBudget(machine.profile(GOOD)), machine, lambda *_: USELESS, steps=2000)
    assert falling > 0.9 * known and rising > 0.85 * known and never > 0.98 * standard, (falling / known, rising / known, never / standard)


@pytest.mark.parametrize("prompts", [4, 16])
def test_batches_share_rows(prompts: int) -> None:
    """Where rows cost time, a batch takes fewer guesses for each prompt, and none at last."""
    with unchecked():
        for curve, guesses in product(("flat", "cpu", "stepped"), (GOOD, FAIR, USELESS)):
            machine = Machine(CURVES[curve], own=0.02)
            profile = machine.profile(guesses)
            rates = [simulate(AutoBudget(profile), machine, lambda *_, g=guesses: g, 800, prompts, seed) for seed in range(3)]
            standard, best = machine.fixed([guesses], 1, prompts), machine.best_fixed([guesses], prompts)
            assert min(rates) > 0.97 * standard and np.mean(rates) > 0.95 * best, (curve, min(rates) / standard, rates, best)


def test_measurements_that_are_off_cost_little() -> None:
    rng = np.random.default_rng(1)
    with unchecked():
        for curve, guesses in product(CURVES, (GOOD, FAIR)):
            machine = Machine(CURVES[curve], own=0.1)
            rate = simulate(AutoBudget(machine.profile(guesses, rng)), machine, lambda *_, g=guesses: g, 1000)
            assert rate > 0.93 * machine.best_fixed([guesses]), (curve, rate / machine.best_fixed([guesses]))


def test_decisions_follow_from_the_profile_and_the_decoded_data() -> None:
    machine = Machine(CURVES["cpu"], own=0.1)
    with unchecked():
        first, second = (simulate(AutoBudget(machine.profile(FAIR)), machine, lambda *_: FAIR, 500) for _ in range(2))
    assert first == second
