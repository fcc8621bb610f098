"""The right-hand sides of Theorems 1 to 3: hand calculations and general properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedagrac.errors import InputError
from fedagrac.theory.bounds import (
    NOTE,
    corollary_convex,
    corollary_nonconvex,
    extreme_steps,
    fednova_condition,
    fednova_rate,
    theorem1,
    theorem1_unpublished,
    theorem2,
    theorem3,
)

# Two clients, omega = (1/4, 3/4), K = (1, 5): Kbar = 4, sum omega^2 K = 46/16, sum omega K^3 = 94,
# sum omega K^4 = 469, sum omega^2 / K = 1/16 + 9/80 = 0.175.
WEIGHTS, STEPS = [0.25, 0.75], [1, 5]

positives = st.floats(0.01, 100)
counts = st.lists(st.integers(1, 1000), min_size=2, max_size=8)


def equal(K):
    return np.full(len(K), 1 / len(K))


def slope(term, rounds):
    """Return the exponent of T between neighbouring rounds."""
    return np.diff(np.log(term)) / np.diff(np.log(rounds))


def test_theorem_1_by_hand():
    bound = theorem1(WEIGHTS, STEPS, [7.0, 0.2], L=2.0)
    assert bound.terms == {"floor": pytest.approx(0.75 * 4 * 0.2)}  # the slowest client's loss does not count
    assert bound.step_size == pytest.approx(1 / 8)
    assert bound.step_limit == pytest.approx(1 / (2 * math.sqrt(40)))
    assert bound.constants == {"Kbar": 4.0, "Kmin": 1.0, "Kmax": 5.0}


def test_the_longer_form_of_theorem_1_by_hand_is_marked_as_not_published():
    constants = {"L": 2.0, "mu": 0.5, "sigma2": 3.0, "distance2": 9.0}
    bound = theorem1_unpublished(WEIGHTS, STEPS, [7.0, 0.2], **constants, rounds=8)
    assert bound.terms == {
        "exponential": pytest.approx(0.5 * 4 / 1 * 9 * math.exp(-2)),
        "noise": pytest.approx(3 / (0.5 * 8 * 4 * 1) * 46 / 16),
        "drift": pytest.approx(3 * 2 / (0.25 * 64 * 16 * 1) * 19),  # sum omega K^2 = 19
        "floor": pytest.approx(0.6),
    }
    assert bound.step_size == pytest.approx(1 / (0.5 * 2 * 8 * 4))
    assert "not in the published statement" in bound.name
    far = theorem1_unpublished(WEIGHTS, STEPS, [7.0, 0.2], **constants, rounds=1e12)
    assert far.total == pytest.approx(theorem1(WEIGHTS, STEPS, [7.0, 0.2], L=2.0).total)


def test_theorem_2_by_hand():
    bound = theorem2(WEIGHTS, STEPS, L=2.0, sigma2=3.0, gap=10.0, rounds=50, calibration=0.5)
    assert bound.terms == {
        "start": pytest.approx(10 / (0.5 * math.sqrt(4 * 2 * 50))),
        "noise": pytest.approx(3 * 2 * math.sqrt(2) / (0.5 * math.sqrt(64 * 50)) * 46 / 16),
        # omega^2 ((Kbar - K)^2 / (Kbar K) + 1): 1/16 (9/4 + 1) and 9/16 (1/20 + 1)
        "calibration noise": pytest.approx(3 * 2 * 0.5 * math.sqrt(2) / math.sqrt(4 * 50) * (3.25 + 9.45) / 16),
        "drift": pytest.approx(4 * 3 * 2 / (0.5 * 16 * 50) * 469),
        # omega K^3 (0.175 K + 1): 1/4 * 1.175 and 3/4 * 125 * 1.875
        "calibration drift": pytest.approx(4 * 3 * 0.5 * 2 / (16 * 50) * (0.29375 + 175.78125)),
    }
    assert bound.total == pytest.approx(sum(bound.terms.values()))
    assert bound.step_size == pytest.approx(0.1)
    assert bound.step_limit == pytest.approx(1 / (2 * math.sqrt(2) * 2 * 5))


def test_theorem_2_with_the_theorems_own_step_size_given_is_theorem_2():
    settings = {"L": 2.0, "sigma2": 3.0, "gap": 10.0, "rounds": 50, "calibration": 0.5}
    assert theorem2(WEIGHTS, STEPS, **settings, lr=0.1).terms == pytest.approx(
        theorem2(WEIGHTS, STEPS, **settings).terms
    )
    double = theorem2(WEIGHTS, STEPS, **settings, lr=0.2)
    ratios = [double.terms[name] / term for name, term in theorem2(WEIGHTS, STEPS, **settings).terms.items()]
    assert ratios == pytest.approx([0.5, 2, 2, 4, 4])


def test_theorem_3_by_hand():
    bound = theorem3(WEIGHTS, STEPS, L=2.0, mu=0.5, sigma2=3.0, distance2=9.0, rounds=8)
    # omega^2 (K + Kbar + (Kbar - K)^2 / K): 1/16 (1 + 4 + 9) and 9/16 (5 + 4 + 1/5)
    H, P = 3 / 16 * (14 + 82.8) / 16, 4 * 3 / 0.5 * 94 * 0.175
    assert bound.constants["H"] == pytest.approx(H)
    assert bound.constants["P"] == pytest.approx(P)
    assert bound.terms == {
        "exponential": pytest.approx(4.5 * math.exp(-2)),
        "H / (mu T)": pytest.approx(H / 4),
        "P / (mu^2 T^2)": pytest.approx(P / 16),
    }
    assert bound.step_size == pytest.approx(1 / (0.5 * 2 * 8 * 4))
    assert theorem3(WEIGHTS, STEPS, L=0.1, mu=0.1, sigma2=1, distance2=1, rounds=1).step_size == pytest.approx(2.5)


def test_the_proofs_limit_on_the_step_size_can_be_far_below_the_statements():
    """K = 1 but for one of M: 1 / (L Kbar) against a limit of about 1 / (L Kmax), and Kmax is about M Kbar."""
    K = extreme_steps(20, 1000)
    bound = theorem1(equal(K), K, np.ones(20), L=1.0)
    assert bound.step_size / bound.step_limit == pytest.approx(math.sqrt(2 * 1000 * 999) * 20 / 1019)
    assert theorem1([0.5, 0.5], [1, 1], [1, 1], L=1.0).step_limit == math.inf


def test_every_bound_carries_the_note_about_the_constant():
    convex = {"L": 2.0, "mu": 0.5, "sigma2": 3.0, "distance2": 9.0, "rounds": 8}
    for bound in (
        theorem1(WEIGHTS, STEPS, [1, 1], L=1.0),
        theorem1_unpublished(WEIGHTS, STEPS, [1, 1], **convex),
        theorem2(WEIGHTS, STEPS, L=1.0, sigma2=1.0, gap=1.0, rounds=8),
        theorem3(WEIGHTS, STEPS, **convex),
    ):
        assert bound.note == NOTE
        assert "eta <=" in bound.condition


def test_terms_scale_with_the_rounds_as_the_theorems_say():
    T = np.array([10.0, 100.0, 1000.0])
    second = theorem2(WEIGHTS, STEPS, L=1.0, sigma2=1.0, gap=1.0, rounds=T)
    assert [slope(term, T).tolist() for term in second.terms.values()] == [
        pytest.approx([power] * 2) for power in (-0.5, -0.5, -0.5, -1, -1)
    ]
    third = theorem3(WEIGHTS, STEPS, L=10.0, mu=0.1, sigma2=1.0, distance2=1.0, rounds=T)
    assert slope(third.terms["H / (mu T)"], T) == pytest.approx([-1, -1])
    assert slope(third.terms["P / (mu^2 T^2)"], T) == pytest.approx([-2, -2])
    assert np.diff(np.log(third.terms["exponential"])) == pytest.approx([-0.9, -9])  # -mu / L per round
    assert slope(corollary_nonconvex(3, T, 7.0), T) == pytest.approx([-0.5, -0.5])
    assert slope(corollary_convex(3, T, 7.0, sigma2=1.0, mu=1.0), T) == pytest.approx([-1, -1])


def test_an_array_of_rounds_gives_what_single_rounds_give():
    convex = {"L": 2.0, "mu": 0.5, "sigma2": 3.0, "distance2": 9.0}
    for form in (
        lambda T: theorem1_unpublished(WEIGHTS, STEPS, [1, 1], **convex, rounds=T).total,
        lambda T: theorem2(WEIGHTS, STEPS, L=1.0, sigma2=1.0, gap=1.0, rounds=T).total,
        lambda T: theorem2(WEIGHTS, STEPS, L=1.0, sigma2=1.0, gap=1.0, rounds=T, lr=0.1).total,
        lambda T: theorem3(WEIGHTS, STEPS, **convex, rounds=T).total,
        lambda T: corollary_nonconvex(2, T, 4),
        lambda T: fednova_rate(STEPS, T),
    ):
        curve = form([3, 30])
        assert curve.shape == (2,)
        assert isinstance(form(3), float)
        assert curve.tolist() == pytest.approx([form(3), form(30)])


@given(st.integers(2, 8), st.integers(1, 500), positives)
def test_theorem_1_has_no_floor_for_equal_steps(M, K, loss):
    assert theorem1(np.full(M, 1 / M), [K] * M, [loss] * M, L=1.0).total == 0


@given(counts, positives, st.integers(1, 1000))
def test_theorem_1s_floor_grows_when_the_fastest_client_gets_faster(K, loss, more):
    losses = np.full(len(K), loss)
    faster = list(K)
    faster[int(np.argmax(K))] += more
    # with all K equal but one the minimum stays, as at least two clients are here
    assert theorem1(equal(K), faster, losses, L=1.0).total > theorem1(equal(K), K, losses, L=1.0).total


@given(counts, st.data())
def test_the_floor_holds_with_constant_1_where_fedavg_ends_for_small_steps(K, data):
    """FedAvg with eta -> 0 ends at the minimiser of sum omega K F; F_i = a_i (x - b_i)^2 / 2 has closed forms."""
    numbers = st.lists(st.floats(0.1, 10), min_size=len(K), max_size=len(K))
    a, b = np.array(data.draw(numbers)), np.array(data.draw(numbers))
    w = np.array(data.draw(numbers))
    w, K = w / w.sum(), np.array(K, dtype=float)
    optimum, end = (w * a) @ b / (w @ a), (w * K * a) @ b / ((w * K) @ a)
    gap = w @ (a * (end - b) ** 2 / 2) - w @ (a * (optimum - b) ** 2 / 2)
    assert gap <= theorem1(w, K, a * (optimum - b) ** 2 / 2, L=a.max()).total + 1e-9


@given(counts, positives, st.floats(0.1, 1))
def test_with_equal_weights_theorem_2s_third_term_is_fednovas_rate(K, constant, lam):
    """It is sigma^2 L lambda / sqrt(M T Kbar) times FedNova's own condition: no better where FedNova is slow."""
    bound = theorem2(equal(K), K, L=1.0, sigma2=constant, gap=1.0, rounds=70, calibration=lam)
    assert bound.terms["calibration noise"] == pytest.approx(constant * lam * fednova_rate(K, 70))


@given(counts, positives, positives)
def test_with_equal_weights_the_corollarys_first_two_terms_are_its_rate(K, constant, gap):
    bound = theorem2(equal(K), K, L=1.0, sigma2=constant, gap=gap, rounds=70)
    rate = corollary_nonconvex(len(K), 70, float(np.mean(K)))
    assert bound.terms["start"] == pytest.approx(gap * rate)
    assert bound.terms["noise"] == pytest.approx(constant * rate)


@given(counts, positives, st.floats(0.1, 1))
def test_with_equal_weights_h_is_the_corollary_times_one_plus_fednovas_condition(K, sigma2, mu):
    """H / (mu T) = (1 + sum_i Kbar / (M K_i)) sigma^2 / (mu M T Kbar)."""
    bound = theorem3(equal(K), K, L=1.0, mu=mu, sigma2=sigma2, distance2=1.0, rounds=70)
    rate = corollary_convex(len(K), 70, float(np.mean(K)), sigma2=sigma2, mu=mu)
    assert bound.terms["H / (mu T)"] == pytest.approx((1 + fednova_condition(K)) * rate)


def test_with_equal_steps_h_is_twice_the_corollary():
    bound = theorem3([0.25] * 4, [25] * 4, L=1.0, mu=0.5, sigma2=2.0, distance2=1.0, rounds=100)
    assert bound.terms["H / (mu T)"] == pytest.approx(2 * 0.0004)
    assert corollary_convex(4, 100, 25, sigma2=2.0, mu=0.5) == pytest.approx(0.0004)


@given(counts)
def test_fednova_over_fedagracs_corollary_is_the_condition_and_at_least_one(K):
    Kbar = sum(K) / len(K)
    ratio = fednova_rate(K, 9) / corollary_nonconvex(len(K), 9, Kbar)
    assert ratio == pytest.approx(sum(Kbar / (len(K) * k) for k in K))
    assert ratio >= 1 - 1e-12


@given(st.integers(2, 50), st.integers(1, 10**6))
def test_in_the_extreme_case_the_condition_grows_like_the_mean_steps(M, fast):
    K = extreme_steps(M, fast)
    Kbar = (M - 1 + fast) / M
    assert fednova_condition(K) == pytest.approx(Kbar * (1 - (1 - 1 / fast) / M))
    assert Kbar * (1 - 1 / M) <= fednova_condition(K) <= Kbar * (1 + 1e-12)
    assert fednova_rate(K, 100) <= math.sqrt(Kbar / (M * 100)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights", {"weights": [0.5, 0.6]}),
        ("weights", {"weights": [1.0, 0.0]}),
        ("weights", {"weights": [[0.5, 0.5]]}),
        ("weights", {"weights": [np.nan, 0.5]}),
        ("weights", {"weights": ["a", "b"]}),
        ("steps", {"steps": [0, 5]}),
        ("steps", {"steps": [1, np.inf]}),
        ("steps", {"steps": [1, 2, 3]}),
        ("L", {"L": 0.0}),
        ("mu", {"mu": -1.0}),
        ("mu", {"mu": 3.0}),
        ("sigma2", {"sigma2": -1.0}),
        ("distance2", {"distance2": np.nan}),
        ("rounds", {"rounds": 0}),
        ("rounds", {"rounds": [1, np.inf]}),
        ("rounds", {"rounds": []}),
        ("rounds", {"rounds": "ten"}),
    ],
)
def test_bad_input_is_named(field, change):
    good = {"weights": WEIGHTS, "steps": STEPS, "L": 2.0, "mu": 0.5, "sigma2": 1.0, "distance2": 1.0, "rounds": 5}
    theorem3(**good)
    with pytest.raises(InputError, match=f"^{field} = "):
        theorem3(**good | change)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("local_losses", lambda: theorem1(WEIGHTS, STEPS, [1.0], L=1.0)),
        ("local_losses", lambda: theorem1(WEIGHTS, STEPS, [1.0, -0.1], L=1.0)),
        ("gap", lambda: theorem2(WEIGHTS, STEPS, L=1.0, sigma2=1.0, gap=-1.0, rounds=1)),
        ("calibration", lambda: theorem2(WEIGHTS, STEPS, L=1, sigma2=1, gap=1, rounds=1, calibration=0)),
        ("lr", lambda: theorem2(WEIGHTS, STEPS, L=1, sigma2=1, gap=1, rounds=1, lr=0)),
        ("clients", lambda: corollary_nonconvex(0, 1, 1)),
        ("mean_steps", lambda: corollary_nonconvex(1, 1, 0.5)),
        ("mu", lambda: corollary_convex(1, 1, 1, sigma2=1, mu=0)),
        ("fast", lambda: extreme_steps(3, 0)),
        ("clients", lambda: extreme_steps(1, 5)),
        ("steps", lambda: fednova_rate([], 1)),
    ],
)
def test_bad_input_of_the_others_is_named(field, call):
    with pytest.raises(InputError, match=f"^{field} = "):
        call()
