"""What the public records say of themselves, at full size: schedules, rows of hashes, ids of a
softmax. published.toml has the figures of schedules."""

import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from record_folders import LADDERS, claim, load

FIGURES, latest = {}, {}  # by number
for number, own in tomllib.loads(Path(__file__).with_name("published.toml").read_text()).items():
    latest = latest | own
    FIGURES[int(number)] = latest


def number_of(record):
    published = claim(record)["published"]
    return published and published["number"]


NUMBERS = {number_of(record): record for record in LADDERS["time"]}


def settings(record):
    """The script, its settings, and the schedule of each step, the last validation's included."""
    script = load(record)
    cfg = script.Hyperparameters()
    return script, cfg, [script.schedule(step, cfg) for step in range(cfg.num_iterations + 1)]


def changes_of(values):
    """(index, value) of each that is not the one before it."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [(index, after) for index, (before, after) in pairs if before != after]


def windows_of(now):
    """The long and the short one, in blocks."""
    if "window" in vars(now):
        return [now.window, max(1, now.window // 2)]
    return [now.long_window // 128, now.short_window // 128]


def figures(record, published):
    script, cfg, schedules = settings(record)
    steps, last = schedules[:-1], schedules[-1]
    long = [windows_of(now)[0] for now in schedules]
    if len(steps) not in published["windows"]:  # the last validation's, which some records count
        long.pop()
    factors = [now.lr_factor for now in steps]
    changes = changes_of(factors)
    falls = next(step for step, after in changes if after < factors[step - 1] - 1e-5)
    found = dict(
        steps=len(steps),
        windows=[step for step, _ in changes_of(long)],
        at_last=windows_of(last),
        shorts=[[long, dict(map(windows_of, steps))[long]] for long, _ in published["shorts"]],
        falls=falls,
        jumps=[step for step, after in changes if after > factors[step - 1]],
        plateaus=factors[:1] + [after for step, after in changes if step < falls],
        last_rate=last.lr_factor,
    )
    if "tokens" in published:
        decimals = len(str(published["tokens"]).partition(".")[2])
        found["tokens"] = round(script.planned_tokens(cfg)[-1] / 1e6, decimals)
    if "multipliers" in published:
        groups = script.parameter_groups(cfg)
        attention, mlp = groups["attention"].factors, groups["mlp"].factors
        found["multipliers"] = [attention[0], *mlp]
    return found


@pytest.mark.parametrize("number", [number for number in FIGURES if number in NUMBERS])
def test_a_record_has_the_published_figures(number):
    published = FIGURES[number]
    found = figures(NUMBERS[number], published)
    held = published.keys() & found.keys()
    assert held >= {"windows", "shorts", "at_last"}
    for name in held:
        assert found[name] == pytest.approx(np.array(published[name]), rel=1e-9, abs=5.1e-7), name


def test_pairs_of_tokens_have_the_published_rows():
    """A row a token; to the second one the token before is always the same, and overflows."""
    def rows(*tokens):
        return load(NUMBERS[62]).hash_bigrams(torch.tensor([tokens]), 251_520)[0].tolist()

    tokens = 50256, 0, 1, 2, 50256, 50255, 50256, 50256, 262, 464, 11, 13, 198
    assert rows(*tokens) == [251519, 193815, 36313, 94597, 187029, 127707, 244156, 35060, 245243,
                             70649, 188566, 238680, 78264]
    seconds = [rows(7, second)[1] for second in (0, 1, 2, 198, 464, 50255)]
    assert seconds == [193815, 159838, 129737, 209144, 204580, 32011]


def test_classes_of_a_softmax_in_92():
    script, cfg, _ = settings(NUMBERS[92])

    def chosen(targets, offset, wanted):
        ids, offset = script.candidates(np.array(targets), offset, wanted, 50_304, cfg)
        return ids.tolist(), offset

    targets = range(3000)
    ids, offset = chosen(targets, 0, 10_240)
    assert (sum(ids), ids[3000:3004], offset) == (197_471_229, [3006, 3014, 3017, 3025], 12_564)
    ids, offset = chosen(targets, offset, 10_240)
    assert (sum(ids), offset) == (197_431_846, 25_128)
    ids, offset = chosen(targets, 50_304 * 7 // 8, 10_240)
    assert (sum(ids), offset) == (197_494_251, 6276)
    swept = [20_011 * k % 50_304 for k in range(30_000)]  # all that the window will have
    ids, offset = chosen(swept, 0, 32_768)
    assert (sum(ids), len(ids), offset) == (821_036_818, 32_768, 4961)
    assert chosen(range(7), 5, 7) == (list(range(7)), 5)
    with pytest.raises(script.UserError, match="7 classes are fewer than the 8 targets"):
        chosen(range(8), 5, 7)
    assert script.first_sweeps(50_304, 8) == [6288 * index for index in range(8)]


def test_rows_and_signs_of_n_grams_in_92():
    script = load(NUMBERS[92])
    rows = 84_602_880

    def hashes(*tokens):
        tokens = torch.tensor([tokens])
        pairs, threes = script.hash_bigrams(tokens, rows), script.hash_trigrams(tokens, rows)
        return pairs[0].tolist(), threes[0].tolist()

    for token, row in ((262, 20_632_011), (11, 13_084_038), (50_256, 40_499_699)):
        assert hashes(7, token) == ([42_301_439, row], [84_602_879] * 2) == hashes(9, token)
    pairs, threes = hashes(1, 50_256, 262, 11)
    assert (pairs[3], threes[3]) == (6_990_873, 49_278_731)
    signs = script.hash_signs(torch.tensor([[1, 50_256, 262, 11]]), 8192)
    of_pairs, of_threes = (x[0].tolist() for x in signs)
    assert (of_pairs[3], of_threes[3]) == (71, 1595)
    assert (of_pairs[0], of_threes[:2]) == (0, [0, 0]) and of_pairs[1] != 0
