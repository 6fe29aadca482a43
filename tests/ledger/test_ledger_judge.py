"""Replay: a model is judged by its logits alone, and a log is run again."""

import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, rename
from ledger import judge, run
from ledger.__main__ import main

pytest_plugins = ["record_fixtures"]

SCRIPT = """
from types import SimpleNamespace
import torch
from torch import nn

class GPT(nn.Module):
    cfg = SimpleNamespace(val_seq_len=64, vocab_size=16)

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16, 16))

    def hidden(self, inputs):
        x = self.table[inputs]
        return x

    def logits(self, x):
        return x.float()

class Double(torch.Tensor):
    pass

load_checkpoint = torch.load
hyperparameters = Ranks = lambda *_: None
build = lambda cfg, ranks: (GPT(), [])
load_state = lambda model, optimizers, state, path: model.load_state_dict(state["model"])
"""
ONE_HOT = "x = x + 3 * nn.functional.one_hot({}.long(), 16)"


@pytest.mark.parametrize("old, new, leaks", [
    ("x = self", "x = self", False),
    ("return x\n", ONE_HOT.format("inputs.roll(-1, 1)") + "; return x\n", True),
    ("return x\n", ONE_HOT.format("inputs[:, -1:]") + "; return x\n", True),
    ("return x.float()",  # a mistake that anyone makes
     "return x + nn.functional.avg_pool1d(x.T[None], 3, 1, 1)[0].T", True),
    ("return x.float()", "return x.as_subclass(Double)", None)])  # with a loss of its own
def test_the_judge_takes_the_logits_alone(old, new, leaks, tmp_path, monkeypatch):
    """Of a table of logits, whose loss numpy knows, saved by a script."""
    tokens = np.random.default_rng(0).integers(0, 16, 1025).astype("<u2")
    weights = np.random.default_rng(1).normal(size=(16, 16)).astype("f4")
    (tmp_path / "val.bin").write_bytes(bytes(1024) + tokens.tobytes() + bytes(100))
    monkeypatch.setattr(judge, "RECORDS", tmp_path / "records")
    rules = {"val_files": "val.bin", "val_tokens": "1024"}
    monkeypatch.setitem(judge.RULES["time"], "pocket", rules)
    (tmp_path / "record.py").write_text(SCRIPT)
    edit(tmp_path / "record.py", old, new)
    torch.save({"settings": {}, "model": {"table": torch.tensor(weights)}}, tmp_path / "a.pt")
    if leaks is None:
        with pytest.raises(SystemExit, match="the logits are no tensor but a Double"):
            judge.judge(tmp_path / "record.py", tmp_path / "a.pt", "pocket", "cpu")
        return
    found = judge.judge(tmp_path / "record.py", tmp_path / "a.pt", "pocket", "cpu")
    assert found["leaks"] == leaks
    assert found["digest"] == hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    logits = weights.astype(float)[tokens[:-1]]
    true = np.log(np.exp(logits).sum(1)) - logits[np.arange(1024), tokens[1:]]
    assert leaks or abs(found["loss"] - true.mean()) < 1e-6


@pytest.mark.slow
def test_the_judge_agrees_with_a_record_and_its_mask(tmp_path, pocket_data):
    """#91's mask of pairs that never occur, here bytes from 128 on after all others."""
    record = REPO / "records/2026-08-06_CanonicalMask/train_gpt.py"
    np.savez(tmp_path / "pairs.npz", before=np.arange(128), before_ends=[128],
             after=np.arange(128, 256), after_ends=[128])
    flags = ("--preset pocket --device cpu --num_iterations 2 --save_every 2 --warmup_steps 0 "
             "--run_id a --canonical_file pairs.npz").split()
    subprocess.run([sys.executable, record, *flags], check=True, cwd=tmp_path)
    log = run.read_log(tmp_path / "logs/a/log.txt")
    (unmasked,) = re.findall(r"without the mask of canonical tokens: (\S+)", log.body)
    assert float(unmasked) - log.val_loss > 0.1
    command = [sys.executable, run.JUDGE, record, "logs/a/step-000002.pt", "pocket", "cpu"]
    found = json.loads(subprocess.run(command, check=True, cwd=tmp_path, text=True,
                                      capture_output=True).stdout)
    assert abs(found.pop("loss") - log.val_loss) < 1e-5
    assert found == {"leaks": False, "digest": log.header["val_digest"]}


# ---- Logs are held to a run of their seed ----
@pytest.fixture
def verdict(monkeypatch, tmp_path):
    """What a judge says on the fake weights: what their log says, and changes."""
    stand_in, changes = tmp_path / "judge.py", tmp_path / "changes.json"
    changes.write_text("{}")
    stand_in.write_text(f"""
import json, pathlib, sys
print("a script may print what it likes")
text = pathlib.Path(sys.argv[2]).with_name("log.txt").read_text()
loss = float(text.rpartition("\\nval_loss: ")[2].split()[0])
honest = dict(loss=loss, digest="1407c02db97ab9a7", leaks=False)
print(json.dumps(honest | json.load(open({str(changes)!r}))))
""")
    monkeypatch.setattr(run, "JUDGE", stand_in)
    return changes


def test_other_losses_in_one_setting_are_told_and_accuse_nobody(
        records, verdict, monkeypatch, capsys):
    """A name may stand for many machines: that of a masked one in a cloud."""
    assert main(["verify", str(records / NEWEST), "--replay", "2"]) == 0
    err = capsys.readouterr().err
    assert err.count(" run again: +0.000000 from its val_loss, Preset pocket on Fake 1") == 2
    train = run.train
    def train_elsewhere(*args):
        log = train(*args)
        log.val_loss += 1e-4
        verdict.write_text(json.dumps({"loss": log.val_loss}))
        return log

    monkeypatch.setattr(run, "train", train_elsewhere)
    assert main(["verify", str(records / NEWEST), "--replay", "1"]) == 0
    assert " run again: +0.000100 from its val_loss, Preset pocket" in capsys.readouterr().err


@pytest.mark.parametrize("name, value, words", [
    ("loss", 1.7, "when it is run again, and its weights have 1.7"),
    ("digest", "0" * 16, "on other validation data than the rules'"),
    ("leaks", True, "whose logits depend on later tokens")])
def test_replay_tells_what_the_judge_finds(name, value, words, records, verdict, capsys):
    verdict.write_text(json.dumps({name: value}))
    assert main(["verify", str(records / PARENT), "--replay", "1"]) == 1
    out = capsys.readouterr().out
    assert words in out and out.startswith(f"{PARENT}: logs/pocket-seed-")


def test_replay_holds_a_log_to_the_tokens_that_its_script_plans(records, verdict, capsys):
    """Its header, its results and its steps may say another number, and agree."""
    for log in (records / NEWEST / "logs").iterdir():
        text = log.read_text()
        text = text.replace("tokens: 9900\n", "tokens: 9999999\n")
        rate = 9_999_999_000 / float(re.findall(r"\ntrain_time_ms: (\d+)", text)[0])
        log.write_text(re.sub(r"tokens_per_s:\d+", f"tokens_per_s:{rate:.0f}", text))
    rename(records / NEWEST / "logs")
    assert main(["verify", str(records / NEWEST), "--replay", "1"]) == 1
    out = capsys.readouterr().out
    assert "plans 9900 tokens when it is run again" in out
