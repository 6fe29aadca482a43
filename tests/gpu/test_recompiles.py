"""What a record makes torch compile is compiled in the warm-up, before the clock starts.

All optimizers share the variants of a rule. Where they need more than torch's limit, torch runs the
rest uncompiled, at a fraction of the speed and without an error. Here Dynamo traces model and rules
as on a GPU, in the pocket on a CPU, and torch's own operators run what it has traced.
"""

import pytest
import torch
from conftest import REPO
from golden import load

RECORDS = sorted(REPO.glob("records/20*/"))
EACH = []
for path in RECORDS:
    mark = pytest.mark.slow if path == RECORDS[-1] else pytest.mark.cards
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
    by_stage = hasattr(script.GPT, "set_stage")  # before, windows are part of the graph
    options = dict(backend="eager", dynamic=False)
    build, train = script.build, script.train
    trained = []

    def build_compiled(cfg, ranks):
        model, optimizers = build(cfg, ranks)
        if by_stage:
            model.compile(**options)
        return model, optimizers

    def train_without_compiling(run, cfg):
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("fail_on_recompile"):
            train(run, cfg)
        trained.append(run)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "build", build_compiled)
    monkeypatch.setattr(script, "train", train_without_compiling)
    monkeypatch.setattr(script, "compile_on_gpu", lambda rule, _: torch.compile(
        rule, fullgraph=True, **options))
    files = [f"--train_files={pocket_data}/pocket_train_*.bin",
             f"--val_files={pocket_data}/pocket_val_*.bin"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert script.main(FLAGS + files) == 0
    assert trained
