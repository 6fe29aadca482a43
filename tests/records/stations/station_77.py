"""#77 SimplifyHC: factors of each half of a layer; late attention reads one saved activation;
documents are shorter at first, and rates end higher (#72)."""

from stations import station_70


class Station(station_70.Station):
    run_length = 7
    num_iterations = 1450
    first_document = 896
    cooldown_frac = 0.6
    final_lr_frac = 0.15
    scalars = dict(lambda0=0.5, lambda1=1.0, skip=-1.5, smear=0.0, backout=0.5)
    constant = {"resid_lambdas": 1.1**0.5, "post_lambdas": 1.0, "bigram_lambdas": 0.05}
    adam = station_70.Station.adam | {
        "resid_lambdas": 5, "post_lambdas": 1, "x0_lambdas": 1, "bigram_lambdas": 1}
    betas = station_70.Station.betas | dict.fromkeys(
        ("resid_lambdas", "post_lambdas", "x0_lambdas", "bigram_lambdas"), (0.9, 0.95))
    our_scalars = {
        "attn.lambdas": ("lambda0", "lambda1"), "skip_lambda": ("skip",),
        "smear_lambda": ("smear",), "backout_lambda": ("backout",)}
    our_weights = station_70.Station.our_weights | {"bigram_lambda": "bigram_lambdas"}

    def document_limit(self, step):
        return self.max_document if self.stage(step) else self.first_document

    def parameter_shapes(self):
        layers = len(self.attention_pattern)
        return super().parameter_shapes() | dict(
            resid_lambdas=(layers, 2), post_lambdas=(layers, 2), bigram_lambdas=(layers,))

    def bigrams(self, weights, tokens):
        return weights["bigram_embed.weight"][self.rows_read(tokens)["bigram_embed"]]

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
