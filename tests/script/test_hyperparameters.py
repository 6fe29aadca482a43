"""Hyperparameters: flags made from one dataclass, its help, and clear words for wrong ones."""

import dataclasses
import inspect
import re

import pytest

import train_gpt
from train_gpt import Hyperparameters, main, parse_args

FIELDS = dataclasses.fields(Hyperparameters)
RECORD = Hyperparameters()
POCKET = Hyperparameters(**{each.name: each.metadata["pocket"] for each in FIELDS})
NOT_UNDERSTOOD = [  # flags, and the words that the line has
    ("--no_such_flag 1", "--no_such_flag"),
    ("--num_iteration 5", "--num_iteration"),  # no abbreviations: a typo is never another flag
    ("--num_iterations", "--num_iterations"),
    ("--num_iterations many", "--num_iterations"),
    ("--num_iterations 1.5", "--num_iterations"),
    ("--fp8_head maybe", "--fp8_head"),
    ("--vocab_size 70000 --eot_token 5", "--vocab_size 70000: must exceed eot_token, up to 65536"),
    ("--eot_token 257", "--vocab_size 257: must exceed eot_token, up to 65536"),
    ("--attention_pattern LSSL", "--value_embed_pattern 0.: must have an entry a layer"),
    ("--lr_factors 1,nan", "--lr_factors 1.0,nan: must be from 0 to 1000"),
    ("--muon_momentum 1", "--muon_momentum 1.0: must be below 1"),
    ("--embed_lr 1e38", "--embed_lr 1e+38: must be from 0 to 1000"),
    ("--cooldown_frac 0", "--cooldown_frac 0.0: must be above 0, at most 1"),
    (f"--seed {2**70}", "--seed"),
    ("--threads 2", "--threads"),  # chosen when the run starts
    ("stray", "stray")]
MUST = {  # flags, and what they must be; the line begins with the flags
    "--num_iterations 0": "be from 1 to ", "--seed -1": "be from 0 to ",
    "--muon_lr nan": "be from 0 to 1000", "--muon_lr -0.1": "be from 0 to 1000",
    "--preset laptop": "be record or pocket", "--device tpu": "be auto, cuda or cpu",
    "--seq_lens 128,100": "be multiples of 128", "--seq_lens 2097152": "be from 1 to ",
    "--long_windows 1;2": "be like 3,7,11,13,20", "--short_windows 1.5": "be like 1,3,5,6",
    "--long_windows 0": "be from 1 to ", "--long_windows 1,2147483648": "be from 1 to ",
    "--val_seq_len 8193": "be a multiple of 128", "--val_seq_len 1280000": "not exceed val_tokens",
    "--head_dim 6": "be a multiple of 4", "--model_dim 100": "be a multiple of head_dim",
    "--model_dim 16000000": "be at most 8192", "--attention_pattern LXSL": "be of L, S and .",
    "--skip_layer 1": "lie below the first .", "--backout_layer 2": "be a layer",
    "--targets_ahead 0": "be from 1 to ", "--targets_ahead 1000000000": "be at most ",
    "--resume auto": "come with the --run_id of a run", "--run_id a/b": "be of letters, digits",
    "--run_id ..": "be of letters, digits, _ . + -, and not begin with ."}
BAD = NOT_UNDERSTOOD + [(flags, f"{flags}: must {words}") for flags, words in MUST.items()]


def test_presets_are_the_columns_of_the_table():
    assert parse_args([]) == RECORD
    assert parse_args(["--preset", "pocket"]) == POCKET and POCKET.preset == "pocket"
    assert (POCKET.vocab_size, POCKET.eot_token, POCKET.val_tokens) == (257, 256, 262_144)
    assert POCKET.target_loss == 1.64


@pytest.mark.parametrize("field", FIELDS[1:], ids=lambda field: field.name)
def test_each_field_has_a_flag_that_wins_over_the_preset(field, monkeypatch):
    monkeypatch.setattr(train_gpt, "check_hyperparameters", lambda cfg: None)
    assert type(field.default) is type(getattr(POCKET, field.name)) is field.type
    value = {bool: not field.default, str: "else"}.get(field.type)
    if field.type is tuple:
        value = (*field.default, 2 * field.default[-1])
    elif value is None:
        value = field.default + 3
    text = ",".join(map(str, value)) if field.type is tuple else value
    preset = ["--preset", "pocket"]
    for argv in (preset + [f"--{field.name}", str(text)], [f"--{field.name}={text}"] + preset):
        cfg = parse_args(argv)
        assert cfg == dataclasses.replace(POCKET, **{field.name: value})
        assert type(getattr(cfg, field.name)) is field.type


def test_a_switch_takes_true_or_false():
    assert parse_args(["--fp8_head", "True"]).fp8_head is True
    assert parse_args(["--fp8_head", "false"]).fp8_head is False



def test_help_is_the_docstring_and_the_table(capsys):
    """Each flag with its values and meaning, under the headings of the table."""
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert not exit_.value.code
    text, source = capsys.readouterr().out, inspect.getsource(Hyperparameters)
    assert text.startswith(train_gpt.__doc__)
    rows = re.findall(r"^    (\w+): \w+ = (.*?)(?:  (#.*))?$", source, re.M)
    assert [name for name, *_ in rows] == [field.name for field in FIELDS]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for name, values, meaning in rows:
        assert f"--{name} {values} {meaning}".strip() in lines
        assert meaning or name.endswith("_files")
    for heading in ("Model", "Optimizers", "Schedules", "Data and validation", "Run"):
        assert f"# {heading}" in lines


@pytest.mark.parametrize(("flags", "named"), BAD, ids=[flags for flags, _ in BAD])
def test_a_bad_flag_ends_in_one_line_and_2(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "train", lambda *args: pytest.fail("it was not refused"))
    assert main(["--preset", "pocket", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", err)
    assert named in err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_brings_its_hyperparameters_and_flags_win():
    """But its run, its device and what it was resumed from stay behind; a named preset wins."""
    then = dataclasses.replace(POCKET, muon_lr=0.3, run_id="then", resume="a.pt", device="cpu")
    saved = dataclasses.asdict(then)
    cfg = parse_args(["--resume", "b.pt", "--save_every", "9"], saved)
    assert cfg == dataclasses.replace(POCKET, muon_lr=0.3, resume="b.pt", save_every=9)
    assert parse_args(["--preset", "pocket"], saved) == POCKET
    assert parse_args(["--preset", "record"], saved) == RECORD
