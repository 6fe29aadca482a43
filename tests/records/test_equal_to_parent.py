"""Steps that change how a record computes, and not what: they compute what their parents do.

Whole tiny runs in float64, on two ranks, and resumed at each step that can be saved.
Where weights are bf16, as on a GPU, owners step in fp32 all the same.
"""

import copy
import dataclasses
from types import SimpleNamespace

import golden
import pytest
import torch
from record_folders import for_each, having, load, parent_of
from test_ranks import Exchange, RankRun

STEPS = [*having("ValueReading")[:1], *having("read_share")[:1]]  # 92i and 92j
EXACT = 1e-12  # of a tensor, relative: sums in another order


class SavingRun(RankRun):
    """A rank's run. It keeps what a checkpoint has, before each step that can be saved."""

    def __init__(self, record, folder, count, rank=0, exchange=None):
        super().__init__(record, folder, count, rank, exchange)
        self.tokens = golden.tokens_of("training", 32_000)
        self.saved = {}

    def validate_and_save(self, step, can_save):
        if can_save and step > self.first_step:
            states = {each.name: each.full_state() for each in self.optimizers}
            kept = self.place, self.model.state_dict(), states
            self.saved[step] = copy.deepcopy(kept)  # as a file would
        return super().validate_and_save(step, can_save)

    def resume(self, step, saved):
        self.first_step = self.step = step
        self.place, model, states = saved
        self.model.load_state_dict(model)
        for optimizer in self.optimizers:
            optimizer.load_full_state(states[optimizer.name])


def runs_of(record, folder, num_ranks, at=None, saved=None):
    """The finished runs and their states, by rank."""
    count = max(4, num_ranks)  # sequences of a step
    exchange = Exchange(num_ranks) if num_ranks > 1 else None

    def run(rank):
        mine = SavingRun(record, folder, count, rank, exchange)
        if saved:
            mine.resume(at, saved)
        mine.train()
        return mine, mine.state()

    return exchange.on_each_rank(run) if exchange else [run(0)]


def assert_near(state, expected):
    for name, value in expected.items():
        error = (state[name] - value).norm()
        assert error <= EXACT * value.norm() + 1e-15, name


@for_each(STEPS)
@pytest.mark.slow
def test_two_ranks_end_as_their_parents(record, tmp_path):
    golden.write_tables(tmp_path)
    parent = parent_of(record)
    with golden.in_float64():
        expected = runs_of(parent, tmp_path, 2)
        found = runs_of(record, tmp_path, 2)
    for (mine, state), (parents, of_parent) in zip(found, expected):
        assert_near(state, of_parent)
        assert mine.validations == pytest.approx(parents.validations, rel=EXACT)


@for_each(STEPS)
@pytest.mark.slow
def test_it_can_be_resumed_at_each_saved_step_on_another_number_of_ranks(record, tmp_path):
    golden.write_tables(tmp_path)
    with golden.in_float64():
        ((mine, expected),) = runs_of(record, tmp_path, 1)
        assert [*mine.saved] == [2, 4, 8, 12]
        for step, saved in mine.saved.items():
            for _, state in runs_of(record, tmp_path, 2, step, saved):
                assert_near(state, expected)


# ---- 92i: the rows of value tables


@for_each(STEPS[:1])
def test_a_pass_plans_the_rows_that_its_inputs_need(record):
    """And as many others, each once. The host knows what every rank reads."""
    script = load(record)
    vocab, dim, sequences, length = 96, 2, 4, 8
    cfg = script.Hyperparameters()
    group = script.parameter_groups(cfg)["value embeds"]
    tokens = golden.tokens_of("inputs", sequences * length).reshape(sequences, length) % vocab
    inputs = torch.from_numpy(tokens.astype("int32"))
    for rank in range(2):
        ranks = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"))
        tables = [torch.nn.Parameter(torch.randn(vocab, dim)) for _ in range(2)]
        adam = script.ValueAdam("value embeds", group, tables, ranks)
        mine = inputs[2 * rank + 1 :][:1]  # the second pass
        classes = torch.zeros(1, 16, dtype=torch.int64)
        step = inputs.roll(-2 * rank - 1, dims=0)
        batch = adam.plan_batch(script.Batch(mine, None, classes, step))
        ids, place, is_read = batch.values
        assert len(ids) == min(length, 17) and len(ids.unique()) == len(ids)
        assert ids[place].equal(mine.long())
        for reader, read in enumerate(is_read):
            assert read.nonzero()[0].tolist() == inputs[2 * reader + 1].unique().tolist()
        rows = adam.take(batch.values)
        for table, of_table in zip(tables, rows):
            assert of_table[place].equal(table[mine])


# ---- 92j: weights in bf16


def muon_of(script, params, ranks=None):
    cfg = script.Hyperparameters(device="cpu")
    group = dataclasses.replace(script.parameter_groups(cfg)["mlp"], lr=1e-4)
    params = [torch.nn.Parameter(x.clone()) for x in params]
    return script.Muon("mlp", group, params, ranks or script.Ranks(cfg))


@for_each(STEPS[1:])
def test_owners_of_bf16_weights_step_in_fp32(record):
    """To the bit. Each step is less than half of a weight's last digit in bf16."""
    script = load(record)
    generator = torch.Generator().manual_seed(0)
    first = [(1 + torch.rand(16, 8, generator=generator)).bfloat16() for _ in range(2)]
    low, high = (muon_of(script, [x.to(dtype) for x in first])
                 for dtype in (torch.bfloat16, torch.float32))
    for step in range(60):
        now = script.schedule(600 + step, script.Hyperparameters())
        before = high.weights.clone()
        grads = torch.randn(low.grads.shape, generator=generator).bfloat16()
        for optimizer in (low, high):
            optimizer.grads.copy_(grads)
            optimizer.update(now, divisor=8)
            optimizer.average(dataclasses.replace(now, average_rates=dict(late=0.5, banks=0.5)))
        assert low.read_share().equal(high.weights)
        assert low.weights.equal(high.weights.bfloat16())
        assert (high.weights - before).abs().max() < 2.0**-9
        assert not high.state["rest"].any()
    assert not low.weights.equal(torch.cat(first).flatten())  # bf16 alone would not have moved
    # A checkpoint has both parts. It is taken up on another number of ranks.
    for rank in range(2):
        ranks = SimpleNamespace(rank=rank, world_size=2, device=torch.device("cpu"))
        again = muon_of(script, low.weights.view(2, 16, 8), ranks)
        again.load_full_state(low.full_state())
        assert again.read_share().equal(low.read_share()[again.mine])
    for optimizer in (low, high):
        optimizer.write_averages()
    assert low.read_share().equal(high.weights) and low.weights.equal(high.weights.bfloat16())


@for_each(STEPS[1:])
def test_all_of_muons_weights_are_bf16_on_a_gpu(record, tmp_path):
    """And no others that were not so before."""
    script = load(record)
    golden.write_tables(tmp_path)
    model = golden.make_model(script, golden.tiny(script, tmp_path))
    bf16 = {name for name, param in model.named_parameters() if param.bf16}
    parent = load(parent_of(record))
    of_parent = golden.make_model(parent, golden.tiny(parent, tmp_path))
    already = {name for name, param in of_parent.named_parameters() if param.bf16}
    of_muon = {name for name, param in model.named_parameters()
               if isinstance(script.parameter_groups(model.cfg)[param.group], script.MuonGroup)}
    assert bf16 - already == of_muon and already < bf16
