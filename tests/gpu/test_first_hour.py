"""The first hour of bench.py gpu: its order and its one file, and what it measures, on a CPU."""

import re
import sys
from types import SimpleNamespace

import first_hour
import pytest
import torch

import train_gpt

# Each part as a process: one ends well, one badly, one never.
PART = """import sys, time
print("part", *sys.argv[1:], flush=True)
if sys.argv[1] == "endless": time.sleep(60)
sys.exit(sys.argv[1] == "bad")
"""
TINY = """--preset pocket --device cpu --sequences_per_step 2 --sequences_per_forward 2
    --warmup_steps 1 --val_seq_len 256""".split()


def test_a_part_that_fails_or_hangs_stops_no_other_and_is_told_in_the_file(tmp_path, monkeypatch):
    script, file = tmp_path / "part.py", tmp_path / "found.txt"
    script.write_text(PART)
    command = [sys.executable, str(script)]
    monkeypatch.setattr(first_hour, "__file__", str(script))  # the command gets the flags
    times = {"first": 60, "bad": 60, "endless": 1, "last": 60}
    parts = {name: (seconds, [*command, name]) for name, seconds in times.items()}
    assert first_hour.run_parts(file, ["--a", "b"], parts) == ["first", "last"]
    text = file.read_text()
    for name, end in dict(first="exit code 0", bad="exit code 1", endless="out of time").items():
        assert f"==== {name}\npart {name} --a b\n---- {name}: {end} after " in text
    assert text.index("==== endless") < text.index("==== last")


def test_the_first_hour_takes_an_hour_and_has_an_exchange_where_there_are_several_gpus():
    alone, on_six = first_hour.parts_of(1), first_hour.parts_of(6)
    assert sum(seconds for seconds, _ in alone.values()) <= 3600
    more = [command for name, (_, command) in on_six.items() if name not in alone]
    assert len(more) == 2 and all("--nproc_per_node=4" in command for command in more)


@pytest.mark.slow
def test_each_stage_is_timed_and_profiled(capsys, monkeypatch):
    monkeypatch.setattr(first_hour, "STAGE_STEPS", 2)
    first_hour.steps(train_gpt, TINY)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-3:]] == ["stage 0", "stage 1", "stage 2"]
    first_hour.kernels(train_gpt, TINY)
    text = capsys.readouterr().out
    assert re.findall(r"\nstep (\d+)\n", text) == ["1", "3", "5"]
    assert re.findall(r"\nstage (\d), ms of the step", text) == ["0", "1", "2"]


def event(name, start, end, on_gpu=True):
    """Of a profile, in microseconds: a kernel, or an operator and the time of its kernels."""
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return SimpleNamespace(name=name, device_type=kind, self_device_time_total=end - start,
                           time_range=SimpleNamespace(start=start, end=end))


def test_groups_of_a_profile_and_its_gaps():
    events = [
        event("triton_tem_fused_flex_attention_3", 0, 1000),
        event("aten::_scaled_mm", 0, 2000, on_gpu=False), event("nvjet_qqtst", 1000, 3000),
        event("triton_poi_fused_clone_7", 4000, 4500), event("triton_red_fused_norm_1", 4500, 5000),
        event("ncclDevKernel_ReduceScatter", 5000, 6000)]
    found = first_hour.measured_groups(SimpleNamespace(events=lambda: events),
                                      {"triton_poi_fused_clone_7": "FP8 copies"})
    assert found == {"attention": 1, "FP8 matmuls": 2, "bf16 matmuls": 0, "FP8 copies": 0.5,
                     "other": 0.5, "wire": 1, "loss": 0, "gaps between kernels": 1}


def test_the_first_hour_has_the_models_times_beside_its_own():
    """Of every stage of the root and of the newest record, on one GPU."""
    for path in (first_hour.ROOT, first_hour.NEWEST[0]):
        script = first_hour.load_with_equal_stages(path)
        expected = first_hour.modelled(script)
        for stage in range(len(script.Hyperparameters().stages)):
            times = first_hour.expected_ms(expected, stage)
            assert {"attention", "loss", "FP8 matmuls", "FP8 copies", "other"} <= times.keys()
            of_eight = first_hour.expected_ms(expected, stage, ranks=8)
            assert sum(of_eight.values()) == pytest.approx(
                expected["stages"][stage]["step_ms"], abs=0.01)
        assert first_hour.expected_ms(expected, 0, ranks=4) == {}
