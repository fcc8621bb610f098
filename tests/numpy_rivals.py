"""The algorithms beside the paper's, in plain NumPy, written from their own papers' equations.

Every function takes `problem` (gradient(i, x), the client's full gradient), n (sample counts of all clients), K
(steps of all clients), x, eta (a number, or one for each round) and `cohorts`, the clients that take part in each
round. It returns the models after every round. Full batches, so a gradient over "the same batch" is the full
gradient.
"""

import numpy as np


def rounds_of(eta, cohorts):
    """Return the step size and the clients of every round."""
    return zip([eta] * len(cohorts) if np.isscalar(eta) else eta, cohorts, strict=True)


def share(n, clients):
    """Return the weights of some clients, which sum to 1."""
    total = sum(n[i] for i in clients)
    return {i: n[i] / total for i in clients}


def mean(weights, vectors):
    return sum(weights[i] * vectors[i] for i in weights)


def descend(direction, x, steps, eta, momentum=0.0):
    y, b = x.copy(), 0.0 * x
    for _ in range(steps):
        b = momentum * b + direction(y)
        y = y - eta * b
    return y


def heavy_ball(momentum, server_lr):
    """Return FedAvgM's rule of the server: what is added to x for delta = (next model of the algorithm) - x."""
    memory = {"v": 0.0}

    def rule(delta):
        memory["v"] = momentum * memory["v"] - delta
        return -server_lr * memory["v"]

    return rule


def adaptive(kind, server_lr, beta1, beta2, tau):
    """Return the rules of Reddi et al., Algorithm 2: v_{-1} = tau^2."""
    memory = {"m": 0.0, "v": tau**2}

    def rule(delta):
        m, v = beta1 * memory["m"] + (1 - beta1) * delta, memory["v"]
        if kind == "fedadagrad":
            v = v + delta**2
        elif kind == "fedyogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
        memory.update(m=m, v=v)
        return server_lr * m / (np.sqrt(v) + tau)

    return rule


def server_optimizer(problem, n, K, x, eta, cohorts, rule):
    """Local SGD with a rule of the server."""
    path = []
    for step, clients in rounds_of(eta, cohorts):
        y = {i: descend(lambda z, i=i: problem.gradient(i, z), x, K[i], step) for i in clients}
        x = x + rule(mean(share(n, clients), y) - x)
        path.append(x)
    return path


def fedavgm(problem, n, K, x, eta, cohorts, **settings):
    return server_optimizer(problem, n, K, x, eta, cohorts, heavy_ball(**settings))


def fedopt(problem, n, K, x, eta, cohorts, **settings):
    return server_optimizer(problem, n, K, x, eta, cohorts, adaptive(**settings))


def feddyn(problem, n, K, x, eta, cohorts, alpha):
    """h_i is the client's last regularized gradient; the server's h is the mean over all clients."""
    everyone = share(n, range(len(n)))
    h_local, path = {i: np.zeros_like(x) for i in everyone}, []
    for step, clients in rounds_of(eta, cohorts):
        y = {
            i: descend(lambda z, i=i, x=x: problem.gradient(i, z) - h_local[i] + alpha * (z - x), x, K[i], step)
            for i in clients
        }
        for i in clients:
            h_local[i] = h_local[i] - alpha * (y[i] - x)
        x = mean(share(n, clients), y) - mean(everyone, h_local) / alpha
        path.append(x)
    return path


def fedcm(problem, n, K, x, eta, cohorts, alpha, server_lr, momentum=0.0):
    """With momentum, the gradient with j steps after it enters x~ - x_i with 1 + r + ... + r^j."""
    work = [sum(momentum**power for j in range(k) for power in range(j + 1)) for k in K]  # K without momentum
    delta, path = np.zeros_like(x), []
    for step, clients in rounds_of(eta, cohorts):
        w, y = share(n, clients), {}
        for i in clients:

            def direction(z, i=i, delta=delta):
                return alpha * problem.gradient(i, z) + (1 - alpha) * delta

            y[i] = descend(direction, x, K[i], step, momentum)
        delta = mean(w, {i: (x - y[i]) / (step * work[i]) for i in clients})
        x = x - server_lr * step * mean(w, work) * delta
        path.append(x)
    return path


def fedacg(problem, n, K, x, eta, cohorts, momentum, mu):
    m, path = np.zeros_like(x), []
    for step, clients in rounds_of(eta, cohorts):
        z0 = x + momentum * m
        y = {
            i: descend(lambda z, i=i, z0=z0: problem.gradient(i, z) + mu * (z - z0), z0, K[i], step)
            for i in clients
        }
        m = momentum * m + mean(share(n, clients), {i: y[i] - z0 for i in clients})
        x = x + m
        path.append(x)
    return path


def mime(problem, n, K, x, eta, cohorts, momentum, lite):
    m, path = np.zeros_like(x), []
    for step, clients in rounds_of(eta, cohorts):
        w = share(n, clients)
        c = mean(w, {i: problem.gradient(i, x) for i in clients})

        def direction(z, i, m=m, x=x, c=c):
            g = problem.gradient(i, z)
            if not lite:
                g = g - problem.gradient(i, x) + c
            return (1 - momentum) * g + momentum * m

        y = {i: descend(lambda z, i=i: direction(z, i), x, K[i], step) for i in clients}
        m = (1 - momentum) * c + momentum * m
        x = mean(w, y)
        path.append(x)
    return path


def fedvarp(problem, n, K, x, eta, cohorts, server_lr, mifa):
    """The server keeps G_i = (x~ - x_i) / eta of the client's last round."""
    everyone = share(n, range(len(n)))
    G, path = {i: np.zeros_like(x) for i in everyone}, []
    for step, clients in rounds_of(eta, cohorts):
        w = share(n, clients)
        new = {i: (x - descend(lambda z, i=i: problem.gradient(i, z), x, K[i], step)) / step for i in clients}
        reduced = mean(w, {i: new[i] - G[i] for i in clients}) + mean(everyone, G)
        G.update(new)
        x = x - server_lr * step * (mean(everyone, G) if mifa else reduced)
        path.append(x)
    return path


def fedexp(problem, n, K, x, eta, cohorts, eps):
    path = []
    for step, clients in rounds_of(eta, cohorts):
        w = share(n, clients)
        D = {i: x - descend(lambda z, i=i: problem.gradient(i, z), x, K[i], step) for i in clients}
        average = mean(w, D)
        spread = sum(w[i] * D[i] @ D[i] for i in clients)
        x = x - max(1.0, spread / (2 * (average @ average + eps))) * average
        path.append(x)
    return path


def scaffnew(problem, n, K, x, eta, cohorts, p):
    h, path = {i: np.zeros_like(x) for i in range(len(n))}, []
    for step, clients in rounds_of(eta, cohorts):
        y = {i: descend(lambda z, i=i: problem.gradient(i, z) - h[i], x, K[i], step) for i in clients}
        x = mean(share(n, clients), y)
        for i in clients:
            h[i] = h[i] + p / step * (x - y[i])
        path.append(x)
    return path


def fedsam(problem, n, K, x, eta, cohorts, rho):
    def direction(z, i):
        g = problem.gradient(i, z)
        return problem.gradient(i, z + rho * g / np.linalg.norm(g))

    path = []
    for step, clients in rounds_of(eta, cohorts):
        y = {i: descend(lambda z, i=i: direction(z, i), x, K[i], step) for i in clients}
        x = mean(share(n, clients), y)
        path.append(x)
    return path


def fedlesam(problem, n, K, x, eta, cohorts, rho):
    received, path = {}, []
    for step, clients in rounds_of(eta, cohorts):
        y = {}
        for i in clients:
            back = received.get(i, x) - x
            length = np.linalg.norm(back)
            p = rho * back / length if length > 0 else 0 * x
            y[i] = descend(lambda z, i=i, p=p: problem.gradient(i, z + p), x, K[i], step)
            received[i] = x
        x = mean(share(n, clients), y)
        path.append(x)
    return path


def fedper(problem, n, K, x, eta, cohorts, personal, server=lambda delta: delta):
    """`personal` marks the client's own coordinates. Return the models of the server and of all clients.

    `server` is the rule of the server for the shared coordinates: what is added to x.
    """
    own, path = {i: x.copy() for i in range(len(n))}, []
    for step, clients in rounds_of(eta, cohorts):
        y = {i: np.where(personal, own[i], x) for i in clients}
        y = {i: descend(lambda z, i=i: problem.gradient(i, z), y[i], K[i], step) for i in clients}
        x = np.where(personal, x, x + server(mean(share(n, clients), y) - x))
        own |= y
        path.append([x, *(np.where(personal, own[i], x) for i in range(len(n)))])
    return path


def ditto(problem, n, K, x, eta, cohorts, mu, server=lambda delta: delta):
    """Algorithm 1 of Li et al. Return the models of the server and of all clients."""
    v, path = {i: x.copy() for i in range(len(n))}, []
    for step, clients in rounds_of(eta, cohorts):
        y = {i: descend(lambda z, i=i: problem.gradient(i, z), x, K[i], step) for i in clients}
        for i in clients:
            v[i] = descend(lambda z, i=i, x=x: problem.gradient(i, z) + mu * (z - x), v[i], K[i], step)
        x = x + server(mean(share(n, clients), y) - x)
        path.append([x, *(v[i] for i in range(len(n)))])
    return path


def heterofl(data, n, K, weights, eta, cohorts, levels, scaler):
    """Two linear layers, y = W2 (W1 a) / r, in sub-networks of k = ceil(r h) hidden channels.

    `data` has the inputs and targets of every client, `weights` are W1 [h, d] and W2 [1, h].
    """
    W1, W2 = weights
    h, path = len(W1), []
    for step, clients in rounds_of(eta, cohorts):
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
                U, V = U - step * dU, V - step * dV[None]
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

    def __init__(self, like, decay, betas=(0.9, 0.999), eps=1e-8):
        self.decay, self.betas, self.eps = decay, betas, eps
        self.m, self.v, self.t = np.zeros_like(like), np.zeros_like(like), 0

    def step(self, x, g, lr):
        (b1, b2), self.t = self.betas, self.t + 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        mhat, vhat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return x - lr * (mhat / (np.sqrt(vhat) + self.eps) + self.decay * x)


def diloco(problem, n, K, x, eta, cohorts, server_lr, momentum, merge, keep, decay, calibration):
    """Algorithm 1 of Douillard et al. with K_i inner steps, and Nesterov's momentum on the outer gradient."""
    everyone, path, velocity = share(n, range(len(n))), [], np.zeros_like(x)
    inner, nu = {}, {i: problem.gradient(i, x) for i in everyone}
    for step, clients in rounds_of(eta, cohorts):
        w, y, c = share(n, clients), {}, mean(everyone, nu)
        for i in clients:
            if i not in inner or not keep:
                inner[i] = AdamW(x, decay)
            y[i], gradients = x.copy(), []
            for _ in range(K[i]):
                gradients.append(problem.gradient(i, y[i]))
                correction = calibration * (c - nu[i]) if merge == "calibrated" else 0
                y[i] = inner[i].step(y[i], gradients[-1] + correction, step)
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
