"""What the script asks of CUDA: the clock, a card's kernels, a card for each rank. By stand-ins.

No GPU is needed.
"""

import dataclasses
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import tiny_runs
import torch
from conftest import REPO, SCRIPTS, script_module
from host_gpu.cards import CARDS
from record_folders import RECORDS, one_of_each_kind, source
from tiny_runs import one_error, tiny
from torch.nn.attention.flex_attention import BlockMask

import train_gpt
from train_gpt import UserError

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures


@pytest.fixture
def cards(monkeypatch):
    """`cards(count, **variables)` makes a machine of cards, and of this process a rank; what is
    asked of CUDA and of torch.distributed."""
    def make(count, capability=(9, 0), hip=None, **variables):
        calls = Mock()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
        monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
        monkeypatch.setattr(train_gpt.dist, "init_process_group", calls.init_process_group)
        monkeypatch.setattr(train_gpt.dist, "destroy_process_group", calls.destroy_process_group)
        monkeypatch.setattr(train_gpt.dist, "group", SimpleNamespace(WORLD=calls.world))
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return calls

    return make


# ---- The clock ----


class GPU:
    """A GPU and its host, by a clock of the test's own.

    The host takes no time. What it asks for is done in order, each when its seconds are over. The
    host waits where it synchronizes, and nowhere else.
    """

    def __init__(self):
        self.now = 0.0  # of the host's clock, in seconds
        self.ends = []  # of all that was asked for
        self.results = []  # what is there at that time, and not before

    def ask(self, seconds, result=None):
        begins = max([self.now, *self.ends[-1:]])
        self.ends.append(begins + seconds)
        self.results.append(result or (lambda: None))

    def wait(self, count):
        """The host goes on when the first `count` are done."""
        for end, result in zip(self.ends[:count], self.results[:count]):
            self.now = max(self.now, end)
            result()

    def synchronize(self, device=None):
        self.wait(len(self.ends))

    def record_event(self):
        return SimpleNamespace(synchronize=partial(self.wait, len(self.ends)))


class OnGPU(torch.Tensor):
    """A tensor whose values are on the host once a copy's turn has come, and NaN before."""

    is_cuda = True

    def to(self, device, non_blocking=False):
        copy = torch.full(self.shape, torch.nan)
        self.gpu.ask(0.0, partial(copy.copy_, self.as_subclass(torch.Tensor)))
        if not non_blocking:
            self.gpu.synchronize()
        return copy


@pytest.fixture
def gpu(monkeypatch):
    gpu = GPU()
    monkeypatch.setattr(OnGPU, "gpu", gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu)
    return gpu


def test_the_clock_counts_all_that_the_gpu_was_asked_for_and_losses_are_those_that_came(
    gpu, monkeypatch
):
    """By the record's own loop. Gradients take a second, updates a quarter, validations hours. A
    step is logged one step late, so that the host need not wait; but for one before a validation,
    when the whole of the update counts as well."""
    lines = []
    run = object.__new__(train_gpt.Run)
    run.cfg = tiny(num_iterations=4, val_every=2)
    run.ranks = SimpleNamespace(device=torch.device("cuda"), all_gather=lambda x: x[None])
    run.model = SimpleNamespace(set_stage=lambda now: None)
    run.loader = SimpleNamespace(next_step=lambda now: [], place=None)
    run.optimizers = run.val_tokens = None
    run.pending, run.stop, run.signalled, run.first_step, run.saved_step = [], False, False, 0, 0
    run.train_time_ms = run.process_time_ms = 0.0
    run.log_losses = lambda step, ms, **losses: lines.append((step, ms, *losses.values()))
    first_losses = iter([10.0, 11.0, 12.0, 13.0])

    def accumulate_gradients(model, batches, now):
        gpu.ask(1.0)
        return torch.tensor([next(first_losses)]).as_subclass(OnGPU)

    def update(optimizers, now, divisor):
        gpu.ask(0.25)

    def validate(*args):
        gpu.ask(10_000.0)
        gpu.synchronize()  # as it reads its sum
        return 9.0

    clock = SimpleNamespace(perf_counter=lambda: gpu.now, process_time=lambda: gpu.now)
    monkeypatch.setattr(train_gpt, "time", clock)
    monkeypatch.setattr(train_gpt, "accumulate_gradients", accumulate_gradients)
    monkeypatch.setattr(train_gpt, "validate", validate)
    monkeypatch.setattr(train_gpt, "step_tied", update)
    monkeypatch.setattr(train_gpt, "step_optimizers", update)
    run.start_clock()
    train_gpt.train(run, run.cfg)
    assert lines == [(0, 0, 9),
                     (1, 1000, 10), (2, 2500, 11), (2, 2500, 9),
                     (3, 3500, 12), (4, 5000, 13), (4, 5000, 9)]
    assert run.train_time_ms == run.process_time_ms == 5000


def test_the_log_of_a_run_on_gpus_tells_the_card_and_its_software(cards, monkeypatch):
    cards(8)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(train_gpt.collect_env, "get_nvidia_driver_version", lambda run: "580.65")
    facts = train_gpt.machine_facts(torch.device("cuda", 0))
    told = dict(device="A Card", cuda="13.0", driver="580.65", torch=torch.__version__)
    assert told.items() <= facts.items()


# ---- A card's kernels ----


def scripts_with_tiles():
    """The root, and the last record of each text of `prepare` that chooses tiles."""
    records = [record for record in RECORDS if "\nSMALL_TILES = " in source(record)]
    names = [record.relative_to(REPO) / "train_gpt.py" for record in
             one_of_each_kind(records, "prepare")]
    return [SCRIPTS[0], *map(str, names)]


def prepared(script, card, monkeypatch, **flags):
    """The record's small model, made ready for a card."""
    properties = SimpleNamespace(shared_memory_per_block_optin=card.shared_memory_per_block)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
    cfg = script.parse_args(["--preset", "pocket"])
    cfg = dataclasses.replace(cfg, **{name: True for name in ("fp8_head", "fp8_layers")
                                      if hasattr(cfg, name)})
    model = script.GPT(cfg)
    model.compile = lambda dynamic: None
    script.prepare(model, cfg, torch.device("cuda", 0))
    return model


@pytest.mark.parametrize("name", scripts_with_tiles())
def test_a_card_takes_tiles_that_its_shared_memory_holds_and_fp8_where_it_has_it(
    name, monkeypatch
):
    script = script_module(name)
    for arch, small, fp8 in (("sm_80", False, False), ("sm_86", True, False),
                             ("sm_89", True, True), ("sm_90", False, True),
                             ("sm_120", True, True)):
        model = prepared(script, CARDS[arch], monkeypatch)
        options = [block.attn.kernel_options for block in model.blocks if block.attn]
        assert options == [script.SMALL_TILES if small else None] * len(options), arch
        chosen = {module.use_fp8 for module in model.modules() if hasattr(module, "use_fp8")}
        assert chosen in (set(), {fp8}) and bool(chosen) == hasattr(model.cfg, "fp8_head"), arch


def test_tiles_reach_every_kernel_of_attention(monkeypatch):
    model = prepared(train_gpt, CARDS["sm_86"], monkeypatch).float()
    tokens = torch.randint(256, (1, 128))
    attend, taken = train_gpt.attend, []

    def attend_by_blocks(q, k, v, mask, kernel_options):
        return attend(q, k, v, BlockMask.__new__(BlockMask), kernel_options)

    def flex_attention(q, k, v, **options):
        taken.append(options["kernel_options"])
        return v

    monkeypatch.setattr(train_gpt, "attend", attend_by_blocks)
    monkeypatch.setattr(train_gpt, "flex_attention", flex_attention)
    model.hidden(tokens)
    assert taken == [train_gpt.SMALL_TILES] * sum(bool(block.attn) for block in model.blocks)


def test_a_smaller_card_takes_the_head_in_chunks(monkeypatch):
    for memory_gb, chunks in ((84, 1), (41.5, 2), (16, 8)):
        properties = SimpleNamespace(total_memory=int(memory_gb * 1e9))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert train_gpt.default_head_chunks(torch.device("cuda", 0)) == chunks


# ---- Ranks and cards ----


def test_a_rank_takes_its_own_card_of_its_machine_and_waits_for_those_that_compile(cards):
    calls = cards(2, WORLD_SIZE=4, RANK=3, LOCAL_RANK=1)
    with train_gpt.Ranks(tiny(device="auto")) as ranks:
        card = torch.device("cuda", 1)
        assert (ranks.rank, ranks.world_size, ranks.device) == (3, 4, card)
        assert calls.set_device.mock_calls == [call(card)]
        (init,) = calls.init_process_group.mock_calls
        assert init.kwargs["device_id"] == card
        assert init.kwargs["timeout"] > timedelta(minutes=20)
    assert calls.mock_calls[2:] == [call.destroy_process_group()]
    calls.reset_mock()
    with pytest.raises(UserError), train_gpt.Ranks(tiny(device="auto")):
        raise UserError
    # Without the first, a rank that has failed would wait for the others.
    assert calls.mock_calls[2:] == [call.world.abort(), call.destroy_process_group()]


def test_the_memory_that_a_log_tells_is_of_the_steps_and_not_of_the_warm_up(
    run, cards, monkeypatch
):
    cards(1)
    events = []
    for name, event in (("open_log", "log"), ("warm_up", "warm-up"), ("finish", "results")):
        monkeypatch.setattr(train_gpt.Run, name, lambda *_, event=event: events.append(event) or 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: events.append("from here"))
    monkeypatch.setattr(train_gpt, "build", lambda *_: (None, []))
    monkeypatch.setattr(train_gpt, "train", lambda *_: events.append("steps"))
    assert run(device="auto", head_chunks=1).code == 0
    assert events == ["log", "warm-up", "from here", "steps", "results"]


@pytest.mark.parametrize("machine, said", [
    (dict(capability=(7, 5)), "A Card has a compute capability below 8.0; use --device cpu"),
    (dict(hip="6.4"), "ROCm is untried; use --device cpu")])
def test_a_card_on_which_nothing_runs_is_told(run, cards, machine, said):
    cards(1, **machine)
    assert one_error(run(device="auto")).endswith(f"error: {said}\n")


# What srun, Open MPI's mpirun and MPICH's mpiexec tell each task: how many there are
TASKS = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]


@pytest.mark.parametrize("name", TASKS)
def test_tasks_that_know_nothing_of_each_other_are_refused_and_one_that_starts_torchrun_is_not(
    run, cards, monkeypatch, name
):
    for other in TASKS:
        monkeypatch.delenv(other, raising=False)
    cards(0, **{name: 8})
    said = f"error: {name}: each task would train alone; let one start torchrun\n"
    assert one_error(run()).endswith(said)
    assert not Path("logs").exists()
    for alone in "1", "":
        monkeypatch.setenv(name, alone)
        assert train_gpt.Ranks(tiny()).world_size == 1
    cards(0, WORLD_SIZE=16, RANK=9, LOCAL_RANK=1, **{name: 2})  # two machines of eight ranks
    assert train_gpt.Ranks(tiny()).rank == 9
