"""Runs of the script on a GPU, or on the host in its place: steps, validations, checkpoints."""

import gc
import re
import shutil
from pathlib import Path

import pytest
import torch
from golden import tokens_of
from host_gpu.trace import Notes
from shards import write_shard
from test_gpu import on_the_host, rows_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt
from train_gpt import Layer, train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
# Two steps of warm-up: from the second on, the losses of the step before are still there.
RUN = """--preset pocket --model_dim 32 --head_dim 32 --num_iterations 3 --extension_steps 0
    --sequences_per_step 1 --sequences_per_forward 1 --warmup_steps 2
    --train_files train.bin --val_files val.bin
    --val_seq_len 256 --val_tokens 256 --val_every 2 --save_every 2"""
TABLES = rows_of(128, long_window=128, short_window=128, lr_factor=1.0, num_targets=1)
TABLES["layers"] = Layer("L", table=0, skip=True, saved=True), Layer("S")


class Allocations(TorchDispatchMode):
    """Notes what operators and compiled code allocate on the device, in the warm-up and after it.

    It does not see what an operator allocates and frees inside.
    """

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.notes = Notes()
        self.sizes = set()  # of the current phase, in units of torch's allocator, 512 bytes
        self.of_phase = {"warm-up": (set(), 0), "run": (set(), 0)}  # sizes, and peaks in bytes

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_cuda and self.is_new(x.untyped_storage()):
                self.notes.allocated(x)
                self.sizes.add(-(-x.untyped_storage().nbytes() // 512))
        return result

    def is_new(self, storage) -> bool:
        known = self.notes.storages.get(storage._cdata)
        return storage.nbytes() > 0 and (not known or known[0].expired())

    def of_training(self, script, train):
        """The script's loop, which is noted."""

        def train_noted(run, cfg):
            gc.collect()  # else what compiling has left is a part of some phases
            self.sizes, self.notes.peak = set(), 0
            train(run, cfg)
            phase = "warm-up" if isinstance(run, script.WarmUp) else "run"
            sizes, peak = self.of_phase[phase]
            self.of_phase[phase] = sizes | self.sizes, max(peak, self.notes.peak)

        return train_noted

    def assert_no_size_is_new(self):
        sizes, _ = self.of_phase["run"]
        known, _ = self.of_phase["warm-up"]
        assert sizes and sizes <= known

    def assert_no_higher_peak(self):
        _, peak = self.of_phase["run"]
        _, known = self.of_phase["warm-up"]
        assert 0 < peak <= known


def run_on(device, name, *flags, script=train_gpt):
    """Run the script; the losses of its validations by their steps."""
    words = [*RUN.split(), "--device", device, "--run_id", name, *flags]
    assert script.main(words) == 0
    text = Path("logs", name, "log.txt").read_text()
    return dict(re.findall(r"^step:(\d+)/\d+ val_loss:([\d.]+)", text, re.MULTILINE))


def train_without_waiting(run, cfg):
    """The script's loop. In its steps a GPU's host may not wait, and nothing is compiled."""
    if isinstance(run, train_gpt.WarmUp):
        return train(run, cfg)
    next_step = run.loader.next_step
    log_step = run.log_step

    def begin_step(now):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        return next_step(now)

    def end_step(*args, **options):
        log_step(*args, **options)
        torch.cuda.set_sync_debug_mode("default")

    run.loader.next_step = begin_step
    run.log_step = end_step
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            train(run, cfg)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of three steps, each in another stage, the losses of validations, and
    what it has allocated."""
    folder = tmp_path_factory.mktemp("runs")
    for name, size in dict(train=3000, val=300).items():
        write_shard(folder / f"{name}.bin", tokens_of(name, size))
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "POCKET", train_gpt.POCKET | TABLES)
        with pytest.MonkeyPatch.context() as at_first:
            at_first.chdir(folder)
            allocations = Allocations()
            at_first.setattr(train_gpt, "train",
                             allocations.of_training(train_gpt, train_without_waiting))
            with allocations:
                losses = run_on("cuda", "whole")
        yield folder, losses, allocations


def test_steps_after_the_warm_up_neither_wait_nor_compile(whole):
    """From stage to stage, with validations between the steps."""
    folder, losses, _ = whole
    assert list(losses) == ["0", "2", "3"]
    text = Path(folder, "logs/whole/log.txt").read_text()
    assert text.count(" train_loss:") == 3
    facts = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
    assert facts["device"] == torch.cuda.get_device_name()
    assert {"cuda", "driver"} < facts.keys()


@on_the_host
def test_a_checkpoint_is_resumed_to_the_bit_and_on_the_other_device(whole, monkeypatch):
    """Validated where it is resumed, it has the loss that it had where it was saved."""
    folder, losses, _ = whole
    monkeypatch.chdir(folder)
    for name in ("again", "moved"):
        Path("logs", name).mkdir()
        shutil.copy("logs/whole/step-000002.pt", Path("logs", name))
    resumed = "--resume", "auto"
    assert run_on("cuda", "again", *resumed) == {step: losses[step] for step in "23"}
    once, again = (
        torch.load(f"logs/{name}/step-000003.pt", map_location="cpu")["model"]
        for name in ("whole", "again"))
    assert all(torch.equal(again[name], x) for name, x in once.items())
    # bf16 rounds the embeddings and, in each layer, the activations: 0.4 % at most of each.
    moved = run_on("cpu", "moved", *resumed)
    assert float(moved["2"]) == pytest.approx(float(losses["2"]), rel=2e-3)


@on_the_host
def test_nothing_is_allocated_for_the_first_time_after_the_warm_up(whole):
    *_, allocations = whole
    allocations.assert_no_size_is_new()
    allocations.assert_no_higher_peak()
