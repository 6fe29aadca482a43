"""#5 ModernArch: a plain Transformer with ReLU², QK-norm and Muon."""

import lineage_oracles


class Station(lineage_oracles.Station):
    parameters = 123_568_128
