"""#21 BatchSize: a smaller batch, long and short windows."""

from stations import station_19


class Station(station_19.Station):
    num_iterations = 1770
    seq_lens = (49_152,)
    val_seq_len = 262_144
    attention_scale = 0.12
    attention_pattern = "LSSSLSS.SSSL"
    norm_eps = 2.0**-23
    fp8_divisors = (0.5, 2.0**-9, 2.0**-19)
    adam_eps = 1e-10
