"""No step of a record from #53 on waits for the GPU: its host could enqueue all of a run.

Model, batches and optimizers are on torch's meta device, where no tensor has values. So what would
have to wait on a GPU for a value, or for a number of elements, is an error. Copies to the device
for which the host would wait are noted. Two ranks are assumed, of which one runs four steps: every
optimizer steps, and a stage ends.
"""

import subprocess
import sys
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import golden
import pytest
import torch
from conftest import PATIENCE
from host_gpu.trace import few_layers_of
from record_folders import for_each_slowly, having, one_of_each_kind
from shards import write_shard
from torch.utils._python_dispatch import TorchDispatchMode

SINCE_53 = having("num_targets")
NEWEST = SINCE_53[-1]
STEPS = 4
META = torch.device("meta")
WORLD_SIZE = 2


class Waits(TorchDispatchMode):
    """Notes the copies between host and device for which a host waits."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            crosses = result.device != args[0].device
            if crosses and not kwargs.get("non_blocking"):
                self.found.append(f"{func} of {tuple(result.shape)}")
        if func is torch.ops.aten.copy_.default:
            crosses = args[0].device != args[1].device and args[1].ndim  # a number is an argument
            if crosses and not (len(args) > 2 and args[2]):
                self.found.append(f"{func} of {tuple(result.shape)}")
        return result


class Collectives:
    """torch.distributed, as a rank sees it that does not ask what came."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: SimpleNamespace(wait=lambda: None)


class AtOnce(Executor):
    """Stands in for a thread, whose copies `Waits` would not see."""

    def __init__(self, threads):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


class MetaRun(golden.TinyRun):
    """A rank's run on the meta device. It takes the first part of each step."""

    def __init__(self, script, cfg):
        self.script, self.cfg = script, cfg
        self.ranks = script.Ranks(cfg)
        self.ranks.world_size, self.ranks.device = WORLD_SIZE, META
        with META:
            self.model = script.GPT(cfg)
        script.prepare(self.model, cfg, META)
        self.optimizers = script.build_optimizers(self.model, cfg, self.ranks)
        self.tokens = golden.tokens_of("training", 8000)
        self.place = script.Place()
        self.stages = set()  # that steps belonged to
        self.loader = self

    def batches(self, rows):
        share = self.cfg.sequences_per_step // WORLD_SIZE
        part = [x if x is None else x[:share] for x in rows]
        return [self.script.to_batch(self.script.Rows(*part), META)]

    def validate_and_save(self, step, can_save):
        self.stages.add(self.script.schedule(step, self.cfg).stage)
        return step == STEPS

    def exchange_losses(self, step, losses):
        """What the harness does with the losses reads them a step later."""


def waits_of(record, folder):
    """The copies that a host would wait for in the first steps of a tiny run.

    Raises what torch raises where a value or a number of elements is asked for.
    """
    script = golden.load(record)
    golden.write_tables(folder)
    golden.shrink_blocks(script)
    cfg = golden.tiny(script, folder, layers=few_layers_of(script))
    dense_mask = script.dense_mask

    def mask_of_some_reach(docs, reach):  # a GPU has FlexAttention's, which asks for no number
        return dense_mask(docs, 16)

    run = MetaRun(script, cfg)
    stand_ins = dict(
        dist=Collectives(), dense_mask=mask_of_some_reach, ThreadPoolExecutor=AtOnce)
    with mock.patch.multiple(script, **stand_ins), Waits() as waits:
        script.train(run, cfg)
    assert len(run.stages) > 1
    return waits.found


@for_each_slowly(one_of_each_kind(SINCE_53, "train", "ShardedOptimizer", "Muon", "NgramTable"))
def test_no_step_waits(record, tmp_path):
    assert waits_of(record, Path(tmp_path)) == []


@pytest.mark.parametrize("wait", [
    "item", "unique", pytest.param("copy", marks=pytest.mark.slow)])
def test_a_step_that_waits_is_found(wait, tmp_path, monkeypatch):
    """Planted into the newest record, behind its backward pass."""
    script = golden.load(NEWEST)
    accumulate_gradients = script.accumulate_gradients

    def and_wait(*args):
        losses = accumulate_gradients(*args)
        if wait == "copy":
            losses = losses + torch.zeros(2).to(losses.device)
        else:
            getattr(losses, wait)()
        return losses

    script.accumulate_gradients = and_wait
    monkeypatch.setattr(golden, "load", lambda record: script)
    try:
        found = waits_of(NEWEST, Path(tmp_path))
    except (RuntimeError, NotImplementedError):
        return
    assert len(found) > 1


@pytest.mark.slow
def test_a_step_may_skip_several_shards(tmp_path, pocket_data):
    """The thread that plans a step waits for each shard, which another thread reads."""
    for index, size in enumerate([9000, 300, 300, 9000]):
        tokens = golden.tokens_of(f"shard {index}", size)
        tokens[tokens < 256] %= 64  # no more than a sequence has classes
        write_shard(tmp_path / f"train_{index}.bin", tokens)
    flags = """--preset pocket --device cpu --num_iterations 12 --extension_steps 1 --warmup_steps 0
        --val_tokens 256 --val_seq_len 256 --repeat_data true --train_files train_*.bin""".split()
    flags.append(f"--val_files={pocket_data}/pocket_val_*.bin")
    script = [sys.executable, NEWEST / "train_gpt.py"]
    done = subprocess.run(
        [*script, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "the training data begin again" in done.stdout
