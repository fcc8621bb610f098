"""Every algorithm once more, in plain NumPy, written from the papers' equations and not by calling the package.

`gradient(i, x)` is client i's full gradient; omega its weight; K its number of steps. Each function returns the
list of global models after every round. "First gradient" with full batches is the gradient at the server's model.
"""

import numpy as np


def fedavg(gradient, omega, K, x, eta, rounds):
    path = []
    for _ in range(rounds):
        local = []
        for i in range(len(omega)):
            y = x.copy()
            for _ in range(K[i]):
                y = y - eta * gradient(i, y)
            local.append(y)
        x = sum(w * y for w, y in zip(omega, local, strict=True))
        path.append(x)
    return path


def fedprox(gradient, omega, K, x, eta, rounds, mu):
    path = []
    for _ in range(rounds):
        local = []
        for i in range(len(omega)):
            y = x.copy()
            for _ in range(K[i]):
                y = y - eta * (gradient(i, y) + mu * (y - x))
            local.append(y)
        x = sum(w * y for w, y in zip(omega, local, strict=True))
        path.append(x)
    return path


def fednova(gradient, omega, K, x, eta, rounds):
    path = []
    for _ in range(rounds):
        normalised = []
        for i in range(len(omega)):
            y = x.copy()
            for _ in range(K[i]):
                y = y - eta * gradient(i, y)
            normalised.append((x - y) / (eta * K[i]))  # d_i: the mean gradient along the way
        tau = sum(w * k for w, k in zip(omega, K, strict=True))
        x = x - tau * eta * sum(w * d for w, d in zip(omega, normalised, strict=True))
        path.append(x)
    return path


def fedlin(gradient, omega, K, x, eta, rounds):
    path = []
    for _ in range(rounds):
        g = [gradient(i, x) for i in range(len(omega))]
        g_bar = sum(w * v for w, v in zip(omega, g, strict=True))
        local = []
        for i in range(len(omega)):
            y = x.copy()
            for _ in range(K[i]):
                y = y - (eta / K[i]) * (gradient(i, y) - g[i] + g_bar)
            local.append(y)
        x = sum(w * y for w, y in zip(omega, local, strict=True))
        path.append(x)
    return path


def scaffold(gradient, omega, K, x, eta, rounds, option="II", server_lr=1.0):
    """Algorithm 1 of the SCAFFOLD paper with weights, zero start, all clients; line numbers are the paper's.

    Option I: c_i+ = g_i(x) at the server's model. Option II: c_i+ = c_i - c + (x - y_i) / (K eta).
    """
    M = len(omega)
    c_local = [np.zeros_like(x) for _ in range(M)]
    c = np.zeros_like(x)
    path = []
    for _ in range(rounds):
        local, c_next = [], []
        for i in range(M):
            y = x.copy()
            for _ in range(K[i]):
                y = y - eta * (gradient(i, y) - c_local[i] + c)
            local.append(y)
            one, two = gradient(i, x), c_local[i] - c + (x - y) / (K[i] * eta)  # line 12
            c_next.append(one if option == "I" else two)
        x = x + server_lr * sum(w * (y - x) for w, y in zip(omega, local, strict=True))  # lines 16 and 17
        c = c + sum(w * (new - old) for w, new, old in zip(omega, c_next, c_local, strict=True))
        c_local = c_next
        path.append(x)
    return path


def fedagrac(
    gradient, omega, K, x, eta, rounds, lam, transmit="hybrid", reference="mean", start="full", n_first=1
):
    """Algorithm 1 of the FedaGrac paper, line by line; lam(t) with t the rounds already done."""
    M = len(omega)
    nu_local = [gradient(i, x) if start == "full" else np.zeros_like(x) for i in range(M)]
    nu = sum(omega[i] * nu_local[i] for i in range(M))
    path = []
    for t in range(rounds):
        local, means, firsts = [], [], []
        for i in range(M):
            y = x.copy()
            g_sum, g_first = np.zeros_like(x), np.zeros_like(x)
            for k in range(K[i]):
                g = gradient(i, y)
                y = y - eta * (g + lam(t) * (nu - nu_local[i]))
                g_sum += g
                if k < min(n_first, K[i]):
                    g_first += g / min(n_first, K[i])
            local.append(y)
            means.append(g_sum / K[i])
            firsts.append(g_first)
        K_bar = sum(omega[i] * K[i] for i in range(M))
        sent = []
        for i in range(M):
            fast = K[i] > K_bar + 1e-9
            send_first = {"hybrid": fast, "average": False, "first": True, "reverse": not fast}[transmit]
            sent.append(firsts[i] if send_first else means[i])
        x = sum(omega[i] * local[i] for i in range(M))
        nu = sum(omega[i] * sent[i] for i in range(M))
        nu_local = means if reference == "mean" else sent
        path.append(x)
    return path
