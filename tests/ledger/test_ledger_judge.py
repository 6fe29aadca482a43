"""Replay: a model is judged by its logits alone, and a log by a run of its seed."""

import hashlib
import re

import numpy as np
import pytest
import torch
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, set_gain
from ledger import records as rules
from ledger import run
from ledger.__main__ import main
from ledger.scripts import flag_words
from shards import load_script

pytest_plugins = ["record_fixtures"]

SCRIPT = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Hyperparameters:
    seed: int = 0
    val_seq_len: int = 64
    vocab_size: int = 16

class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(
            cfg.seed)))

    def hidden(self, inputs):
        x = self.table[inputs]
        return x

    def logits(self, x):
        return x.float()

class Double(torch.Tensor):
    pass

def load_checkpoint(path):
    return torch.load(path)

def hyperparameters(given, saved):
    return Hyperparameters(**saved)

def Ranks(cfg):
    return None

def build(cfg, ranks):
    return GPT(cfg), []

def load_state(model, optimizers, state, path):
    model.load_state_dict(state["model"])
"""
HONEST = {"leaks": False, "mixes": False, "seedless": False}
ONE_HOT = "x = x + 3 * nn.functional.one_hot({}.long(), 16)"


@pytest.mark.parametrize("old, new, wrong", [
    ("x = self", "x = self", {}),
    ("return x\n", ONE_HOT.format("inputs.roll(-1, 1)") + "; return x\n", {"leaks": True}),
    ("return x\n", ONE_HOT.format("inputs[:, -1:]") + "; return x\n", {"leaks": True}),
    ("return x.float()",  # a mistake that anyone makes
     "return x + nn.functional.avg_pool1d(x.T[None], 3, 1, 1)[0].T",
     {"leaks": True, "mixes": True}),
    ("return x\n", "return x + 9 * x[:1, :1]\n", {"mixes": True}),  # of the first row
    ("return x\n",  # of how many rows were seen before
     "self.n = getattr(self, 'n', 0) + 1; return x * (1 + (self.n > 9))\n", {"mixes": True}),
    ("cfg.seed)))", "3)))", {"seedless": True})])
def test_the_judge_takes_the_logits_alone(old, new, wrong, tmp_path, monkeypatch):
    """Of a table of logits, whose loss numpy knows, saved by a script."""
    tokens = np.random.default_rng(0).integers(0, 16, 1025).astype("<u2")
    weights = np.random.default_rng(1).normal(size=(16, 16)).astype("f4")
    found = judge(tmp_path, monkeypatch, tokens, weights, old, new)
    assert {name: found[name] for name in HONEST} == HONEST | wrong
    assert found["digest"] == hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    logits = weights.astype(float)[tokens[:-1]]
    true = np.log(np.exp(logits).sum(1)) - logits[np.arange(1024), tokens[1:]]
    assert bool(wrong) or abs(found["loss"] - true.mean()) < 1e-6


def judge(folder, monkeypatch, tokens, weights, old, new):
    (folder / "val.bin").write_bytes(bytes(1024) + tokens.tobytes() + bytes(100))
    monkeypatch.setattr(run, "REPO", folder)
    monkeypatch.setitem(rules.RULES, "pocket", {"val_files": "val.bin", "val_tokens": "1024"})
    (folder / "record.py").write_text(SCRIPT)
    edit(folder / "record.py", old, new)
    state = {"settings": {"seed": 0}, "model": {"table": torch.tensor(weights)}}
    torch.save(state, folder / "a.pt")
    return run.judge(folder / "record.py", folder / "a.pt", "pocket", "cpu")


def test_the_judge_refuses_what_is_no_plain_tensor(tmp_path, monkeypatch):
    """As it may compute another loss than its numbers give."""
    tokens = np.zeros(1025, "<u2")
    with pytest.raises(run.LedgerError, match="its logits are no tensor but a Double"):
        judge(tmp_path, monkeypatch, tokens, np.zeros((16, 16), "f4"), "return x.float()",
              "return x.as_subclass(Double)")


def test_the_judge_leaves_out_what_the_last_validation_leaves_out(
        tmp_path, pocket_data, monkeypatch):
    """#91's mask of pairs that never occur, here bytes from 128 on after all others."""
    record = REPO / "records/2026-08-06_CanonicalMask/train_gpt.py"
    np.savez(tmp_path / "pairs.npz", before=np.arange(128), before_ends=[128],
             after=np.arange(128, 256), after_ends=[128])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(rules.RULES, "pocket", rules.RULES["pocket"] | {"val_tokens": "8192"})
    flags = {
        "preset": "pocket", "device": "cpu", "num_iterations": 2, "save_every": 2,
        "warmup_steps": 0, "val_tokens": 8192, "val_seq_len": 512, "run_id": "a",
        "canonical_file": "pairs.npz"}
    assert load_script(record).main(flag_words(flags)) == 0
    log = run.read_log(tmp_path / "logs/a/log.txt")
    (unmasked,) = re.findall(r"without the mask of canonical tokens: (\S+)", log.body)
    assert float(unmasked) - log.val_loss > 0.1
    found = run.judge(record, tmp_path / "logs/a/step-000002.pt", "pocket", "cpu")
    assert {name: found[name] for name in HONEST} == HONEST
    assert abs(found["loss"] - log.val_loss) < 1e-5


# ---- Logs are held to a run of their seed ----
@pytest.fixture
def verdict(monkeypatch):
    """The verdict on weights, which the fake scripts have not: what their logs say, and changes."""
    changes = {}

    def judge(function, script, checkpoint, *_):
        found = {"loss": run.read_log(checkpoint.with_name("log.txt")).val_loss,
                 "digest": "1407c02db97ab9a7", **HONEST}
        return found | {name: value(found[name]) for name, value in changes.items()}

    monkeypatch.setattr(run, "apart", judge)
    return changes


def test_in_one_setting_losses_are_equal_to_the_digit_also_the_parents(records, verdict, capsys):
    set_gain(records, None)
    assert main(["verify", str(records / NEWEST), "--replay", "2"]) == 0
    err = capsys.readouterr().err
    assert err.count("in the same setting") == 2 and f"{PARENT}: seed" in err
    for path in [*records.glob("*/train_gpt.py"), records.parent / "train_gpt.py"]:
        edit(path, "return loss", "return loss + 1e-6")  # in the harness, so the logs bear it
    assert main(["verify", str(records / NEWEST), "--replay", "1"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and all("in the same setting it has 1." in line for line in out)
    assert any(line.startswith(PARENT) for line in out)


@pytest.mark.parametrize("name, value, words", [
    ("loss", lambda loss: loss + 0.1, "when it is run again, and its weights have 1."),
    ("loss", lambda loss: 0.0064, "no honest model gets below 0.47"),
    ("digest", lambda digest: "0" * 16, "on other validation data than the rules'"),
    ("leaks", lambda _: True, "whose logits depend on later tokens"),
    ("mixes", lambda _: True, "whose logits depend on other rows"),
    ("seedless", lambda _: True, "with the same first weights for each seed")])
def test_replay_tells_what_the_judge_finds(name, value, words, records, verdict, capsys):
    verdict[name] = value
    assert main(["verify", str(records / PARENT), "--replay", "1"]) == 1
    out = capsys.readouterr().out
    assert words in out and out.startswith(f"{PARENT}: logs/pocket-seed-")


@pytest.mark.parametrize("spread, seeds, moves", [
    (0.001, 1, 0.025), (0.001, 4, 0.025), (0.1, 1, 2**0.5 * 0.1 * (10 / 9) ** 0.5)])
@pytest.mark.parametrize("share, is_wrong", [(0.97, False), (-1.03, True), (1.03, True)])
def test_elsewhere_the_mean_is_held_to_the_records_own_spread(
        spread, seeds, moves, share, is_wrong, records, verdict, capsys):
    """Honest seeds move both ways: of four times as many, the mean moves half as far."""
    record = rules.find_records(records)[0][1]
    for log in record.logs:
        log.header["torch"] = "2.11.0"
        log.final["val_loss"] = f"{1.5 + spread * (-1) ** log.seed:.6f}"
    chosen = record.logs[:seeds]
    shift = share * 3 * moves / seeds**0.5
    losses = iter([log.val_loss for log in chosen])
    verdict["loss"] = lambda _: next(losses) + shift
    wrong = run.replay(record, chosen, record.logs)
    told = capsys.readouterr().err.strip()
    assert f"{shift:+.6f} from the logs' in the mean, where they may move by " in told
    assert (told in wrong) == is_wrong and "torch 2.13.0+cpu" in told


def test_what_this_machine_cannot_run_is_told(records, monkeypatch, capsys):
    record = rules.find_records(records)[0][0]
    record.logs = record.logs[:1]
    record.logs[0].header |= {"cuda": "13.0", "world_size": "8", "device": "NVIDIA H100"}
    monkeypatch.setattr("torch.cuda.device_count", lambda: 7)
    assert run.replay_all([record], 1) == []
    assert "this machine has no such GPUs; not run again" in capsys.readouterr().err
