"""data/sample.py: what it draws from, from which checkpoint, by which script; bad input."""

import dataclasses
import math
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import sample as sample_tool
import torch
from conftest import REPO

import train_gpt
from train_gpt import PRESETS, Hyperparameters

POCKET = Hyperparameters(**PRESETS["pocket"])


class Fixed(torch.nn.Module):
    """A model whose logits are the same after any text."""

    def __init__(self, logits, **changes):
        super().__init__()
        self.fixed = torch.nn.Parameter(torch.tensor(logits))
        self.cfg = dataclasses.replace(POCKET, **changes)

    def hidden(self, tokens):
        return torch.zeros(*tokens.shape, 1)

    def logits(self, x):
        return self.fixed.clone()


class Sure(Fixed):
    """A model that is sure: after token i comes i + 1, until end-of-text after "e"."""

    def __init__(self, **changes):
        super().__init__([0.0], **changes)
        self.seen = []

    def hidden(self, tokens):
        self.seen.append(tokens[0].tolist())
        return tokens[..., None].float()

    def logits(self, x):
        following = torch.where(x == ord("e"), 256, x + 1).long()
        return 1000 * torch.nn.functional.one_hot(following[..., 0], 384).float()


def test_sampling_follows_the_model_token_by_token_to_the_documents_end():
    model = Sure()
    assert sample_tool.sample(model, [256, *b"ab"], 9, 1.0, 0) == [256, *b"abcde", 256]
    assert model.seen == [[256, *b"abcde"[:length]] for length in (2, 3, 4, 5)]


def test_the_model_sees_as_many_tokens_as_a_validation_sequence_has():
    model = Sure(val_seq_len=3)
    assert sample_tool.sample(model, [256, *b"ab"], 2, 1.0, 0) == [256, *b"abcd"]
    assert model.seen == [[256, *b"ab"], [*b"abc"]]


@pytest.mark.parametrize(("temperature", "top_k"), [(1, 0), (0.5, 0), (2, 3), (1, 1), (0, 0)])
def test_temperature_and_top_k_shape_what_is_drawn_from(monkeypatch, temperature, top_k):
    logits = [0.3, 2.0, -1.0, 1.2, 0.9, 50.0]  # the last one pads the vocabulary
    drawn_from = []
    monkeypatch.setattr(
        torch, "multinomial", lambda p, n: (drawn_from.append(p.double()), torch.zeros(n).long())[1]
    )
    sample_tool.sample(Fixed(logits, vocab_size=5, eot_token=4), [4], 1, temperature, top_k)
    kept = sorted(logits[:5])[-(top_k or 5) :]
    weights = [math.exp((x - 2.0) / (temperature or 1e-3)) * (x in kept) for x in logits[:5]]
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    torch.testing.assert_close(drawn_from[0], expected, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, write_shard):
    """A folder with checkpoints of four steps, by the root script and by the oldest record."""
    folder = tmp_path_factory.mktemp("runs")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (1025,), generator=generator)
    tokens[::100] = 256
    write_shard(folder / "tiny.bin", tokens.tolist())
    oldest = sorted(REPO.glob("records/20*/train_gpt.py"))[0]
    paths = {}
    for name, script in (("oldest", oldest), ("root", REPO / "train_gpt.py")):
        flags = f"""--preset pocket --device cpu --num_iterations 4 --train_seq_len 128
            --val_seq_len 128 --sequences_per_step 2 --val_tokens 128 --warmup_steps 0
            --train_files tiny.bin --val_files tiny.bin --save_every 1 --run_id {name}"""
        subprocess.run([sys.executable, script, *flags.split()], cwd=folder, check=True,
                       capture_output=True)  # fmt: skip
        paths[name] = folder / "logs" / name / "step-000004.pt"
    return SimpleNamespace(folder=folder, oldest_script=oldest, **paths)


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(folder, *args)` runs the tool there, in this process."""
    def run_here(folder, *args):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["sample.py", *map(str, args)])
        handler, code = signal.getsignal(signal.SIGTERM), 0
        try:
            sample_tool.run(sample_tool.main)
        except SystemExit as exit_:
            code = exit_.code
        finally:
            signal.signal(signal.SIGTERM, handler)
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)
    return run_here


@torch.no_grad()
def test_the_newest_checkpoint_says_the_likeliest(runs, run):
    """As the model's logits have it, computed here."""
    state = torch.load(runs.root, weights_only=True)
    model = train_gpt.GPT(Hyperparameters(**state["hyperparameters"])).eval()
    model.load_state_dict(state["model"])
    ids = [256, *b"xy"]
    while len(ids) < 3 + 12 and (ids[-1] != 256 or len(ids) == 1):
        logits = model.logits(model.hidden(torch.tensor([ids], dtype=torch.int32)))
        ids.append(logits[0, -1, :257].argmax().item())
    flags = ["--prompt", "xy", "--tokens", 12]
    done, cold = run(runs.folder, *flags, "--temperature", 0), run(
        runs.folder, runs.root, *flags, "--top_k", 1, "--temperature", 3)
    text = bytes(i for i in ids if i < 256).decode(errors="replace")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", text + "\n")
    assert cold.stdout == done.stdout


def test_the_script_is_that_of_the_runs_log_or_the_one_named(runs, run, tmp_path):
    """Both of a record whose model is another than today's."""
    logged = run(runs.folder, runs.oldest, "--tokens", 20)
    assert logged.returncode == 0, logged.stderr
    shutil.copy(runs.oldest, tmp_path / "model.pt")
    named = run(tmp_path, "model.pt", "--script", runs.oldest_script, "--tokens", 20)
    assert named.stdout == logged.stdout and len(named.stdout) > 3
    other = run(tmp_path, "model.pt", "--script", runs.oldest_script, "--tokens", 20, "--seed", 1)
    assert other.stdout != logged.stdout


@pytest.mark.parametrize(("args", "part"), [
    ([], "no checkpoint under logs/: train with --save_every"),
    (["gone.pt"], "gone.pt: there is no such checkpoint"),
    (["text.pt"], "log.txt: there is no such file; name the checkpoint's script by --script"),
    (["ROOT", "--top", "3"], "--top"),
    (["text.pt", "--script", "SCRIPT"], "text.pt: no checkpoint"),
    (["text.pt", "--script", "text.pt"], "text.pt: no training script, SyntaxError"),
    (["OLDEST", "--script", "SCRIPT"], "step-000004.pt: no checkpoint"),
    (["ROOT", "--tokens", "-1"], "--tokens"),
    (["ROOT", "--temperature", "nan"], "--temperature"),
    (["ROOT", "--device", "abacus"], "abacus"),
    (["ROOT", "--wrong"], "--wrong"),
])  # fmt: skip
def test_bad_input_is_one_line(runs, run, tmp_path, args, part):
    (tmp_path / "text.pt").write_text("some words of text")
    names = {"SCRIPT": REPO / "train_gpt.py", "OLDEST": runs.oldest, "ROOT": runs.root}
    done = run(tmp_path, *(names.get(arg, arg) for arg in args))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("sample.py: ") and part in done.stderr


def test_a_vocabulary_without_a_tokenizer_is_said():
    with pytest.raises(sample_tool.DataError, match="eot_token 7: of no tokenizer known, gpt2, by"):
        sample_tool.find_tokenizer(7)
