"""Hyperparameters: one frozen dataclass, flags made from it, and clear words for wrong ones."""

import dataclasses
import re

import pytest

import train_gpt
from train_gpt import PRESETS, Hyperparameters, UserError, main, parse_args

POCKET = Hyperparameters(**PRESETS["pocket"])
FIELDS = dataclasses.fields(Hyperparameters)
# What the published record #21 was run with, by its own log.
PUBLISHED = {
    "vocab_size": 50257,
    "eot_token": 50256,
    "num_iterations": 1770,
    "train_seq_len": 49152,
    "val_tokens": 10485760,
    "val_seq_len": 262144,
    "val_every": 125,
    "model_dim": 768,
    "head_dim": 128,
    "sequences_per_step": 8,
    "vocab_multiple": 128,
    "attention_scale": 0.12,
    "rope_base": 1024,
    "embed_lr": 0.6,
    "head_lr": 0.008,
    "scalar_lr": 0.04,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_eps": 1e-10,
    "muon_lr": 0.05,
    "muon_momentum": 0.95,
    "momentum_start": 0.85,
    "momentum_warmup": 300,
    "ns_steps": 5,
    "cooldown_frac": 0.4,
    "final_lr_frac": 0.1,
    "window_tokens": 1728,
    "fp8_x_scale": 2,
    "fp8_w_scale": 512,
    "fp8_grad_scale": 524288,
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
    ("--tokenizer llama", "--tokenizer llama"),
    ("--device tpu", "--device tpu"),
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
    preset, cfg = parse_args([])
    assert preset == "record"
    assert cfg == Hyperparameters()
    assert {name: getattr(cfg, name) for name in PUBLISHED} == PUBLISHED


def test_pocket_replaces_fields_of_the_record():
    preset, cfg = parse_args(["--preset", "pocket"])
    assert preset == "pocket"
    assert cfg == dataclasses.replace(Hyperparameters(), **PRESETS["pocket"])
    assert (cfg.vocab_size, cfg.eot_token, cfg.val_tokens) == (257, 256, 262_144)
    assert cfg.target_loss == 1.64


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_each_field_has_a_flag(field, monkeypatch):
    monkeypatch.setattr(train_gpt, "check_hyperparameters", lambda cfg: None)
    value = {bool: not field.default, str: "else"}.get(field.type)
    if value is None:
        value = field.type(field.default) + 3
    for argv in ([f"--{field.name}", str(value)], [f"--{field.name}={value}"]):
        _, cfg = parse_args(["--preset", "pocket", *argv])
        assert getattr(cfg, field.name) == value
        assert type(getattr(cfg, field.name)) is field.type
        other = dataclasses.replace(cfg, **{field.name: getattr(POCKET, field.name)})
        assert other == POCKET


def test_a_flag_wins_over_the_preset_in_any_order():
    for argv in (["--preset", "pocket", "--seed", "3"], ["--seed", "3", "--preset", "pocket"]):
        assert parse_args(argv)[1] == dataclasses.replace(POCKET, seed=3)


def test_a_switch_needs_no_value():
    assert parse_args(["--profile"])[1].profile is True
    assert parse_args(["--fp8_head", "False"])[1].fp8_head is False


def test_help_shows_each_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    usage, _, options = capsys.readouterr().out.partition("\noptions:\n")
    own = {}
    for entry in re.split(r"\n  --", "\n" + options):
        name, _, text = entry.partition(" ")
        own[name] = "".join(text.split())
    assert own["preset"].startswith("{record,pocket}")
    for field in FIELDS:
        assert f"--{field.name} " in usage
        assert f"[{field.default!r}".replace(" ", "") in own[field.name]
        for preset, values in PRESETS.items():
            if field.name in values:
                assert f"{preset}:{values[field.name]!r}".replace(" ", "") in own[field.name]


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


def test_the_record_without_cuda_names_the_pocket_preset(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "CUDA" in err and "--preset pocket" in err
    assert list(tmp_path.iterdir()) == []
