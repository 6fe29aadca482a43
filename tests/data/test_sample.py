"""data/sample.py: what it draws from, from which checkpoint, by which script; bad input."""

import contextlib
import math
import os
import shutil
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import sample as sample_tool
import torch
from conftest import REPO, SCRIPTS, script_module

OLDEST = SCRIPTS[1]
WITH_TABLE = "records/2026-08-30_92g_NgramTable/train_gpt.py"


def model_of(logits, **cfg):
    """A model whose logits are a function of the last token; it notes the tokens that it sees."""
    def hidden(tokens):
        model.seen.append(tokens[0].tolist())
        return tokens
    cfg = SimpleNamespace(**dict(vocab_size=257, eot_token=256, val_seq_len=1024) | cfg)
    model = SimpleNamespace(cfg=cfg, seen=[], hidden=hidden, logits=logits,
                            parameters=lambda: iter([torch.zeros(1)]))
    return model


def letter_after(token):
    """Logits of which one is drawn for sure: after "a" comes "b", after "e" end-of-text."""
    logits = torch.zeros(384)
    logits[256 if token == ord("e") else token + 1] = 1000
    return logits


def test_sampling_follows_the_model_token_by_token_to_the_documents_end():
    """The model sees as many tokens as a validation sequence has."""
    model = model_of(letter_after, val_seq_len=3)
    assert bytes(sample_tool.draw_tokens(model, [256, *b"ab"], 9, 1.0, 0)) == b"cde"
    assert model.seen == [[256, *b"ab"], [*b"abc"], [*b"bcd"], [*b"cde"]]
    assert bytes(sample_tool.draw_tokens(model, [256, *b"ab"], 2, 1.0, 0)) == b"cd"


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, 0), (2, 3), (0, 0)])
def test_temperature_and_top_k_shape_what_is_drawn_from(monkeypatch, temperature, top_k):
    logits = [0.3, 2.0, -1.0, 1.2, 0.9, 50.0]  # the last one pads the vocabulary
    drawn_from = []

    def note(probabilities, _):
        drawn_from.append(probabilities.double())
        return torch.zeros(1).long()

    monkeypatch.setattr(torch, "multinomial", note)
    # The tokenizer's last id is end-of-text; a vocabulary that is larger is never drawn from.
    model = model_of(lambda x: torch.tensor(logits), vocab_size=6, eot_token=4)
    next(sample_tool.draw_tokens(model, [4], 1, temperature, top_k))
    kept = sorted(logits[:5])[-(top_k or 5) :]
    weights = [math.exp((x - 2.0) / (temperature or 1e-3)) * (x in kept) for x in logits[:5]]
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    torch.testing.assert_close(drawn_from[0], expected, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write_shard):
    """A folder with checkpoints after two steps, of the newest record and then of the oldest."""
    folder = tmp_path_factory.mktemp("runs")
    tokens = torch.randint(60, 123, (60_001,), generator=torch.Generator().manual_seed(0))
    tokens[::100] = 256
    write_shard(folder / "tiny.bin", tokens.tolist())
    write_shard(folder / "val.bin", tokens[:200].tolist())
    scripts = dict(table=script_module(WITH_TABLE), oldest=script_module(OLDEST))
    for name, script in scripts.items():
        flags = f"""--preset pocket --device cpu --num_iterations 2 --val_seq_len 128
            --sequences_per_step 8 --val_tokens 128 --warmup_steps 0 --save_every 2
            --train_files tiny.bin --val_files val.bin --run_id {name}"""
        with contextlib.chdir(folder):
            assert not script.main(flags.split())
    paths = {name: folder / "logs" / name / "step-000002.pt" for name in scripts}
    return SimpleNamespace(folder=folder, **paths)


@pytest.fixture
def run(call_tool):
    """`run(folder, *args, stdin=b"", refused=())` runs the tool there; what it printed."""
    return lambda folder, *args, **options: call_tool(sample_tool, args, folder, **options)


LIKELIEST = ["--prompt", "xy", "--tokens", 12, "--temperature", 0]


def test_without_a_checkpoint_it_is_the_last_step_of_the_run_that_wrote_last(
    runs, run, tmp_path, monkeypatch, capsys
):
    """Steps are compared by name, whatever the clock was when they were written."""
    text = run(tmp_path, runs.oldest, *LIKELIEST)
    mine = shutil.copytree(runs.oldest.parent, tmp_path / "logs" / "mine")
    earlier = mine / "step-000001.pt"
    earlier.write_text("no checkpoint")
    for name in ("step-000002-best.pt", "step-000009.keep.pt", "step-best.pt", "step-9.pt"):
        (mine / name).write_text("a person's copy, which is never chosen")
    os.utime(earlier, (2e9, 2e9))
    assert run(tmp_path, *LIKELIEST) == text
    other = shutil.copytree(mine, tmp_path / "logs" / "other")
    os.utime(other / "log.txt", (0, 0))
    monkeypatch.chdir(tmp_path)
    for last, folder in (1, mine), (2, other):
        os.utime(folder / "log.txt", (last, last))
        found = os.path.join("logs", folder.name, "step-000002.pt")
        assert str(sample_tool.last_checkpoint()) == found
        assert capsys.readouterr().err == f"{found}, of 2 runs\n"


def test_a_table_of_n_grams_is_read_as_well(runs, run):
    """It is no weight of the model, but the state of an optimizer."""
    state = script_module(WITH_TABLE).load_checkpoint(runs.table)["optimizers"]["n-grams"]
    model = sample_tool.load_model(runs.table, None, "cpu")
    found = model.ngram_table.full_state()
    assert state["rows"].any() and all(found[name].equal(x) for name, x in state.items())
    assert len(run(runs.folder, runs.table, *LIKELIEST)) > 3


def test_the_script_is_that_of_the_runs_log_or_the_one_named(runs, run, tmp_path):
    """A log from elsewhere may begin with anything, so that it is not run before it is named."""
    logged = run(runs.folder, runs.oldest, "--tokens", 20)
    model = shutil.copy(runs.oldest, tmp_path)
    named = [model, "--script", REPO / OLDEST, "--tokens", 20]
    assert run(tmp_path, *named) == logged and len(logged) > 3
    assert run(tmp_path, *named, "--seed", 1) != logged
    log = tmp_path / "log.txt"
    log.write_text("open('trap', 'w')\n" + runs.oldest.with_name("log.txt").read_text())
    told = f"{log}: its source is neither train_gpt.py nor a record's, and would be run; "
    run(tmp_path, model, refused=["sample.py: ", f"{told}read it, then: --script {log}"])
    assert not (tmp_path / "trap").exists()
    assert run(tmp_path, model, "--script", log, "--tokens", 20) == logged
    assert (tmp_path / "trap").exists()


def test_several_samples_differ_and_the_prompt_may_be_a_file(runs, run, tmp_path):
    flags = [runs.oldest, "--tokens", 30]
    given = run(tmp_path, *flags, "--prompt", "naïve\n")
    assert run(tmp_path, *flags, "--prompt_file", "-", stdin="naïve\n".encode()) == given
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf" + "naïve\n".encode())  # as text.py's
    flags += ["--prompt_file", tmp_path / "prompt.txt", "--num_samples", 2]
    first, second = run(tmp_path, *flags).split(sample_tool.BETWEEN_SAMPLES + "\n")
    assert first == given != second and second.startswith("naïve\n")


@pytest.mark.parametrize("script", [SCRIPTS[0], "records/2025-09-18_Smear/train_gpt.py"])
def test_a_checkpoint_of_the_middle_is_sampled_as_its_stage_has_it(monkeypatch, tmp_path, script):
    """Windows of a step, not those of the last validation."""
    trainer = script_module(script)
    monkeypatch.setattr(sample_tool, "load_script", lambda path: trainer)
    reach = {}
    for step in 0, trainer.parse_args(["--preset", "pocket"]).num_iterations:
        cfg = trainer.parse_args(["--preset", "pocket", "--device", "cpu"])
        model = trainer.GPT(trainer.shorten(cfg))
        state = dict(step=step, settings=asdict(cfg), model=model.state_dict())
        monkeypatch.setattr(trainer, "load_checkpoint", lambda path, state=state: state)
        path = tmp_path / "step.pt"
        path.touch()
        loaded = sample_tool.load_model(path, path, "cpu")
        reach[step] = [int(value) for value in loaded.reach]
        now = trainer.schedule(step, cfg)
        assert reach[step][0] == now.long_window
    assert len(set(map(tuple, reach.values()))) == 2


def test_letters_come_whole_and_a_standard_input_that_is_closed_is_told(runs, run, monkeypatch):
    monkeypatch.setattr(sample_tool, "draw_tokens", lambda *_: iter("aé…".encode()))
    assert run(runs.folder, runs.oldest, "--prompt", "> ") == "> aé…\n"
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(sample_tool.DataError, match="standard input is closed"):
        sample_tool.read_prompt("", "-")


@pytest.mark.parametrize("prompt", [
    "The <|endoftext|> token", '[{"a": 1}, ', '{"text": "hi', "PAR1 is", "BZhang", "a\0b"])
def test_a_prompt_may_be_any_text(tmp_path, prompt):
    for name in "a.txt", "a.csv", "a.json":
        (tmp_path / name).write_text(prompt)
        assert sample_tool.read_prompt("", str(tmp_path / name)) == prompt


def test_an_output_that_cannot_be_reconfigured_is_written_to(runs, run, monkeypatch):
    """As that of a notebook."""
    written = []
    output = SimpleNamespace(write=written.append, flush=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        run(runs.folder, runs.oldest, "--prompt", "xy", "--tokens", 1)
    assert "".join(written).startswith("xy")


@pytest.mark.parametrize(("args", "part"), [
    ([], "no checkpoint under logs/: train with --save_every"),
    (["gone.pt"], "gone.pt: there is no such file; name a checkpoint"),
    (["logs"], "logs: there is no such file; name a checkpoint, logs/RUN/step-*.pt"),
    (["text.pt"], "text.pt: there is no log.txt; name a checkpoint in its run's folder, or its"),
    (["text.pt", "--script", "text.pt"], "text.pt: no training script (SyntaxError"),
    (["OLDEST", "--script", REPO / "train_gpt.py"], "step-000002.pt: not of this script"),
    (["OLDEST", "--temperature", "nan"], "--temperature nan: give"),
    (["OLDEST", "--device", "abacus"], "--device abacus"),
    (["OLDEST", "--device", "meta"], "--device meta"),
    (["OLDEST", "--prompt", "-x"], "one that begins with - is given as --flag=VALUE"),
    (["OLDEST", "--tokens", "-1"], "argument --tokens: '-1': give a whole number from 0 on"),
    (["LOG"], "name another checkpoint, or its script by --script"),
    (["OLDEST", "--prompt_file", "zipped.gz"], "zipped.gz: not UTF-8 at byte 1; convert"),
    (["OLDEST", "--prompt_file", "-"], "standard input: not UTF-8 at byte 0; convert"),
    (["OLDEST", "--prompt_file", "gone.txt"], "gone.txt")])
def test_bad_input_is_one_line(runs, run, tmp_path, args, part):
    (tmp_path / "text.pt").write_text("some words of text")
    (tmp_path / "zipped.gz").write_bytes(b"\x1f\x8b\x08")
    files = {"OLDEST": runs.oldest, "LOG": runs.oldest.with_name("log.txt")}
    args = [files.get(arg, arg) for arg in args]
    run(tmp_path, *args, stdin=b"\xff", refused=[part])
