"""What is shown: tables, the generated blocks of the READMEs, the ladder and the curves."""

import math
import re
import statistics
import sys
from pathlib import Path

import numpy as np
from ledger.logs import LedgerError, Log, changed_lines, own_part, read_text, sha256, write_file
from ledger.public import DATED, TARGET, Group
from ledger.table import (
    RULES,
    TABLE,
    Record,
    compare,
    is_shown,
    p_below,
    read_claim,
    run_row,
    std_of,
)

BLOCK = ("<!-- ledger: begin -->", "<!-- ledger: end -->")  # around a README's generated lines
LADDER = ("Record", "Minutes", "Loss (n)", "Float64", "Modelled", "Pocket loss ± std (n)",
          "Difference")
LEGEND = """\
Minutes, Loss: of the public record's n runs on 8×H100, by its own files. Float64: the largest
difference between our script and the public one. Modelled: minutes of our script on 8×H100, where
it was not run. Pocket: all runs of `--preset pocket`, at equal tokens. Difference: of that mean
from the parent's, with the two-sided p of the paired t-test; * where p < 0.01."""
FOREIGN = ("Folder", "Runs", "Loss ± std (n)", "p", "Steps", "Tokens a step", "Minutes")
FOREIGN_LEGEND = """
p: one-sided t-test that the mean lies below 3.28. Runs: the record's, or a baseline (the source of
an older folder, or called one), or of fewer ranks, another source or another number of steps."""
RESULTS = ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time")
RESULTS_LEGEND = """
Target: p of a one-sided t-test that the mean lies below target_loss. Difference: from the parent's
mean, or else the first contestant's, with the p of a two-sided t-test, paired where the seeds are
the same; * where p < 0.01. Shown from: the smallest difference that would reach that. Time: median
and range of the ratios by seed, which only runs alone on the machine (--jobs 1) measure."""

# ---- Cells ----


def decimal(value: float | None, digits: int = 4, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.{digits}f}".replace("-", "−")


def loss_words(losses: list[float]) -> str:
    """Mean, standard deviation and number."""
    if not losses:
        return ""
    spread = f" ± {decimal(std_of(losses))}" if len(losses) > 1 else ""
    return f"{decimal(statistics.fmean(losses))}{spread} ({len(losses)})"


def difference_words(versus: dict | None) -> str:
    if not versus:
        return ""
    p = "no p" if versus["p"] is None else f"p {versus['p']:.2g}"
    return f"{decimal(versus['difference'], sign='+')} ({p})" + "*" * is_shown(versus)


def ratio_words(versus: dict | None) -> str:
    ratios = versus["time_ratios"] if versus else []
    if not ratios:
        return ""
    return f"×{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"


def markdown(heading: tuple, rows: list) -> str:
    lines = []
    for row in (heading, ["---"] * len(heading), *rows):
        lines.append("| " + " | ".join(row).replace("\n", " ") + " |")
    return "\n".join(lines)


def print_table(heading: tuple, rows: list) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows)]
    for row in (heading, ["-" * width for width in widths], *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())


# ---- Records ----


def losses_of(runs: list[dict]) -> list[float]:
    return [float(run["val_loss"]) for run in runs]


def versus_parent(record: Record, kind: str) -> dict | None:
    theirs = record.parent.runs.get(kind) if record.parent else None
    return compare(record.runs[kind], theirs) if theirs and record.runs.get(kind) else None


def ladder_row(record: Record) -> list[str]:
    claim, losses = record.claim, losses_of(record.runs.get("loss", []))
    row = [f"{claim['number']} {record.name}", "", "", "", "", loss_words(losses),
           difference_words(versus_parent(record, "loss"))]
    if published := claim["published"]:
        row[1] = f"{published['minutes']:g}"
        row[2] = f"{published['val_loss']:.4f} ({published['n']})"
    if claim["equality"]:
        row[3] = f"{claim['equality']['largest']:.0e}"
    if claim["modelled_minutes"]:
        row[4] = f"{claim['modelled_minutes']:g}"
    return row


def machine_words(runs: list[dict]) -> str:
    words = "{device}, torch {torch}, {threads} thread(s) a run, {jobs} run(s) at once"
    return "; ".join(sorted({words.format(**run) for run in runs})) or "nothing measured yet"


def ladder_block(records: list[Record], folder: Path) -> str:
    """The generated lines of records/README.md: the ladder, what it ran on, the rules' numbers."""
    rows, runs, rules = [], [], []
    for record in records:
        name, *cells = ladder_row(record)
        rows.append([f"[{name}]({record.folder.name})", *cells])
        runs += record.runs.get("loss", [])
    for preset, rule in RULES.items():
        rules.append([f"`{preset}`", f"{rule.target_loss:g}", f"`{rule.val_files}`",
                      f"{rule.val_tokens:,}", rule.val_digest or "", f"`{rule.train_files}`"])
    path = folder / TABLE
    digest = sha256(read_text(path)) if path.exists() else "no runs yet"
    heading = ("Preset", "Target", "Validation set", "Its tokens", "Digest", "Training set")
    return "\n\n".join([markdown(LADDER, rows), LEGEND, f"Measured on {machine_words(runs)}.",
                        markdown(heading, rules), f"[{TABLE}]({TABLE}), sha256 {digest}."])


def record_block(record: Record) -> str:
    """The generated lines of a record's README.md."""
    published, equality = record.claim["published"], record.claim["equality"]
    parts = []
    if published:
        parts.append("Published as #{number}: {minutes:g} minutes, validation loss {val_loss:.4f} "
                     "(n = {n}) on {hardware}; {source}.".format(**published))
    if record.claim["modelled_minutes"]:
        parts.append(f"Modelled on 8×H100, not run: {record.claim['modelled_minutes']:g} minutes.")
    if equality:
        parts.append("Equal to the published script in float64, largest difference "
                     f"{equality['largest']:.1e}: {equality['of']}.")
    for kind, runs in record.runs.items():
        parts.append(f"{len(runs)} runs of `--preset {runs[0]['preset']}`, {runs[0]['steps']} "
                     f"steps of {int(runs[0]['tokens']) // int(runs[0]['steps']):,} tokens: "
                     f"loss {loss_words(losses_of(runs))}; {machine_words(runs)}.")
        if versus := versus_parent(record, kind):
            parts[-1] += (f" Against the parent: {difference_words(versus)}, {versus['test']}; "
                          f"times {ratio_words(versus)}.")
    if record.parent:
        old = own_part(read_text(record.parent.folder / "train_gpt.py")).splitlines()
        new = own_part(read_text(record.folder / "train_gpt.py")).splitlines()
        added, removed = changed_lines(old, new)
        parts.append(f"Source: +{added} −{removed} lines against {record.parent.folder.name}.")
    return "\n\n".join(parts)


def split_block(path: Path) -> tuple[str, str, str]:
    """A README's text before, in and after its generated lines. Raises LedgerError without them."""
    begin, end = BLOCK
    match = re.fullmatch(rf"(.*{begin}\n)(.*?)(\n?{end}.*)", read_text(path), re.S)
    if not match:
        raise LedgerError(f"{path} has no lines {begin} and {end}; add them")
    return match.groups()


def write_block(path: Path, text: str) -> None:
    before, _, after = split_block(path)
    write_file(path, before + text + "\n" + after.removeprefix("\n"))


# ---- Other people's logs ----


def foreign_row(group: Group, record: Group, previous: Group | None) -> dict:
    """What a group of runs is, as numbers; its lines against the record before it."""
    log, losses = group.logs[0], [log.val_loss for log in group.logs]
    times = [log.train_time_ms for log in group.logs]
    dated = DATED.fullmatch(group.folder.name)
    steps = log.planned_steps or log.last_step
    tokens = log.tokens_until(steps)
    row = {"date": dated[1] if dated else "", "name": dated[2] if dated else group.folder.name}
    row["kind"], row["runs"] = group.kind(record)
    row |= {"n": len(losses), "ranks": group.ranks or None, "steps": steps,
            "tokens_per_step": tokens and round(tokens / max(1, steps)),
            "val_loss_mean": round(statistics.fmean(losses), 6), "val_loss_std": std_of(losses),
            "p_target": p_below(losses, TARGET),
            "train_time_ms_median": None if None in times else statistics.median(times),
            "lines_added": None, "lines_removed": None, "losses": losses}
    if previous and previous.logs[0].source and log.source:
        before, after = previous.logs[0].source.splitlines(), log.source.splitlines()
        row["lines_added"], row["lines_removed"] = changed_lines(before, after)
    return row


def foreign_cells(row: dict) -> list[str]:
    p, ms, tokens = row["p_target"], row["train_time_ms_median"], row["tokens_per_step"]
    return [f"{row['date']} {row['name'][:32]}".strip(), row["kind"], loss_words(row["losses"]),
            "" if p is None else f"{p:.1g}", f"{row['steps']:,}", f"{tokens:,}" if tokens else "",
            decimal(ms and ms / 60_000, 3)]


# ---- Curves ----


def trained_steps(logs: list[Log]) -> list[int]:
    """Steps that all logs validated at, without the untrained model where there are others."""
    steps = set.intersection(*(set(log.val) for log in logs))
    if not steps:
        raise LedgerError(f"{logs[0].path.parent}: its logs share no step of validation; give "
                          "them one by one")
    return sorted(steps - {0}) or [0]


def time_to_losses(groups: dict[str, list[Log]], target: float) -> list[dict]:
    """When each group first validated at or below the target, and five losses on the way."""
    ends, found = [], []
    for logs in groups.values():
        for log in logs:
            steps = trained_steps([log])
            ends += [log.val[steps[0]][0], log.val[steps[-1]][0]]
    low, high = max(target, min(ends)), max(ends)
    losses = {target}
    for share in range(5):
        losses.add(round(low + (high - low) * share / 5, 1 if high - low > 1 else 2))
    for name, logs in groups.items():
        for loss in sorted(losses, reverse=True)[-6:]:
            hits = [log.reach(loss) for log in logs if log.reach(loss)]
            timed = [ms for _, ms in hits if ms is not None]
            found.append({"loss": loss, "name": name, "reached": len(hits), "n": len(logs),
                          "step": statistics.median_low(next(zip(*hits))) if hits else None,
                          "time_ms": statistics.median(timed) if timed else None})
    return found


def print_times(found: list[dict], target: float) -> None:
    heading, rows = {}, {}
    for one in found:
        heading[one["loss"]] = f"{one['loss']:g}" + " (target)" * (one["loss"] == target)
        cell = f"{one['step']}" if one["reached"] else "not reached"
        cell += "" if one["time_ms"] is None else f", {one['time_ms'] / 1000:.1f} s"
        cell += f" ({one['reached']}/{one['n']})" * (0 < one["reached"] < one["n"])
        rows.setdefault(one["name"], [one["name"]]).append(cell)
    print_table(("Loss", *heading.values()), list(rows.values()))
    print("\nStep and training time of the first validation at or below a loss: the median of the "
          "seeds\nthat reach it, whose number stands behind it where others do not.")


def series(logs: list[Log], steps: list[int], part: str) -> np.ndarray:
    """Losses and times of runs at steps: (runs, steps, 2); a time that no log has is NaN."""
    return np.array([[getattr(log, part)[step] for step in steps] for log in logs], dtype=float)


def curve_of(logs: list[Log]) -> tuple[list[int], np.ndarray]:
    """Steps, and the losses and times of the runs of one script at these.

    Runs that validate once have their training losses before that, of the next token, in pieces.
    """
    steps = trained_steps(logs)
    values = series(logs, steps, "val")
    trained = sorted(set.intersection(*(set(log.train) for log in logs)))
    size = max(1, len(trained) // 50)
    ends = trained[size - 1::size]
    if len(steps) > 1 or not ends:
        return steps, values
    pieces = series(logs, trained[:len(ends) * size], "train")
    pieces = pieces.reshape(len(logs), len(ends), size, 2)
    means = np.stack([pieces[..., 0].mean(2), pieces[..., -1, 1]], axis=2)
    return [*ends, *steps], np.concatenate([means, values], axis=1)


# ---- Pictures: nine inches are the 900 pixels of a page, drawn twice as fine ----

# Okabe and Ito's colours, told apart by all kinds of sight; line styles tell them apart in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")


def picture(panels: int, height: float):
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise LedgerError("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.rcParams.update({"font.size": 11, "axes.spines.top": False, "legend.frameon": False,
                                "axes.spines.right": False, "axes.grid": True,
                                "grid.color": "#e3e6e9"})
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)


def save(figure, png: str) -> None:
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    print(f"wrote {png}", file=sys.stderr)


def draw_ladder(records: list[Record], png: str) -> None:
    """Published and modelled minutes of each record, on a logarithmic axis."""
    figure, ((axis,),) = picture(1, 0.36 * len(records) + 1.2)
    names = []
    for y, record in enumerate(records):
        names.append(f"{record.claim['number']}  {record.name}")
        published, modelled = record.claim["published"] or {}, record.claim["modelled_minutes"]
        if minutes := published.get("minutes"):
            axis.plot(minutes, y, "o", color=COLORS[0], markersize=8, label="published")
            axis.annotate(f"{minutes:g}", (minutes, y), (9, 0), textcoords="offset points",
                          va="center")
        if modelled:
            axis.plot(modelled, y, "D", color=COLORS[1], markersize=7, label="modelled, not run")
            axis.annotate(f"{modelled:g}", (modelled, y), (-9, 0), textcoords="offset points",
                          va="center", ha="right")
    axis.set(xscale="log", xlim=(1.5, 20), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)),
             yticklabels=names, xlabel="minutes on 8×H100 (logarithmic)")
    axis.set_xticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axis.minorticks_off()
    handles, labels = axis.get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    axis.legend(unique.values(), unique.keys(), loc="lower right")
    save(figure, png)


def draw_curves(groups: dict[str, list[Log]], target: float, png: str) -> None:
    """Loss over steps, tokens and training time, each panel where a log has it."""
    panels = {"steps": [], "training tokens": [], "training time (s)": []}
    top = bottom = target
    for name, logs in groups.items():
        steps, values = curve_of(logs)
        losses, times = values[..., 0], values[..., 1].mean(0) / 1000
        tokens = [logs[0].tokens_until(step) or math.nan for step in steps]
        # A curve of training begins with the untrained model: what is above its tenth is cut.
        top = max(top, losses.mean(0)[len(steps) // 10 if len(steps) > len(logs[0].val) else 0])
        bottom = min(bottom, losses.min())
        for kind, x in zip(panels, (steps, tokens, times)):
            if np.isnan(x).any():
                print(f"{name} has no {kind}, so it is not in that panel", file=sys.stderr)
            else:
                panels[kind].append((name, x, losses))
    kinds = [kind for kind in panels if panels[kind]]
    figure, (axes,) = picture(len(kinds), 4.5)
    margin = max(top - bottom, 0.01) * 0.06
    for axis, kind in zip(axes, kinds):
        for index, name in enumerate(groups):
            for label, x, losses in panels[kind]:
                if label == name:
                    color, mean = COLORS[index % 7], losses.mean(0)
                    axis.plot(x, mean, color=color, linestyle=STYLES[index % 4], label=name)
                    axis.plot(x[-1], mean[-1], "o", color=color)
                    axis.fill_between(x, losses.min(0), losses.max(0), color=color, alpha=0.2)
        axis.axhline(target, color="#4a525a", linestyle=(0, (2, 2)))
        axis.set(xlabel=kind, ylim=(bottom - margin, top + margin))
        axis.locator_params(axis="x", nbins=4)
    axes[0].set_ylabel("loss (nats per token)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, png)


def results(contestants: list, kind: str) -> list[dict]:
    """What `run` found, as numbers: each contestant, against its parent or the first one."""
    found, runs = [], {}
    for one in contestants:
        rows = [run_row(one.label, kind, log.path, log) for log in one.logs]
        target = float(one.logs[0].header.get("target_loss", TARGET))
        parent = read_claim(one.folder / "record.json")["parent"] if one.folder else None
        other = parent if parent in runs else contestants[0].label
        versus = {"name": other, **compare(rows, runs[other])} if runs else None
        runs[one.label] = rows
        losses = losses_of(rows)
        found.append({"name": one.label, "losses": losses, "target": target, "against": versus,
                      "p_target": p_below(losses, target), "runs": rows})
    return found


def print_results(found: list[dict]) -> None:
    rows = []
    for one in found:
        versus, p = one["against"], one["p_target"]
        least = versus and versus["smallest_shown"]
        name = re.sub(r"^[\d-]{10}_", "", one["name"])
        rows.append([name[:32], loss_words(one["losses"]), "" if p is None else f"p {p:.1g}",
                     difference_words(versus), f"{least:.2g}" if least else "",
                     ratio_words(versus)])
    print_table(RESULTS, rows)
    print(RESULTS_LEGEND)
