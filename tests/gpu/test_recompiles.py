"""What a record makes torch compile is compiled in the warm-up, before the clock starts.

All optimizers share the variants of a rule. Where they need more than torch's limit, torch runs the
rest uncompiled, at a fraction of the speed and without an error. Here Dynamo traces model and rules
as on a GPU, in the pocket on a CPU, and torch's own operators run what it has traced.
"""

import pytest
import torch
from golden import load
from ledger.records import ladder_of
from record_folders import NEWEST, RECORDS, having, source

EACH = []
for path in RECORDS:
    mark = pytest.mark.slow if path == NEWEST else pytest.mark.cards
    EACH.append(pytest.param(path, id=path.name, marks=mark))
FLAGS = """--preset pocket --device cpu --num_iterations 20 --warmup_steps 4
    --sequences_per_step 1 --sequences_per_forward 1 --val_tokens 256 --val_seq_len 256""".split()


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # autocast's
@pytest.mark.parametrize("path", EACH)
def test_nothing_is_compiled_after_the_warm_up(path, pocket_data, tmp_path, monkeypatch):
    """Zeros take the place of a mask that is not compiled."""
    script = load(path)
    # Records of time before these had windows as part of the graph.
    has_one_graph = hasattr(script.GPT, "set_stage") or ladder_of(path) != "time"
    # Eigenvectors and QR are left to libraries, between graphs.
    is_whole = "torch.compiler.disable" not in source(path)
    # One sequence a step is too few for some optimizers' rates.
    slow_rates = [] if ladder_of(path) == "time" else ["--matrix_lr", "0.0001"]
    options = dict(backend="eager", dynamic=False)
    build, train = script.build, script.train
    trained = []

    def build_compiled(cfg, ranks):
        model, optimizers = build(cfg, ranks)
        if has_one_graph:
            model.compile(**options)
        return model, optimizers

    def train_without_compiling(run, cfg):
        if isinstance(run, script.WarmUp):
            return train(run, cfg)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("fail_on_recompile"):
            train(run, cfg)
        trained.append(run)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "build", build_compiled)
    monkeypatch.setattr(script, "train", train_without_compiling)
    monkeypatch.setattr(script, "compile_on_gpu", lambda rule, _: torch.compile(
        rule, fullgraph=is_whole, **options))
    if hasattr(script, "dense_mask"):
        monkeypatch.setattr(script, "dense_mask", lambda docs_BT, reach: torch.zeros(
            docs_BT.numel() // 32, 1, 32, 32))
    files = [f"--train_files={pocket_data}/pocket_train_*.bin",
             f"--val_files={pocket_data}/pocket_val_*.bin"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert script.main(FLAGS + slow_rates + files) == 0
    assert trained


KINDS = {  # what may happen for the first time, and whose it is
    "step_tied": "script", "step_optimizers": "script", "validate": "script",
    "average": "optimizer", "write_averages": "optimizer", "ask_ahead": "optimizer",
    "update": "optimizer"}


@pytest.mark.slow
def test_the_warm_up_meets_every_kind_of_step(pocket_data, tmp_path, monkeypatch):
    """Tied and untied steps, averages as they come due, rows asked for ahead, steps of tables, and
    validation with the mask and without: what a run calls, its warm-up has called before.
    """
    script = load(having("write_averages")[-1])
    called = {"warm-up": set(), "run": set()}
    now_in = ["warm-up"]

    def noted(owner, name, of=""):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            details = {of}
            schedules = [x for x in args if isinstance(x, script.Schedule)]
            if name == "average":  # which averages are due
                details |= {*schedules[0].average_rates} & owner.averages.keys()
            if name == "validate":
                details.add(f"masked: {getattr(args[0], 'is_masked', None)}")
            called[now_in[0]].update((name, detail) for detail in details)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    build, train = script.build, script.train

    def build_noted(cfg, ranks):
        model, optimizers = build(cfg, ranks)
        for optimizer in optimizers:
            for name, place in KINDS.items():
                if place == "optimizer" and hasattr(optimizer, name):
                    noted(optimizer, name, optimizer.name)
        return model, optimizers

    def train_noted(run, cfg):
        if not isinstance(run, script.WarmUp):
            now_in[0] = "run"
        train(run, cfg)

    monkeypatch.chdir(tmp_path)
    for name, place in KINDS.items():
        if place == "script":
            noted(script, name)
    monkeypatch.setattr(script, "build", build_noted)
    monkeypatch.setattr(script, "train", train_noted)
    files = [f"--train_files={pocket_data}/pocket_train_*.bin",
             f"--val_files={pocket_data}/pocket_val_*.bin"]
    assert script.main(FLAGS + files) == 0
    assert called["run"] - called["warm-up"] == set()
