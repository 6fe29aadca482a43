"""Hyperparameters: flags made from one dataclass, its help, and clear words for wrong ones."""

import dataclasses
import inspect
import re
import runpy
import sys

import pytest

import train_gpt
from train_gpt import POCKET, Hyperparameters, main, parse_args

IN_RECORD = vars(Hyperparameters())
IN_POCKET = IN_RECORD | POCKET
FLAGS = [name for name, value in IN_RECORD.items() if isinstance(value, int | float | str)]
BAD = {  # flags, and the words that the line has
    "--no_such_flag 1": "unrecognized arguments: --no_such_flag 1",
    "--num_iter 3": "unrecognized arguments: --num_iter 3",  # of --num_iterations
    "--layers L,S": "unrecognized arguments: --layers L,S",  # edited in the file
    "--num_iterations 0": "--num_iterations must be at least 1, and below 2147483648; here it is 0",
    "--num_iterations 1000000": "--num_iterations must be below a million; here it is 1000000",
    "--num_iterations 1.5": "argument --num_iterations: invalid int value: '1.5'",
    "--seed -1": "--seed must be at least 0",
    f"--seed {2**70}": "--seed must be at least 0, and below 2147483648; here it is",
    "--muon_lr nan": "--muon_lr must be at least 0",
    "--repeat_data 1": "argument --repeat_data: 1 is not true or false",
    "--val_seq_len 100": "--val_seq_len must be a multiple of 128; here it is 100",
    "--eot_token 257": "--eot_token must be below vocab_size; here it is 257",
    "--shorten 3": "--shorten must be 1, 2, 4 or 8; here it is 3",
    "--shorten 2": "--shorten must leave multiples of 128; here it is 2",
    "--model_dim 100": "--model_dim must be a multiple of head_dim; here it is 100",
    "--resume auto": "--resume auto: which run is told by --run_id",
    "--resume none.pt": "none.pt: no whole checkpoint (FileNotFoundError: ",
    "--local-rank=0": "unrecognized arguments: --local-rank=0; start it by torchrun",
    "--run_id ..": "--run_id must be of letters, digits, _ . + -, and not begin with .",
    "--preset small": "--preset must be record or pocket; here it is small",
    "--device gpu": "--device must be auto, cuda or cpu; here it is gpu",
    "--device cuda": "--device cuda: no GPU 0; use --device cpu",
    "--preset record": "there is no CUDA device; use --preset pocket"}


def test_help_has_each_flag_with_its_meaning_and_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert not exit_.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert " ".join(train_gpt.__doc__.split()) in text
    table = inspect.getsource(Hyperparameters)
    rows = dict(re.findall(r"^    (\w+): (?:int|float|str|bool) = .*?  # (.*)$", table, re.M))
    assert list(rows) == FLAGS
    for name, meaning in rows.items():
        values = f"(record: {IN_RECORD[name]}, pocket: {IN_POCKET[name]})"
        assert f"--{name} X {meaning} {values}" in text


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


def test_a_bad_table_is_named_with_its_rule(monkeypatch):
    for name, table, said in (
        ("layers", POCKET["layers"][1:], "layers in train_gpt.py must have one row with skip"),
        ("stages", POCKET["stages"][1:], "stages in train_gpt.py must have 3 rows"),
        ("extension", POCKET["stages"][0],
         "extension in train_gpt.py must have no share or lr_factor"),
        ("last_validation", POCKET["extension"],
         "last_validation in train_gpt.py must have two windows above 0, no more"),
        ("last_validation", dataclasses.replace(POCKET["last_validation"], short_window=0),
         "last_validation in train_gpt.py must have two windows above 0, no more"),
    ):
        with monkeypatch.context() as patch, pytest.raises(train_gpt.UserError) as error:
            patch.setitem(POCKET, name, table)
            parse_args(["--preset", "pocket"])
        assert str(error.value) == said


def test_a_process_ends_with_the_code_of_main(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--val_seq_len", "100"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(train_gpt.SCRIPT), run_name="__main__")
    assert exit_.value.code == 2


def test_a_checkpoint_brings_its_settings_and_few_flags_may_differ():
    """Its run and its device stay behind. What is named with the same value is no difference."""
    then = Hyperparameters(**POCKET | dict(run_id="then", device="cpu", muon_lr=0.3))
    saved = dataclasses.asdict(then)
    given = dict(resume="b.pt", save_every=9, preset="pocket", muon_lr=0.3)
    cfg = train_gpt.hyperparameters(given, saved)
    expected = Hyperparameters(**POCKET | dict(muon_lr=0.3, resume="b.pt", save_every=9))
    assert cfg == expected
    with pytest.raises(train_gpt.UserError, match="--seed 7: not as in the checkpoint; a resumed"):
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
        assert 0.1 <= now.lr_factor <= max(row.lr_factor for row in cfg.all_stages())
        assert cfg.muon_momentum >= now.momentum >= 0.85
    assert steps[-1].lr_factor == pytest.approx(0.1)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_shorten_cuts_sequences_and_keeps_a_steps_tokens_and_windows(parts):
    cfg = parse_args(["--shorten", str(parts)])
    short = train_gpt.shorten(cfg)
    assert train_gpt.planned_tokens(short) == train_gpt.planned_tokens(cfg)
    for row, other in zip(cfg.all_stages(), short.all_stages(), strict=True):
        assert other == dataclasses.replace(row, seq_len=row.seq_len // parts)
    assert train_gpt.shorten(parse_args([])) == parse_args([])
