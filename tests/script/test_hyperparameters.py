"""Hyperparameters: flags made from one dataclass, its help, and clear words for wrong ones."""

import dataclasses
import inspect
import re

import pytest

import train_gpt
from train_gpt import POCKET, Hyperparameters, main, parse_args

FIELDS = dataclasses.fields(Hyperparameters)
IN_RECORD = dataclasses.asdict(Hyperparameters())
IN_POCKET = IN_RECORD | POCKET
BAD = {  # flags, and the words that the line has
    "--no_such_flag 1": "unrecognized arguments: --no_such_flag 1",
    "--num_iterations many": "argument --num_iterations: invalid flag value: 'many'",
    "--num_iterations 0": "--num_iterations: invalid",
    "--num_iterations 10000000": "num_iterations must be at most a million; here it is 10000000",
    f"--seed {2**70}": "--seed: invalid",
    "--muon_lr nan": "--muon_lr: invalid",
    "--lr_factors 1,nan": "argument --lr_factors: invalid flag value: '1,nan'",
    "--long_windows 0": "--long_windows: invalid",
    "--seq_lens 128,100": "seq_lens and val_seq_len must be multiples of 128; here it is 128,100",
    "--eot_token 257": "--eot_token must be below vocab_size; here it is 257",
    "--attention_pattern LSSL": "--value_embed_pattern must have an entry a layer; here it is 0.",
    "--attention_pattern LXSL": "--attention_pattern must be of L, S and .; here it is LXSL",
    "--skip_layer 1": "--skip_layer must lie below the first .; here it is 1",
    "--backout_layer 2": "--backout_layer must be a layer",
    "--cooldown_frac 0": "--cooldown_frac must be above 0, at most 1; here it is 0.0",
    "--head_dim 6": "--head_dim must be a multiple of 4; here it is 6",
    "--model_dim 100": "--model_dim must be a multiple of head_dim; here it is 100",
    "--resume auto": "auto: no such checkpoint; give its path, or auto with --run_id",
    "--run_id a/b": "--run_id must be of letters, digits, _ . + -, and not begin with .",
    "--resume none.pt": "none.pt: no such checkpoint; give its path",
    "--run_id ..": "--run_id must be of letters",
    "--device cuda": "--device cuda: no GPU 0; use --device cpu",
    "--preset record": "there is no CUDA device; use --preset pocket"}


def test_the_presets_are_the_table_and_what_differs_from_it():
    assert parse_args([]) == Hyperparameters()
    pocket = parse_args(["--preset", "pocket"])
    assert pocket == Hyperparameters(**POCKET) and pocket.preset == "pocket"
    assert (pocket.model_dim, pocket.vocab_size, pocket.val_tokens) == (64, 257, 262_144)
    assert all(IN_RECORD[name] != value for name, value in POCKET.items())


@pytest.mark.parametrize("preset", [[], ["--preset", "pocket"]])
def test_what_is_shown_of_each_field_is_a_flag_that_gives_its_value(preset):
    """Checkpoints keep their settings in this form."""
    values = vars(parse_args(preset))
    shown = [f"--{name}={train_gpt.show(value)}" for name, value in values.items()]
    assert train_gpt.parse_flags(shown) == values


def test_help_has_each_flag_with_its_meaning_and_values(capsys):
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


def test_a_checkpoint_brings_its_settings_and_few_flags_may_differ():
    """Its run and its device stay behind. What is named with the same value is no difference."""
    saved = IN_POCKET | dict(run_id="then", device="cpu", muon_lr=0.3)
    given = dict(resume="b.pt", save_every=9, preset="pocket", muon_lr=0.3)
    cfg = train_gpt.hyperparameters(given, saved)
    expected = Hyperparameters(**POCKET | dict(muon_lr=0.3, resume="b.pt", save_every=9))
    assert cfg == expected


def test_other_flags_are_refused_by_name_when_a_run_is_resumed():
    assert train_gpt.hyperparameters(dict(val_every=7), IN_POCKET).val_every == 7
    with pytest.raises(train_gpt.UserError, match="--seed 7: the checkpoint has 0; a resumed run"):
        train_gpt.hyperparameters(dict(seed=7), IN_POCKET)
    assert set(train_gpt.MAY_CHANGE) < set(IN_POCKET)
