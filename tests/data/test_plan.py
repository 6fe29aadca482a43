"""data/plan.py: processes, flags for small GPUs, and data, of the root and of records."""

import json
import re
import sys
from types import SimpleNamespace

import machine
import plan as plan_tool
import pytest
from conftest import REPO, script_module
from gpu_tables import flags_that_fit

GIB = 2**30


def plan_for(script, flags, gib, gpus=1, fp8=True):
    """Flags for GPUs of such a size, as one text."""
    return " ".join(flags_that_fit(script, script.parse_args(flags.split()), int(gib * GIB), gpus,
                                   fp8))


@pytest.mark.parametrize(("gpus", "flags", "ranks"), [
    (3, "", 2), (8, "", 8), (8, "--sequences_per_step 12", 6), (1, "", 1)])
def test_as_many_ranks_as_divide_the_sequences_of_a_step(gpus, flags, ranks):
    script = script_module("train_gpt.py")
    assert plan_tool.most_ranks(script.parse_args(flags.split()), gpus) == ranks


@pytest.mark.parametrize(("sizes", "oldest", "flags"), [
    ([22.0], (9, 0), []),
    ([79.1, 15.6, 79.1], (9, 0), ["--shorten", "2"]),  # by the smallest
    ([7.7], (9, 0), ["--shorten", "8", "--val_seq_len", "131072"])])
def test_flags_are_for_the_smallest_gpu(monkeypatch, sizes, oldest, flags):
    show_gpus(monkeypatch, sizes, oldest)
    script = script_module("train_gpt.py")
    assert plan_tool.flags_for_gpus(script, script.parse_args([]), len(sizes)) == flags


def test_one_gpu_without_fp8_needs_the_memory_of_all_without_it(monkeypatch):
    """Sequences have one length on all of them."""
    script = script_module("records/2026-08-30_92h_Fp8Products/train_gpt.py")
    cfg = script.parse_args([])
    show_gpus(monkeypatch, 8 * [42.0], (9, 0))
    assert plan_tool.flags_for_gpus(script, cfg, 8) == []
    show_gpus(monkeypatch, 8 * [42.0], (8, 6))
    assert plan_tool.flags_for_gpus(script, cfg, 8) == ["--shorten", "2"]


def show_gpus(monkeypatch, sizes, oldest):
    """GPUs of so many GiB; `oldest` is the compute capability of the last one."""
    def properties(device):
        index = device if isinstance(device, int) else device.index
        return SimpleNamespace(total_memory=int(sizes[index] * GIB))

    capabilities = [*[(9, 0)] * (len(sizes) - 1), oldest]
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capabilities[index])


def test_a_gpu_that_is_too_small_is_told():
    with pytest.raises(machine.MachineError, match="5.8 GiB is too small for 2025-12-22_Multi.*"
                                                   "--preset pocket"):
        plan_for(script_module("train_gpt.py"), "", 5.8)


# ---- Which GPUs there are ----


@pytest.fixture
def count(monkeypatch, tmp_path):
    """`count(gpus, cuda, fault, device)` counts the GPUs that torch says it has, of a script that
    refuses some, on a machine with NVIDIA's driver."""
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(plan_tool, "check_compiler", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()

    def run(gpus, cuda="13.0", fault="", device="auto", check_gpu=lambda device: None):
        def init():
            if fault:
                raise RuntimeError(fault)

        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("torch.cuda.init", init)
        monkeypatch.setattr("torch.version.cuda", cuda)
        monkeypatch.setattr("torch.version.hip", None)
        script = SimpleNamespace(check_gpu=check_gpu, UserError=LookupError)
        return plan_tool.count_gpus(script, device)

    return run


def test_a_torch_without_cuda_is_told_where_there_is_a_gpu(count, monkeypatch, tmp_path):
    """It would train the pocket on the CPU without a word."""
    said = rf"torch \S+ of {re.escape(sys.executable)} has no CUDA.*--device cpu does without"
    for shown in None, "0", "0,1", "GPU-5f2":
        if shown:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(machine.MachineError, match=said):
            count(0, cuda=None)
    assert count(0, cuda=None, device="cpu") == 0
    for hidden in "", "-1", "NoDevFiles":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert count(0, cuda=None) == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "dev" / "nvidiactl").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count(0, cuda=None) == 0  # no driver
    smi = tmp_path / "nvidia-smi"
    for code in 9, 0:  # it is there without a GPU, and, as under Windows, with one
        smi.write_text(f"#!/bin/sh\nexit {code}\n")
        smi.chmod(0o755)
        if code:
            assert count(0, cuda=None) == 0
    with pytest.raises(machine.MachineError, match=said):
        count(0, cuda=None)


def test_cuda_that_does_not_start_is_told(count):
    fault = "system has unsupported display driver"
    for gpus in 0, 2:
        with pytest.raises(machine.MachineError, match=f"{fault}; --device cpu"):
            count(gpus, fault=fault)
    assert count(2) == 2 and count(2, device="cpu") == 0


def test_a_gpu_that_the_script_refuses_is_named(count):
    def check_gpu(device):
        if device.index == 1:
            raise LookupError("it is old; use --device cpu")

    assert count(1, check_gpu=check_gpu) == 1
    with pytest.raises(machine.MachineError, match="GPU 1: it is old; use --device cpu"):
        count(2, check_gpu=check_gpu)


# ---- What is counted ----


def test_memory_is_what_the_model_found():
    """Of the records whose model is kept; the others were counted at commit 9552d96."""
    kept = json.loads((REPO / "tests" / "gpu" / "modelled.json").read_text())
    for found in kept.values():
        script = script_module(found["script"])
        name = plan_tool.record_of(script)
        if plan_tool.is_by_steps(script):
            check_memory_by_steps(script, found["gib"])
            continue
        row = max(key for key in plan_tool.MEMORY if key <= name)
        gib = (found["gib"][part] for part in ("training", "validation", "state"))
        assert plan_tool.MEMORY[row] == tuple(round(each, 1) for each in gib), name


def check_memory_by_steps(script, gib):
    """What the optimizers keep is computed; a pass of all rows takes what is planned, or less."""
    cfg = script.parse_args([])
    state, _ = plan_tool.optimizer_memory(script, cfg, 1)
    assert state == pytest.approx(gib["state"], abs=0.01)
    planned = plan_tool.OF_PASS + cfg.sequences_per_forward * plan_tool.OF_ROW
    assert 0.95 * planned < gib["training"] - gib["state"] <= planned


@pytest.mark.parametrize(("record", "minutes"), [
    ("2025-12-22_MultiTokenPrediction", 5), ("2026-07-13_PrefixTargets", 7),
    ("2026-08-30_92h_Fp8Products", 10)])
def test_how_long_the_first_start_compiles_is_estimated_by_stages(record, minutes):
    script = script_module(f"records/{record}/train_gpt.py")
    assert plan_tool.compiling_minutes(script, script.parse_args([])) == minutes


def tokens_of(script, cfg):
    """The tokens of each step."""
    return [cfg.sequences_per_step * script.schedule(step, cfg).seq_len
            for step in range(cfg.num_iterations)]


@pytest.mark.parametrize(("record", "gib", "fp8", "flags"), [
    ("2024-11-19_FlexAttention", 23.5, True, "--shorten 2"),  # 65,536 tokens a forward
    ("2025-01-26_BatchSize", 23.5, True, ""),  # 49,152
    ("2026-08-30_92h_Fp8Products", 42.0, True, ""),
    ("2026-08-30_92h_Fp8Products", 42.0, False, "--shorten 2")])  # 4 GiB more
def test_memory_follows_the_tokens_of_a_forward_pass_and_fp8(record, gib, fp8, flags):
    script = script_module(f"records/{record}/train_gpt.py")
    assert plan_for(script, "", gib, 8, fp8) == flags


@pytest.mark.parametrize(("record", "shards"), [
    ("2024-06-06_AdamW", 51), ("2025-01-26_BatchSize", 7), ("2025-09-05_SkipMLPBlocks", 10),
    ("2025-11-29_BatchSizeSchedule", 9), ("2025-12-22_MultiTokenPrediction", 8)])
def test_shards_suffice_where_documents_are_cut(record, shards):
    """Nine were enough for the published #30, and are not by the share that is counted on."""
    script = script_module(f"records/{record}/train_gpt.py")
    assert plan_tool.count_shards(script, script.parse_args([])) == shards


@pytest.mark.parametrize(("record", "gib", "flags", "data"), [  # at least eight shards
    ("2024-10-14_ModernArch", 15.6, "--sequences_per_forward 16", ["fineweb.py 27"]),
    ("2025-01-13_Fp8LmHead", 15.6, "--shorten 4", ["fineweb.py 8"]),
    ("2026-07-13_PrefixTargets", 23.5, "--shorten 2", ["prefixes.py", "fineweb.py 8"]),
    ("2026-08-30_92f_SampledSoftmax", 23.5, "--shorten 2",
     ["prefixes.py", "canonical.py", "fineweb.py 8"])])
def test_records_are_planned_with_their_data_and_memory(monkeypatch, tmp_path, record, gib, flags,
                                                        data):
    """The tokens of their steps stay what they were."""
    script = script_module(f"records/{record}/train_gpt.py")
    cfg = script.parse_args([])
    assert plan_for(script, "", gib, 8) == flags
    small = script.shorten(script.parse_args(flags.split()))
    assert tokens_of(script, small) == tokens_of(script, cfg)
    monkeypatch.setattr(plan_tool, "__file__", f"{tmp_path}/data/plan.py")
    assert plan_tool.scripts_of_data(script, cfg) == data
    for table in plan_tool.TABLES:  # which are not made again
        (tmp_path / table).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / table).touch()
    assert plan_tool.scripts_of_data(script, cfg) == data[-1:]


# ---- The ladder by steps ----


@pytest.mark.parametrize(("record", "shards"), [
    ("2026-04-26_o2_AdamW", 30), ("2026-06-11_o36_MuonTuned", 18)])
def test_records_by_steps_read_each_token_once(record, shards):
    script = script_module(f"records/optimizers/{record}/train_gpt.py")
    assert plan_tool.count_shards(script, script.parse_args([])) == shards


def test_records_by_steps_take_fewer_rows_a_pass_and_no_shorter_ones():
    """Of all cards that hold one row at least, a larger one takes as many or more."""
    script = script_module("records/optimizers/2026-06-11_o36_MuonTuned/train_gpt.py")
    cfg = script.parse_args([])
    passes = []
    for gib in 7.7, 11.6, 15.6, 23.5, 31.4, 39.4, 47.4, 79.1:
        small = script.parse_args(plan_for(script, "", gib).split())
        assert (small.seq_len, small.shorten) == (cfg.seq_len, 1)
        assert tokens_of(script, small) == tokens_of(script, cfg)
        passes.append(small.sequences_per_forward)
    assert passes == sorted(passes) and passes[0] < 16 and passes[-1] == cfg.sequences_per_forward


def test_what_an_optimizer_by_steps_keeps_takes_room():
    """SOAP's Gram matrices and bases beside Muon's mean; ranks share them."""
    muon, soap = (script_module(f"records/optimizers/{name}/train_gpt.py")
                  for name in ("2026-05-03_o12_Muon", "2026-05-04_o14_SoapMlps"))
    with pytest.raises(machine.MachineError, match="7.7 GiB is too small for 2026-05-04_o14_.*"
                                                   "--preset pocket"):
        plan_for(soap, "", 7.7)
    assert plan_for(soap, "", 7.7, 8)


def test_a_table_in_parts_needs_enough_gpus_or_fewer_rows():
    script = script_module("records/2026-08-30_92h_Fp8Products/train_gpt.py")

    assert plan_for(script, "", 79.1, 8) == plan_for(script, "--ngram_rows 21150720", 79.1) == ""
    assert plan_for(script, "--ngram_rows 377280", 23.5) == "--shorten 2"
    with pytest.raises(machine.MachineError, match="92h_Fp8.*fewer --ngram_rows"):
        plan_for(script, "", 79.1)


@pytest.mark.parametrize(("flags", "data"), [
    ("--preset pocket", ["pocket.py"]), ("", ["fineweb.py 8"]),
    ("--train_files mine/fineweb_*.bin", []), ("--train_files my_pocket/*.bin", [])])
def test_data_of_ones_own_are_not_made(flags, data):
    script = script_module("train_gpt.py")
    assert plan_tool.scripts_of_data(script, script.parse_args(flags.split())) == data
