"""Hold a script of records/optimizers/ against the reference, in float64, on one rank.

    from compare import hold, load
    script = load("2026-05-03_o12_Muon")
    assert max(hold(script, "o12", steps=10)) < 1e-12  # losses, gradients, weights
    assert hold_rates(script, "o12") < 1e-12           # rates and momentum of all steps
    assert hold_first_weights(script, "o12") < 1e-12   # laws of the first weights

Here alone stands what knows a script's interface. The script trains by its own loop, schedule and
optimizers at a small size, with the rates and the number of steps of the record. Each number of
the result is the largest difference of any entry, over the largest entry of its tensor.
"""

from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import golden
import reference
import reference_branches as branches
import reference_initial as first_weights
import torch
from reference_model import rows_of

SIZES = dict(
    vocab_size=61, vocab_multiple=16, eot_token=60, model_dim=32, head_dim=8, num_layers=2,
    seq_len=32, val_seq_len=32, sequences_per_step=8, sequences_per_forward=8, head_chunks=1,
    device="cpu",
)


class Difference(NamedTuple):
    """Between script and reference: the largest of any step, relative to a tensor's largest."""

    losses: float
    gradients: float
    weights: float  # at which gradients are taken, and in the end
    validated: float  # at which the script validates
    factors: float  # of results 19 and 25, whose bases are taken over


def load(folder):
    """The script of a folder of records/optimizers/, as a module."""
    return golden.load(golden.REPO / "records" / "optimizers" / folder)


def reference_name(name):
    """A parameter's name in the reference, of its name in the script."""
    for theirs, ours in (
        ("lm_head.", "head."), ("embed.weight", "embed"), (".gain", ""), (".c_", "."),
    ):
        name = name.replace(theirs, ours)
    return name


def weights_of(model):
    """The script's weights by the reference's names; copies."""
    return {reference_name(name): param.detach().clone()
            for name, param in model.named_parameters()}


def gradients_of(model):
    """Its gradients by the reference's names; copies."""
    return {reference_name(name): param.grad.clone()
            for name, param in model.named_parameters()}


def make_generic(model, seed):
    """Give every parameter weights of some size, none of them zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            if name.endswith(".gain"):
                param.copy_(1 + 0.1 * noise)
            elif name.endswith(".bias"):
                param.copy_(0.1 * noise)
            elif name == "embed.weight":
                param.copy_(noise)
            else:
                param.copy_(noise * 0.6 / param.shape[1] ** 0.5)


def relative(found, expected, moving=None):
    """The largest difference of an entry over the largest entry; of dictionaries of tensors.

    moving: gradients; where one is zero the entry is left out.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    largest = 0.0
    for name, value in expected.items():
        size = value.abs().max().item() or 1.0
        difference = (found[name] - value).abs()
        if moving:
            difference = difference.where(moving[name] != 0, 0.0)
        share = difference.max().item() / size
        largest = max(largest, share if share == share else float("inf"))
    return largest


class Harness:
    """The harness's side of a script's `train`, which runs the reference beside it."""

    def __init__(self, script, cfg, label, steps, first_step, own_init, shared, follows, seed,
                 resumed, around):
        self.cfg = cfg
        self.script = script
        self.first_step = first_step
        self.last_step = first_step + steps
        self.shared = shared
        self.follows = follows
        self.moving = None  # the last gradients, where the reference follows
        self.resumed = resumed
        self.loader = self
        self.ranks = script.Ranks(cfg)
        self.model = script.GPT(cfg)
        self.model.init_weights(torch.Generator().manual_seed(seed))
        if not own_init:
            make_generic(self.model, seed)
        self.build_optimizers()
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.reference = reference.Run(label, weights_of(self.model), cfg.head_dim, first_step,
                                       rotary_base=cfg.rope_base, **around)
        self.worst = dict.fromkeys(Difference._fields, 0.0)
        self.update = self.reference.result.update
        if self.update is branches.whitened_muon:
            self.take_over_first_bases()
        if self.update is branches.psgd:
            self.reference.draw = self.drawn
        average = self.reference.result.average
        if average and first_step >= average.first:
            self.begin_average()

    def build_optimizers(self):
        """As the script does, for the model that there is."""
        self.optimizers = self.script.build_optimizers(self.model, self.cfg, self.ranks)
        for optimizer in self.optimizers:
            optimizer.dtype = torch.float64

    def resume(self):
        """Go on with a new model and new optimizers, from what a checkpoint keeps."""
        weights = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        kept = {optimizer.name: optimizer.full_state() for optimizer in self.optimizers}
        self.model = self.script.GPT(self.cfg)
        self.build_optimizers()
        state = dict(model=weights, optimizers=kept)
        self.script.load_state(self.model, self.optimizers, state, "a checkpoint")

    def train(self):
        """Run the script's own loop, and compare in the end, too."""
        self.script.train(self, self.cfg)
        found = weights_of(self.model)
        self.note("weights", relative(found, self.reference.weights, self.moving))
        return Difference(**self.worst)

    def places(self):
        """Each hidden matrix's name, the script's optimizer of it, and its place in there."""
        members = {}  # name of a group → its parameters' names, in order
        for name, param in self.model.named_parameters():
            members.setdefault(param.group, []).append(reference_name(name))
        for optimizer in self.optimizers:
            if not isinstance(optimizer, self.script.Adam):
                for place, name in enumerate(members[optimizer.name]):
                    yield name, optimizer, place

    def take_over_first_bases(self):
        """Of result 18, which are random."""
        for name, optimizer, place in self.places():
            for side in ("left_basis", "right_basis"):
                self.reference.states[name][side] = optimizer.state[side][place].clone()

    def begin_average(self):
        """Let the average of weights begin with the weights, in both."""
        kept = {name: weight for name, weight in self.reference.weights.items() if name != "embed"}
        self.reference.around["average"] = kept
        for optimizer in self.optimizers:
            if "average" in optimizer.state:
                optimizer.state["average"].copy_(optimizer.share)

    def drawn(self, name, what, shape, step):
        """A probe of result 33, as the script draws it."""
        for other, optimizer, place in self.places():
            if other == name:
                optimizer.draw_probes(step)
                return optimizer.probes[("probe", "noise").index(what)][place]
        raise KeyError(name)

    def take_over_bases(self):
        """Give the reference of results 19 and 25 the script's bases.

        A basis of a matrix of less than full rank is rounding in part. The factors are compared;
        the mean, which is kept in the bases, is turned with them.
        """
        for name, optimizer, place in self.places():
            ours = self.reference.states[name]
            if "left" not in ours:
                continue
            theirs = {key: value[place] for key, value in optimizer.state.items() if value.ndim}
            for side in ("left", "right"):
                self.note("factors", relative({side: theirs[side]}, {side: ours[side]}))
            mean = ours["left_basis"] @ ours["mean"] @ ours["right_basis"].T
            for side in ("left_basis", "right_basis"):
                ours[side] = theirs[side].clone()
            ours["mean"] = ours["left_basis"].T @ mean @ ours["right_basis"]

    def follow(self, weights):
        """Go on from the script's weights, as if the reference's last update had led to them."""
        running, result = self.reference, self.reference.result
        ways = {name: weight - running.weights[name] for name, weight in weights.items()}
        if result.look_ahead:
            for what, share in (("moves", 0.01), ("previous", 1.0)):
                running.around[what] = {name: kept + share * ways[name]
                                        for name, kept in running.around[what].items()}
        if "average" in running.around:
            share = 1.0 if running.step == result.average.first else 1 / result.average.tau
            running.around["average"] = {name: kept + share * ways[name]
                                         for name, kept in running.around["average"].items()}
        running.weights = weights

    def note(self, what, difference):
        self.worst[what] = max(self.worst[what], difference)

    # -- what `train` calls --

    def validate_and_save(self, step, can_save):
        if step == self.resumed:
            self.resume()
        self.model.eval()
        found = weights_of(self.model)
        self.note("validated", relative(found, self.reference.read(), self.moving))
        self.model.train()
        return step == self.last_step

    def next_step(self, now):
        count = self.cfg.sequences_per_step * now.seq_len + 1
        tokens = torch.randint(self.cfg.vocab_size, (count,), generator=self.generator)
        self.batch = rows_of(tokens, now.seq_len)
        place = self.script.Place()
        rows, _ = self.script.cut_rows(tokens.numpy(), None, place, now, self.cfg)
        return [self.script.to_batch(rows, self.ranks.device)]

    def exchange_losses(self, step, losses):
        """Called between a step's gradients and its update."""
        if self.update is branches.kl_soap:
            self.take_over_bases()
        self.reference.move_ahead()
        weights = weights_of(self.model)
        self.note("weights", relative(weights, self.reference.weights, self.moving))
        if self.follows:
            self.follow(weights)
        loss, expected = self.reference.gradients_of(self.batch)
        self.note("losses", abs(losses[0].item() - loss) / abs(loss))
        found = gradients_of(self.model)
        if self.reference.result.of_mean_loss:  # the script divides when it updates
            found = {name: grad / self.reference.tokens for name, grad in found.items()}
        self.note("gradients", relative(found, expected))
        if self.follows:
            self.moving = found
        self.reference.update(found if self.shared else expected)

    def log_step(self, step):
        pass

    def log(self, text):
        pass


def hold(script, label, steps=10, first_step=0, own_init=False, share_gradients=True,
         share_weights=False, seed=0, resumed=None, sizes=None, change=None, **around):
    """Run a script's small model and the reference side by side. Returns a Difference.

    first_step: the step with which both begin, their states empty.
    own_init: begin with the script's own first weights; else all weights are unlike zero.
    share_gradients: the reference takes its steps by the script's gradients, which it only
    compares with its own. Bases of matrices of less than full rank need that: they hang on the
    last bit. Without it, both run freely.
    share_weights: each step of the reference begins with the script's weights, once compared, and
        with states of its own. Over hundreds of steps rounding grows in weights, not in states.
        Entries without a gradient are not compared: where a unit is off for all tokens its update
        is rounding, of which a cautious decay takes the sign.
    resumed: the step before which the script's side is saved and built anew.
    sizes: settings beside SIZES. change(harness): what is to be done before the first step.
    around: settings of reference.Run: calls_before, draw, states.
    """
    with golden.in_float64():
        cfg = replace(script.Hyperparameters(), **SIZES | (sizes or {}))
        harness = Harness(script, cfg, label, steps, first_step, own_init, share_gradients,
                          share_weights, seed, resumed, around)
        if change:
            change(harness)
        return harness.train()


def hold_rates(script, label):
    """The largest difference of a rate, relative to a rate early in the run, or of the momentum.

    Of every parameter and step, as the optimizers get them.
    """
    with golden.in_float64():
        cfg = replace(script.Hyperparameters(), **SIZES)
        result = reference.result_of(label)
        assert cfg.num_iterations == result.steps, (cfg.num_iterations, result.steps)
        model = script.GPT(cfg)
        members = {}  # name of a group → parameters in it
        for name, param in model.named_parameters():
            members.setdefault(param.group, []).append(reference_name(name))
        optimizers = script.build_optimizers(model, cfg, script.Ranks(cfg))
        for optimizer in optimizers:
            optimizer.step_fn = lambda *args, **settings: None
        sizes = reference.rates(label, result.steps // 4)
        worst = 0.0
        for step in range(result.steps):
            now = script.schedule(step, cfg)
            expected = reference.rates(label, step)
            for optimizer in optimizers:
                kind = script.Adam if isinstance(optimizer, script.Adam) else script.MatrixOptimizer
                kind.update_share(optimizer, optimizer.weights, now)
                for rate in {reference.rate_group(name) for name in members[optimizer.name]}:
                    difference = abs(optimizer.lr.item() - expected[rate])
                    worst = max(worst, difference / sizes[rate])
                if "momentum" in getattr(optimizer, "scheduled", {}):
                    momentum = optimizer.scheduled["momentum"].item()
                    worst = max(worst, abs(momentum - result.momentum(step)))
    return worst


def hold_first_weights(script, label):
    """The largest difference of a parameter's law: its deviation, its bound, or its constant.

    Of twelve layers. Where draws are normal, the deviation stands in place of each, and where they
    are uniform, the bound. Gain signs are drawn; the two norms of a block mirror each other, and
    blocks of a pair cancel.
    """
    def deviation(tensor, mean=0.0, std=1.0, generator=None):
        return tensor.fill_(mean + std)

    def bound(tensor, low=0.0, high=1.0, generator=None):
        assert low == -high, (low, high)
        return tensor.fill_(high)

    cfg = replace(script.Hyperparameters(), **SIZES | dict(num_layers=12))
    with golden.in_float64(), mock.patch.multiple(torch.Tensor, normal_=deviation, uniform_=bound):
        model = script.GPT(cfg)
        model.init_weights(torch.Generator().manual_seed(0))
    found = weights_of(model)
    initial = reference.result_of(label).initial
    laws = first_weights.laws(initial, {name: weight.shape for name, weight in found.items()})
    expected = {name: torch.full_like(found[name], law.scale) for name, law in laws.items()}

    strength = first_weights.GAIN_SIGNS.get(initial)
    if strength:
        signs = []
        for layer in range(cfg.num_layers):
            first = f"blocks.{layer}.norm1"
            signs.append((1 - found[first]).sign())
            expected[first], expected[f"blocks.{layer}.norm2"] = first_weights.gains(
                signs[-1], strength)
        assert all(abs(sign.mean()) < 1 for sign in signs)
        if initial == "line44":
            for layer in range(first_weights.FIRST_PAIR, cfg.num_layers, 2):
                assert (signs[layer].sum() + signs[layer + 1].sum()) == 0, layer
    return relative(found, expected)


def boundaries(label):
    """Steps at which something of a result changes, and its last one."""
    result = reference.result_of(label)
    steps = range(result.steps)
    curves = [[result.momentum(step) for step in steps]]
    for name in reference.rates(label, 0):
        curves.append([reference.rates(label, step)[name] for step in steps])

    found = {result.steps - 1}
    for curve in curves:
        for step in steps[1:-1]:
            bend = curve[step + 1] - 2 * curve[step] + curve[step - 1]
            if abs(bend) > 1e-4 * max(curve):
                found.add(step)
    if result.look_ahead:
        found |= {result.look_ahead.first, result.look_ahead.last}
    if result.average:
        found |= {result.average.first, result.average.end}
    update = result.update.__name__
    found |= {
        "soap_trusted": {1375, 1625}, "soap_everywhere": {1375, 1625}, "row_floor": {1375, 1625},
        "soft_muon": {2000, 2500, 2908}, "radial_brake": {2000, 2500, 2908},
        "aurora_proj": {2500}, "newton_muon": {63, 127}, "dynamic_muon": {128},
    }.get(update, set())
    if result.outer:
        found.add(result.outer.every)
    return sorted(step for step in found if step < result.steps)
