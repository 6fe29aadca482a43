"""The tiny model that the tests train, and whole runs of it in their process: `run`, `run_main`.

Its tables are the pocket's. A test that needs other flags says by `tiny(...)` what differs.
"""

import gc
import io
import re
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import final_values

import train_gpt

STEPS = 6
TOKENS = 4 * (2 * 128 + 2 * 256 + 2 * 384)  # of these steps
FLAGS = dict(
    preset="pocket", device="cpu", run_id="x", model_dim=32, head_dim=16, vocab_multiple=128,
    embed_lr=0.6, num_iterations=STEPS, extension_steps=1, freeze_steps=1, warmup_steps=1,
    sequences_per_step=4, sequences_per_forward=2, val_every=3, val_tokens=700, val_seq_len=256,
    repeat_data=True)


def to_argv(flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def tiny(**flags):
    """The hyperparameters of the tiny model."""
    return train_gpt.parse_args(to_argv(FLAGS | flags))


@pytest.fixture
def data_flags(tiny_shards):
    """Two training shards of less than 6 steps together, and two for validation of a token more."""
    val_files = tiny_shards([300, 402], name="tiny_val", seed=1)
    return {"train_files": tiny_shards([3200, 2600]), "val_files": val_files}


def run_main(folder, argv, fault=None):
    """Run main in a folder: exit code, steps' two losses, what it built, output, log, results.

    `fault(step, losses)` is called once a step's gradients are there, before its update.
    """
    result = SimpleNamespace(losses=[], folder=folder / "logs" / "x")
    exchange, build = train_gpt.Run.exchange_losses, train_gpt.build
    handlers = {number: signal.getsignal(number) for number in train_gpt.STOP_SIGNALS}

    def exchanged(self, step, losses):
        if fault:
            fault(step, losses)
        result.losses.append(losses.tolist())
        exchange(self, step, losses)

    def noted(cfg, ranks):
        result.model, result.optimizers = build(cfg, ranks)
        return result.model, result.optimizers

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(train_gpt.Run, "exchange_losses", exchanged)
        patch.setattr(train_gpt, "build", noted)
        gc.freeze()  # the run's search for cycles leaves out what tests have imported
        try:
            result.code = train_gpt.main(argv)
        except Killed:
            result.code = None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    result.out, result.err = out.getvalue(), err.getvalue()
    found = re.search(r"chunk\(s\), (logs/.+)$", result.out, re.M)
    result.log = (folder / found[1] / "log.txt").read_text() if found else ""
    result.values = final_values(result.log)
    return result


class Killed(BaseException):
    """Ends a run where it stands, as SIGKILL would: the script catches it nowhere."""


@pytest.fixture
def run(data_flags, tmp_path, monkeypatch):
    """`run(**flags)` runs main in tmp_path, `run(argv=[...])` with these words alone."""
    monkeypatch.chdir(tmp_path)

    def run(argv=None, fault=None, **flags):
        return run_main(tmp_path, argv or to_argv(FLAGS | data_flags | flags), fault)

    return run


def saved_steps(folder=Path("logs/x")):
    """Steps of the checkpoints that are there."""
    return sorted(int(path.stem[5:]) for path in folder.glob("step-??????.pt"))


def one_error(result):
    """The line that a run ended in; it is one, and the exit code is 2."""
    assert result.code == 2
    assert re.fullmatch(r"train_gpt\.py: error: [^\n]+\n", result.err), result.err
    return result.err
