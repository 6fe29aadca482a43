"""#92 ANVIL2: in place of the bigrams, a table of pairs and of threes of tokens, with a second
moment a row."""

from lineage_oracles import kind_of
from stations import station_92f
from stations.station_62 import int32


class Station(station_92f.Station):
    ngram_rows = 84_602_880  # the first half of pairs, the other of threes
    tables = ("value_embeds", "ngram_embed")
    adam = {kind: of for kind, of in station_92f.Station.adam.items() if kind != "bigram_embed"}
    adam |= {"ngram_embed": 70}
    betas = station_92f.Station.betas | {"ngram_embed": (0.0, 0.95)}
    decays = station_92f.Station.decays | {"ngram_embed": 0.025}
    bf16 = station_92f.Station.bf16 - {"bigram_embed"} | {"ngram_embed"}

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
        return dict(embed=x, pairs=pairs, threes=threes)

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
