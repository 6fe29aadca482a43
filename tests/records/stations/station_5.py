"""#5 ModernArch: a plain Transformer with ReLU², QK-norm and Muon."""

import lineage_oracles


class Station(lineage_oracles.Station):
    published = dict(parameters=123_568_128)
    num_iterations = 5100
    streams = 512
    seq_lens = (1024,)
    val_seq_len = 1024
    rope_base = 10_000
    attention_pattern = "L" * 12
    value_embed_pattern = "." * 12
    adam = {"embed": 0.45}
    adam_betas = (0.9, 0.95)
    muon_lr = 0.00036
    cooldown_frac = 1450 / 5100
    final_lr_frac = 0.0
    momentum = (0.95, 0.95)
