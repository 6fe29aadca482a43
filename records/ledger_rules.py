"""The rules' numbers, in one place; the table in README.md is generated from them."""

from dataclasses import dataclass

SIGNIFICANCE = 0.01  # what a p-value has to stay under
SIMULATED = "host standing in for"  # how the name of a device begins that is no device


@dataclass(frozen=True)
class Rule:
    """What a measurement with a preset is held to."""

    target_loss: float  # nats per token
    val_files: str
    val_tokens: int
    seeds: int  # least number of runs
    seeds_newest: int  # the same, for the newest record

    def least_seeds(self, newest: bool) -> int:
        return self.seeds_newest if newest else self.seeds


RULES = {
    "record": Rule(3.28, "data/fineweb10B/fineweb_val_*.bin", 10_485_760, 5, 10),
    "pocket": Rule(1.64, "data/pocket/pocket_val_*.bin", 262_144, 5, 10),
    "lab": Rule(1.4, "data/lab/lab_val_*.bin", 131_072, 5, 5),
}
PUBLIC_TARGET = RULES["record"].target_loss  # of logs that name no target
