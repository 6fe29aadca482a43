"""What is shown: tables, the generated blocks of the READMEs, the ladder and the curves."""

import math
import re
import statistics
import sys
from pathlib import Path

from ledger import table
from ledger.logs import LedgerError, Log, changed_lines, own_part, read_text, sha256, write_file
from ledger.public import DATED, TARGET, Group
from ledger.table import Record, versus_parent

BLOCK = ("<!-- ledger: begin -->", "<!-- ledger: end -->")  # around a README's generated lines
LADDER = ("Record", "Minutes", "Loss (n)", "Float64", "Modelled", "Pocket loss ± std (n)",
          "Difference")
LADDER_LEGEND = """
Minutes, Loss: of the public record's n runs on 8×H100, by its own files. Float64: the largest
difference between our script and the public one. Modelled: minutes of our script on 8×H100, where
it was not run. Pocket: all runs of `--preset pocket`, at equal tokens. Difference: of that mean
from the parent's, with the two-sided p of the paired t-test; * where p < 0.01."""
FOREIGN = ("Folder", "Runs", "Loss ± std (n)", "p", "Steps", "Tokens a step", "Minutes")
FOREIGN_LEGEND = """
p: one-sided t-test that the mean lies below 3.28. Runs: the record's, or what they are beside it; a
baseline is what has the source of the older folder that is named, or is called one."""
RESULTS = ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time")
RESULTS_LEGEND = """
Target: p of a one-sided t-test that the mean lies below target_loss. Difference: from the parent's
mean, or else the first contestant's, with the p of a two-sided t-test, paired where the seeds are
the same; * where p < 0.01. Shown from: the smallest difference that would reach that. Time: median
and range of the ratios by seed, which only runs alone on the machine (--jobs 1) measure."""
TIMES = ("Record", "Last loss ± std (n)", "Reached", "Step", "Tokens", "Seconds")
TIMES_LEGEND = """
Reached: runs with a validation at or below the loss {:g}. Step, Tokens, Seconds: of the first one,
the median of these runs."""

# ---- Cells --------------------------------------------------------------------------


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form).replace("-", "−")


def loss_words(losses: list[float]) -> str:
    """Mean, standard deviation and number."""
    if not losses:
        return ""
    spread = f" ± {table.std_of(losses):.4f}" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{spread} ({len(losses)})"


def versus_words(versus: dict | None) -> list[str]:
    """Difference with its p, the smallest that would be shown, and the ratios of times."""
    if not versus:
        return ["", "", ""]
    ratios = versus["time_ratios"] or [math.nan]
    p = "no p" if versus["p"] is None else f"p {versus['p']:.2g}"
    return [f"{number(versus['difference'], '+.4f')} ({p})" + "*" * table.is_shown(versus),
            number(versus["smallest_shown"], ".2g"),
            f"×{statistics.median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})"]


def markdown(heading: tuple, rows: list) -> str:
    lines = []
    for row in (heading, ["---"] * len(heading), *rows):
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def print_table(heading: tuple, rows: list, legend: str) -> None:
    widths = [max(map(len, column)) for column in zip(heading, *rows)]
    for row in (heading, ["-" * width for width in widths], *rows):
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    print(legend)


# ---- Records ------------------------------------------------------------------------


def losses_of(runs: list[dict]) -> list[float]:
    return [float(run["val_loss"]) for run in runs]


def ladder_row(record: Record) -> list[str]:
    claim, published = record.claim, record.claim["published"] or {}
    loss = "{val_loss:.4f} ({n})".format(**published) if published else ""
    name = f"{claim['number']} {record.folder.name.partition('_')[2]}"
    return [name, number(published.get("minutes"), "g"), loss,
            number((claim["equality"] or {}).get("largest"), ".0e"),
            number(claim["modelled_minutes"], "g"), loss_words(losses_of(record.runs.get("loss", []))),
            versus_words(versus_parent(record, "loss"))[0]]


def linked_rows(records: list[Record], above: str) -> str:
    rows = []
    for record in records:
        name, *cells = ladder_row(record)
        rows.append([f"[{name}]({above}{record.folder.name})", *cells])
    return markdown(LADDER, rows)


def machine_words(records: list[Record]) -> str:
    words = "{device}, torch {torch}, {threads} thread(s) a run, {jobs} run(s) at once"
    found = set()
    for record in records:
        found.update(words.format(**run) for run in record.runs.get("loss", []))
    return "; ".join(sorted(found)) or "nothing yet"


def ladder_block(records: list[Record], folder: Path) -> str:
    """The generated lines of records/README.md: the ladder, what it ran on, the rules' numbers."""
    rules = []
    for preset, rule in table.RULES.items():
        rules.append([f"`{preset}`", *(f"`{value or 'not known here'}`" for value in rule.values())])
    path = folder / table.TABLE
    digest = sha256(read_text(path)) if path.exists() else "none yet"
    return "\n\n".join([linked_rows(records, ""), LADDER_LEGEND.strip(),
                        f"Measured on {machine_words(records)}.",
                        markdown(("preset", *table.RULES["record"]), rules),
                        f"[{table.TABLE}]({table.TABLE}), sha256 {digest}."])


def record_block(record: Record) -> str:
    """The generated lines of a record's README.md: its row beside its parent's, and the tests."""
    parent = record.parent
    parts = [linked_rows([parent, record] if parent else [record], "../"),
             f"Measured on {machine_words([record])}."]
    for kind in record.runs if parent else ():
        difference, least, times = versus_words(versus_parent(record, kind))
        parts.append(f"Against the parent, {len(record.runs[kind])} runs made for their {kind}: "
                     f"{difference}, shown from {least}; times {times}.")
    if parent:
        old, new = [own_part(read_text(one.folder / "train_gpt.py")) for one in (parent, record)]
        parts.append("Source above the banner: +{} −{} lines.".format(*changed_lines(old, new)))
    return "\n\n".join(parts)


def split_block(path: Path) -> tuple[str, str, str]:
    """A README's text before, in and after its generated lines. Raises LedgerError without them."""
    begin, end = BLOCK
    match = re.fullmatch(rf"(.*{begin}\n)(.*?)({end}.*)", read_text(path), re.S)
    if not match:
        raise LedgerError(f"{path} has no lines {begin} and {end}; add them")
    return match.groups()


def write_block(path: Path, text: str) -> None:
    before, _, after = split_block(path)
    write_file(path, f"{before}{text}\n{after}")


# ---- Contestants of `run` -------------------------------------------------------------


def results(contestants: list) -> list[dict]:
    """What `run` found, as numbers: each contestant, against its parent or the first one."""
    found, runs = [], {}
    for one in contestants:
        rows = [table.run_row(one.label, "loss", log) for log in one.logs]
        parent = table.read_claim(one.folder)["parent"] if one.folder else None
        other = parent if parent in runs else contestants[0].label
        target, losses = float(one.logs[0].header["target_loss"]), losses_of(rows)
        versus = {"name": other, **table.compare(rows, runs[other])} if runs else None
        found.append({"name": one.label, "losses": losses, "target": target, "against": versus,
                      "p_target": table.p_below(losses, target), "runs": rows})
        runs[one.label] = rows
    return found


def result_cells(one: dict) -> list[str]:
    name = re.sub(r"^[\d-]{10}_", "", one["name"])
    return [name[:32], loss_words(one["losses"]), number(one["p_target"], ".1g"),
            *versus_words(one["against"])]


# ---- Other people's logs ----------------------------------------------------------------


def foreign_row(group: Group, record: Group, previous: Group | None) -> dict:
    """What a group of runs is, as numbers; its lines against the record before it."""
    log, losses = group.logs[0], [log.val_loss for log in group.logs]
    dated = DATED.fullmatch(group.folder.name) or ["", "", group.folder.name]
    steps = log.planned_steps or log.last_step
    tokens = log.tokens_until(steps)
    row = {"date": dated[1], "name": dated[2], "runs": group.words(record), "n": len(losses),
           "ranks": group.ranks or None, "steps": steps, "losses": losses,
           "tokens_per_step": tokens and round(tokens / max(1, steps)),
           "val_loss_mean": round(statistics.fmean(losses), 6),
           "val_loss_std": table.std_of(losses), "p_target": table.p_below(losses, TARGET),
           "train_time_ms_median": median([log.train_time_ms for log in group.logs]),
           "lines_added": None, "lines_removed": None}
    if previous and log.source:
        added, removed = changed_lines(previous.logs[0].source, log.source)
        row |= {"lines_added": added, "lines_removed": removed}
    return row


def foreign_cells(row: dict) -> list[str]:
    ms = row["train_time_ms_median"]
    return [f"{row['date']} {row['name'][:20]}".strip(), row["runs"].replace("source of ", "")[:31],
            loss_words(row["losses"]), number(row["p_target"], ".1g"), f"{row['steps']:,}",
            number(row["tokens_per_step"], ","), number(ms and ms / 60_000, ".3f")]


# ---- Curves and pictures: nine inches are the 900 pixels of a page, drawn twice as fine ----


def median(values: list) -> float | None:
    return None if None in values or not values else statistics.median(values)


def time_to_loss(name: str, logs: list[Log], target: float) -> dict:
    """When runs first validated at or below a loss, in the median."""
    hits, tokens = [], []
    for log in logs:
        for step in [step for step in sorted(log.val) if log.val[step][0] <= target][:1]:
            hits.append((step, log.val[step][1]))
            tokens.append(log.tokens_until(step))
    return {"name": name, "loss": target, "last_losses": [log.val_loss for log in logs],
            "n": len(logs), "reached": len(hits), "step": int(median([step for step, _ in hits]) or 0),
            "tokens": median(tokens), "time_ms": median([ms for _, ms in hits])}


def time_cells(one: dict) -> list[str]:
    ms = one["time_ms"]
    return [one["name"], loss_words(one["last_losses"]), f"{one['reached']} of {one['n']}",
            number(one["step"], ","), number(one["tokens"], ",.0f"),
            number(ms and ms / 1000, ".2f")]


def curve_of(log: Log) -> list[tuple]:
    """(step, loss, time) of a run's validations; of its training, in pieces, if it has but one."""
    points = [(step, *log.val[step]) for step in sorted(log.val) if step or len(log.val) == 1]
    steps = sorted(log.train) if len(points) == 1 else []
    size = max(1, len(steps) // 50)
    for end in range(size, len(steps) + 1, size):
        losses = [log.train[step][0] or math.nan for step in steps[end - size:end]]
        last = steps[end - 1]
        points.insert(-1, (last, statistics.fmean(losses), log.train[last][1]))
    return points


def picture(panels: int, height: float):
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError:
        raise LedgerError("pictures need matplotlib: pip install -r requirements-dev.txt") from None
    matplotlib.style.use(["tableau-colorblind10", {
        "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e3e6e9", "legend.frameon": False}])
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(1, panels, sharey=True, squeeze=False)[0]


def save(figure, png: str) -> None:
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    print(f"wrote {png}", file=sys.stderr)


def draw_ladder(records: list[Record], png: str) -> None:
    """Published and modelled minutes of each record, on a logarithmic axis."""
    figure, (axis,) = picture(1, 0.36 * len(records) + 1.2)
    names, published, modelled = [], [], []
    for record in records:
        names.append(ladder_row(record)[0])
        published.append((record.claim["published"] or {}).get("minutes", math.nan))
        modelled.append(record.claim["modelled_minutes"] or math.nan)
    for values, marker, side, label in ((published, "o", "left", "published"),
                                        (modelled, "D", "right", "modelled, not run")):
        axis.plot(values, range(len(names)), marker, markersize=8, label=label)
        for y, value in enumerate(values):
            shift = 9 if side == "left" else -9
            if value > 0:
                axis.annotate(f"{value:g}", (value, y), (shift, 0), ha=side, va="center",
                              textcoords="offset points")
    axis.set(xscale="log", xlim=(1.5, 20), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)),
             yticklabels=names, xlabel="minutes on 8×H100 (logarithmic)")
    axis.set_xticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axis.minorticks_off()
    axis.legend(loc="lower right")
    save(figure, png)


def draw_curves(groups: dict[str, list[Log]], target: float, png: str) -> None:
    """Loss of each run over steps, tokens and training time, where its log has them."""
    kinds = ("steps", "training tokens", "training time (s)")
    figure, axes = picture(len(kinds), 4.5)
    tops, lows = [target], [target]
    for index, (name, logs) in enumerate(groups.items()):
        missing = set()
        for log in logs:
            steps, losses, times = zip(*curve_of(log))
            tokens = [log.tokens_until(step) or math.nan for step in steps]
            seconds = [math.nan if ms is None else ms / 1000 for ms in times]
            # A curve of training begins with the untrained model: what is above its tenth is cut.
            tops.append(losses[len(losses) // 10])
            lows.append(min(losses))
            for axis, kind, x in zip(axes, kinds, (steps, tokens, seconds)):
                label = name if log is logs[0] else None
                axis.plot(x, losses, "-o", color=f"C{index}", markevery=[-1], label=label,
                          alpha=0.4 + 0.6 / len(logs))
                if math.isnan(x[-1]):
                    missing.add(kind)
        for kind in sorted(missing):
            print(f"{name} has no {kind}, so it is not in that panel", file=sys.stderr)
    margin = max(max(tops) - min(lows), 0.01) * 0.06
    for axis, kind in zip(axes, kinds):
        axis.axhline(target, color="#4a525a", linestyle=(0, (2, 2)))
        axis.set(xlabel=kind, ylim=(min(lows) - margin, max(tops) + margin))
        axis.locator_params(axis="x", nbins=4)
    axes[0].set_ylabel("loss (nats per token; point: validation)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, png)
