"""The third of seven steps to #92: ANVIL in place of NorMuon's momentum and decay. It has no
public number.

Two means of gradients, a fast and a slow one, are blended from some step on. Six maps bring the
singular values nearer to 1, and a weight decays where the slow mean would shrink it.
"""

import torch
from stations import station_92b

MAPS = (  # coefficients of X, A X and A² X
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245))


def mapped(V):
    """V (R, C) with singular values near 1."""
    X = V / (1.05 * V.norm() + 1e-6)
    for a, b, c in MAPS:
        if X.size(0) > X.size(1):
            A = X.T @ X
            X = a * X + X @ (b * A + c * A @ A)
        else:
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
    return X


def equalized(X, seen):
    """X with its lanes by their mean squares, of the size of before, and these means. A lane is a
    row, or a column where there are more columns than rows."""
    lane = 1 if X.size(0) >= X.size(1) else 0
    p, length = (X**2).mean(lane, keepdim=True), X.size(lane)
    seen = seen + 0.1 * (p - seen)
    g = seen.clamp(min=1e-10) ** -0.5
    return X * g * X.norm() / (p * length * g**2).sum().sqrt().clamp(min=1e-10), seen


class Station(station_92b.Station):
    momentum = (0.85, 0.93)
    momentum_warmup = 240
    blend_from = 514  # the step that begins to blend the means
    muon_decay = 2.25

    def optimizer_state(self, weights):
        state = super().optimizer_state(weights)
        for name, p in weights.items():
            if self.is_muon(name):
                zeros = [torch.zeros_like(W) for W in p.view(-1, *p.shape[-2:])]
                state[name] = dict(fast=zeros, slow=list(zeros), second=[0.0] * len(zeros))
        return state

    def muon_step(self, p, grad, state, step, lr):
        """Matrix by matrix. The step ahead keeps the momentum of the step, also once the fast mean
        has another one."""
        beta, c = self.muon_momentum(step), self.rate_factor(step)
        blends = step >= self.blend_from
        matrices = zip(p.view(-1, *p.shape[-2:]), grad.reshape(-1, *p.shape[-2:]))
        for index, (W, G) in enumerate(matrices):
            F, S = state["fast"][index], state["slow"][index]
            F = F + (1 - (0.85 if blends else beta)) * (G - F)
            S = S + 0.02 * (G - S)
            M = 0.4385 * F + 0.5615 * S if blends else F
            U, second = equalized(mapped(G + beta * (M - G)), state["second"][index])
            decayed = torch.where(S * W >= 0, W, 0.0)
            W -= lr * c * (U + self.muon_decay * self.muon_lr * c * decayed)
            state["fast"][index], state["slow"][index] = F, S
            state["second"][index] = second
