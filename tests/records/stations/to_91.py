"""Stations from #57 to #91."""

import math

import numpy as np
import torch
from lineage_oracles import losses, turned
from stations.to_53 import Station53


class Station57(Station53):
    """#57 MixedPrecisionInterweavedOptimizer: another cap, gates on value embeddings and skip,
    Adam's betas and decay by group."""

    run_length = 6
    num_iterations = 1800
    fp8_divisors = (100 / 448, 1.6 / 448, 0.75 / 448)
    bf16 = Station53.bf16 | {"value_gate", "skip_gate"}
    adam = Station53.adam | {"attn_gate": 1, "value_gate": 1, "skip_gate": 0.05}
    adam_betas = (0.9, 0.99)
    betas = {
        "lm_head": (0.5, 0.95), "embed": (0.5, 0.95), "value_embeds": (0.75, 0.95),
        "x0_lambdas": (0.65, 0.95)}
    adam_eps = 1e-10
    decays = {
        "lm_head": 0.75, "embed": 0.75, "value_embeds": 0.025, "attn_gate": 0.005,
        "value_gate": 0.005}
    cooldown_frac = 0.5
    freeze_steps = 0

    def untied_step(self):
        """Adam has stepped in the one before."""
        return (super().untied_step() | 1) + 1

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if self.value_embed_pattern[layer] != ".":
            shapes["attn.value_gate.weight"] = shapes["attn.attn_gate.weight"]
        return shapes

    def parameter_shapes(self):
        return super().parameter_shapes() | {"skip_gate.weight": (1, self.gate_inputs)}

    def with_values(self, weights, layer, u, v, value_embed):
        W = weights[f"blocks.{layer}.attn.value_gate.weight"]
        gates = 2 * torch.sigmoid(self.value_gate_input(layer, u, value_embed) @ W.T)  # (T, H)
        return v + gates.repeat_interleave(self.head_dim, dim=1) * value_embed

    def value_gate_input(self, layer, u, value_embed):
        return u[:, : self.gate_inputs]

    def skip_weight(self, weights, index, x0):
        gate = 2 * torch.sigmoid(x0[:, : self.gate_inputs] @ weights["skip_gate.weight"].T)
        return super().skip_weight(weights, index, x0) * gate

    def capped(self, z):
        return 23 * torch.sigmoid((z + 5) / 7.5)


def woven(x):
    """(H / 2, 2T, K) of heads (H, T, K): those of both halves, token by token in turns."""
    first, second = x.chunk(2)
    return torch.stack([first, second], dim=2).flatten(1, 2)


class Station58(Station57):
    """#58 PairedHeadAttention: two heads share a softmax, in a sequence of twice the tokens."""

    tiny = dict(model_dim=48, head_dim=8)  # of two or four heads all angles would be in step
    num_iterations = 1735
    attention_pattern = "PSPLSP.SSPL"  # P: short, of paired heads

    def masks(self, documents, windows):
        paired = self.mask(np.repeat(documents, 2), windows[1])  # of as many positions
        return super().masks(documents, windows) | {"P": paired}

    def heads(self, layer, q, k, v, seen, step):
        """Head b and head b + H / 2 of a token are positions 2t and 2t + 1 of one sequence. A head
        turns by 2t + its number's parity, so the first one of (1, 4) by 2t + 1."""
        if self.attention_pattern[layer] != "P":
            return super().heads(layer, q, k, v, seen, step)
        frequencies, scale = self.rotary_of(layer, step)
        parity = torch.arange(q.size(0)) % 2
        positions = 2 * torch.arange(q.size(1)) + parity[:, None]
        q = woven(turned(self.norm(q), positions, frequencies))
        k = woven(turned(self.norm(k), positions, frequencies))
        scores = (scale * q @ k.mT).masked_fill(~seen, -math.inf)
        y = scores.softmax(-1) @ woven(v)
        return torch.cat([y[:, 0::2], y[:, 1::2]])

    def shifted(self, channels):
        """The slow half of those that turn, and half of those that do not: an accident of this
        record, whose channels have another order."""
        return channels // (self.head_dim // 8) % 2 == 1


def int32(x: np.ndarray) -> np.ndarray:
    """What is left of whole numbers in 32 bits with a sign."""
    return (x + 2**31) % 2**32 - 2**31


class Station62(Station58):
    """#62 BigramHashEmbedding: a table of pairs of tokens; attention's rate is halved."""

    num_iterations = 1560
    bf16 = Station58.bf16 | {"bigram_embed"}
    scalars = Station58.scalars | dict(bigram=0.1)
    adam = Station58.adam | {"bigram_embed": 75}
    betas = Station58.betas | {"bigram_embed": (0.75, 0.95)}
    decays = Station58.decays | {"bigram_embed": 0.025}
    muon_factors = {"c_proj": 2}
    cooldown_frac = 0.55
    our_scalars = Station58.our_scalars | {"bigram_lambda": ("bigram",)}

    def parameter_shapes(self):
        return super().parameter_shapes() | {
            "bigram_embed.weight": (self.bigram_rows, self.model_dim)}

    def rows_read(self, tokens):
        """The first token has the last row. To the second one the number of that row is the token
        before it, so large that a product is cut to 32 bits."""
        last = self.bigram_rows - 1
        x = np.asarray(tokens, dtype=np.int64)
        previous = np.concatenate([x[:1], x[:-1]])
        previous[1:2] = last
        rows = (int32(36_313 * x) ^ int32(27_191 * previous)) % last
        rows[0] = last
        return rows

    def shifted(self, channels):
        return super(Station58, self).shifted(channels)

    def bigrams(self, weights, tokens):
        return weights["bigram_embed.weight"][self.rows_read(tokens)]

    def injected(self, weights, layer, x, x0, tokens):
        x = super().injected(weights, layer, x, x0, tokens)
        return x + weights["bigram"][layer] * self.bigrams(weights, tokens)


class Station70(Station62):
    """#70 VeTuned: five value tables, whose gates see them; first values of V, O and the tables;
    stages with rounded borders. That the linked log doubles all gradients is left out."""

    run_length = 8  # its second border is not that of #62
    num_iterations = 1507
    value_embed_pattern = ".01.....234"
    uniform = {"qkvo_w": 0.5, "c_fc": 0.5}
    draws_output = True
    normal = Station62.normal | {"value_embeds": 0.01}

    def borders(self):
        """Where the stages end."""
        N = self.num_iterations
        return [round(N / 3), round(2 * N / 3), N]

    def stage(self, step):
        return sum(step >= border for border in self.borders())

    def peak(self, step):
        stage = self.stage(step)
        return self.lr_factors[stage] if stage < 3 else 1.0

    def rate_factor(self, step):
        """It falls from a whole step on, and changes where the stages do."""
        begins = int(self.num_iterations * (1 - self.cooldown_frac))
        fallen = min(1.0, max(0, step - begins) / (self.num_iterations - begins))
        return self.peak(step) * (1 - fallen) + self.final_lr_frac * fallen

    def target_weights(self, step):
        stage = self.stage(step)
        if stage > 1:
            return [1.0]
        begin, end = [0, *self.borders()][stage : stage + 2]
        fading = 0.5 ** (2 - stage) * (1 - (step - begin) / (end - begin))
        return [1.0, 0.5, fading] if stage == 0 else [1.0, fading]

    def untied_step(self):
        return (self.borders()[1] | 1) + 1

    def value_gate_input(self, layer, u, value_embed):
        """Of heads that are not paired, half of it is the table's row."""
        if self.attention_pattern[layer] == "P":
            return super().value_gate_input(layer, u, value_embed)
        half = self.gate_inputs // 2
        return torch.cat([u[:, :half], value_embed[:, :half]], dim=1)


class Station77(Station70):
    """#77 SimplifyHC: factors of each half of a layer; late attention reads one saved activation;
    documents are shorter at first, and rates end higher (#72)."""

    run_length = 7
    num_iterations = 1450
    first_document = 896
    cooldown_frac = 0.6
    final_lr_frac = 0.15
    scalars = dict(lambda0=0.5, lambda1=1.0, skip=-1.5, smear=0.0, backout=0.5)
    constant = {"resid_lambdas": 1.1**0.5, "post_lambdas": 1.0, "bigram_lambdas": 0.05}
    adam = Station70.adam | {
        "resid_lambdas": 5, "post_lambdas": 1, "x0_lambdas": 1, "bigram_lambdas": 1}
    betas = Station70.betas | dict.fromkeys(
        ("resid_lambdas", "post_lambdas", "x0_lambdas", "bigram_lambdas"), (0.9, 0.95))
    our_scalars = {
        "attn.lambdas": ("lambda0", "lambda1"), "skip_lambda": ("skip",),
        "smear_lambda": ("smear",), "backout_lambda": ("backout",)}
    our_weights = Station70.our_weights | {"bigram_lambda": "bigram_lambdas"}

    def document_limit(self, step):
        return self.max_document if self.stage(step) else self.first_document

    def parameter_shapes(self):
        layers = len(self.attention_pattern)
        return super().parameter_shapes() | dict(
            resid_lambdas=(layers, 2), post_lambdas=(layers, 2), bigram_lambdas=(layers,))

    def entered(self, weights, x0, tokens):
        return x0 + weights["bigram_lambdas"][0] * self.bigrams(weights, tokens)

    def injection(self, weights, layer, x0, tokens):
        """What is added beside a layer's attention; the first layer has its bigrams already."""
        added = weights["x0_lambdas"][layer] * x0
        if layer > 0:
            added = added + weights["bigram_lambdas"][layer] * self.bigrams(weights, tokens)
        return added

    def layer_output(self, weights, layer, x, x0, tokens, outputs, seen, step):
        """Layer 6 has its skip and an MLP alone."""
        kept, added = weights["resid_lambdas"][layer], weights["post_lambdas"][layer]
        if layer not in dict(self.skips):
            read = outputs.get(self.backout_layer, x)  # there from layer 8 on
            x = kept[0] * x + self.injection(weights, layer, x0, tokens)
            if self.attention_pattern[layer] != ".":
                x = x + added[0] * self.attended(weights, layer, read, tokens, seen, step)
        return kept[1] * x + added[1] * self.mlp_of(weights, layer, x)


class Station80(Station77):
    """#80 PairedHeadMuon: queries and keys are orthogonalised by pairs of heads; moments of a wide
    matrix are by column, and shorter (#78)."""

    num_iterations = 1440
    second_beta = 0.9
    uniform = {"qk_w": 0.5, "vo_w": 0.5, "c_fc": 0.5}
    our_weights = Station77.our_weights | {
        r"attn\.(qkv_w|c_.*)": "attn.vo_w", r"attn\.v_w": "attn.vo_w"}

    def block_shapes(self, layer):
        """Of attention: matrices for heads 0 and 1, 2 and 3, ..., of Q and then of K; V and O."""
        shapes = super().block_shapes(layer)
        if "attn.qkvo_w" in shapes:
            shapes.pop("attn.qkvo_w")
            heads = self.model_dim // self.head_dim
            shapes["attn.qk_w"] = heads, 2 * self.head_dim, self.model_dim
            shapes["attn.vo_w"] = 2, self.model_dim, self.model_dim
        return shapes

    def projections(self, weights, layer):
        Q_and_K = weights[f"blocks.{layer}.attn.qk_w"].flatten(0, 1)
        return *Q_and_K.chunk(2), *weights[f"blocks.{layer}.attn.vo_w"]

    def moments_axis(self, U):
        """One for each column where rows are fewer, else for each row."""
        return -2 if U.size(-2) < U.size(-1) else -1


LAST = 1.1**0.5 * 10  # factors of the last layer over 0.1


def gelu(z):
    return z * (1 + torch.erf(z / 2**0.5)) / 2


def network(weights, x, kind, number, rows):
    """b + W_2 gelu(W_1 x) of a bank's network, (T, rows.stop - rows.start)."""
    hidden = gelu(x @ weights[f"{kind}_w1"][number].T)
    return weights[f"{kind}_b2"][rows] + hidden @ weights[f"{kind}_w2"][rows].T


class Station82(Station80):
    """#82, merged: the last layer and the head mix earlier outputs by factors of each token (MUDD,
    #81); heads lose what lies along their token's own value (XSA); all value gates see their value.

    Parameters of which a part is never used have only the rest here: MUDD's second network, XSA by
    layer, the value gate of the last layer.
    """

    num_iterations = 1375
    extension = 10
    bf16 = Station80.bf16 | {"w1", "w2", "bias", "output_factors"}  # by our names
    xsa_pattern = ".X.XX..XX.X"
    mudd_biases = [0.0] * 6 + [20.0, 20.0, LAST, 10.0, 0.0, 0.5, LAST, 10.0]  # of the last layer
    mudd_biases += [0.0, -5.0, 0.0, 0.0, 0.0]  # of the head
    scalars = dict(lambda0=0.5, lambda1=1.0, skip=-1.5, smear=0.0)
    constant = Station80.constant | {"mudd_b2": mudd_biases}
    uniform = Station80.uniform | {"mudd_w1": 3**-0.5}
    adam = Station80.adam | {"mudd_w1": 0.25, "mudd_w2": 0.25, "mudd_b2": 0.25,
                                      "xsa_alphas": 1}
    betas = Station80.betas | {"xsa_alphas": (0.9, 0.95)}
    decays = Station80.decays | {"mudd_w1": 0.005, "mudd_w2": 0.005}
    our_weights = Station80.our_weights | {
        r"(network|output_factors)\.(w.)\.weight": r"mudd_\2",
        r"(network|output_factors)\.bias": "mudd_b2",
        r"attn\.xsa_lambda": "xsa_alphas"}

    def last_layer(self):
        return len(self.attention_pattern) - 1

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if layer == self.last_layer():
            shapes.pop("attn.value_gate.weight")
        return shapes

    def parameter_shapes(self):
        heads = self.model_dim // self.head_dim
        return super().parameter_shapes() | dict(
            mudd_w1=(2, 64, self.model_dim), mudd_w2=(19, 64), mudd_b2=(19,),
            xsa_alphas=(self.xsa_pattern.count("X"), heads))

    def value_gate_input(self, layer, u, value_embed):
        half = self.gate_inputs // 2
        return torch.cat([u[:, :half], value_embed[:, :half]], dim=1)

    def with_values(self, weights, layer, u, v, value_embed):
        """The last layer's come with their factors."""
        if layer == self.last_layer():
            return v + value_embed
        return super().with_values(weights, layer, u, v, value_embed)

    def own_share(self, weights, layer):
        """Of what lies along a head's own value, (H,) or (T, H); None where nothing is taken."""
        if self.xsa_pattern[layer] != "X":
            return None
        return weights["xsa_alphas"][self.xsa_pattern[:layer].count("X")].tanh()

    def without_own(self, weights, layer, outputs, v):
        shares = self.own_share(weights, layer)
        if shares is None:
            return outputs
        unit = v / v.norm(dim=-1, keepdim=True).clamp(min=1e-4)
        own = (outputs * unit).sum(-1, keepdim=True) * unit
        return outputs - shares.expand(v.size(1), -1).T[..., None] * own

    def mixture(self, weights, number, x):
        """Factors of each token, of the last layer (0) or after it (1), (T, 1) each."""
        rows = slice(0, 14) if number == 0 else slice(14, None)
        return (0.1 * network(weights, x, "mudd", number, rows)).unsqueeze(2).unbind(1)

    def layer_output(self, weights, layer, x, x0, tokens, outputs, seen, step):
        if layer != self.last_layer():
            return super().layer_output(weights, layer, x, x0, tokens, outputs, seen, step)
        m = self.mixture(weights, 0, x)
        h0, h7 = self.entered(weights, x0, tokens), outputs[self.backout_layer]
        e = weights[f"value_embeds.{self.value_embed_pattern[layer]}.weight"][tokens]
        half = self.model_dim // 2
        values = m[0] * h0 + m[1] * h7 + m[2] * x
        values = values + torch.cat([m[6] * e[:, :half], m[7] * e[:, half:]], dim=1)
        kind = self.attention_pattern[layer]
        y = self.attention(weights, layer, self.norm(h7), values, seen[kind], step)
        x = (1 + m[5]) * x + m[3] * h0 + m[4] * h7
        x = m[8] * x + m[9] * y + m[10] * h0 + m[11] * self.bigrams(weights, tokens)
        return m[12] * x + m[13] * self.mlp_of(weights, layer, x)

    def left(self, weights, x, x0, tokens, outputs):
        m = self.mixture(weights, 1, x)
        skipped = self.skips[0][1]
        x = x + m[0] * self.entered(weights, x0, tokens) + m[1] * outputs[self.backout_layer]
        x = x + m[2] * outputs[self.last_layer() - 1] + m[4] * outputs[skipped]
        return x + m[3] * weights["value_embeds.0.weight"][tokens]


class Station83(Station82):
    """#83, merged: a longer, narrower table of pairs, with fixed signs; x0 has them too."""

    bigram_rows = 754_560
    bigram_width = 192
    signs = None  # (sign_rows, bigram_width), drawn once; not a parameter

    def parameter_shapes(self):
        return super().parameter_shapes() | {
            "bigram_embed.weight": (self.bigram_rows, self.bigram_width)}

    def sign_rows_read(self, tokens):
        """By a token and the one before it, the first one too."""
        x = np.asarray(tokens, dtype=np.int64)
        return np.concatenate([[0], (x[1:] ^ x[:-1]) % self.sign_rows])

    def bigrams(self, weights, tokens):
        """Of the first channels; the others have none."""
        signed = super().bigrams(weights, tokens) * self.signs[self.sign_rows_read(tokens)]
        rest = torch.zeros(len(signed), self.model_dim - self.bigram_width)
        return torch.cat([signed, rest], dim=1)

    def embedded(self, weights, tokens, step):
        """The published code adds the first bigrams to x0 in place, so that x0 keeps them."""
        return super().entered(weights, super().embedded(weights, tokens, step), tokens)

    def entered(self, weights, x0, tokens):
        return x0


GATES = ("attn_gate", "skip_gate", "x0_lambdas", "bigram_lambdas", "xsa_alphas")


class Station85(Station83):
    """#85, as logged: two networks make all gates of a token (MUDD gates); the heads of the last
    layer look through each other's eyes in a window of their own (DC); x0 has no bigrams."""

    num_iterations = 1275
    extension = 15
    bf16 = Station83.bf16 | {"gates_early", "gates_late"}
    bigram_rows = 377_280
    bigram_width = 768
    xsa_pattern = ".X.XX..X..."
    adam = {kind: of for kind, of in Station83.adam.items() if kind not in GATES}
    adam |= dict.fromkeys(("mudd_gate_w1", "mudd_gate_w2", "mudd_gate_b2", "mudd_gate_scale"), 0.1)
    decays = Station83.decays | {"mudd_gate_w1": 0.005, "mudd_gate_w2": 0.005}
    uniform = Station83.uniform | {"mudd_gate_w1": 3**-0.5}
    our_weights = {
        r"gates_.*\.(w.)\.weight": r"mudd_gate_\1", r"gates_.*\.bias": "mudd_gate_b2",
        "gates_lambda": "mudd_gate_scale"} | Station83.our_weights

    def gate_rows(self):
        """(kind, layer, rows, first value) of the gates of both networks, in their order."""
        heads = self.model_dim // self.head_dim
        early = []
        for layer in (0, 1, 2, 3):
            early += [("xsa", layer, heads, 0.0)] * (layer in (1, 3))
            early += [("heads", layer, heads, 0.25)] * (layer == 3)
            early += [("x0", layer, 1, 0.0), ("bigram", layer, 1, 0.05)]
        late = []
        for layer in (4, 5, 7, 8, 9):
            late += [("skip", 6, 1, 0.5)] * (layer == 7)
            late += [("xsa", layer, heads, 0.0)] * (layer in (4, 7))
            late += [("x0", layer, 1, 0.0), ("bigram", layer, 1, 0.05)]
        late += [("heads", 10, heads, 0.25), ("w1", 10, heads, 1.0), ("w2", 10, heads, 0.0)]
        return early, late

    def gates_of(self, weights, number, x):
        """{(kind, layer): (T, rows)} of network 0 or 1, on x."""
        of_both = self.gate_rows()
        first = sum(rows for _, _, rows, _ in of_both[0]) if number else 0
        sizes = [rows for _, _, rows, _ in of_both[number]]
        rows = slice(first, first + sum(sizes))
        z = network(weights, x, "mudd_gate", number, rows)
        parts = (weights["mudd_gate_scale"] * z).split(sizes, dim=1)
        return {gate[:2]: part for gate, part in zip(of_both[number], parts)}

    def parameter_shapes(self):
        shapes = super().parameter_shapes()
        for name in list(shapes):
            if any(gate in name for gate in GATES):
                shapes.pop(name)
        rows = sum(rows for of in self.gate_rows() for _, _, rows, _ in of)
        return shapes | dict(mudd_gate_w1=(2, 64, self.model_dim), mudd_gate_w2=(rows, 64),
                             mudd_gate_b2=(rows,), mudd_gate_scale=())

    @property
    def constant(self):
        biases = []
        for *_, rows, value in sum(self.gate_rows(), []):
            biases += [value / 0.1] * rows
        of_gates = {"mudd_gate_b2": biases, "mudd_gate_scale": 0.1}
        return Station83.constant | of_gates

    def embedded(self, weights, tokens, step):
        return super(Station83, self).embedded(weights, tokens, step)

    def entered(self, weights, x0, tokens):
        gate = self.gates_of(weights, 0, x0)["bigram", 0]
        return x0 + gate * self.bigrams(weights, tokens)

    def masks(self, documents, windows):
        """What composed heads see is kept aside: fewer tokens than the window, not as many."""
        i, j = np.indices((len(documents), len(documents)))
        near = (j <= i) & (i - j < self.composed_window)
        self.composed = torch.from_numpy(near & (documents[i] == documents[j]))
        return super().masks(documents, windows)

    def layer_output(self, weights, layer, x, x0, tokens, outputs, seen, step):
        """Gates of layers 0 to 3 are made from x0, the others from the output of layer 3."""
        if layer == 0:
            self.of_tokens = self.gates_of(weights, 0, x0)
        if layer == 4:
            self.of_tokens = self.of_tokens | self.gates_of(weights, 1, x)
        return super().layer_output(weights, layer, x, x0, tokens, outputs, seen, step)

    def injection(self, weights, layer, x0, tokens):
        added = 0.0
        if ("x0", layer) in self.of_tokens:
            added = self.of_tokens["x0", layer] * x0
        if layer > 0 and ("bigram", layer) in self.of_tokens:
            added = added + self.of_tokens["bigram", layer] * self.bigrams(weights, tokens)
        return added

    def skip_weight(self, weights, index, x0):
        return weights["skip"][0].sigmoid() * self.of_tokens["skip", self.skips[0][0]]

    def own_share(self, weights, layer):
        gate = self.of_tokens.get(("xsa", layer))
        return None if gate is None else gate.tanh()

    def gates(self, weights, layer, u):
        ones = torch.ones(len(u), self.model_dim // self.head_dim)
        return self.of_tokens.get(("heads", layer), ones)

    def heads(self, layer, q, k, v, seen, step):
        """In the last layer each head also has its values where all heads look, mixed by w1, at
        its own w2."""
        outputs = super().heads(layer, q, k, v, seen, step)
        if ("w1", layer) not in self.of_tokens:
            return outputs
        w1, w2 = self.of_tokens["w1", layer], self.of_tokens["w2", layer]
        w1 = w1 / ((w1**2).mean(1, keepdim=True) + 1e-6).sqrt()
        scores = self.scores(layer, q, k, step).masked_fill(~self.composed, -math.inf)
        mixed = (w1.T[..., None] * scores.softmax(-1)).sum(0)
        return outputs + w2.T[..., None] * (mixed @ v)


class Station88(Station85):
    """#88, merged: the longest token that the next one begins with is a target too."""

    num_iterations = 1270
    prefixes = None  # of each token its prefix, or -1

    def prefix_weight(self, step):
        """In the loss; it fades in the second third."""
        first, second, _ = self.borders()
        if step < first:
            return 0.25
        return 0.25 * max(0.0, 1 - (step - first) / (second - first))

    def other_losses(self, z, stream, step):
        prefix = torch.as_tensor(self.prefixes[stream.targets])
        has_one = (prefix >= 0) & (z[range(len(z)), prefix] > -torch.inf)
        return self.prefix_weight(step) * losses(z[has_one], prefix[has_one]).sum()


class Station90(Station88):
    """#90 NarrowHeads, as submitted: queries and keys have 96 channels, values 128. W_O is stored
    transposed, so that NorMuon has a second moment for each of its inputs, not for each output."""

    tiny = dict(model_dim=48, head_dim=8, qk_dim=12)
    extension = 45
    qk_dim = 96

    def rotary(self, step):
        """The scale keeps the spread of random scores."""
        frequencies, scale = super().rotary(step)
        return frequencies, scale * (self.head_dim / self.qk_dim) ** 0.5

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if "attn.qk_w" in shapes:
            heads = self.model_dim // self.head_dim
            shapes["attn.qk_w"] = heads, 2 * self.qk_dim, self.model_dim
        return shapes

    def projections(self, weights, layer):
        W_Q, W_K, W_V, stored = super().projections(weights, layer)
        return W_Q, W_K, W_V, stored.T


class Station91(Station88):
    """#91 CanonicalMask, on #88: in the last validation a token is not followed by one that GPT-2's
    tokenizer would never emit after it."""

    forbidden = None  # (V, V), bool: whether a column's token never comes after a row's

    def validation_loss(self, weights, streams, step):
        """The last one masked. The row is that of the input, not of the target."""
        if step < self.total_steps() or self.forbidden is None:
            return super().validation_loss(weights, streams, step)
        means = []
        for stream in streams:
            z = self.stream_logits(weights, stream, self.validation_windows(step), step)
            for position, token in enumerate(stream.inputs):
                z[position, torch.as_tensor(self.forbidden[token])] = -60.0
            means.append(losses(z, stream.targets).mean())
        return torch.stack(means).mean()

    def unmasked_loss(self, weights, streams, step):
        return super().validation_loss(weights, streams, step)
