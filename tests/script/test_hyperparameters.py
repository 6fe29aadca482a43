"""Hyperparameters: one frozen dataclass, flags made from it, and clear words for wrong ones."""

import dataclasses
import re

import pytest

import train_gpt
from train_gpt import PRESETS, Hyperparameters, UserError, main, parse_args

RECORD, POCKET = (Hyperparameters(**PRESETS[name]) for name in ("record", "pocket"))
FIELDS = dataclasses.fields(Hyperparameters)
# What the published record #53 was run with, by its own log.
PUBLISHED = {
    "vocab_size": 50257,
    "eot_token": 50256,
    "num_iterations": 1920,
    "extension_steps": 40,
    "train_seq_len": 49152,
    "length_stages": "1 2 3",
    "align_documents": False,
    "max_document_tokens": 2048,
    "val_tokens": 10485760,
    "val_seq_len": 262144,
    "val_every": 250,
    "model_dim": 768,
    "head_dim": 128,
    "sequences_per_step": 8,
    "vocab_multiple": 128,
    "attention_scale": 0.1,
    "skip_layer": 3,
    "backout_layer": 7,
    "embed_std": 0.005,
    "targets_ahead": 3,
    "rope_base": 1024,
    "embed_lr": 0.6,
    "head_lr": 0.008,
    "smear_lr": 0.008 * 0.01,
    "scalar_lr": 0.04,
    "freeze_steps": 40,
    "adam_every": 2,
    "adam_beta1": 0.65,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "adam_decay": 0.005,
    "muon_lr": 0.023,
    "muon_decay": 1.2,
    "muon_momentum": 0.95,
    "momentum_start": 0.85,
    "momentum_warmup": 300,
    "momentum_cooldown": 50,
    "lr_stages": "100 152 173",
    "cooldown_frac": 0.55,
    "final_lr_frac": 0.1,
    "window_stages": "3 7 11 13",
    "final_window": 20,
    "fp8_x_scale": 448 / 100,
    "fp8_w_scale": 448 / 1.5,
    "fp8_grad_scale": 448 / 0.75,
}
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
    ("--preset laptop", "--preset"),
    ("--train_seq_len 100", "--train_seq_len 100"),
    ("--val_seq_len 8193", "--val_seq_len 8193"),
    ("--head_dim 6", "--head_dim 6"),
    ("--model_dim 100", "--model_dim 100"),
    ("--vocab_size 70000 --eot_token 5", "--vocab_size 70000"),
    ("--vocab_size 256", "--vocab_size 256"),
    ("--eot_token 300", "--vocab_size 257"),
    ("--attention_pattern LXSL", "--attention_pattern LXSL"),
    ("--attention_pattern LSSL --value_embed_pattern 0.0", "--value_embed_pattern 0.0"),
    ("--attention_pattern LSSL --value_embed_pattern 0x.0", "--value_embed_pattern 0x.0"),
    ("--logit_slope 0", "--logit_slope 0"),
    ("--device tpu", "--device tpu"),
    ("--adam_beta1 1.5", "--adam_beta1 1.5: must be below 1"),
    ("--adam_beta2 1", "--adam_beta2 1.0: must be below 1"),
    ("--muon_momentum 1", "--muon_momentum 1.0: must be below 1"),
    ("--logit_cap 0", "--logit_cap 0.0: must be positive"),
    ("--logit_cap 65", "--logit_cap 65.0: must be at most 64"),
    ("--value_embed_pattern 1.", "--value_embed_pattern 1.: must have . or 0, 1, … a layer"),
    ("--window_stages=0,1,2,3", "--window_stages 0,1,2,3: must be up to 4 numbers from 1 to 9999"),
    ("--window_stages 99999", "--window_stages 99999: must be up to 4 numbers from 1 to 9999"),
    ("--lr_stages 1=2", "--lr_stages 1=2: must be up to 4 numbers from 1 to 9999"),
    ("--length_stages 0", "--length_stages 0: must be up to 4 numbers from 1 to 9999"),
    ("--lr_stages 1.5", "--lr_stages 1.5: must be up to 4 numbers from 1 to 9999"),
    ("--targets_ahead 0", "--targets_ahead 0: must be positive"),
    ("--skip_layer 1", "--skip_layer 1: must be below any '.'"),
    ("--final_window 0", "--final_window 0: must be positive"),
    ("--backout_layer 2", "--backout_layer 2: must be a layer's number"),
    ("--adam_every 0", "--adam_every 0: must be positive"),
    ("--cooldown_frac 5", "--cooldown_frac 5.0: must be at most 1"),
    ("--final_lr_frac 1.1", "--final_lr_frac 1.1: must be at most 1"),
    ("--resume auto", "--resume auto: must come with the --run_id of a run"),
    ("--run_id ..", "--run_id ..: must be the name of a folder"),
    ("--run_id a/b", "--run_id a/b: must be the name of a folder"),
    ("--model_dim 64 --head_dim 48", "--model_dim 64: must be a multiple of 48"),
    ("--seed -1", "--seed -1"),
    (f"--seed {2**70}", "--seed"),
    ("stray", "stray"),
]


def test_every_field_is_typed_and_commented_on_its_line():
    source = train_gpt.SCRIPT.read_text()
    for field in FIELDS:
        assert field.type in (int, float, str, bool), field.name
        assert type(field.default) is field.type, field.name
        assert re.search(rf"^    {field.name}: {field.type.__name__} = .+  # \w", source, re.M)


def test_hyperparameters_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hyperparameters().seed = 1


def test_default_is_the_published_record():
    cfg = parse_args([])
    assert cfg.preset == "record"
    assert cfg == RECORD
    assert {name: getattr(cfg, name) for name in PUBLISHED} == PUBLISHED


def test_pocket_replaces_fields_of_the_record():
    cfg = parse_args(["--preset", "pocket"])
    assert cfg.preset == "pocket"
    assert cfg == dataclasses.replace(Hyperparameters(), **PRESETS["pocket"])
    assert (cfg.vocab_size, cfg.eot_token, cfg.val_tokens) == (257, 256, 262_144)
    assert cfg.target_loss == 1.64


@pytest.mark.parametrize("field", FIELDS[1:], ids=lambda field: field.name)
def test_each_field_has_a_flag(field, monkeypatch):
    monkeypatch.setattr(train_gpt, "check_hyperparameters", lambda cfg: None)
    value = {bool: not field.default, str: "else"}.get(field.type)
    if value is None:
        value = field.type(field.default) + 3
    for argv in ([f"--{field.name}", str(value)], [f"--{field.name}={value}"]):
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


def help_of(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_has_each_flag_in_its_group_with_its_meaning_and_the_presets_values(capsys):
    text, source = help_of(capsys), train_gpt.SCRIPT.read_text()
    body = source.partition("class Hyperparameters:")[2].partition("PRESETS = ")[0]
    assert re.match(r"usage: \S+\.py \[--FLAG VALUE \.\.\.\]\n", text)
    assert f"In brackets: {', '.join(PRESETS)}." in text
    expected = ["options"]
    for group, name, meaning in re.findall(r"^    (?:# ([^:\n]*)|(\w+): .*  # (.*)$)", body, re.M):
        if group:
            expected.append(group.rstrip(":"))
            continue
        values = [getattr(Hyperparameters(**preset), name) for preset in PRESETS.values()]
        expected.append(f"--{name} X {meaning} [{', '.join(map(repr, values))}]")
    flags = text.partition("\noptions:\n")[2].partition("\nIn ")[0]
    rows = re.split(r"\n(?=  -|\w[^\n]*:\n)", flags)
    found = [" ".join(row.replace("[X]", "X", 1).split()).removesuffix(":") for row in rows]
    assert [re.sub("[ -]", "", row) for row in found[1:]] == [
        re.sub("[ -]", "", row) for row in expected[1:]]


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


def test_an_error_says_what_would_be_right():
    with pytest.raises(UserError, match=r"--train_seq_len 100: must be a multiple of 128"):
        parse_args(["--train_seq_len", "100"])
    with pytest.raises(UserError, match=r"--device tpu: must be auto, cuda or cpu"):
        parse_args(["--device", "tpu"])


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
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "CUDA" in err and "--preset pocket" in err
    assert list(tmp_path.iterdir()) == []
