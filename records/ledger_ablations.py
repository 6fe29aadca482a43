"""Ablations: the newest record with one thing taken out or put back, and what that does.

Each row is the record's script with a few pieces of its text replaced, or with flags. Rows with a
published effect calibrate the preset they are measured in; the others are there for the reader.
"""

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

from ledger_base import LedgerError, read_text, sha256, write_file
from ledger_records import run_facts
from ledger_rules import SIGNIFICANCE
from ledger_runs import Contestant
from ledger_sources import own_sections
from ledger_stats import is_significant, p_paired, scipy_stats, smallest_difference, std_of
from ledger_tables import decimal, duration, markdown, p_words

BASE = "as-it-is"


@dataclass(frozen=True)
class Ablation:
    """One change of the script, and what the technique that it takes away gained in public."""

    name: str
    change: str
    edits: tuple[tuple[str, str], ...] = ()  # pieces of the script, each there once, and others
    flags: dict[str, str] = field(default_factory=dict)
    steps: tuple[int, int] | None = None  # published: with the technique, and without it
    source: str = ""

    @property
    def published(self) -> float | None:
        """Steps that the technique saved, in percent of those without it."""
        return None if self.steps is None else 100 * (1 - self.steps[0] / self.steps[1])

    def apply(self, script: str) -> str:
        """The script with the change. Raises LedgerError where a piece is not there once."""
        for old, new in self.edits:
            if script.count(old) != 1:
                raise LedgerError(f"ablation {self.name}: the script has {old!r} "
                                  f"{script.count(old)} times, not once; mend ledger_ablations.py")
            script = script.replace(old, new)
        return script


NEWTON_SCHULZ = "    for a, b, c in POLAR_EXPRESS:"
PROJECTIONS = '''            elif name.endswith(("qkv_w", "c_fc")):
                std = self.cfg.model_dim**-0.5 * (0.5 if name.endswith("c_fc") else 1.0)'''
ABLATIONS = (
    Ablation("no-key-offset", "keys are their own token's in all channels",
             (("before[..., 1, :]], dim=-2)", "k[..., 1, :]], dim=-2)"),),
             steps=(2110, 2160), source="#49"),
    Ablation("offset-long", "keys are offset in layers with long windows alone",
             (("CausalSelfAttention(cfg) if", "CausalSelfAttention(cfg, layer) if"),
              ("    def __init__(self, cfg: Hyperparameters):\n        super().__init__()\n"
               "        self.heads",
               "    def __init__(self, cfg: Hyperparameters, layer: int):\n"
               "        super().__init__()\n"
               '        self.shifted = int(cfg.attention_pattern[layer] == "L")\n'
               "        self.heads"),
              ("before[..., 1, :]], dim=-2)",
               "(before if self.shifted else k)[..., 1, :]], dim=-2)"))),
    Ablation("one-target", "the next token alone is predicted", flags={"targets_ahead": "1"},
             steps=(1950, 2000), source="#53, by its parts"),
    Ablation("gelu", "GELU in the place of ReLU²", (("F.relu(x).square()", "F.gelu(x)"),)),
    Ablation("no-qk-norm", "queries and keys without norm, scores over √d",
             (("rotate(norm(qk), *turn)", "rotate(qk, *turn)"),), {"attention_scale": "0.1768"}),
    Ablation("full-rotary", "all pairs of channels turn",
             (("frequency = F.pad(frequency, (0, self.cfg.head_dim // 4))", "pass"),
              ("steps=cfg.head_dim // 4)", "steps=cfg.head_dim // 2)"))),
    Ablation("no-cap", "logits without a cap",
             (("self.cfg.logit_cap * torch.sigmoid(self.lm_head(x).float() / self.cfg.logit_slope)",
               "self.lm_head(x).float()"),)),
    Ablation("tanh-cap", "logits capped by 15 tanh(x / 15), the same but for a constant",
             (("self.cfg.logit_cap * torch.sigmoid(self.lm_head(x).float() / self.cfg.logit_slope)",
               "15 * torch.tanh(self.lm_head(x).float() / 15)"),)),
    Ablation("cap-30", "logits capped twice as far away", flags={"logit_cap": "60",
                                                               "logit_slope": "15"},
             steps=(1390, 1490), source="#18"),
    Ablation("tied-head", "the head is the embedding to the end",
             (("stage(step, head.cfg) < 2", "stage(step, head.cfg) < 4"),)),
    Ablation("untied-head", "the head has its own matrix from the start",
             (("stage(step, head.cfg) < 2", "stage(step, head.cfg) < 0"),),
             steps=(2035, 2090), source="#51"),
    Ablation("no-embed-norm", "no norm after the embedding",
             (("norm(self.smear(self.embed(inputs_BT)))", "self.smear(self.embed(inputs_BT))"),)),
    Ablation("no-value-embeds", "no value embeddings", flags={"value_embed_pattern": "....."}),
    Ablation("no-skip", "nothing is added where there is no attention",
             (("x = x + torch.sigmoid(self.skip_lambda) * outputs[self.cfg.skip_layer]", "pass"),),
             steps=(2225, 2242), source="#45: 0.0025 of loss, some 17 steps"),
    Ablation("no-x0", "the embedding is not added in the blocks",
             (("self.x_lambda * x + self.x0_lambda * x0", "self.x_lambda * x"),)),
    Ablation("nonzero-projections", "output projections begin as the other matrices",
             ((PROJECTIONS,
               PROJECTIONS.replace('"c_fc"))', '"c_fc", "c_proj", "c_proj.weight"))').replace(
                   '0.5 if name.endswith("c_fc") else 1.0',
                   '1.0 if name.endswith("qkv_w") else 0.5')),)),
    Ablation("no-document-mask", "attention over the edges of documents",
             (("starts = inputs_BT == self.cfg.eot_token",
               "starts = torch.zeros_like(inputs_BT, dtype=torch.bool)"),)),
    Ablation("full-window", "windows at full length from the start",
             flags={"window_stages": "4 4 4 4"}),
    Ablation("all-long", "short windows as long as the long ones",
             (("self.windows[1] = max(1, long // 2)", "self.windows[1] = long"),)),
    Ablation("scale", "scores over √d", flags={"attention_scale": "0.1768"},
             steps=(1390, 1410), source="#20"),
    Ablation("no-gate", "heads without gates",
             (("(y * gate[..., None]).flatten(2)", "y.flatten(2)"),),
             steps=(1700, 1750), source="#28, by its parts"),
    Ablation("no-smear", "embeddings of their own token alone",
             (("norm(self.smear(self.embed(inputs_BT)))", "norm(self.embed(inputs_BT))"),),
             steps=(1655, 1660), source="#34, by its author"),
    Ablation("no-backout", "nothing is taken from the last layer's output",
             (("        x = x - self.backout_lambda * outputs[self.cfg.backout_layer]  "
               "# backout: @snimu\n", ""),)),
    Ablation("adam", "Adam in the place of Muon, at a rate of 0.003",
             (('table = [(Muon, f"matrices', 'table = [(Adam, f"matrices'),
              ("p.shape[-2:] == (M, N)],\n              cfg.muon_lr)",
               "p.shape[-2:] == (M, N)],\n              0.003)"))),
    Ablation("muon", "Muon in the place of NorMuon",
             (("evened = update / square.clamp_min(1e-10).sqrt()", "evened = update"),),
             steps=(2315, 2330), source="#41"),
    Ablation("no-nesterov", "Muon's mean of gradients as it is",
             (("orthogonalize(grad.lerp(mean, momentum), dtype)", "orthogonalize(mean, dtype)"),)),
    Ablation("3-iterations", "three iterations of Polar Express in the place of five",
             ((NEWTON_SCHULZ, NEWTON_SCHULZ.replace("EXPRESS:", "EXPRESS[:3]:")),)),
    Ablation("7-iterations", "seven iterations, the last one's coefficients three times",
             ((NEWTON_SCHULZ, NEWTON_SCHULZ.replace(
                 "EXPRESS:", "EXPRESS + POLAR_EXPRESS[-1:] * 2:")),)),
    Ablation("quintic", "five Newton-Schulz iterations in the place of Polar Express",
             ((NEWTON_SCHULZ, NEWTON_SCHULZ.replace(
                 "POLAR_EXPRESS:", "5 * [(3.4445, -4.7750, 2.0315)]:")),),
             steps=(1670, 1680), source="#38"),
    Ablation("constant-momentum", "Muon's momentum neither rises nor falls",
             flags={"momentum_warmup": "0", "momentum_cooldown": "0"}),
    Ablation("rates-to-0", "rates down to 0 in the place of a tenth", flags={"final_lr_frac": "0"}),
    Ablation("no-muon-decay", "no weight decay in Muon", flags={"muon_decay": "0"},
             steps=(2245, 2285), source="#43"),
    Ablation("no-adam-decay", "no weight decay in Adam", flags={"adam_decay": "0"},
             steps=(2090, 2110), source="#50"),
    Ablation("fast-scalars", "scalars as fast as embeddings in Adam, and never at rest",
             (('betas = (0.9, 0.99) if self.name == "scalars" else',
               'betas = (cfg.adam_beta1, cfg.adam_beta2) if self.name == "scalars" else'),),
             {"freeze_steps": "0"}, steps=(2000, 2035), source="#52"),
    Ablation("constant-batch", "as many tokens in steps of equal length, rates at their mean",
             flags={"length_stages": "1", "train_seq_len": "1024", "lr_stages": "142"},
             steps=(2160, 2225), source="#46"),
    Ablation("fp8", "FP8 products in the head, on a CPU",
             (("    model.head_chunks = choose_head_chunks(model, cfg, ranks.device)\n",
               "    model.head_chunks = choose_head_chunks(model, cfg, ranks.device)\n"
               "    model.lm_head.fp8_scales = cfg.fp8_x_scale, cfg.fp8_w_scale, "
               "cfg.fp8_grad_scale\n"),)),
)


def chosen(names: list[str]) -> list[Ablation]:
    """The ablations of these names, or all. Raises LedgerError for a name that is none's."""
    by_name = {ablation.name: ablation for ablation in ABLATIONS}
    if unknown := [name for name in names if name not in by_name]:
        raise LedgerError(f"{unknown[0]}: no ablation; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(ABLATIONS)


def contestants(record: Path, names: list[str], out: Path, steps: int | None) -> list[Contestant]:
    """The record's script as it is, then with each change, as `run` takes them."""
    script, found = read_text(record / "train_gpt.py"), []
    (out / "scripts").mkdir(parents=True, exist_ok=True)
    length = {"num_iterations": str(steps)} if steps else {}
    for name, flags, text in [(BASE, {}, script)] + [
            (a.name, a.flags, a.apply(script)) for a in chosen(names)]:
        path = out / "scripts" / f"{name}.py"
        write_file(path, text)
        found.append(Contestant(name, path, None, length | flags, sha256(text)))
    return found


# -----------------------------------------------------------------------------
# Results
# -----------------------------------------------------------------------------


def ablation_findings(folder: Path, newest: Path) -> tuple[list[str], list[str]]:
    """(findings, notes) on the kept results of a folder of records, where it has any."""
    if not (folder / "ablations.json").exists():
        return [], []
    script, kept = read_text(newest / "train_gpt.py"), read_results(folder / "ablations.json")
    found, notes = [], []
    try:
        for ablation in ABLATIONS:
            ablation.apply(script)
        if read_text(folder / "ablations.md") != page(kept):
            found.append("ablations.md is not what `ablate --write` gives")
    except (LedgerError, OSError) as error:
        found.append(str(error))
    except (KeyError, TypeError, ValueError) as error:
        found.append(f"ablations.json cannot be used: {error!r}")
    if kept.get("sections") != sections_sha256(script):
        notes.append(f"ablations.json: measured with another script than {newest.name}'s")
    return found, notes


def read_results(path: Path) -> dict:
    """What is kept. Raises LedgerError where nothing is."""
    try:
        return json.loads(read_text(path))
    except (FileNotFoundError, ValueError) as error:
        raise LedgerError(f"{path}: no kept results ({error}); `ablate --seeds 5` makes them"
                          ) from None


def keep(path: Path, record: Path, preset: str, runs: list[Contestant]) -> None:
    """Add the runs to what is kept, by their steps. Those of another script or preset go."""
    script = read_text(record / "train_gpt.py")
    head = {"record": record.name, "preset": preset, "sections": sections_sha256(script)}
    kept = json.loads(read_text(path)) if path.exists() else {}
    if {name: kept.get(name) for name in head} != head:
        kept = head | {"runs": {}}
    for run in runs:
        for log in run.logs.values():
            fact = run_facts(log)
            by_name = kept["runs"].setdefault(str(fact["steps"]), {})
            by_name.setdefault(run.name, {})[str(fact["seed"])] = {
                "val_loss": fact["val_loss"], "train_time_ms": fact["train_time_ms"],
                "log_sha256": sha256(read_text(log))}
    write_file(path, json.dumps(kept, indent=1) + "\n")


def sections_sha256(script: str) -> str:
    """sha256 of what makes a script's losses: its own sections."""
    return sha256("\n".join(f"{title}\n{text}" for title, text in own_sections(script).items()))


@dataclass
class Row:
    """An ablation's runs against those of the script as it is, by seed."""

    ablation: Ablation
    differences: list[float]
    ratios: list[float]
    losses: list[float]

    @property
    def difference(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def p(self) -> float | None:
        return p_paired(self.differences)

    @property
    def interval(self) -> float | None:
        """Half of the interval that has the true difference at 95 %."""
        n, spread = len(self.differences), std_of(self.differences)
        return spread and scipy_stats().t.ppf(0.975, n - 1) * spread / n**0.5

    @property
    def is_shown(self) -> bool:
        return is_significant(self.p)

    @property
    def words(self) -> list[str]:
        interval = "" if self.interval is None else f" ± {self.interval:.4f}"
        verdict = ("worse" if self.difference > 0 else "better") if self.is_shown else "not shown"
        a = self.ablation
        published = "–" if a.published is None else f"−{a.published:.1f} % steps ({a.source})"
        return [f"`{a.name}`", a.change, str(len(self.differences)),
                f"{decimal(self.difference, sign='+')}{interval}", f"{p_words(self.p)}: {verdict}",
                f"×{statistics.median(self.ratios):.3f}", published]


def tables_of(kept: dict) -> dict[int, list[Row]]:
    """By number of steps, fewest first: a row of each ablation, the greatest loss first."""
    return {int(steps): rows_of(kept["runs"][steps]) for steps in sorted(kept["runs"], key=int)}


def rows_of(by_name: dict) -> list[Row]:
    base, found = by_name.get(BASE, {}), []
    for ablation in ABLATIONS:
        runs = by_name.get(ablation.name, {})
        seeds = [seed for seed in runs if seed in base]
        if seeds:
            pairs = [(runs[seed], base[seed]) for seed in seeds]
            found.append(Row(ablation, [a["val_loss"] - b["val_loss"] for a, b in pairs],
                             [a["train_time_ms"] / b["train_time_ms"] for a, b in pairs],
                             [a["val_loss"] for a, _ in pairs]))
    return sorted(found, key=lambda row: -row.difference)


def calibration(rows: list[Row]) -> dict:
    """How far the differences here go with the published ones, and what could be seen at all."""
    known = [row for row in rows if row.ablation.published is not None]
    agree = sum(row.difference > 0 for row in known)
    found = {"published": len(known), "agree": agree, "rank_correlation": None, "smallest": {}}
    if len(known) > 2:
        here, there = [r.difference for r in known], [r.ablation.published for r in known]
        found["rank_correlation"] = round(float(scipy_stats().spearmanr(here, there).statistic), 2)
    spreads = [spread for row in rows if (spread := std_of(row.differences))]
    if spreads:
        found["smallest"] = {n: smallest_difference(statistics.median(spreads) / n**0.5, n - 1)
                             for n in (5, 10)}
    return found


def table_words(steps: int, base: dict, rows: list[Row]) -> str:
    """The part of ablations.md on the runs of so many steps, where the script as it is has some."""
    found = calibration(rows)
    losses = [run["val_loss"] for run in base.values()]
    times = [run["train_time_ms"] for run in base.values()]
    least = " and ".join(f"{value:.3f} with {n} seeds" for n, value in found["smallest"].items())
    table = markdown(("Row", "Change", "n", "Loss, 95 % interval", "p", "Time", "Published"),
                     [row.words for row in rows])
    start = (f"As it is, the script ends at {statistics.fmean(losses):.4f}, standard deviation "
             f"{decimal(std_of(losses))} (n = {len(losses)}), in "
             f"{duration(statistics.median(times))} in the median.")
    end = (f"Of {found['published']} rows with a published effect, {found['agree']} have its sign "
           f"here; the rank correlation of their sizes is {found['rank_correlation']}. To be shown "
           f"at p < {SIGNIFICANCE:g}, by the median spread of the rows' paired differences, a "
           f"difference has to be {least or 'unknown'}.")
    fewest = min((len(row.differences) for row in rows), default=len(losses))
    if fewest < len(losses):
        mean = statistics.fmean(losses)
        above = sum(statistics.fmean(row.losses) > mean for row in rows
                    if row.ablation.published is not None)
        start += (f" Of the first {fewest}, which the rows of so many are held against, the mean "
                  f"is {statistics.fmean(losses[:fewest]):.4f}: where these were fortunate, all "
                  "such differences are too high together.")
        end += (f" Held against all {len(losses)} runs of the script as it is, in the place of "
                f"those of the same seeds, {above} of the {found['published']} have their sign.")
    return f"## {steps} steps\n\n{fill(start, 100)}\n\n{table}\n\n{fill(end, 100)}\n"


def page(kept: dict) -> str:
    """The text of ablations.md."""
    parts = "\n".join(table_words(steps, kept["runs"][str(steps)][BASE], rows)
                      for steps, rows in tables_of(kept).items())
    run = {name for by_name in kept["runs"].values() for name in by_name}
    rest = ", ".join(f"`{a.name}`" for a in ABLATIONS if a.name not in run)
    todo = fill(f"Not run yet: {rest}.", 100, break_on_hyphens=False) + "\n\n" if rest else ""
    return f"""# What each technique is worth

{kept['record']} with one thing taken out or put back at a time, trained with
`--preset {kept['preset']}`: the difference of its validation loss to that of the script as it is,
at equal steps, paired by seed. Above 0 the change does harm, so what it takes away is of use. Times
are beside another run, on one thread each. The runs of the script as it is serve the rows of later
calls too, whose ratios of times then have the machine's hour in them; `cap-30`, which computes as
much, shows how much of it. *Published* are the steps that the technique saved in the
public lineage, where a record tells of it alone, by the numbers of steps before and after.

    python records/ledger.py ablate gelu --seeds 5 --jobs 2     # any row
    python records/ledger.py ablate --seeds 5 --jobs 2          # all of them

With `--steps N` each run has N steps, and a table of its own.

{parts}
![The rows with a published effect](ablations.png)

{todo}Generated by `ledger.py ablate --write` from `ablations.json`, which has each run's loss, time
and the sha256 of its log.
"""
