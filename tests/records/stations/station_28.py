"""#28 SparseAttnGate: heads are gated; each sequence begins with a document."""

import torch
from lineage_oracles import stream_at
from stations import station_24


class Station(station_24.Station):
    parameters = None
    num_iterations = 1695
    table_rows = 50_304
    cooldown_frac = 0.45
    fp8_divisors = (768**0.5 / 448, 2.0**-9, 1 / 448)
    align_documents = True
    scaled_eps = False
    summed_loss = True

    def streams_of_steps(self, shards, steps):
        """Each stream begins where a document does, T or more after the one before. Before a step,
        a shard with no more than twice its tokens and one is left for the next. Raises ValueError
        where documents are missing."""
        shards = iter(shards)
        tokens, position = next(shards, ()), 0
        for length in map(self.seq_len, steps):
            reach = 2 * self.streams * length
            if position + reach + 1 >= len(tokens):
                tokens, position = next(shards, None), 0
                if tokens is None:
                    return
            starts, start = [], -1
            for here in range(position, min(position + reach, len(tokens))):
                if tokens[here] == self.eot_token and (start < 0 or here - start >= length):
                    starts.append(start)
                    start = here
                    if len(starts) > self.streams:
                        break
            starts = starts[1:]
            if len(starts) < self.streams:
                raise ValueError(f"{len(starts)} beginnings in {reach} tokens")
            position = start
            yield [stream_at(tokens, first, length) for first in starts]

    def mlp_shapes(self):
        shape = self.model_dim, self.mlp_ratio * self.model_dim
        return shape, shape

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if "attn.qkvo_w" in shapes:
            heads = self.model_dim // self.head_dim
            shapes["attn.attn_gate.weight"] = (heads, self.gate_inputs)
        return shapes

    def gates(self, weights, layer, u):
        W = weights[f"blocks.{layer}.attn.attn_gate.weight"]
        return torch.sigmoid(u[:, : self.gate_inputs] @ W.T)

    def mlp(self, c_fc, c_proj, u):
        return (u @ c_fc).clamp(min=0) ** 2 @ c_proj.T
