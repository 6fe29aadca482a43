"""The seven steps to #92, of which the last one alone has a public number."""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from lineage_oracles import kind_of, size_of
from stations.to_53 import yarn
from stations.to_91 import Station91, gelu, int32


class Station92a(Station91):
    """Fewer and narrower heads.

    Seven layers have attention. Queries and keys have 128 channels where the window is long, in the
    other layers the first 64 of their 128; values have the first 64 in layers 1 and 8. Layer 7 has
    neither attention nor MLP, layer 8 two MLPs. Unused rows and columns are there, and decay.
    """

    tiny = dict(model_dim=48, head_dim=12, mlp_dim=176, windows=(2, 4, 6, 8), final_window=10)
    attention_pattern = "PSPL.P..S.L"
    mlp_pattern = "MMMMMMM.MMM"
    value_embed_pattern = ".01.....2.3"
    xsa_pattern = ".X.X......."
    half_values = (1, 8)  # layers
    mlp_dim = 2816
    scales = dict(L=0.085, S=0.13, P=0.13)  # of attention, in the first stage
    our_weights = Station91.our_weights | {r"mlp_2\.(c_.*)": r"second_mlp.\1"}

    def rotary(self, step, letter="L"):
        """Frequencies and scale follow the long windows in layers with long ones, else the short
        ones; not what only the last validation sees. Half-wide heads turn wholly."""
        turning = self.head_dim // 4
        frequencies = [self.rope_base ** (-j / (turning - 1)) for j in range(turning)]
        scale = self.scales[letter]
        steps = range(min(step, self.total_steps() - 1) + 1)
        windows = [self.training_windows(s)[letter != "L"] for s in steps]
        for before, after in itertools.pairwise(windows):
            if before != after:
                frequencies = yarn(frequencies, self.block, before, after)
                scale *= 1 + 0.2 * math.log(after / before)
        return frequencies + [0.0] * turning * (letter == "L"), scale

    def rotary_of(self, layer, step):
        return self.rotary(step, self.attention_pattern[layer])

    def gate_rows(self):
        """(kind, layer, rows, first value) of the gates that are made from x0, and from h3."""
        heads = self.model_dim // self.head_dim
        early = [("xsa", 1, heads, 0.0), ("xsa", 3, heads, 0.0), ("heads", 3, heads, 0.25)]
        early += [("x0", layer, 1, 0.0) for layer in (0, 1, 2)]
        early += [("bigram", layer, 1, 0.05) for layer in (0, 1)]
        late = [("heads", 10, heads, 0.25)]
        late += [("x0", layer, 1, 0.0) for layer in (4, 5, 7)]
        late += [("bigram", layer, 1, 0.05) for layer in (4, 5, 9)]
        return early, [*late, ("skip", 6, 1, 0.5)]

    def layers(self):
        return list(range(11))

    def mlp_shapes(self):
        return ((self.mlp_dim, self.model_dim),) * 2

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if layer == 8:
            shapes["second_mlp.c_fc"], shapes["second_mlp.c_proj"] = self.mlp_shapes()
        return shapes

    def trimmed(self, x, width):
        """The first channels of each head, of all heads' (..., D)."""
        return x.unflatten(-1, (-1, self.head_dim))[..., :width].flatten(-2)

    def value_width(self, layer):
        return self.head_dim // 2 if layer in self.half_values else self.head_dim

    def projections(self, weights, layer):
        wide = self.attention_pattern[layer] == "L"
        W_Q, W_K, W_V, W_O = super().projections(weights, layer)
        qk, v = self.head_dim if wide else self.head_dim // 2, self.value_width(layer)
        rows = [self.trimmed(W.T, width).T for W, width in ((W_Q, qk), (W_K, qk), (W_V, v))]
        return *rows, self.trimmed(W_O, v)

    def with_values(self, weights, layer, u, v, value_embed):
        gated = super().with_values(weights, layer, u, 0.0, value_embed)
        return v + self.trimmed(gated, self.value_width(layer))

    def mlp_of(self, weights, layer, x):
        """The sum of a layer's MLPs: of one, of two, of none."""
        total = 0.0
        for name in ("mlp", "second_mlp"):
            if f"blocks.{layer}.{name}.c_fc" in weights:
                ends = (weights[f"blocks.{layer}.{name}.{end}"] for end in ("c_fc", "c_proj"))
                total = total + self.mlp(*ends, self.norm(x))
        return total


class Station92b(Station92a):
    """The output mixes ten sources, at factors of twelve groups of channels."""

    groups = 12  # of neighbouring channels
    adam = Station92a.adam | {"mudd_w2g": 0.25}
    decays = Station92a.decays | {"mudd_w2g": 0.005}
    our_weights = Station92a.our_weights | {r"output_factors\.groups": "mudd_w2g"}
    # Places of ours: outputs of layers, what the last layer and its MLP see, values of four tables
    our_sources = 0, 1, 2, 6, 3, 7, 9, 8, 5, 4

    @property
    def constant(self):
        before = super().constant
        return before | {"mudd_b2": before["mudd_b2"] + [0.0] * 5}

    def parameter_shapes(self):
        return super().parameter_shapes() | dict(
            mudd_w2=(14 + 10, 64), mudd_b2=(14 + 10,), mudd_w2g=(10, self.groups, 64))

    def mlp_of(self, weights, layer, x):
        """What that of the last layer reads is kept aside."""
        self.last_read = self.norm(x)
        return super().mlp_of(weights, layer, x)

    def left(self, weights, x, x0, tokens, outputs):
        """All factors are made from the stream before. Those of groups have no bias."""
        e1, e2, e8, e10 = (weights[f"value_embeds.{table}.weight"][tokens] for table in range(4))
        sources = (
            self.entered(weights, x0, tokens), outputs[7], outputs[9], e1, outputs[3], e2, e10, e8,
            self.last_read, self.norm(outputs[7]))
        hidden = gelu(x @ weights["mudd_w1"][1].T)
        width = self.model_dim // self.groups
        for k, source in enumerate(sources):
            of_all = hidden @ weights["mudd_w2"][14 + k] + weights["mudd_b2"][14 + k]  # (T,)
            of_groups = hidden @ weights["mudd_w2g"][k].T  # (T, groups)
            factors = of_all[:, None] + of_groups
            x = x + 0.1 * factors.repeat_interleave(width, dim=1) * source
        return x


MAPS = (  # coefficients of X, A X and A² X
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245))


class Station92c(Station92b):
    """ANVIL in place of NorMuon's momentum and decay.

    Two means of gradients, a fast and a slow one, are blended from some step on. Six maps bring the
    singular values nearer to 1, and a weight decays where the slow mean would shrink it.
    """

    momentum = (0.85, 0.93)
    momentum_warmup = 240
    blend_from = 514  # the step that begins to blend the means
    muon_decay = 2.25
    coefficients = MAPS

    def scaled(self, X):
        return X / (1.05 * size_of(X) + 1e-6)

    def muon_step(self, p, grad, state, step, lr):
        """The step ahead keeps the momentum of the step, also once the fast mean has another."""
        beta, c = self.muon_momentum(step), self.rate_factor(step)
        blends = step >= self.blend_from
        fast, slow = state.get("fast", 0.0), state.get("slow", 0.0)
        fast = fast + (1 - (0.85 if blends else beta)) * (grad - fast)
        slow = slow + 0.02 * (grad - slow)
        state["fast"], state["slow"] = fast, slow
        M = 0.4385 * fast + 0.5615 * slow if blends else fast
        U = self.equalized(self.orthogonalize(grad + beta * (M - grad)), state)
        decayed = torch.where(slow * p >= 0, p, 0.0)
        p -= lr * c * (U + self.muon_decay * self.muon_lr * c * decayed)


class Stage(NamedTuple):
    end: int  # its first step that is the next one's
    seq_len: int  # tokens of a stream
    max_document: int
    long: int  # windows, in blocks
    short: int
    peak: float  # what the rates fall from


class Station92d(Station92c):
    """Five stages, 1,194 steps.

    Rates fall over four fifths of it. Documents are longer, but attention is cut within them. Head
    and embedding part at the end, the prefixes' weight falls in steps. Tables are stepped at
    events, fewer later on; that of bigrams is one of them, as in the public #349.
    """

    run_length = 24
    tiny = Station92c.tiny | dict(period_from=8, attention_cut=20, blend_from=15)
    num_iterations = 1174
    extension = 20
    stage_rows = (
        Stage(320, 16_384, 896, 3, 1, 1.0), Stage(681, 32_768, 2048, 7, 3, 1.52),
        Stage(1107, 49_152, 3072, 11, 5, 1.73),
        Stage(1174, 40_960, 3072, 11, 5, 1.73 * (20 / 24) ** 0.5),
        Stage(1194, 16_384, 3072, 13, 6, 1.0))
    attention_cut = 2560  # tokens of a document that see each other, from the third stage on
    longest = None  # the same, while a training step is computed
    cooldown_frac = 0.80
    lr_factors = None  # stage_rows have them
    final_lr_frac = 0.30
    prefix_weights = (0.20, 0.15, 0.10, 0.05)  # in the quarters of the second stage
    period_from = 336  # the step from which an event is one step of four
    tables = ("value_embeds", "bigram_embed")
    adam = Station92c.adam | {"value_embeds": 70, "bigram_embed": 70}

    def document_limit(self, step):
        return self.stage_rows[self.stage(step)].max_document

    def stage(self, step):
        return min(sum(step >= row.end for row in self.stage_rows), 4)

    def within(self, step):
        """The share of its stage that is done before a step."""
        stage = self.stage(step)
        begin = self.stage_rows[stage - 1].end if stage else 0
        return (step - begin) / (self.stage_rows[stage].end - begin)

    def seq_len(self, step):
        return self.stage_rows[self.stage(step)].seq_len

    def long_window(self, step):
        return self.stage_rows[self.stage(step)].long

    def training_windows(self, step):
        return self.long_window(step), self.stage_rows[self.stage(step)].short

    def peak(self, step):
        return self.stage_rows[self.stage(step)].peak

    def target_weights(self, step):
        stage, left = self.stage(step), 1 - self.within(step)
        return ([1.0, 0.5, 0.25 * left], [1.0, 0.5 * left], [1.0], [1.0], [1.0])[stage]

    def prefix_weight(self, step):
        if self.stage(step) == 1:
            return self.prefix_weights[int(4 * self.within(step))]
        return 0.25 if self.stage(step) == 0 else 0.0

    def untied_step(self):
        return (self.num_iterations | 1) + 1

    def event(self, step):
        """Whether the tables are stepped, by the sum of all gradients since the last event."""
        return step % (2 if step < self.period_from else 4) == (1 if step < self.period_from else 3)

    def due(self, name, step):
        return self.event(step) if kind_of(name) in self.tables else self.adam_steps(step)

    def complete(self, step):
        return self.event(step - 1)

    def training_logits(self, weights, stream, step):
        self.longest = self.attention_cut if self.stage(step) >= 2 else None
        z = super().training_logits(weights, stream, step)
        self.longest = None
        return z

    def documents(self, inputs):
        """Counted from a document's first token in the stream. Nothing but attention is cut."""
        numbers, number, length = [], 0, 0
        for token in inputs:
            if token == self.eot_token or length == self.longest:
                number, length = number + 1, 0
            numbers.append(number)
            length += 1
        return np.array(numbers)

    def powers(self, kind, step):
        """Tables that wait for four steps forget and decay as in two steps of before."""
        return 2 if kind in self.tables and step >= self.period_from else 1

    def betas_at(self, kind, step):
        return tuple(beta ** self.powers(kind, step) for beta in super().betas_at(kind, step))

    def decay_at(self, kind, step):
        return self.powers(kind, step) * super().decay_at(kind, step)


BANKS = dict(  # kinds of weights whose size is kept, together
    embed=["embed"], head=["lm_head"], mlp=["c_fc", "c_proj"], qk=["qk_w"], vo=["vo_w"])
KINDS = dict(  # of weights, by their averages
    ends=["embed", "lm_head"], late=["vo_w", "c_fc", "c_proj"],
    banks=["qk_w", "vo_w", "c_fc", "c_proj"], tables=["value_embeds"])


class Station92e(Station92d):
    """Before the last validation, averages over the last steps are written into the weights."""

    tiny = Station92d.tiny | dict(average_steps=18, late_steps=14)
    average_steps = 298  # the last ones
    late_steps = 250
    ends_rate = 2 / 299  # of a step
    banks_rate = 2 / 75
    late_rate = 4 / 53  # of the tables, too
    unused_square = 0.0  # of a matrix that no layer uses, but which counts in the MLPs' norm

    def ticks(self, step):
        """{average: rate} of those that take the weights after a step. The first one copies."""
        end, found = self.total_steps(), {}
        first, late = end - self.average_steps, end - self.late_steps
        if step == first or (step > first and step % 2 == 1):
            steps = 1 if step == end - 1 else 2
            found["ends"] = 1 - (1 - self.ends_rate) ** steps
        if step >= late and (end - 1 - step) % 4 == 0:
            found["late"] = self.late_rate
        if step >= first and (step % 4 == 1 or step == end - 2):
            found["banks"] = self.banks_rate
        if step >= late and self.event(step):
            found["tables"] = self.late_rate
        return found

    def optimizer_state(self, weights):
        return super().optimizer_state(weights) | {"averages": {}}

    def optimizer_step(self, weights, grads, state, step):
        super().optimizer_step(weights, grads, state, step)
        for average, rate in self.ticks(step).items():
            for name, p in weights.items():
                if kind_of(name) in KINDS[average]:
                    if name == "embed.weight" and self.tied(step):
                        p = weights["lm_head.weight"]
                    a = state["averages"].get((average, name), p)
                    state["averages"][average, name] = a + rate * (p - a)

    def norms(self, weights):
        found = {}
        for bank, kinds in BANKS.items():
            squares = [(p**2).sum() for name, p in weights.items() if kind_of(name) in kinds]
            found[bank] = (sum(squares) + self.unused_square * (bank == "mlp")) ** 0.5
        return found

    def finish(self, weights, state):
        averages, before = state["averages"], self.norms(weights)
        for name, p in weights.items():
            kind = kind_of(name)
            if kind in KINDS["ends"]:
                p += 0.65 * (averages["ends", name] - p)
            if kind == "value_embeds":
                p.copy_(averages["tables", name])
            if kind == "qk_w":
                p += 0.55 * (averages["banks", name] - p)
            if kind in KINDS["late"]:
                late = averages["late", name]
                p.copy_(late + (0.55 - 0.2007) * (averages["banks", name] - late))
        after = self.norms(weights)
        for name, p in weights.items():
            for bank, kinds in BANKS.items():
                if kind_of(name) in kinds:
                    p *= before[bank] / after[bank]


class Station92f(Station92e):
    """Until the batch gets smaller again, a stream's softmax is over its targets and some other
    classes, by a sweep."""

    tiny = Station92e.tiny | dict(sweep_stride=107, sweep_margin=0)
    classes = ((10_240,), (10_240,), (14_336, 14_336, 24_576), (), ())  # a stream's, by stage
    sweep_stride = 20_011  # has no divisor in common with the number of all classes
    sweep_margin = 256
    offsets = None  # of the sweeps, a stream each
    chosen = None  # classes of a stream, while its loss is computed

    def optimizer_state(self, weights):
        self.offsets = [self.vocab_size * r // self.streams for r in range(self.streams)]
        return super().optimizer_state(weights)

    def num_classes(self, step):
        """Of a stream in a step, or None: all."""
        counts = self.classes[self.stage(step)]
        return counts[int(len(counts) * self.within(step))] if counts else None

    def candidates(self, targets, offset, wanted):
        """The classes of a stream, ascending, and the sweep's next offset."""
        V, chosen = self.vocab_size, {int(target) for target in targets}
        need = wanted - len(chosen)
        assert need >= 0, "more targets than classes"
        if need == 0:
            return sorted(chosen), offset
        drawn = min(V, int(1.7 * need) + self.sweep_margin)
        swept = [self.sweep_stride * k % V for k in range(offset, offset + drawn)]
        others = [x for x in swept if x not in chosen][:need]
        if len(others) < need:  # too few: the sweep is not used, but moves on
            free = [x for x in range(V) if x not in chosen]
            others = free[:: max(1, len(free) // need)][:need]
        return sorted(chosen.union(others)), (offset + drawn) % V

    def step_loss(self, weights, streams, step):
        wanted, total = self.num_classes(step), 0.0
        for r, stream in enumerate(streams):
            self.chosen = None
            if wanted:
                self.chosen, self.offsets[r] = self.candidates(
                    stream.targets, self.offsets[r], wanted)
            total = total + self.training_loss(weights, stream, step)
        return total / len(streams)

    def training_logits(self, weights, stream, step):
        """Of classes that are not chosen -inf, so that a prefix among them has no loss."""
        z = super().training_logits(weights, stream, step)
        if self.chosen is None:
            return z
        left_out = torch.ones(z.size(1), dtype=torch.bool)
        left_out[self.chosen] = False
        return z.masked_fill(left_out, -math.inf)


class Station92(Station92f):
    """#92 ANVIL2: in place of the bigrams, a table of pairs and of threes of tokens, with a second
    moment a row."""

    ngram_rows = 84_602_880  # the first half of pairs, the other of threes
    tables = ("value_embeds", "ngram_embed")
    adam = {kind: of for kind, of in Station92f.adam.items() if kind != "bigram_embed"}
    adam |= {"ngram_embed": 70}
    betas = Station92f.betas | {"ngram_embed": (0.0, 0.95)}
    decays = Station92f.decays | {"ngram_embed": 0.025}
    bf16 = Station92f.bf16 - {"bigram_embed"} | {"ngram_embed"}

    def parameter_shapes(self):
        shapes = super().parameter_shapes()
        shapes.pop("bigram_embed.weight")
        return shapes | {"ngram_embed.weight": (self.ngram_rows, self.model_dim)}

    def rows_read(self, tokens):
        """To the second token the one before it is the last row of the pairs."""
        half, x = self.ngram_rows // 2, [int(token) for token in tokens]
        pairs, threes = [], []
        for t in range(len(x)):
            before = half - 1 if t == 1 else x[t - 1]
            pair = int32(36_313 * x[t]) ^ int32(27_191 * before)
            pairs.append(pair % (half - 1) if t else half - 1)
            three = int32(17_351 * x[t]) ^ int32(60_961 * x[t - 1]) ^ int32(45_259 * x[t - 2])
            threes.append(half + three % (half - 1) if t > 1 else self.ngram_rows - 1)
        return dict(pairs=pairs, threes=threes)

    def sign_rows_read(self, tokens):
        """By the tokens themselves; the first ones have row 0."""
        x, n = [int(token) for token in tokens], self.sign_rows
        pairs, threes = [], []
        for t in range(len(x)):
            pairs.append((48_271 * x[t] ^ 30_011 * x[t - 1]) % n if t else 0)
            three = 58_699 * x[t] ^ 39_779 * x[t - 1] ^ 26_801 * x[t - 2]
            threes.append(three % n if t > 1 else 0)
        return pairs, threes

    def bigrams(self, weights, tokens):
        rows, signs = self.rows_read(tokens), self.sign_rows_read(tokens)
        table = weights["ngram_embed.weight"]
        pairs = table[rows["pairs"]] * self.signs[signs[0]]
        return pairs + table[rows["threes"]] * self.signs[signs[1]]

    def adam_step(self, name, p, state, step, lr):
        """All rows of the table: those that were not read do not move by it, as g is 0 there."""
        if kind_of(name) != "ngram_embed":
            return super().adam_step(name, p, state, step, lr)
        later, lr, g = step >= self.period_from, lr * self.rate_factor(step), state["sum"]
        beta2, state["count"] = 0.95**2 if later else 0.95, state["count"] + 1
        v = beta2 * state["square"] + (1 - beta2) * (g**2).mean(1, keepdim=True)
        u = lr * (1 - beta2 ** state["count"]) ** 0.5 * g / (v.sqrt() + 1e-10)
        p -= u + lr**2 * 0.005 * (10 if later else 5) * p * (u * p > 0)
        state["square"] = v
