"""How many variants of a rule a record makes torch compile, counted without a GPU.

All optimizers share the variants of a rule. Where they need more than torch's limit, torch runs the
rest uncompiled, at a fraction of the speed and without an error.
"""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import REPO
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter

RECORDS = sorted((REPO / "records").glob("20*/train_gpt.py"))
RULES = ("adam_update", "muon_update")
STEPS = 10  # at the begin, amid and at the end of a run, more than the limit


def load(path):
    spec = importlib.util.spec_from_file_location(f"recompiles_{path.parent.name}", path)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def steps_to_take(cfg):
    """Rates and momentum change at both ends. A number that is compiled in exceeds the limit."""
    last = cfg.num_iterations - STEPS
    return [first + step for first in (0, last // 2, last) for step in range(STEPS)]


def step_all(script, optimizers, now):
    update = script.step_tied if getattr(now, "tied", False) else script.step_optimizers
    update(optimizers, now, divisor=1)


@pytest.fixture
def h100(monkeypatch):
    """What `prepare_for_cuda` asks of a GPU."""
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 2**10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def each_record():
    """The newest one is quick to test, the others are slow together."""
    found = []
    for path in RECORDS:
        marks = [pytest.mark.slow] * (path != RECORDS[-1])
        found.append(pytest.param(path, id=path.parent.name, marks=marks))
    return found


@pytest.mark.parametrize("path", each_record())
def test_variants_of_a_rule_stay_below_torchs_limit(path, h100, monkeypatch):
    """At the record's size, on the meta device, where tensors have shapes and types but no data."""
    script = load(path)
    counters = {}

    def compile_and_count(rule, tensor):
        counter = counters.setdefault(rule.__name__, CompileCounter())
        return torch.compile(rule, backend=counter, dynamic=False, fullgraph=True)

    monkeypatch.setattr(script, "compile_on_gpu", compile_and_count)
    cfg = script.parse_args([])
    with torch.device("meta"):
        model = script.GPT(cfg)
    script.prepare_for_cuda(model, cfg, torch.device("cpu"))  # it knows no meta device
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("meta"))
    optimizers = script.build_optimizers(model, cfg, ranks)
    for optimizer in optimizers:
        if optimizer.group.rule is script.Muon:
            optimizer.dtype = torch.bfloat16  # as on a GPU
    for step in steps_to_take(cfg):
        step_all(script, optimizers, script.schedule(step, cfg))
    assert set(counters) == set(RULES)
    variants = {name: counter.frame_count for name, counter in counters.items()}
    print(variants)
    assert all(0 < each < dynamo_config.recompile_limit for each in variants.values()), variants
