"""Two records whose script writes the log of a run without training anything.

`loss` and `ms` of the last step vary with the seed: the larger part of the noise is the seed's own,
as if it came from the order of the data, the rest is the script's.
"""

import json
import sys
from pathlib import Path

from conftest import REPO

sys.path.insert(0, str(REPO / "records"))

from ledger import logs, verify

PARENT, NEWEST = "2026-01-01_First", "2026-02-02_Second"
SEEDS = 10

SCRIPT = '''"""A run's log without a run.

Parent: none. It is the first.

Record: 2026-01-01_First
"""

import random
from dataclasses import dataclass

# ---- Hyperparameters ---------------------------------------------------------
@dataclass(frozen=True)
class Stage:
    window: int
    share: float = 1.0

@dataclass(frozen=True)
class Hyperparameters:
    preset: str = "record"
    num_iterations: int = 80  # steps
    loss: float = 1.6  # where the loss ends
    muon_lr: float = 0.05  # of no effect
    stages: tuple = (Stage(3), Stage(window=7, share=1 / 3))  # of no effect
    target_loss: float = 3.28
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    val_tokens: int = 10_485_760
    sequences_per_forward: int = 1
    seed: int = 0
    run_id: str = ""
    save_every: int = 0

POCKET = dict(
    preset="pocket",
    num_iterations=40,
    stages=(Stage(1), Stage(1)),
    target_loss=1.78,
    train_files="data/pocket/pocket_train_*.bin",
    val_files="data/pocket/pocket_val_*.bin",
    val_tokens=65_536,
)

# ---- Training ----------------------------------------------------------------
def train(cfg):
    value = cfg.loss + random.Random(cfg.seed).gauss(0, 0.004)
    own = random.Random(f"{cfg.seed} {cfg.loss}")
    value += own.gauss(0, 0.002)
    for step in range(cfg.num_iterations + 1):
        yield step, value + 4 * 0.8**step, step * (30 + own.random())

# ==== Harness: the same in every record =======================================
import os
import sys
from pathlib import Path

def validate(loss):
    return loss

def parse_args(argv):
    flags = dict(zip(argv[::2], argv[1::2]))
    values = POCKET if flags.get("--preset") == "pocket" else {}
    cfg = vars(Hyperparameters(**values))
    return Hyperparameters(**cfg | {
        flag[2:]: type(cfg[flag[2:]])(value) for flag, value in flags.items()})

def harness(cfg):
    folder = Path("logs") / cfg.run_id
    folder.mkdir(parents=True)
    machine = dict(device="Fake 1 (x86_64)", torch="2.13.0+cpu", seed=cfg.seed, world_size=1,
                   threads=os.environ["OMP_NUM_THREADS"])
    header = vars(cfg) | machine | dict(
        val_digest="1407c02db97ab9a7", train_digest="30407b9a0e1c536a", planned_tokens=9900)
    lines = [Path(__file__).read_text(), "=" * 100]
    lines += [f"{k}: {v}" for k, v in header.items()] + ["=" * 100]
    ms = 0
    for step, loss, now in train(cfg):
        loss, ms = validate(loss), max(ms, now)
        average = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        average += f" tokens_per_s:{9_900_000 * step / cfg.num_iterations / max(ms, 1):.0f}"
        name = f"step:{step}/{cfg.num_iterations}"
        if step:
            lines.append(f"{name} train_loss:{loss:.4f} {average}")
        if step % 10 == 0:
            lines.append(f"{name} val_loss:{loss:.4f} {average}")
    final = dict(val_loss=f"{loss:.6f}", train_time_ms=round(ms), steps=step, tokens=9900,
                 process_time_ms=round(ms)) | machine | dict(parameters=1234)
    lines += ["---", *(f"{k}: {v}" for k, v in final.items())]
    (folder / "log.txt").write_text("\\n".join(lines) + "\\n")
    if cfg.save_every:
        (folder / f"step-{step:06d}.pt").write_text("weights")

if __name__ == "__main__":
    harness(parse_args(sys.argv[1:]))
'''
CHILD = SCRIPT.replace("loss: float = 1.6", "loss: float = 1.5").replace(
    "Parent: none. It is the first.", f"Parent: {PARENT}. Change: less loss.").replace(
    f"Record: {PARENT}", f"Record: {NEWEST}")
PUBLIC = """record = [
  {number = 5, date = "2024-10-14", minutes = "15.20", idea = "the first", by = "@a", pr = 7},
  {number = 6, date = "2024-10-15", minutes = "15.1", idea = "a twin", by = "@b", within = 5},
  {number = 7, date = "2024-10-16", minutes = "14", idea = "types", by = "", none = "rounding"},
]
"""


def make_records(root: Path) -> Path:
    """Two claimed records, without runs, and the root's script, under `root`."""
    published = dict(number=5, minutes=15.2, val_loss=3.2741, n=1, hardware="8×H100",
                     source="https://example.org/log")
    claims = {
        PARENT: {"change": "the first", "parent": None, "published": published,
                 "equality": {"largest": 3e-13, "of": "8 steps"}},
        NEWEST: {"change": "less loss", "parent": PARENT, "published": None}}
    block = "<!-- ledger: begin{} -->\n<!-- ledger: end -->\n"
    for name, claim in claims.items():
        folder = root / "records" / name
        folder.mkdir(parents=True)
        (folder / "train_gpt.py").write_text(SCRIPT if name == PARENT else CHILD)
        (folder / "record.json").write_text(json.dumps(claim, indent=2))
        parts = f"{block.format(' sources')}\n{block.format('')}"
        (folder / "README.md").write_text(f"# {name}\n{parts}\nEnd.\n")
    (root / "records/public.toml").write_text(PUBLIC)
    for path, names in ((root / "records/README.md", ("", " public")),
                        (root / "README.md", ("", " gpus"))):
        path.write_text("# Page\n\n" + "\n".join(block.format(name) for name in names) + "\nEnd.\n")
    (root / "train_gpt.py").write_text(CHILD)
    return root / "records"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def log_of(out: Path, name: str, seed: int) -> Path:
    """The log of a run of `ledger run --out OUT`."""
    (path,) = out.glob(f"logs/{name}-????????-seed-{seed}/log.txt")
    return path


def rename(place: Path) -> None:
    """Name logs after what is in them, as their forger would."""
    for path in place.glob("*.txt"):
        log = logs.read_log(path)
        log.describe()
        path.rename(path.with_name(verify.file_name(log)))
