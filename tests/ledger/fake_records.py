"""Two records whose script writes the log of a run without training anything.

`loss` and `ms` of the last step vary with the seed: the larger part of the noise is the seed's own,
as if it came from the order of the data, the rest is the script's.
"""

import hashlib
import json
import sys
from pathlib import Path

from conftest import REPO

sys.path.insert(0, str(REPO / "records"))

PARENT, NEWEST = "2026-01-01_First", "2026-02-02_Second"
SEEDS = 10

SCRIPT = '''"""A run's log without a run.

Parent: none. It is the first.

Record: 2026-01-01_First
"""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

# ---- Hyperparameters ---------------------------------------------------------
RECORD = dict(
    num_iterations=80,  # steps
    loss=1.6,  # where the loss ends
    muon_lr=0.05,  # of no effect
    long_windows=(3, 7),  # of no effect
    target_loss=3.28,
    train_files="data/fineweb10B/fineweb_train_*.bin",
    val_files="data/fineweb10B/fineweb_val_*.bin",
    val_tokens=10_485_760,
    seed=0,
    run_id="",
    save_every=0)
POCKET = RECORD | dict(
    num_iterations=40, long_windows=(1, 1), target_loss=1.78, val_tokens=65_536,
    train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin")

# ---- Training ----------------------------------------------------------------
def train(cfg):
    value = cfg.loss + random.Random(cfg.seed).gauss(0, 0.004)
    own = random.Random(f"{cfg.seed} {cfg.loss}")
    value += own.gauss(0, 0.002)
    for step in range(cfg.num_iterations + 1):
        yield step, value + 4 * 0.8**step, step * (30 + own.random())

# ==== Harness: the same in every record =======================================
def validate(loss):
    return loss

def parse_args(argv):
    flags = dict(zip(argv[::2], argv[1::2]))
    preset = flags.pop("--preset", "record")
    cfg = {"preset": preset} | (POCKET if preset == "pocket" else RECORD)
    for flag, value in flags.items():
        name = flag[2:]
        if name not in cfg:
            raise ValueError(f"{flag} {value}: no such flag")
        cfg[name] = value if name == "long_windows" else type(cfg[name])(value)
    return SimpleNamespace(**cfg)

def show(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

def harness(cfg):
    folder = Path("logs") / cfg.run_id
    folder.mkdir(parents=True)
    machine = dict(device="Fake 1 (x86_64)", torch="2.13.0+cpu", seed=cfg.seed, world_size=1,
                   threads=os.environ["OMP_NUM_THREADS"])
    header = vars(cfg) | machine | dict(
        val_digest="1407c02db97ab9a7", train_digest="30407b9a0e1c536a")
    lines = [Path(__file__).read_text(), "=" * 100]
    lines += [f"{k}: {show(v)}" for k, v in header.items()] + ["=" * 100]
    for step, loss, ms in train(cfg):
        loss = validate(loss)
        average = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        name = f"step:{step}/{cfg.num_iterations}"
        if step:
            lines.append(f"{name} train_loss:{loss:.4f} {average}")
        if step % 10 == 0:
            lines.append(f"{name} val_loss:{loss:.4f} {average}")
    final = dict(val_loss=f"{loss:.6f}", steps=step, train_time_ms=round(ms)) | machine
    final["parameters"] = 1234
    lines += ["---", *(f"{k}: {v}" for k, v in final.items())]
    (folder / "log.txt").write_text("\\n".join(lines) + "\\n")
    if cfg.save_every:
        (folder / f"step-{step:06d}.pt").write_text("weights")

if __name__ == "__main__":
    harness(parse_args(sys.argv[1:]))
'''
CHILD = SCRIPT.replace("loss=1.6", "loss=1.5").replace(
    "Parent: none. It is the first.", f"Parent: {PARENT}. Change: less loss.").replace(
    f"Record: {PARENT}", f"Record: {NEWEST}")


def sha_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def log_of(out: Path, name: str, seed: int) -> Path:
    """The log of a run of `ledger run --out OUT`."""
    (path,) = out.glob(f"logs/{name}-????????-seed-{seed}/log.txt")
    return path


def make_records(root: Path) -> Path:
    """Two claimed records, without runs, and the root's script, under `root`."""
    published = {"number": 5, "minutes": 15.2, "val_loss": 3.2741, "n": 1, "hardware": "8×H100",
                 "source": "https://example.org/log"}
    claims = {
        PARENT: {"change": "the first", "parent": None, "published": published,
                 "equality": {"largest": 3e-13, "of": "8 steps"}},
        NEWEST: {"change": "less loss", "parent": PARENT, "published": None, "gain": "loss"}}
    block = "<!-- ledger: begin -->\n<!-- ledger: end -->"
    for name, claim in claims.items():
        folder = root / "records" / name
        folder.mkdir(parents=True)
        (folder / "train_gpt.py").write_text(SCRIPT if name == PARENT else CHILD)
        (folder / "record.json").write_text(json.dumps(claim, indent=2))
        (folder / "README.md").write_text(f"# {name}\n\n{block}\n\nEnd.\n")
    for path in (root / "records" / "README.md", root / "README.md"):
        path.write_text(f"# Records\n\n{block}\n\nEnd.\n")
    edit(root / "README.md", "# Records\n", f"# Front\n\n{block.replace('begin', 'begin gpus')}\n")
    (root / "train_gpt.py").write_text(CHILD)
    return root / "records"


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def set_gain(records: Path, gain: str | None) -> None:
    """What the newest record claims to gain."""
    path = records / NEWEST / "record.json"
    claim = json.loads(path.read_text()) | {"gain": gain}
    path.write_text(json.dumps(claim, indent=2))
