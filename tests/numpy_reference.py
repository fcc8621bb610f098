"""The paper's algorithms once more, in plain NumPy, written from the equations and not by calling the package.

`gradient(i, x)` is client i's full gradient; omega the weights of all clients; K their numbers of steps; eta the
step size, or one for each round; `cohorts` the clients of each round, by default all. Each function returns the
list of global models after every round. "First gradient" with full batches is the gradient at the server's model.
"""

import numpy as np


def rounds_of(omega, eta, rounds, cohorts):
    """Yield the step size of every round, and the weights of its clients, which sum to 1."""
    for t in range(rounds):
        clients = range(len(omega)) if cohorts is None else cohorts[t]
        total = sum(omega[i] for i in clients)
        yield (eta if np.isscalar(eta) else eta[t]), {i: omega[i] / total for i in clients}


def mean(weights, vectors):
    return sum(w * vectors[i] for i, w in weights.items())


def fedavg(gradient, omega, K, x, eta, rounds, cohorts=None):
    return fedprox(gradient, omega, K, x, eta, rounds, mu=0.0, cohorts=cohorts)


def fedprox(gradient, omega, K, x, eta, rounds, mu, cohorts=None):
    path = []
    for step, w in rounds_of(omega, eta, rounds, cohorts):
        local = {}
        for i in w:
            y = x.copy()
            for _ in range(K[i]):
                y = y - step * (gradient(i, y) + mu * (y - x))
            local[i] = y
        x = mean(w, local)
        path.append(x)
    return path


def fednova(gradient, omega, K, x, eta, rounds, momentum=0.0, nesterov=False, cohorts=None):
    """Section 4 of the FedNova paper. a_i holds the coefficients of the K_i gradients in (x~ - x_i) / eta."""
    path = []
    for step, w in rounds_of(omega, eta, rounds, cohorts):
        direction, work = {}, {}
        for i in w:
            y, buffer = x.copy(), np.zeros_like(x)
            a, in_buffer = np.zeros(K[i]), np.zeros(K[i])
            for k in range(K[i]):
                g = gradient(i, y)
                one = np.eye(K[i])[k]
                buffer, in_buffer = momentum * buffer + g, momentum * in_buffer + one
                y = y - step * (g + momentum * buffer if nesterov else buffer)
                a += one + momentum * in_buffer if nesterov else in_buffer
            work[i] = np.abs(a).sum()
            direction[i] = (x - y) / (step * work[i])  # d_i: the mean gradient along the way
        tau = mean(w, work)
        x = x - tau * step * mean(w, direction)
        path.append(x)
    return path


def fedlin(gradient, omega, K, x, eta, rounds, cohorts=None):
    path = []
    for step, w in rounds_of(omega, eta, rounds, cohorts):
        g = {i: gradient(i, x) for i in w}
        g_bar = mean(w, g)
        local = {}
        for i in w:
            y = x.copy()
            for _ in range(K[i]):
                y = y - (step / K[i]) * (gradient(i, y) - g[i] + g_bar)
            local[i] = y
        x = mean(w, local)
        path.append(x)
    return path


def scaffold(gradient, omega, K, x, eta, rounds, option="II", server_lr=1.0, cohorts=None, server=None):
    """Algorithm 1 of the SCAFFOLD paper with weights and zero start; line numbers are the paper's.

    Option I: c_i+ = g_i(x) at the server's model. Option II: c_i+ = c_i - c + (x - y_i) / (K eta). Absent clients
    keep c_i. `server` is another rule of the server: it returns what is added to x.
    """
    c_local = {i: np.zeros_like(x) for i in range(len(omega))}
    c = np.zeros_like(x)
    path = []
    for step, w in rounds_of(omega, eta, rounds, cohorts):
        local, c_next = {}, {}
        for i in w:
            y = x.copy()
            for _ in range(K[i]):
                y = y - step * (gradient(i, y) - c_local[i] + c)
            local[i] = y
            one, two = gradient(i, x), c_local[i] - c + (x - y) / (K[i] * step)  # line 12
            c_next[i] = one if option == "I" else two
        c = c + sum(omega[i] * (c_next[i] - c_local[i]) for i in w)  # line 17, with the weights among all
        c_local |= c_next
        change = mean(w, local) - x  # line 16
        x = x + (server_lr * change if server is None else server(change))
        path.append(x)
    return path


def fedagrac(
    gradient, omega, K, x, eta, rounds, lam, transmit="hybrid", reference="mean", start="full", n_first=1,
    cohorts=None, server=None,
):  # fmt: skip
    """Algorithm 1 of the FedaGrac paper, line by line; lam(t) with t the rounds already done.

    Absent clients keep nu_i and count in nu with what they sent last. `server` is another rule of the server: it
    returns what is added to x.
    """
    everyone = range(len(omega))
    nu_local = {i: gradient(i, x) if start == "full" else np.zeros_like(x) for i in everyone}
    sent = dict(nu_local)
    nu = sum(omega[i] * sent[i] for i in everyone)
    path = []
    for t, (step, w) in enumerate(rounds_of(omega, eta, rounds, cohorts)):
        local, means, firsts = {}, {}, {}
        for i in w:
            y = x.copy()
            g_sum, g_first = np.zeros_like(x), np.zeros_like(x)
            for k in range(K[i]):
                g = gradient(i, y)
                y = y - step * (g + lam(t) * (nu - nu_local[i]))
                g_sum += g
                if k < min(n_first, K[i]):
                    g_first += g / min(n_first, K[i])
            local[i], means[i], firsts[i] = y, g_sum / K[i], g_first
        K_bar = sum(w[i] * K[i] for i in w)
        for i in w:
            fast = K[i] > K_bar + 1e-9
            send_first = {"hybrid": fast, "average": False, "first": True, "reverse": not fast}[transmit]
            sent[i] = firsts[i] if send_first else means[i]
            nu_local[i] = means[i] if reference == "mean" else sent[i]
        nu = sum(omega[i] * sent[i] for i in everyone)
        change = mean(w, local) - x
        x = x + (change if server is None else server(change))
        path.append(x)
    return path
