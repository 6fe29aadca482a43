"""Hyperparameters: one frozen dataclass, flags made from it, and clear words for wrong ones."""

import dataclasses
import inspect
import re

import pytest

import train_gpt
from train_gpt import Hyperparameters, main, parse_args

FIELDS = dataclasses.fields(Hyperparameters)
RECORD = Hyperparameters()
POCKET = Hyperparameters(**{each.name: each.metadata["pocket"] for each in FIELDS})
BAD_FLAGS = [
    ("--no_such_flag 1", "--no_such_flag"),
    ("--num_iteration 5", "--num_iteration"),  # no abbreviations: a typo is never another flag
    ("--num_iterations many", "--num_iterations"),
    ("--num_iterations 1.5", "--num_iterations"),
    ("--num_iterations", "--num_iterations"),
    ("--num_iterations 0", "--num_iterations 0"),
    ("--num_iterations -3", "--num_iterations -3"),
    ("--muon_lr fast", "--muon_lr"),
    ("--muon_lr nan", "--muon_lr nan"),
    ("--muon_lr inf", "--muon_lr inf"),
    ("--muon_lr -0.1", "--muon_lr -0.1"),
    ("--fp8_head maybe", "--fp8_head"),
    ("--preset laptop", "--preset laptop: must be record or pocket"),
    ("--seq_lens 100", "--seq_lens 100: must be "),
    ("--seq_lens 128,100", "--seq_lens 128,100: must be "),
    ("--seq_lens 2097152", "--seq_lens 2097152: must be "),
    ("--seq_lens", "--seq_lens"),
    ("--long_windows 1;2", "--long_windows 1;2: must be like 3,7,11,13,20"),
    ("--long_windows 1,,2", "--long_windows 1,,2: must be like 3,7,11,13,20"),
    ("--long_windows 0", "--long_windows 0: must be from 1 to "),
    ("--long_windows 1,2147483648", "--long_windows 1,2147483648: must be from 1 to "),
    ("--short_windows 1.5", "--short_windows 1.5: must be like 1,3,5,6"),
    ("--lr_factors 1,nan", "--lr_factors 1.0,nan: must be from 0 to "),
    ("--val_seq_len 8193", "--val_seq_len 8193: must be a multiple of 128"),
    ("--val_seq_len 1280000", "--val_seq_len 1280000: must not exceed val_tokens"),
    ("--head_dim 6", "--head_dim 6: must be a multiple of 4"),
    ("--model_dim 100", "--model_dim 100: must be a multiple of head_dim"),
    ("--model_dim 16000000", "--model_dim 16000000: must be "),
    ("--vocab_size 70000 --eot_token 5", "--vocab_size 70000"),
    ("--vocab_size 256", "--vocab_size 256: must exceed eot_token, up to 65536"),
    ("--eot_token 300", "--vocab_size 257: must exceed eot_token, up to 65536"),
    ("--attention_pattern LXSL", "--attention_pattern LXSL: must be of L, S and ."),
    ("--attention_pattern LSSL", "--value_embed_pattern 0.: must have an entry a layer"),
    ("--value_embed_pattern 0x", "--value_embed_pattern 0x: must have ., or 0, 1, 2, …"),
    ("--value_embed_pattern 1.", "--value_embed_pattern 1.: must have ., or 0, 1, 2, …"),
    ("--targets_ahead 0", "--targets_ahead 0: must be from 1 to "),
    ("--targets_ahead 1000000000", "--targets_ahead 1000000000: must be at most "),
    ("--skip_layer 1", "--skip_layer 1: must lie below the first ."),
    ("--backout_layer 2", "--backout_layer 2: must be a layer"),
    ("--muon_momentum 1", "--muon_momentum 1.0: must be below 1"),
    ("--embed_lr 1e38", "--embed_lr 1e+38: must be from 0 to "),
    ("--cooldown_frac 5", "--cooldown_frac 5.0: must be above 0, at most 1"),
    ("--cooldown_frac 0", "--cooldown_frac 0.0: must be above 0, at most 1"),
    ("--device tpu", "--device tpu: must be auto, cuda or cpu"),
    ("--resume auto", "--resume auto: must come with the --run_id of a run"),
    ("--run_id ..", "--run_id ..: must be of letters, digits, _ . + -, and not begin with ."),
    ("--run_id a/b", "--run_id a/b: must be of letters"),
    ("--seed -1", "--seed -1: must be from 0 to "),
    (f"--seed {2**70}", "--seed"),
    ("--threads 2", "--threads"),  # chosen when the run starts
    ("stray", "stray"),
]


def test_every_field_is_typed_and_explained_on_its_line():
    source = train_gpt.SCRIPT.read_text()
    for field in FIELDS:
        assert type(field.default) is type(getattr(POCKET, field.name)) is field.type, field.name
        values = field.default if field.type is tuple else [field.default]
        assert {type(entry) for entry in values} <= {int, float, str, bool}
        declared = rf"^    {field.name}: {field.type.__name__} = .+?, .+?(  # \w.+)?$"
        (meaning,) = re.findall(declared, source, re.M)
        assert meaning or field.name.endswith("_files")


def test_hyperparameters_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hyperparameters().seed = 1


def test_pocket_is_the_other_column_of_the_table():
    cfg = parse_args(["--preset", "pocket"])
    assert parse_args([]) == RECORD
    assert cfg == POCKET and cfg.preset == "pocket"
    assert (cfg.vocab_size, cfg.eot_token, cfg.val_tokens) == (257, 256, 262_144)
    assert cfg.target_loss == 1.64


@pytest.mark.parametrize("field", FIELDS[1:], ids=lambda field: field.name)
def test_each_field_has_a_flag(field, monkeypatch):
    monkeypatch.setattr(train_gpt, "check_hyperparameters", lambda cfg: None)
    value = {bool: not field.default, str: "else"}.get(field.type)
    if field.type is tuple:
        value = (*field.default, 2 * field.default[-1])
    elif value is None:
        value = field.default + 3
    text = ",".join(map(str, value)) if field.type is tuple else value
    for argv in ([f"--{field.name}", str(text)], [f"--{field.name}={text}"]):
        cfg = parse_args(["--preset", "pocket", *argv])
        assert getattr(cfg, field.name) == value
        assert type(getattr(cfg, field.name)) is field.type
        other = dataclasses.replace(cfg, **{field.name: getattr(POCKET, field.name)})
        assert other == POCKET


def test_a_flag_wins_over_the_preset_in_any_order():
    for argv in (["--preset", "pocket", "--seed", "3"], ["--seed", "3", "--preset", "pocket"]):
        assert parse_args(argv) == dataclasses.replace(POCKET, seed=3)


def test_a_switch_needs_no_value():
    assert parse_args(["--fp8_head"]).fp8_head is True
    assert parse_args(["--fp8_head", "False"]).fp8_head is False


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
    for heading in ("Model", "Optimizers", "Schedules", "Data and validation", "Run"):
        assert f"# {heading}" in lines


@pytest.mark.parametrize(("flags", "named"), BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
def test_a_bad_flag_ends_in_one_line_and_2(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "train", lambda *args: pytest.fail("it was not refused"))
    assert main(["--preset", "pocket", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", err)
    assert named in err
    assert list(tmp_path.iterdir()) == []


SAVED = dataclasses.asdict(dataclasses.replace(POCKET, muon_lr=0.3, run_id="then", resume="a.pt"))


def test_a_checkpoint_brings_its_hyperparameters_and_flags_win():
    """But its run, its device and what it was resumed from stay behind."""
    cfg = parse_args(["--resume", "b.pt", "--save_every", "9"], SAVED)
    assert cfg == dataclasses.replace(POCKET, muon_lr=0.3, resume="b.pt", save_every=9)
    assert parse_args([], SAVED | {"device": "cpu"}).device == "auto"


def test_a_preset_that_is_named_wins_over_the_checkpoint():
    assert parse_args(["--preset", "pocket"], SAVED) == POCKET
    assert parse_args(["--preset", "record"], SAVED) == RECORD


def test_the_record_without_cuda_names_the_pocket_preset(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt.torch.cuda, "device_count", lambda: 0)
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "CUDA" in err and "--preset pocket" in err
    assert list(tmp_path.iterdir()) == []
