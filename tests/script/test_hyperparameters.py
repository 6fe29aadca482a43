"""Hyperparameters: flags made from one dataclass, its help, and clear words for wrong ones."""

import dataclasses
import inspect
import re
import runpy
import sys

import pytest

import train_gpt
from train_gpt import POCKET, Hyperparameters, main, parse_args

FIELDS = dataclasses.fields(Hyperparameters)
IN_RECORD = vars(Hyperparameters())
IN_POCKET = IN_RECORD | POCKET
REST = ",0:128:1:1:1:1,0:128:1:1:1:1"  # stages: the extension and the last validation
BAD = {  # flags, and the words that the line has
    "--no_such_flag 1": "unrecognized arguments: --no_such_flag 1",
    "--num_iterations 0": "--num_iterations: invalid",
    "--num_iterations 10000000": "num_iterations must be at most a million; here it is 10000000",
    f"--seed {2**70}": "--seed: invalid",
    "--muon_lr nan": "--muon_lr: invalid",
    f"--stages 1:128:1:1:1{REST}": "argument --stages: invalid flag value: '1:128:1:1:1,0:128",
    f"--stages 1:100:1:1:1:1{REST}": "--stages must have lengths that are multiples of 128; here",
    f"--stages 0:128:1:1:1:1{REST}": "--stages must have a row with a share, one of the extension",
    "--val_seq_len 100": "--val_seq_len must be a multiple of 128; here it is 100",
    "--eot_token 257": "--eot_token must be below vocab_size; here it is 257",
    "--layers L:skip,X:saved": "--layers must be at most 99 words such as S, S0, ., L1:skip or",
    "--layers S:saved,.,L:skip": "--layers must have one word with :skip, below the first .",
    "--layers L:skip,.": "--layers must have one word with :saved; here it is L:skip,.",
    "--model_dim 100": "--model_dim must be a multiple of head_dim; here it is 100",
    "--resume auto": "auto: no such checkpoint; give its path, or auto with --run_id",
    "--run_id ..": "--run_id must be of letters, digits, _ . + -, and not begin with .",
    "--device cuda": "--device cuda: no GPU 0; use --device cpu",
    "--preset record": "there is no CUDA device; use --preset pocket"}


def test_help_has_each_flag_with_its_meaning_and_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # no row of stages is broken
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert not exit_.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert " ".join(train_gpt.__doc__.split()) in text
    table = inspect.getsource(Hyperparameters)
    rows = re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", table, re.M)
    assert [name for name, _ in rows] == [field.name for field in FIELDS]
    for name, meaning in rows:
        record, pocket = train_gpt.show(IN_RECORD[name]), train_gpt.show(IN_POCKET[name])
        assert f"--{name} X {meaning} (record: {record}, pocket: {pocket})" in text


@pytest.mark.parametrize(("flags", "named"), BAD.items(), ids=BAD)
def test_a_bad_flag_ends_in_one_line_and_2(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(train_gpt, "train", lambda *args: pytest.fail("it was not refused"))
    assert main(["--preset", "pocket", *flags.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", err)
    assert named in err
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_the_code_of_main(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--val_seq_len", "100"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(train_gpt.SCRIPT), run_name="__main__")
    assert exit_.value.code == 2


def test_a_checkpoint_brings_its_settings_and_few_flags_may_differ():
    """Its run and its device stay behind. What is named with the same value is no difference."""
    saved = IN_POCKET | dict(run_id="then", device="cpu", muon_lr=0.3)
    given = dict(resume="b.pt", save_every=9, preset="pocket", muon_lr=0.3)
    cfg = train_gpt.hyperparameters(given, saved)
    expected = Hyperparameters(**POCKET | dict(muon_lr=0.3, resume="b.pt", save_every=9))
    assert cfg == expected
    with pytest.raises(train_gpt.UserError, match="--seed 7: the checkpoint has 0; a resumed run"):
        train_gpt.hyperparameters(dict(seed=7), saved)


@pytest.mark.parametrize(("preset", "changes", "stages"), [
    ("record", dict(num_iterations=1), "04"),
    ("record", dict(num_iterations=9, extension_steps=0), "0001112224"),
    ("pocket", dict(num_iterations=4, extension_steps=300), "03334")], ids=str)
def test_a_run_of_any_length_goes_through_its_stages(preset, changes, stages):
    """Thirds, then the extension, which may be longer than the run; 4 is the last validation."""
    cfg = dataclasses.replace(parse_args(["--preset", preset]), **changes)
    steps = [train_gpt.schedule(step, cfg) for step in range(cfg.num_iterations + 1)]
    assert [now.stage for now in steps] == list(map(int, stages))
    for now in steps:
        assert 0.1 <= now.lr_factor <= max(row.lr_factor for row in cfg.stages)
        assert cfg.muon_momentum >= now.momentum >= 0.85
    assert steps[-1].lr_factor == pytest.approx(0.1)
