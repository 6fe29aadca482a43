"""What a record makes torch compile, and when, counted without a GPU.

All optimizers share the variants of a rule. Where they need more than torch's limit, torch runs the
rest uncompiled, at a fraction of the speed and without an error. What a training step needs is
compiled in the warm-up, before the clock starts.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPO
from golden import load
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter

RECORDS = sorted(REPO.glob("records/20*/"))
BY_STAGE = [path for path in RECORDS if "def set_stage" in (path / "train_gpt.py").read_text()]
STEPS = 10  # at the begin, amid and at the end of a run, more than the limit


def each_of(records, *newest_marks):
    """The newest one is quick to test; all together take minutes."""
    params = []
    for path in records:
        marks = newest_marks if path == RECORDS[-1] else [pytest.mark.cards]
        params.append(pytest.param(path, id=path.name, marks=marks))
    return pytest.mark.parametrize("path", params)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # autocast's
@each_of(RECORDS)
def test_variants_of_a_rule_stay_below_torchs_limit(path, monkeypatch):
    """At the record's size, on the meta device, where tensors have shapes and types but no data."""
    script = load(path)
    counters = {}

    def compile_and_count(rule, tensor):
        counter = counters.setdefault(rule.__name__, CompileCounter())
        return torch.compile(rule, backend=counter, dynamic=False, fullgraph=True)

    monkeypatch.setattr(script, "compile_on_gpu", compile_and_count)
    files = {"prefix_file", "canonical_file"} & vars(script.Hyperparameters()).keys()
    cfg = script.Hyperparameters(**dict.fromkeys(files, ""))
    with torch.device("meta"):
        model = script.GPT(cfg)
    properties = SimpleNamespace(shared_memory_per_block_optin=227 * 2**10)  # an H100's
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    script.prepare(model, cfg, torch.device("cuda"))  # casts weights
    ranks = SimpleNamespace(rank=0, world_size=1, device=torch.device("meta"))
    optimizers = script.build_optimizers(model, cfg, ranks)
    # A table of n-grams steps the rows that were read, by a rule that is not compiled.
    optimizers = [each for each in optimizers if not hasattr(each, "waiting")]
    for optimizer in optimizers:
        if hasattr(optimizer, "dtype"):
            optimizer.dtype = torch.bfloat16  # Muon's on a GPU
    # Rates and momentum change at both ends. A number that is compiled in exceeds the limit.
    last = cfg.num_iterations - STEPS
    for step in [first + step for first in (0, last // 2, last) for step in range(STEPS)]:
        now = script.schedule(step, cfg)
        tied = getattr(now, "tied", False)  # as of #53
        update = script.step_tied if tied else script.step_optimizers
        update(optimizers, now, divisor=1)
    assert set(counters) == {"adam_update", "muon_update"} & vars(script).keys()
    variants = {name: counter.frame_count for name, counter in counters.items()}
    assert all(0 < each < dynamo_config.recompile_limit for each in variants.values()), variants


@each_of(BY_STAGE, pytest.mark.slow)
def test_no_training_step_compiles_a_graph_after_the_warm_up(path, monkeypatch):
    """In the pocket, on a CPU, where zeros take the place of a mask that is not compiled."""
    script = load(path)
    monkeypatch.setattr(script, "dense_mask", lambda docs_BT, reach: torch.zeros(
        docs_BT.numel() // 32, 1, 32, 32))
    cfg = script.parse_args(["--preset", "pocket", "--device", "cpu", "--warmup_steps", "2",
                             "--sequences_per_step", "1", "--sequences_per_forward", "1"])
    model = script.GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    counter = CompileCounter()
    model.compile(dynamic=False, backend=counter)
    ranks = script.Ranks(cfg)
    plan = script.plan(cfg)
    blank = np.zeros((cfg.sequences_per_forward, 1 + max(row.seq_len for row in cfg.rows())), int)

    def blank_step(now):
        rows = script.Rows(blank[:, : now.seq_len + 1])
        return [script.to_batch(rows, ranks.device)]

    run = SimpleNamespace(
        cfg=cfg, plan=plan, ranks=ranks, model=model, log=print, last=cfg.num_iterations,
        optimizers=script.build_optimizers(model, cfg, ranks),
        loader=SimpleNamespace(next_step=blank_step))
    script.Run.warm_up(run)
    compiled = counter.frame_count
    for first in plan.first_steps.values():
        for step in first, first + 1:
            now = script.schedule(step, cfg)
            model.set_stage(now)
            script.accumulate_gradients(model, blank_step(now), now)
    assert compiled and counter.frame_count == compiled
