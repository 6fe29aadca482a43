"""data/plan.py: processes, flags for small GPUs, and data, of the root and of records."""

import json
import re
from types import SimpleNamespace

import machine
import plan as plan_tool
import pytest
from conftest import REPO, script_module

GIB = 2**30


@pytest.fixture
def plan(monkeypatch, capsys):
    """`plan(gib, flags)` is what is printed and said for GPUs of such sizes, and the root. `oldest`
    is the compute capability of the last one."""
    monkeypatch.setattr(machine, "check_compiler", lambda: None)
    monkeypatch.setattr(machine, "check_shared_memory", lambda ranks: None)

    def run(gib, flags, record="train_gpt.py", oldest=(9, 0)):
        gpus = [SimpleNamespace(total_memory=int(float(size) * GIB)) for size in gib.split()]
        capabilities = [*[(9, 0)] * (len(gpus) - 1), oldest]
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(plan_tool, "count_gpus", lambda device: len(gpus))
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpus[index])
        plan_tool.plan(script_module(record), flags.split())
        printed, said = capsys.readouterr()
        answers = [line for line in printed.splitlines() if line]
        assert all(line.startswith("answer: ") for line in answers)
        return "".join(line.removeprefix("answer: ") + "\n" for line in answers), said

    return run


@pytest.mark.parametrize(("gib", "flags", "planned"), [
    # GPUs and processes; these divide the sequences of a step
    (3 * "80 ", "--seed 1", "3 2 \nfineweb.py 8\n"),
    (8 * "80 ", "--sequences_per_step 12", "8 6 \nfineweb.py 11\n"),
    (4 * "80 ", "--preset pocket", "4 1 \npocket.py\n"),
    ("80", "--train_files mine/*.bin", "1 1 \n"),
    # The smallest GPU sets the length of the sequences, unless flags do.
    ("22.0", "", "1 1 \nfineweb.py 8\n"),
    ("79.1 15.6 79.1", "", "3 2 --shorten 2\nfineweb.py 8\n"),
    ("7.7", "", "1 1 --shorten 8 --val_seq_len 131072\nfineweb.py 8\n"),
    ("7.7", "--shorten=2", "1 1 \nfineweb.py 8\n")])
def test_the_root_is_planned_for_the_gpus_that_there_are(plan, gib, flags, planned):
    printed, said = plan(gib, flags)
    assert printed == planned
    ranks = re.search(r"(\d+) of (\d+) GPUs", said)
    gpus, processes = planned.split()[:2]
    assert bool(ranks) == (gpus != processes and "pocket" not in planned)
    assert ("first start compiles for about 5 minutes" in said) == ("pocket" not in planned)
    assert ("--shorten" in planned) == ("losses of shorter sequences do not compare" in said)


def test_one_gpu_without_fp8_needs_the_memory_of_all_without_it(plan):
    """Sequences have one length on all of them."""
    record = "records/2026-08-30_92h_Fp8Products/train_gpt.py"
    assert plan(8 * "42 ", "", record)[0].startswith("8 8 \n")
    assert plan(8 * "42 ", "", record, oldest=(8, 6))[0].startswith("8 8 --shorten 2\n")


def test_what_a_run_on_gpus_needs_of_the_machine_is_looked_for(plan, monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "check_compiler", lambda: asked.append("compiler"))
    monkeypatch.setattr(machine, "check_shared_memory", lambda ranks: asked.append(ranks))
    plan("80 80 80", "")
    plan("", "--preset pocket")
    assert asked == ["compiler", 2, 1]  # of two ranks, and of one on the CPU


def test_a_gpu_that_is_too_small_is_told(plan):
    with pytest.raises(machine.MachineError, match="5.8 GiB is too small for 2025-12-22_Multi.*"
                                                   "--preset pocket"):
        plan("79.1 5.8", "")


def test_wrong_flags_are_one_line(capsys):
    assert plan_tool.main(str(REPO / "train_gpt.py"), "--sede", "3") == 2
    said = capsys.readouterr().err
    assert said.startswith("run.sh: ") and "--sede 3" in said and said.count("\n") == 1


def test_cuda_that_does_not_start_is_told(monkeypatch, tmp_path):
    def refuse():
        raise RuntimeError("system has unsupported display driver")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.cuda.init", refuse)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert plan_tool.count_gpus("auto") == 0
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert plan_tool.count_gpus("cpu") == 0
    with pytest.raises(machine.MachineError, match="unsupported display driver; --device cpu"):
        plan_tool.count_gpus("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan_tool.count_gpus("auto") == 0


def test_memory_is_what_the_model_found():
    """Of the records whose model is kept; the others were counted at commit 9552d96."""
    kept = json.loads((REPO / "tests" / "gpu" / "modelled.json").read_text())
    for found in kept.values():
        name = plan_tool.record_of(script_module(found["script"]))
        row = max(key for key in plan_tool.MEMORY if key <= name)
        gib = (found["gib"][part] for part in ("training", "validation", "state"))
        assert plan_tool.MEMORY[row] == tuple(round(each, 1) for each in gib), name


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


@pytest.mark.parametrize(("capabilities", "hip", "said"), [
    ([(7, 5)], None, "capability 7.5, and .*--device cpu"),
    ([(9, 0), (7, 0)], None, "GPU 1 has compute capability 7.0.*CUDA_VISIBLE_DEVICES"),
    ([(9, 4)], "6.4", "AMD's GPUs, on which no script here was tried: --device cpu")])
def test_gpus_that_cannot_train_are_told(monkeypatch, capabilities, hip, said):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr("torch.version.hip", hip)
    with pytest.raises(machine.MachineError, match=said):
        plan_tool.check_gpus(len(capabilities))


@pytest.mark.parametrize(("record", "gib", "fp8", "flags"), [
    ("2024-11-19_FlexAttention", 23.5, True, "--shorten 2"),  # 65,536 tokens a forward
    ("2025-01-26_BatchSize", 23.5, True, ""),  # 49,152
    ("2026-08-30_92h_Fp8Products", 42.0, True, ""),
    ("2026-08-30_92h_Fp8Products", 42.0, False, "--shorten 2")])  # 4 GiB more
def test_memory_follows_the_tokens_of_a_forward_pass_and_fp8(record, gib, fp8, flags):
    script = script_module(f"records/{record}/train_gpt.py")
    cfg = script.parse_args([])
    assert plan_tool.flags_that_fit(script, cfg, int(gib * GIB), 8, fp8) == flags


@pytest.mark.parametrize(("record", "shards"), [
    ("2024-06-06_AdamW", 51), ("2025-01-26_BatchSize", 7), ("2025-09-05_SkipMLPBlocks", 10),
    ("2025-11-29_BatchSizeSchedule", 9), ("2025-12-22_MultiTokenPrediction", 8)])
def test_shards_suffice_where_documents_are_cut(record, shards):
    """Nine were enough for the published #30, and are not by the share that is counted on."""
    script = script_module(f"records/{record}/train_gpt.py")
    assert plan_tool.count_shards(script, script.parse_args([])) == shards


def test_the_table_has_a_row_for_each_record(monkeypatch, capsys):
    names = ["2025-12-22_MultiTokenPrediction", "2026-08-30_92h_Fp8Products"]
    paths = [REPO / "records" / name / "train_gpt.py" for name in names]
    monkeypatch.setattr(plan_tool.Path, "glob", lambda self, pattern: paths)
    assert plan_tool.main("--table") == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 and first.count("|") == rows[0].count("|") == rows[1].count("|")
    assert rows[0].startswith("| MultiTokenPrediction | 8 | 1/8 |")
    assert rows[0].endswith("| whole |")
    assert "| – | whole |" in rows[1]  # its whole table needs eight GPUs


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
    assert plan_tool.flags_that_fit(script, cfg, int(gib * GIB), 8) == flags
    small = script.shorten(script.parse_args(flags.split()))
    assert tokens_of(script, small) == tokens_of(script, cfg)
    monkeypatch.setattr(plan_tool, "__file__", f"{tmp_path}/data/plan.py")
    assert plan_tool.scripts_of_data(script, cfg) == data
    for table in plan_tool.TABLES:  # which are not made again
        (tmp_path / table).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / table).touch()
    assert plan_tool.scripts_of_data(script, cfg) == data[-1:]


def test_a_table_in_parts_needs_enough_gpus_or_fewer_rows():
    script = script_module("records/2026-08-30_92h_Fp8Products/train_gpt.py")

    def flags_that_fit(flags, ranks, gib=79.1):
        cfg = script.parse_args(flags.split())
        return plan_tool.flags_that_fit(script, cfg, int(gib * GIB), ranks)

    assert flags_that_fit("", 8) == flags_that_fit("--ngram_rows 21150720", 1) == ""
    assert flags_that_fit("--ngram_rows 377280", 1, gib=23.5) == "--shorten 2"
    with pytest.raises(machine.MachineError, match="92h_Fp8.*fewer --ngram_rows"):
        flags_that_fit("", 1)
