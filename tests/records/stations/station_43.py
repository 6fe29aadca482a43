"""#43 CautiousWD: NorMuon, whose weights decay where the step shrinks them."""

import torch
from lineage_oracles import size_of
from stations import station_40


class Station(station_40.Station):
    num_iterations = 2205
    muon_lr = 0.03
    muon_factors = {"c_fc": 2}
    muon_decay = 1.2
    second_axis = -2  # of a matrix, along which second moments are averaged
    cooldown_frac = 0.5

    def stage(self, step):
        return 3 * step // self.num_iterations if step < self.num_iterations else 3

    def muon_momentum(self, step):
        return super(station_40.Station, self).muon_momentum(step)

    def moments_axis(self, U):
        return self.second_axis

    def muon_change(self, U, p, state, factor):
        """U by its second moments, https://arxiv.org/abs/2510.05491, at its old Frobenius norm,
        and the decay."""
        moments = (U**2).mean(self.moments_axis(U), keepdim=True)
        state["second"] = state["second"] + (1 - self.second_beta) * (moments - state["second"])
        scaled = U / state["second"].clamp(min=1e-10).sqrt()
        U = scaled * (size_of(U) / size_of(scaled).clamp(min=1e-10))
        decayed = torch.where(U * p >= 0, p, 0.0)
        return U + self.muon_lr * factor * self.muon_decay * decayed
