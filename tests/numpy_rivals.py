"""The algorithms beside the paper's, in plain NumPy, written from their own papers' equations.

Every function takes `problem` (gradient(i, x), the client's full gradient), n (sample counts of all clients), K
(steps of all clients), x, eta and `cohorts`, the clients that take part in each round. It returns the models after
every round. Full batches, so a gradient over "the same batch" is the full gradient.
"""

import numpy as np


def share(n, clients):
    """Return the weights of some clients, which sum to 1."""
    total = sum(n[i] for i in clients)
    return {i: n[i] / total for i in clients}


def mean(weights, vectors):
    return sum(weights[i] * vectors[i] for i in weights)


def descend(direction, x, steps, eta):
    y = x.copy()
    for _ in range(steps):
        y = y - eta * direction(y)
    return y


def server_optimizer(problem, n, K, x, eta, cohorts, rule):
    """Local SGD; `rule(delta, memory)` returns what is added to x for delta = mean(x_i) - x."""
    path, memory = [], {}
    for clients in cohorts:
        y = {i: descend(lambda z, i=i: problem.gradient(i, z), x, K[i], eta) for i in clients}
        x = x + rule(mean(share(n, clients), y) - x, memory)
        path.append(x)
    return path


def fedavgm(problem, n, K, x, eta, cohorts, momentum, server_lr):
    def rule(delta, memory):
        memory["v"] = momentum * memory.get("v", 0) - delta
        return -server_lr * memory["v"]

    return server_optimizer(problem, n, K, x, eta, cohorts, rule)


def fedopt(problem, n, K, x, eta, cohorts, kind, server_lr, beta1, beta2, tau):
    """Algorithm 2 of Reddi et al.: v_{-1} = tau^2."""

    def rule(delta, memory):
        m = beta1 * memory.get("m", np.zeros_like(delta)) + (1 - beta1) * delta
        v = memory.get("v", np.full_like(delta, tau**2))
        if kind == "fedadagrad":
            v = v + delta**2
        elif kind == "fedyogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        memory.update(m=m, v=v)
        return server_lr * m / (np.sqrt(v) + tau)

    return server_optimizer(problem, n, K, x, eta, cohorts, rule)


def feddyn(problem, n, K, x, eta, cohorts, alpha):
    """h_i is the client's last regularized gradient; the server's h is the mean over all clients."""
    everyone = share(n, range(len(n)))
    h_local, path = {i: np.zeros_like(x) for i in everyone}, []
    for clients in cohorts:
        y = {
            i: descend(lambda z, i=i, x=x: problem.gradient(i, z) - h_local[i] + alpha * (z - x), x, K[i], eta)
            for i in clients
        }
        for i in clients:
            h_local[i] = h_local[i] - alpha * (y[i] - x)
        x = mean(share(n, clients), y) - mean(everyone, h_local) / alpha
        path.append(x)
    return path


def fedcm(problem, n, K, x, eta, cohorts, alpha, server_lr):
    delta, path = np.zeros_like(x), []
    for clients in cohorts:
        w = share(n, clients)
        y = {
            i: descend(lambda z, i=i, d=delta: alpha * problem.gradient(i, z) + (1 - alpha) * d, x, K[i], eta)
            for i in clients
        }
        delta = mean(w, {i: (x - y[i]) / (eta * K[i]) for i in clients})
        x = x - server_lr * eta * sum(w[i] * K[i] for i in clients) * delta
        path.append(x)
    return path


def fedacg(problem, n, K, x, eta, cohorts, momentum, mu):
    m, path = np.zeros_like(x), []
    for clients in cohorts:
        z0 = x + momentum * m
        y = {
            i: descend(lambda z, i=i, z0=z0: problem.gradient(i, z) + mu * (z - z0), z0, K[i], eta)
            for i in clients
        }
        m = momentum * m + mean(share(n, clients), {i: y[i] - z0 for i in clients})
        x = x + m
        path.append(x)
    return path


def mime(problem, n, K, x, eta, cohorts, momentum, lite):
    m, path = np.zeros_like(x), []
    for clients in cohorts:
        w = share(n, clients)
        c = mean(w, {i: problem.gradient(i, x) for i in clients})

        def direction(z, i, m=m, x=x, c=c):
            g = problem.gradient(i, z)
            if not lite:
                g = g - problem.gradient(i, x) + c
            return (1 - momentum) * g + momentum * m

        y = {i: descend(lambda z, i=i: direction(z, i), x, K[i], eta) for i in clients}
        m = (1 - momentum) * c + momentum * m
        x = mean(w, y)
        path.append(x)
    return path


def fedvarp(problem, n, K, x, eta, cohorts, server_lr, mifa):
    everyone = share(n, range(len(n)))
    last, path = {i: np.zeros_like(x) for i in everyone}, []
    for clients in cohorts:
        w = share(n, clients)
        update = {i: x - descend(lambda z, i=i: problem.gradient(i, z), x, K[i], eta) for i in clients}
        before = mean(everyone, last)
        reduced = mean(w, {i: update[i] - last[i] for i in clients}) + before
        last.update(update)
        x = x - server_lr * (mean(everyone, last) if mifa else reduced)
        path.append(x)
    return path


def fedexp(problem, n, K, x, eta, cohorts, eps):
    path = []
    for clients in cohorts:
        w = share(n, clients)
        D = {i: x - descend(lambda z, i=i: problem.gradient(i, z), x, K[i], eta) for i in clients}
        average = mean(w, D)
        spread = sum(w[i] * D[i] @ D[i] for i in clients)
        x = x - max(1.0, spread / (2 * (average @ average + eps))) * average
        path.append(x)
    return path


def scaffnew(problem, n, K, x, eta, cohorts, p):
    h, path = {i: np.zeros_like(x) for i in range(len(n))}, []
    for clients in cohorts:
        y = {i: descend(lambda z, i=i: problem.gradient(i, z) - h[i], x, K[i], eta) for i in clients}
        x = mean(share(n, clients), y)
        for i in clients:
            h[i] = h[i] + p / eta * (x - y[i])
        path.append(x)
    return path


def fedsam(problem, n, K, x, eta, cohorts, rho):
    def direction(z, i):
        g = problem.gradient(i, z)
        return problem.gradient(i, z + rho * g / np.linalg.norm(g))

    path = []
    for clients in cohorts:
        y = {i: descend(lambda z, i=i: direction(z, i), x, K[i], eta) for i in clients}
        x = mean(share(n, clients), y)
        path.append(x)
    return path


def fedlesam(problem, n, K, x, eta, cohorts, rho):
    received, path = {}, []
    for clients in cohorts:
        y = {}
        for i in clients:
            back = received.get(i, x) - x
            length = np.linalg.norm(back)
            p = rho * back / length if length > 0 else 0 * x
            y[i] = descend(lambda z, i=i, p=p: problem.gradient(i, z + p), x, K[i], eta)
            received[i] = x
        x = mean(share(n, clients), y)
        path.append(x)
    return path


def fedper(problem, n, K, x, eta, cohorts, personal):
    """`personal` marks the client's own coordinates. Return the models of the server and of all clients."""
    own, path = {i: x.copy() for i in range(len(n))}, []
    for clients in cohorts:
        y = {i: np.where(personal, own[i], x) for i in clients}
        y = {i: descend(lambda z, i=i: problem.gradient(i, z), y[i], K[i], eta) for i in clients}
        x = np.where(personal, x, mean(share(n, clients), y))
        own |= y
        path.append([x, *(np.where(personal, own[i], x) for i in range(len(n)))])
    return path


def ditto(problem, n, K, x, eta, cohorts, mu):
    """Algorithm 1 of Li et al. Return the models of the server and of all clients."""
    v, path = {i: x.copy() for i in range(len(n))}, []
    for clients in cohorts:
        y = {i: descend(lambda z, i=i: problem.gradient(i, z), x, K[i], eta) for i in clients}
        for i in clients:
            v[i] = descend(lambda z, i=i, x=x: problem.gradient(i, z) + mu * (z - x), v[i], K[i], eta)
        x = mean(share(n, clients), y)
        path.append([x, *(v[i] for i in range(len(n)))])
    return path


def heterofl(data, n, K, weights, eta, cohorts, levels, scaler):
    """Two linear layers, y = W2 (W1 a) / r, in sub-networks of k = ceil(r h) hidden channels.

    `data` has the inputs and targets of every client, `weights` are W1 [h, d] and W2 [1, h].
    """
    W1, W2 = weights
    h, path = len(W1), []
    for clients in cohorts:
        omega, total, held = share(n, clients), [0.0 * W1, 0.0 * W2], [0.0 * W1, 0.0 * W2]
        for i in clients:
            r = levels[i % len(levels)]
            k = int(np.ceil(r * h))
            A, b = data[i]
            U, V, s = W1[:k].copy(), W2[:, :k].copy(), 1 / r if scaler else 1.0
            for _ in range(K[i]):
                H = s * A @ U.T
                error = (H @ V.T)[:, 0] - b
                dV = error @ H / len(b)
                dU = s * np.outer(V[0], error @ A) / len(b)
                U, V = U - eta * dU, V - eta * dV[None]
            total[0][:k] += omega[i] * U
            held[0][:k] += omega[i]
            total[1][:, :k] += omega[i] * V
            held[1][:, :k] += omega[i]
        W1, W2 = (
            np.where(m > 0, t / np.where(m > 0, m, 1), W) for t, m, W in zip(total, held, (W1, W2), strict=True)
        )
        path.append(np.concatenate([W1.ravel(), W2.ravel()]))
    return path


class AdamW:
    """The optimizer of Loshchilov and Hutter, Algorithm 2, with eta_t = 1 and a weight decay of lr * decay."""

    def __init__(self, like, lr, decay, betas=(0.9, 0.999), eps=1e-8):
        self.lr, self.decay, self.betas, self.eps = lr, decay, betas, eps
        self.m, self.v, self.t = np.zeros_like(like), np.zeros_like(like), 0

    def step(self, x, g):
        (b1, b2), self.t = self.betas, self.t + 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        mhat, vhat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return x - self.lr * (mhat / (np.sqrt(vhat) + self.eps) + self.decay * x)


def diloco(problem, n, K, x, eta, cohorts, server_lr, momentum, merge, keep, decay, calibration):
    """Algorithm 1 of Douillard et al. with K_i inner steps, and Nesterov's momentum on the outer gradient."""
    everyone, path, velocity = share(n, range(len(n))), [], np.zeros_like(x)
    inner, nu = {}, {i: problem.gradient(i, x) for i in everyone}
    for clients in cohorts:
        w, y, c = share(n, clients), {}, mean(everyone, nu)
        for i in clients:
            if i not in inner or not keep:
                inner[i] = AdamW(x, eta, decay)
            y[i], gradients = x.copy(), []
            for _ in range(K[i]):
                gradients.append(problem.gradient(i, y[i]))
                correction = calibration * (c - nu[i]) if merge == "calibrated" else 0
                y[i] = inner[i].step(y[i], gradients[-1] + correction)
            nu[i] = sum(gradients) / K[i]
        if merge == "work":
            steps = sum(w[i] * K[i] for i in clients)
            delta = steps * mean(w, {i: (x - y[i]) / K[i] for i in clients})
        else:
            delta = mean(w, {i: x - y[i] for i in clients})
        velocity = momentum * velocity + delta
        x = x - server_lr * (delta + momentum * velocity)
        path.append(x)
    return path
