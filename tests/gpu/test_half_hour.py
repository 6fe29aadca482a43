"""The half hour of bench.py gpu: its order and its one file, and each part where no GPU is."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import bench
import half_hour
import pytest
import torch

# Each part as a process: one ends well, one badly, one never.
PARTS = """import sys, time
print("part", *sys.argv[1:], flush=True)
if sys.argv[1] == "endless": time.sleep(60)
sys.exit(sys.argv[1] == "bad")
"""
TINY = """--preset pocket --sequences_per_step 2 --sequences_per_forward 2 --warmup_steps 1
    --val_seq_len 256""".split()


def test_a_part_that_fails_or_hangs_stops_no_other_and_is_told_in_the_file(tmp_path):
    script, file = tmp_path / "parts.py", tmp_path / "found.txt"
    script.write_text(PARTS)
    parts = {"first": 60, "bad": 60, "endless": 5, "last": 60}
    words = (sys.executable, str(script))
    assert half_hour.run_parts(file, ["--a", "b"], parts, words) == ["first", "last"]
    text = file.read_text()
    for name, end in dict(first="exit code 0", bad="exit code 1", endless="out of time").items():
        assert f"==== {name}\npart {name} --a b\n---- {name}: {end} after " in text
    assert text.index("==== endless") < text.index("==== last")


def test_the_exit_code_says_that_no_steps_were_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "REPO", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", "gpu"])
    monkeypatch.setattr(half_hour, "run_parts", lambda file, flags: ["machine"])
    assert bench.main() == 1


def test_each_stage_is_timed_and_profiled(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    half_hour.steps([*TINY, "--device", "cpu"], stage_steps=1)
    lines = capsys.readouterr().out.splitlines()
    timed = [line.partition(":")[0] for line in lines[-4:-1]]
    assert timed == ["stage 0", "stage 1", "stage 2"]
    assert lines[-1].startswith("memory at the peak: ")
    half_hour.kernels([*TINY, "--device", "cpu"], stage_steps=2)
    assert re.findall(r"step (\d+): .* of kernels", capsys.readouterr().out) == ["1", "3", "5"]


def test_the_newest_record_needs_no_files_and_one_gpu(monkeypatch):
    """Its noise has fewer ids than a softmax samples."""
    taken = []
    monkeypatch.setattr(half_hour, "steps", lambda *args: taken.append(args))
    half_hour.newest(["--seed", "3"])
    ((flags, script, stage_steps),) = taken
    assert Path(script.__file__).parent.name == half_hour.NEWEST
    cfg = script.parse_args(half_hour.short_flags(script, flags, stage_steps))
    assert cfg.seed == 3 and cfg.ngram_rows == 377280
    assert [name for name, value in vars(cfg).items() if str(value).startswith("data/")] == [
        "train_files", "val_files"]  # those are noise
    stages = [script.schedule(step, cfg).stage for step in range(cfg.num_iterations)]
    assert stages == sorted(stages) and len(set(stages)) == len(cfg.stages)
    assert len(stages) == stage_steps * len(cfg.stages)
    classes = min(row.classes for row in cfg.stages if row.classes)
    assert classes > cfg.eot_token // half_hour.NOISE_SHARE


def test_the_parts_of_a_step_of_the_table_are_timed(capsys):
    half_hour.rows(["--preset", "pocket", "--device", "cpu"], num_rows=512, tokens=64, repeats=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ms  ")[2] for line in lines] == [
        "plan on the host, but for other ranks", "fetch", "gradients", "step of the table"]


def test_kernels_are_summed_by_group(capsys):
    times = {"triton_tem_fused_flex_attention_1": 3000, "nvjet_tst_128": 2000,
             "void at::native::x": 100, "sm90_xmma_gemm": 1000, "aten::mm": 0}
    rows = [SimpleNamespace(key=name, count=2, self_device_time_total=us)
            for name, us in times.items()]
    half_hour.print_kernels(SimpleNamespace(key_averages=lambda: rows, step_num=3))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [
        "step 2: 6.1 ms of kernels",
        "3.00 ms attention", "3.00 ms matrix products", "0.10 ms torch's own kernels",
        "3.000 ms 2 times triton_tem_fused_flex_attention_1", "2.000 ms 2 times nvjet_tst_128",
        "1.000 ms 2 times sm90_xmma_gemm", "0.100 ms 2 times void at::native::x"]


@pytest.mark.gpu
@pytest.mark.slow
def test_the_parts_for_a_gpu_alone(capsys):
    half_hour.machine([])
    half_hour.fp8([])
    half_hour.attention([], length=256, heads=1, reach=128, repeats=1)
    text = capsys.readouterr().out
    assert text.count(": right") == 3 and "WRONG" not in text
    errors = re.findall(r"[yqkv] (\d\.\d+)", text)
    assert len(errors) == 4 and max(map(float, errors)) < 0.03
