"""Hyperparameters: flags made from one dataclass, its help, and clear words for wrong ones."""

import dataclasses
import inspect
import re

import pytest

import train_gpt
from train_gpt import POCKET, Hyperparameters, main, parse_args

FIELDS = dataclasses.fields(Hyperparameters)
BAD = {  # flags, and the words that the line has
    "--no_such_flag 1": "unrecognized arguments: --no_such_flag 1",
    "--num_iterations": "argument --num_iterations: expected one argument",
    "--num_iterations many": "argument --num_iterations: invalid flag value: 'many'",
    "--num_iterations 1.5": "--num_iterations: invalid",
    "--num_iterations 0": "--num_iterations: invalid",
    "--num_iterations 10000000": "num_iterations must be at most a million; here it is 10000000",
    "--seed -1": "--seed",
    f"--seed {2**70}": "--seed: invalid",
    "--fp8_head maybe": "argument --fp8_head: invalid flag value: 'maybe'",
    "--muon_lr nan": "--muon_lr: invalid",
    "--muon_lr=-0.1": "--muon_lr: invalid",
    "--lr_factors 1,nan": "argument --lr_factors: invalid flag value: '1,nan'",
    "--embed_lr inf": "--embed_lr: invalid",
    "--long_windows 1;2": "--long_windows: invalid",
    "--long_windows 0": "--long_windows: invalid",
    "--short_windows 1.5": "--short_windows: invalid",
    "--seq_lens (128,)": "argument --seq_lens: invalid flag value: '(128,)'",
    "--seq_lens 128,100": "seq_lens and val_seq_len must be multiples of 128; here it is 128,100",
    "--val_seq_len 8193": "seq_lens and val_seq_len must be multiples of 128",
    "--preset laptop": "argument --preset: invalid choice: 'laptop'",
    "--device tpu": "argument --device: invalid choice: 'tpu'",
    "--eot_token 257": "--eot_token must be below vocab_size; here it is 257",
    "--attention_pattern LSSL": "--value_embed_pattern must have an entry a layer; here it is 0.",
    "--attention_pattern LXSL": "--attention_pattern must be of L, S and .; here it is LXSL",
    "--value_embed_pattern ..,": "--value_embed_pattern must have an entry a layer",
    "--skip_layer 1": "--skip_layer must lie below the first .; here it is 1",
    "--backout_layer 2": "--backout_layer must be a layer",
    "--cooldown_frac 0": "--cooldown_frac must be above 0, at most 1; here it is 0.0",
    "--head_dim 6": "--head_dim must be a multiple of 4; here it is 6",
    "--model_dim 100": "--model_dim must be a multiple of head_dim; here it is 100",
    "--resume auto": "auto: no such checkpoint; give its path, or auto with --run_id",
    "--run_id a/b": "--run_id must be of letters, digits, _ . + -, and not begin with .",
    "--run_id ..": "--run_id must be of letters",
    "--threads 2": "--threads",  # OMP_NUM_THREADS has them
    "stray": "stray"}


def test_the_presets_are_the_table_and_what_differs_from_it():
    assert parse_args([]) == Hyperparameters()
    pocket = parse_args(["--preset", "pocket"])
    assert pocket == Hyperparameters(**POCKET) and pocket.preset == "pocket"
    assert (pocket.model_dim, pocket.vocab_size, pocket.val_tokens) == (64, 257, 262_144)
    assert all(getattr(Hyperparameters(), name) != value for name, value in POCKET.items())


@pytest.mark.parametrize("field", FIELDS[1:], ids=lambda field: field.name)
def test_each_field_has_a_flag_that_wins_over_the_preset(field, monkeypatch):
    monkeypatch.setattr(train_gpt, "hyperparameters", lambda given: given)
    assert type(field.default) is field.type
    assert type(POCKET.get(field.name, field.default)) is field.type
    value = {bool: not field.default, str: "else"}.get(field.type)
    if field.name == "device":
        value = "cpu"
    if field.type is tuple:
        value = (*field.default, 2 * field.default[-1])
    elif value is None:
        value = field.default + 3
    text = ",".join(map(str, value)) if field.type is tuple else value
    preset = ["--preset", "pocket"]
    for argv in (preset + [f"--{field.name}", str(text)], [f"--{field.name}={text}"] + preset):
        assert parse_args(argv) == {"preset": "pocket", field.name: value}
        assert type(parse_args(argv)[field.name]) is field.type


def test_a_switch_takes_true_or_false():
    assert parse_args(["--fp8_head", "True"]).fp8_head is True
    assert parse_args(["--fp8_head", "false"]).fp8_head is False


def test_what_may_be_0_may_be():
    names = [each.name for each in FIELDS if each.type is int]
    for name in names:
        if name in train_gpt.MAY_BE_ZERO:
            assert train_gpt.parse_flags([f"--{name}", "0"]) == {name: 0}
        else:
            with pytest.raises(train_gpt.UserError, match=f"--{name}: invalid"):
                train_gpt.parse_flags([f"--{name}", "0"])
    for name in set(POCKET) & set(names):
        assert POCKET[name] or name in train_gpt.MAY_BE_ZERO


def test_help_has_each_flag_with_its_meaning_and_values(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert not exit_.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert " ".join(train_gpt.__doc__.split()) in text
    table = inspect.getsource(Hyperparameters)
    rows = re.findall(r"^    (\w+): \w+ = .*?  # (.*)$", table, re.M)
    assert [name for name, _ in rows] == [field.name for field in FIELDS]
    cfg = Hyperparameters()
    for name, meaning in rows:
        record, pocket = (train_gpt.show(x) for x in (
            getattr(cfg, name), POCKET.get(name, getattr(cfg, name))))
        assert f"--{name} X {meaning} (record: {record}, pocket: {pocket})" in text


@pytest.mark.parametrize(("flags", "named"), BAD.items(), ids=BAD)
def test_a_bad_flag_ends_in_one_line_and_2(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt, "train", lambda *args: pytest.fail("it was not refused"))
    assert main(["--preset", "pocket", *flags.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", err)
    assert named in err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_brings_its_settings_and_few_flags_may_differ():
    """Its run and its device stay behind. What is named with the same value is no difference."""
    saved = train_gpt.parse_flags(["--run_id", "then", "--device", "cpu"]) | {}
    saved = {each.name: each.default for each in FIELDS} | POCKET | saved | {"muon_lr": 0.3}
    given = dict(resume="b.pt", save_every=9, preset="pocket", muon_lr=0.3)
    cfg = train_gpt.hyperparameters(given, saved)
    expected = Hyperparameters(**POCKET | dict(muon_lr=0.3, resume="b.pt", save_every=9))
    assert cfg == expected


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_other_flags_are_refused_by_name_when_a_run_is_resumed(field):
    saved = {each.name: each.default for each in FIELDS} | POCKET
    value = saved[field.name]
    other = {bool: not value, str: "else", tuple: (256, 384)}.get(field.type)
    other = value + 128 if other is None else other
    if field.name in train_gpt.MAY_CHANGE:
        cfg = train_gpt.hyperparameters({field.name: other}, saved)
        assert getattr(cfg, field.name) == other
    else:
        with pytest.raises(train_gpt.UserError, match=f"--{field.name} .*: the checkpoint has "):
            train_gpt.hyperparameters({field.name: other}, saved)
