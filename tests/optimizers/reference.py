"""An independent reference of the second ladder, in float64, written from specifications alone.

It is plain and slow: one process, whole matrices one by one, nothing compiled, sharded or rounded.
Scripts of records/optimizers/ are held against it (compare.py).

    RESULTS["o36"]                          all that defines a run of the public result 36
    rates("o36", step)                      the learning rate of each group
    run("o36", weights, batches, steps=10)  trains a small model, returns losses and weights

The model and the names of its weights are in reference_model.py, the first weights in
reference_initial.py, schedules in reference_schedules.py, the update of one matrix in
reference_line.py and reference_branches.py, made from the pieces in reference_parts.py.

What a float64 port has to know:
- Casts to bf16 and fp32 are dropped. Constants named explicitly stay (2⁻²³ in result 33).
- Gradients are those of the SUM of the loss over the tokens of a step (result 33: of the mean).
- A Gram matrix of a tall matrix has no full rank before its fourth gradient. Its last eigenvectors
  and QR columns are rounding, which SOAP and its like make visible. Two ports then agree only where
  they are equal bit for bit: the same gradients, averages by torch.lerp with the weight 1 − β (not
  0.1, and no tensor in another type), the products `G @ G.T`, `G.T @ G`, `Q.T @ G @ R`,
  `gram @ basis`, and the library's eigh and qr. Batches of matrices give the same bits as single
  ones on a CPU with one thread.
- Signs of a basis's columns never matter; their order does where QR iteration follows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import reference_branches as branches
import reference_line as line
import torch
from reference_model import MATRIX_KINDS, ROTARY_BASE, gradients, group, matrix_kind
from reference_parts import adam
from reference_schedules import (
    FIRST_RATE,
    clip,
    constant_momentum,
    flat_then_linear,
    momentum_schedule,
    power_cool,
)

# ---- What defines a run ----


@dataclass(frozen=True)
class LookAhead:
    """EMA-Nesterov: before the forward pass all weights go on along the mean of their moves."""

    strength: float
    first: int  # step of the window
    last: int


@dataclass(frozen=True)
class OuterStep:
    """MuLoCo: after every so many steps Nesterov's momentum on the way that all weights went."""

    lr: float
    momentum: float
    every: int


@dataclass(frozen=True)
class TailAverage:
    """A mean of late weights, all but the embedding, of which a share is validated."""

    first: int  # number of updates at which the mean begins
    end: int  # and before which it ends
    tau: float  # its time constant, in steps
    share: float  # of the mean, in the mixture
    written: bool = False  # whether the mixture is the last weights, or only what is validated


@dataclass(frozen=True)
class Aux:
    """Adam of what is not a hidden matrix."""

    beta2: dict  # by group: embed, head, gains, biases, proj_biases
    decay: float = 0.0
    corrected_vectors: bool = True  # whether vectors have bias corrections
    beta1: float = 0.8
    epsilon: float = 1e-10


def same_beta2(beta2):
    """One β₂ for all groups."""
    return dict.fromkeys(("embed", "head", "gains", "biases", "proj_biases"), beta2)


@dataclass(frozen=True)
class Result:
    """A public result. Rates and momentum are functions of the step, counted from 0."""

    steps: int  # updates of a whole run
    initial: str  # of reference_initial.py
    update: Callable  # of one matrix
    matrix_rate: Callable  # (step, kind of matrix) → lr
    aux_rate: Callable  # (step, embed, head or vector) → lr
    matrix_decay: dict = field(default_factory=lambda: dict.fromkeys(MATRIX_KINDS, 0.0))
    momentum: Callable = constant_momentum
    aux: Aux = Aux(beta2=same_beta2(0.95))
    update_pair: Callable | None = None  # of attn.v and attn.proj together
    look_ahead: LookAhead | None = None
    outer: OuterStep | None = None
    average: TailAverage | None = None
    of_mean_loss: bool = False


def for_all(number):
    """The same number for each kind of matrix."""
    return dict.fromkeys(MATRIX_KINDS, number)


def scaled(first_rates, factor):
    """Rates that have one factor of the step. first_rates: a number, or one for each group."""
    def rate(step, name):
        first = first_rates[name] if isinstance(first_rates, dict) else first_rates
        return first * factor(step)
    return rate


def falling(total, cooldown):
    """The factor of a schedule that is flat and then linear."""
    return lambda step: flat_then_linear(step, total, cooldown)


OLD_AUX = {"embed": 0.3, "head": 1 / 320, "vector": 0.01}
NEW_AUX = {"embed": 0.7, "head": 0.004, "vector": 0.015}


def plain(steps, initial, update, lr, decay=0.0, **changes):
    """A result whose rates are flat and then fall linearly to zero in the last 70 percent."""
    factor = falling(steps, 0.7)
    return Result(steps, initial, update, matrix_rate=scaled(lr, factor),
                  aux_rate=scaled(OLD_AUX, factor), matrix_decay=for_all(decay), **changes)


def hyperball(steps, update, lr=0.018, initial="hyperball", **changes):
    """A result on a ball: matrices fall from the first step on, the rest in the last 40 percent."""
    return Result(steps, initial, update, matrix_rate=scaled(lr, falling(steps, 1.0)),
                  aux_rate=scaled(OLD_AUX, falling(steps, 0.4)), **changes)


def of_line(steps, end, update, initial="old", **changes):
    """A result of the line from 20 on, with PowerCool up to `end`."""
    return Result(
        steps, initial, update,
        matrix_rate=lambda step, kind: power_cool(step, end, "matrix"),
        aux_rate=lambda step, name: power_cool(step, end, name),
        **changes,
    )


# ---- Schedules of single results ----


def warmed_up(step):
    """Of result 2: 250 steps of warm-up, for all groups."""
    return min(1.0, (step + 1) / 250) * flat_then_linear(step, 5625, 0.7)


def warmed_up_from_zero(step):
    """Of result 4's matrices."""
    return step / 250 if step < 250 else 1 - step / 4875


def to_a_floor(cooldown, floor):
    """Of result 25: a power of 1.5 that ends above zero, by a schedule longer than the run."""
    def factor(step):
        x = flat_then_linear(step, 3125, cooldown)
        return floor + (1 - floor) * x ** 1.5
    return factor


def muown_factor(step):
    """Of result 23: a power of 0.9, by a schedule longer than the run."""
    if step / 3165 < 0.3:
        return 1.0
    return ((1 - step / 3165) / 0.7) ** 0.9


def half_flat_to_a_tenth(step):
    """Of result 33's Adam."""
    return 1 - 0.9 * clip((step - 1700) / 1700)


# ---- The results ----

PAIR_GROUPS = {"embed": 0.99, "head": 0.99, "gains": 0.99, "biases": 0.997, "proj_biases": 0.9965}
SLOW_AUX = Aux(beta2=same_beta2(0.99))
SPLIT_AUX = Aux(beta2=PAIR_GROUPS, corrected_vectors=False)
LINE_LOOK_AHEAD = LookAhead(strength=0.3, first=300, last=1949)

RESULTS = {
    # Muon and its relatives
    "o1": plain(3600, "old", line.muon, lr=0.02, decay=0.01),
    "o2": Result(
        5625, "old", line.adamw, scaled(0.0015, warmed_up), scaled(OLD_AUX, warmed_up),
        matrix_decay=for_all(0.10),
    ),
    "o3": plain(3500, "old", line.muon, lr=0.025, decay=0.0125),
    "o4": Result(
        4875, "hyperball", line.adam_hyperball, scaled(0.018, warmed_up_from_zero),
        scaled(OLD_AUX, falling(4875, 0.4)),
    ),
    "o5": hyperball(3325, line.muon_hyperball),
    "o6": plain(3375, "new", line.muon, lr=0.025, decay=0.025),
    "o7": plain(3325, "old", line.muon_squared, lr=0.10, decay=0.0125),
    "o8": hyperball(3275, line.normuon_hyperball),
    "o9": plain(3250, "old", line.normuon_floored, lr=0.0375),
    "o10": plain(3300, "new", line.normuon_decayed, lr=0.035, decay=0.025),
    "o11": plain(3225, "old", line.contra_muon, lr=0.0375),
    "o12": plain(3350, "new", line.muon, lr=0.035, decay=0.025),
    "o13": hyperball(3210, line.normuon_hyperball, outer=OuterStep(0.7, 0.5, every=30)),
    "o14": plain(3175, "old", line.soap_mlp, lr=0.0375),
    "o15": replace(
        plain(
            3300, "new", branches.newton_muon,
            lr={"attn.q": 0.020, "attn.k": 0.020, "attn.v": 0.020, "attn.proj": 0.025,
                "mlp.fc": 0.030, "mlp.proj": 0.030},
        ),
        matrix_decay=for_all(0.025) | {"mlp.fc": 0.0375},
    ),
    "o16": plain(3175, "old", line.soap_trusted, lr=0.0375),
    "o17": plain(3200, "new", line.aurora, lr=0.0375),
    "o18": plain(3250, "new", branches.whitened_muon, lr=0.035, decay=0.025),
    "o19": hyperball(3125, branches.kl_soap),
    "o21": plain(4150, "new", branches.shampoo, lr=0.0015, decay=0.2),
    "o22": plain(8500, "new", line.muon, lr=0.03, decay=0.015, momentum=lambda step: 0.0),
    "o23": Result(
        3090, "new", branches.muown, scaled(0.00325, muown_factor),
        scaled({"embed": 0.6, "head": 0.009375, "vector": 0.03}, muown_factor),
    ),
    "o24": Result(
        3175, "old", line.contra_muon, scaled(0.0375, falling(3175, 0.8)),
        scaled(OLD_AUX, falling(3175, 0.4)),
    ),
    "o25": Result(
        3040, "hyperball", branches.kl_soap, scaled(0.018, to_a_floor(1.0, 0.017)),
        scaled(OLD_AUX, to_a_floor(0.4, 0.04)),
    ),
    "o26": plain(3125, "new", branches.sink_soap, lr=0.04, decay=0.025),
    "o27": Result(
        3125, "hyperball", branches.soap_hyperball,
        scaled(0.018, lambda step: (1 - step / 3200) ** 1.25),
        scaled(OLD_AUX, falling(3125, 0.4)),
    ),
    "o28": plain(3200, "new", branches.dynamic_muon, lr=0.02, decay=0.025),
    "o33": Result(
        3400, "psgd", branches.psgd, scaled(0.025, falling(3400, 1.0)),
        scaled(OLD_AUX, half_flat_to_a_tenth), of_mean_loss=True,
    ),
    "o35": plain(3375, "new", branches.shampoo_pseudo, lr=0.01, decay=0.1),
    "o36": Result(
        3250, "new", line.muon, scaled(0.025, falling(3250, 0.7)),
        scaled(NEW_AUX, falling(3250, 0.7)), matrix_decay=for_all(0.05),
        aux=Aux(beta2=same_beta2(0.95), decay=0.001),
    ),
    "o37": Result(
        3250, "hyperball_normal", line.muon_hyperball, scaled(0.018, falling(3250, 1.0)),
        scaled({"embed": 0.91, "head": 0.0064, "vector": 0.0195}, falling(3250, 0.85)),
        aux=Aux(beta2=same_beta2(0.95), decay=0.001),
    ),
    "o39": plain(3150, "new", line.muon, lr=0.035, decay=0.025,
                 look_ahead=LookAhead(strength=0.6, first=500, last=2399)),
    # The record's line
    "o20": of_line(3040, 3105, line.soft_muon),
    "o29": of_line(3020, 3105, line.radial_brake),
    "o30": of_line(3020, 3050, line.aurora_proj, "line30", aux=SLOW_AUX,
                   momentum=momentum_schedule(3020, 100)),
    "o40": of_line(2900, 2980, line.aurora_proj, "line30", aux=SLOW_AUX,
                   momentum=momentum_schedule(2900, 100), look_ahead=LINE_LOOK_AHEAD),
    "o41": of_line(2900, 2980, line.aurora_proj, "line30", aux=SLOW_AUX,
                   momentum=momentum_schedule(2900, 100), look_ahead=LINE_LOOK_AHEAD,
                   update_pair=line.circuit_pair),
    "o44": of_line(2900, 2900, line.soap_everywhere, "line44", aux=SPLIT_AUX,
                   momentum=momentum_schedule(2900, 200), look_ahead=LINE_LOOK_AHEAD),
    "o45": of_line(2720, 2900, line.soap_everywhere, "line44", aux=SPLIT_AUX,
                   momentum=momentum_schedule(2900, 200), look_ahead=LINE_LOOK_AHEAD,
                   average=TailAverage(2000, 2721, tau=150, share=0.6, written=True)),
    "o46": of_line(2900, 2900, line.row_floor, "line44", aux=SPLIT_AUX,
                   momentum=momentum_schedule(2900, 200), look_ahead=LINE_LOOK_AHEAD,
                   average=TailAverage(2400, 2900, tau=150, share=0.6)),
}


def result_of(label):
    """A result by its label; a Result is its own."""
    return RESULTS[label] if isinstance(label, str) else label


def rate_group(name):
    """The name in `rates` of a parameter's rate."""
    kind = group(name)
    return kind if kind in ("embed", "head", *MATRIX_KINDS) else "vector"


def rates(label, step):
    """The learning rate of embed, head, vector and each kind of matrix, at a step."""
    result = result_of(label)
    found = {name: result.aux_rate(step, name) for name in FIRST_RATE if name != "matrix"}
    return found | {kind: result.matrix_rate(step, kind) for kind in MATRIX_KINDS}


def look_ahead_strength(label, step):
    """How far the weights go on along the mean of their moves, before the step's forward pass.

    The rate by which it falls is that of the embedding in the step before.
    """
    result = result_of(label)
    window = result.look_ahead
    if window is None or not window.first <= step <= window.last:
        return 0.0
    ratio = result.aux_rate(step - 1, "embed") / result.aux_rate(0, "embed")
    return window.strength * ratio


# ---- Running ----


@dataclass
class Trace:
    """What a run did. Index i of the lists is after i updates; losses have one for each update."""

    losses: list = field(default_factory=list)  # nats per token, at the weights moved ahead
    weights: list = field(default_factory=list)  # name → tensor
    read: list = field(default_factory=list)  # the weights that are validated, where they differ
    gradients: list = field(default_factory=list)  # name → tensor, of each update
    states: dict = field(default_factory=dict)  # of each weight by name, and of `run` itself


class Run:
    """A run, step by step: `gradients_of` a batch, then `update` by them, or by another's.

    label: of RESULTS, or a Result.
    weights: name → float64 tensor.
    calls_before: how many calls the counters of all states have seen, for scripts whose counters
        are the step itself.
    draw(name, what, shape, step): standard normal draws, which results 18 and 33 need.
    states: of an earlier Trace.
    """

    def __init__(self, label, weights, head_dim, first_step=0, calls_before=0, draw=None,
                 states=None, rotary_base=ROTARY_BASE):
        self.result = result_of(label)
        self.head_dim = head_dim
        self.rotary_base = rotary_base
        self.step = first_step
        self.weights = {name: weight.detach().double().clone() for name, weight in weights.items()}
        self.draw = draw
        self.states = states or {name: {"calls": calls_before} for name in weights}
        self.around = self.states.setdefault("run", {})
        self.seen = {}  # the inputs of the hidden matrices in this step
        self.tokens = None  # of this step
        if self.result.outer:
            for name, weight in self.weights.items():
                self.states[name].setdefault("snapshot", weight)
                self.states[name].setdefault("outer", torch.zeros_like(weight))
        if self.result.look_ahead and "moves" not in self.around:
            self.around["moves"] = {name: torch.zeros_like(weight)
                                    for name, weight in self.weights.items()}
            self.around["previous"] = self.weights

    # -- the parts of a step, in their order --

    def move_ahead(self):
        """Move all weights along the mean of their moves, where the result does that."""
        strength = look_ahead_strength(self.result, self.step)
        if strength:
            moves = self.around["moves"]
            self.weights = {name: weight + strength * moves[name]
                            for name, weight in self.weights.items()}

    def gradients_of(self, batch):
        """The loss in nats per token, and the gradients that the optimizers see."""
        inputs, targets = batch
        self.tokens = targets.numel()
        self.seen = {}
        total, found = gradients(self.weights, inputs, targets, self.head_dim, self.seen,
                                 self.rotary_base)
        if self.result.of_mean_loss:
            found = {name: gradient / self.tokens for name, gradient in found.items()}
        return total / self.tokens, found

    def update(self, found):
        """The optimizers' step by these gradients, and what is around it."""
        before = self.weights
        self.weights = {}
        for name, weight in before.items():
            if matrix_kind(name) is None:
                self.weights[name] = self.adam_update(name, weight, found[name])
            elif not self.in_pair(name):
                self.weights[name] = self.result.update(
                    self.states[name], weight, found[name], self.hyper(name), self.step)
        for name in before:
            if self.in_pair(name) and name.endswith("attn.v.weight"):
                self.pair_update(name, before, found)
        self.weights = {name: self.weights[name] for name in before}  # in the order of before
        self.note_moves()
        self.outer_step()
        self.step += 1
        self.average()

    def adam_update(self, name, weight, gradient):
        """Of what is not a hidden matrix."""
        aux = self.result.aux
        rate = rate_group(name)
        lr = self.result.aux_rate(self.step, rate)
        corrected = aux.corrected_vectors or rate != "vector"
        return adam(self.states[name], weight, gradient, lr, aux.beta1, aux.beta2[group(name)],
                    aux.epsilon, aux.decay, corrected)

    def hyper(self, name):
        """What an update may know of its matrix, besides weight, gradient, state and step."""
        kind = matrix_kind(name)

        def draw(what, shape):
            return self.draw(name, what, shape, self.step).double()

        return SimpleNamespace(
            kind=kind,
            lr=self.result.matrix_rate(self.step, kind),
            decay=self.result.matrix_decay[kind],
            mu=self.result.momentum(self.step),
            head_dim=self.head_dim,
            tokens=self.tokens,
            inputs=self.seen[name].flatten(0, 1) if name in self.seen else None,
            draw=draw,
        )

    def in_pair(self, name):
        """Whether a matrix is updated together with another."""
        return bool(self.result.update_pair) and matrix_kind(name) in ("attn.v", "attn.proj")

    def pair_update(self, name, before, found):
        """Values and projection of one block."""
        names = name, name.replace("attn.v", "attn.proj")
        updated = self.result.update_pair(
            [self.states[name] for name in names],
            [before[name] for name in names],
            [found[name] for name in names],
            [self.hyper(name) for name in names],
            self.step,
        )
        self.weights.update(zip(names, updated))

    def note_moves(self):
        """Move the mean of moves; they include what was moved ahead."""
        if not self.result.look_ahead:
            return
        previous = self.around["previous"]
        self.around["moves"] = {
            name: torch.lerp(mean, self.weights[name] - previous[name], 0.01)
            for name, mean in self.around["moves"].items()
        }
        self.around["previous"] = self.weights

    def outer_step(self):
        """MuLoCo's step on all weights, where it is due."""
        outer = self.result.outer
        if not outer:
            return
        for name, weight in self.weights.items():
            state = self.states[name]
            if (self.step + 1) % outer.every == 0:
                way = state["snapshot"] - weight
                state["outer"] = outer.momentum * state["outer"] + outer.lr * way
                moved = state["snapshot"] - outer.momentum * state["outer"] - outer.lr * way
                self.weights[name] = state["snapshot"] = moved

    def average(self):
        """Move the mean of late weights. `self.step` is the number of updates now."""
        tail = self.result.average
        if not tail or not tail.first <= self.step < tail.end:
            return
        kept = {name: weight for name, weight in self.weights.items() if name != "embed"}
        if "average" in self.around:
            kept = {name: torch.lerp(self.around["average"][name], weight, 1 / tail.tau)
                    for name, weight in kept.items()}
        self.around["average"] = kept
        if tail.written and self.step == self.result.steps:
            self.weights = self.mixed()

    def mixed(self):
        """The weights, but for the embedding a share of them in their mean."""
        share = self.result.average.share
        mixed = {name: torch.lerp(self.weights[name], mean, share)
                 for name, mean in self.around["average"].items()}
        return self.weights | mixed

    # -- what others see --

    def read(self):
        """The weights that are validated now."""
        tail = self.result.average
        if not tail or tail.written or "average" not in self.around:
            return self.weights
        return self.mixed()


def run(label, weights, batches, steps, head_dim, first_step=0, **settings):
    """Train from given weights on given batches. Returns a Trace.

    weights: name → tensor. batches: one (inputs, targets) for each step, each (rows, length).
    steps: how many updates, of which the first is that of `first_step`.
    settings: as `Run` takes them.
    """
    trace = Trace()
    running = Run(label, weights, head_dim, first_step, **settings)
    trace.weights.append(running.weights)
    trace.read.append(running.read())
    for index in range(steps):
        running.move_ahead()
        loss, found = running.gradients_of(batches[index])
        running.update(found)
        trace.losses.append(loss)
        trace.gradients.append(found)
        trace.weights.append(running.weights)
        trace.read.append(running.read())
    trace.states = running.states
    return trace
