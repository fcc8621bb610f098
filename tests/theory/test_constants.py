"""The measured constants of a problem against closed forms, NumPy and full Hessians."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedagrac as fg
from fedagrac.errors import FedagracError, InputError
from fedagrac.theory import Problem, constants
from fedagrac.theory.exact import least_squares, softmax_hessian, softmax_smoothness
from fedagrac.theory.measure import extreme_eigenvalues, minimise
from quadratics import half_square, quadratics


def softmax_problem(classes=3, features=4, weight_decay=0.05, batch_size=7, seed=0):
    rng = np.random.default_rng(seed)
    data = [(rng.normal(i, 1.5, (n, features)), rng.integers(0, classes, n)) for i, n in enumerate((15, 30, 22))]
    torch.manual_seed(seed)
    fed = fg.Federation.from_arrays(data)
    return Problem(nn.Linear(features, classes), fed, weight_decay=weight_decay, batch_size=batch_size), data


def whole_hessian(problem, i, x):
    """Return the Hessian column by column from second derivatives, without a closed form."""
    return torch.stack([problem.curvature(i, x, e) for e in torch.eye(problem.size, dtype=x.dtype)], 1)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), weight_decay=st.sampled_from([0.0, 0.3]))
def test_least_squares_has_the_constants_of_its_closed_form(seed, weight_decay):
    q = quadratics(seed)
    data = list(zip(q.A, q.b, strict=True))
    exact = least_squares(data, weight_decay)
    problem = Problem(q.module(), q.federation(), half_square, weight_decay, batch_size=4)
    measured = constants(problem, convex=True)
    assert pytest.approx(exact.L, rel=1e-8) == measured.L
    assert measured.mu == pytest.approx(exact.mu, abs=1e-10 * exact.L)
    np.testing.assert_allclose(measured.optimum, exact.minimiser, atol=1e-9)
    np.testing.assert_allclose(measured.local_values, exact.local_values, atol=1e-9)
    start = q.start()
    values = [((A @ start - b) ** 2).mean() / 2 + weight_decay / 2 * start @ start for A, b in data]
    assert measured.gap == pytest.approx(q.omega @ values - q.omega @ exact.local_values, rel=1e-9)
    assert measured.distance2 == pytest.approx(((start - exact.minimiser) ** 2).sum(), rel=1e-9)


def test_the_noise_is_that_of_batches_drawn_with_replacement():
    """Per sample a (a x - b); the mean of 4 draws has a quarter of the variance. By NumPy, and by drawing."""
    q = quadratics()
    problem = Problem(q.module(), q.federation(), half_square, 0.2, batch_size=4)
    x, A, b = q.start(), q.A[2], q.b[2]
    single = A * (A @ x - b)[:, None]
    expected = ((single - single.mean(0)) ** 2).sum(1).mean() / 4
    assert problem.noise(2, torch.from_numpy(x)) == pytest.approx(expected, rel=1e-10)
    rng = np.random.default_rng(0)
    drawn = single[rng.integers(0, len(b), (40_000, 4))].mean(1)
    assert ((drawn - single.mean(0)) ** 2).sum(1).mean() == pytest.approx(expected, rel=0.03)
    full = Problem(q.module(), q.federation(), half_square, batch_size=None)
    assert constants(full, convex=True).sigma2 == 0.0


def test_dissimilarity_by_hand():
    """F_1 = (x - 1)^2 / 2 and F_2 = (x + 1)^2 / 2 at x = 2: gradients 1 and 3, the mean 2, so B = 3 / 2."""
    fed = fg.Federation.from_arrays([([[1.0]], [1.0]), ([[1.0]], [-1.0])])
    model = nn.Linear(1, 1, bias=False)
    problem = Problem(model, fed, half_square)
    at = torch.tensor([2.0], dtype=torch.float64)
    assert pytest.approx(1.5) == constants(problem, [at], convex=True).B
    optimum = torch.zeros(1, dtype=torch.float64)  # there the clients pull and F does not: it does not count
    assert pytest.approx(1.5) == constants(problem, [at, optimum], convex=True).B


@pytest.mark.parametrize("bias", [True, False])
def test_the_softmax_hessian_is_the_second_derivative(bias):
    problem, _ = softmax_problem()
    if not bias:
        torch.manual_seed(0)
        problem = Problem(nn.Linear(4, 3, bias=False), problem.federation, weight_decay=0.05)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=problem.size))
    for i in range(3):
        H = whole_hessian(problem, i, x)
        torch.testing.assert_close(problem.hessian(i, x), H, rtol=0, atol=1e-12)
        inputs = problem.federation.inputs[problem.federation.samples_of(i)].double()
        decay = 0.05 * torch.eye(problem.size, dtype=torch.float64)
        torch.testing.assert_close(softmax_hessian(inputs, x, bias) + decay, H, rtol=0, atol=1e-12)
        assert float(torch.linalg.eigvalsh(H)[-1]) <= softmax_smoothness(inputs, 0.05, bias)


def test_softmax_regression_has_the_constants_of_its_hessians():
    problem, _ = softmax_problem()
    assert problem.is_convex()
    measured = constants(problem)
    optimum = torch.from_numpy(measured.optimum)
    assert float((problem.weights @ problem.gradients(optimum)).norm()) <= 1e-10
    path = [problem.x1 + part * (optimum - problem.x1) for part in (0, 0.25, 0.5, 0.75, 1)]
    spectra = [torch.linalg.eigvalsh(whole_hessian(problem, i, x)) for x in path for i in range(3)]
    assert pytest.approx(max(float(s[-1]) for s in spectra), rel=1e-7) == measured.L
    assert measured.mu == pytest.approx(min(float(s[0]) for s in spectra), abs=1e-10)
    assert measured.mu == pytest.approx(0.05, abs=1e-9)  # adding one number to all scores changes nothing
    assert measured.sigma2 == max(problem.noise(i, x) for x in path for i in range(3))


def test_the_minimiser_is_that_of_scikit_learn():
    from sklearn.linear_model import LogisticRegression

    problem, data = softmax_problem(weight_decay=0.1)
    X, y = np.concatenate([X for X, _ in data]), np.concatenate([y for _, y in data])
    theirs = LogisticRegression(C=1 / (0.1 * len(y)), fit_intercept=False, tol=1e-10, max_iter=1000).fit(X, y)
    torch.manual_seed(0)
    ours = minimise(Problem(nn.Linear(4, 3, bias=False), problem.federation, weight_decay=0.1))
    np.testing.assert_allclose(ours.numpy(), theirs.coef_.reshape(-1), atol=1e-6)


def test_a_network_has_no_mu_and_its_own_largest_curvature():
    rng = np.random.default_rng(0)
    fed = fg.Federation.from_arrays([(rng.normal(size=(20, 3)), rng.integers(0, 2, 20)) for _ in range(2)])
    torch.manual_seed(1)
    problem = Problem(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), fed)
    assert problem.is_convex() is None
    measured = constants(problem)
    assert (measured.mu, measured.optimum, measured.points) == (None, None, 1)
    spectra = [torch.linalg.eigvalsh(whole_hessian(problem, i, problem.x1)) for i in range(2)]
    assert pytest.approx(max(float(s.abs().max()) for s in spectra), rel=1e-7) == measured.L
    assert measured.gap == pytest.approx(problem.total(problem.x1))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 30), repeated=st.booleans())
def test_eigenvalues_are_those_of_numpy(seed, size, repeated):
    rng = np.random.default_rng(seed)
    values = rng.uniform(0, 3, size)
    if repeated:
        values[: size // 2] = 0.01  # weight decay leaves many equal
    Q = np.linalg.qr(rng.normal(size=(size, size)))[0]
    A = torch.from_numpy((Q * values) @ Q.T)
    assert extreme_eigenvalues(lambda v: A @ v, size) == pytest.approx((values.min(), values.max()), abs=1e-10)


def test_a_problem_without_a_minimiser_is_an_error():
    """A loss that is linear in x has no minimum."""
    fed = fg.Federation.from_arrays([([[1.0], [2.0]], [0.0, 1.0])])
    problem = Problem(nn.Linear(1, 1), fed, loss=lambda output, target: output.mean())
    with pytest.raises(FedagracError, match="weight_decay"):
        constants(problem, convex=True)


def test_points_must_fit_and_hessians_must_not_be_huge(monkeypatch):
    problem, _ = softmax_problem()
    with pytest.raises(InputError, match="vectors of 15 numbers"):
        constants(problem, [torch.zeros(3, dtype=torch.float64)])
    monkeypatch.setattr("fedagrac.theory.problem.LARGEST_HESSIAN", 10)
    monkeypatch.setattr("fedagrac.theory.problem.SMALL_HESSIAN", 10)
    with pytest.raises(InputError, match="at most 10"):
        problem.hessian(0, problem.x1)
    assert constants(problem).mu == pytest.approx(0.05, abs=1e-9)  # without whole Hessians


def test_a_module_whose_buffers_move_is_no_function_of_x_and_is_refused():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    fed = fg.Federation.from_arrays([(np.ones((4, 2)), np.zeros(4, np.int64))])
    with pytest.raises(InputError, match=r"running_mean.*a function of x alone"):
        Problem(module, fed)


def test_a_problem_with_two_inputs_has_the_values_of_a_hand_calculation():
    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, a, b):
            return self.weight * (a + b)

    fed = fg.Federation.from_arrays([((np.array([1.0, 2.0]), np.array([0.0, 1.0])), np.array([1.0, 5.0]))])
    problem = Problem(Sum(), fed, loss=torch.nn.functional.mse_loss)
    assert float(problem.value(0, problem.x1)) == pytest.approx(((2 - 1) ** 2 + (6 - 5) ** 2) / 2)
