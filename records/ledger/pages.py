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
FRONT = ("Record", "Idea", "Published (min)", "Modelled (min)", "Changed lines")
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

PANELS = ("steps", "training tokens", "training time (s)")


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
    low, *_, high = ratios = sorted(versus["time_ratios"]) * 2
    star = "*" * table.is_shown(versus)
    p = number(versus["p"], ".2g") or "unknown"
    return [f"{number(versus['difference'], '+.4f')} (p {p}){star}",
            number(versus["smallest_shown"], ".2g"),
            f"×{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})"]


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


def losses_of(runs: list[dict]) -> list[float]:
    return [float(run["val_loss"]) for run in runs]


def name_of(record: Record) -> str:
    """A record's name, after its number in the public list where it has one."""
    name = record.folder.name.partition("_")[2]
    published = record.claim["published"]
    return f"#{published['number']} {name}" if published else name


def ladder_row(record: Record) -> list[str]:
    claim = record.claim
    minutes = loss = equality = ""
    if claim["published"]:
        minutes = f"{claim['published']['minutes']:g}"
        loss = "{val_loss:.4f} ({n})".format(**claim["published"])
    if claim["equality"]:
        equality = f"{claim['equality']['largest']:.0e}"
    losses = losses_of(record.runs.get("loss", []))
    difference = versus_words(versus_parent(record, "loss"))[0]
    return [name_of(record), minutes, loss, equality, number(claim["modelled_minutes"], "g"),
            loss_words(losses), difference]


def linked_rows(records: list[Record], above: str) -> str:
    rows = []
    for record in records:
        name, *cells = ladder_row(record)
        rows.append([f"[{name}]({above}{record.folder.name})", *cells])
    return markdown(LADDER, rows)


def lines_words(record: Record) -> str:
    """How many lines of the source above the banner changed from the parent to the record."""
    if not record.parent:
        return ""
    old = own_part(read_text(record.parent.folder / "train_gpt.py"))
    new = own_part(read_text(record.folder / "train_gpt.py"))
    return "+{} −{}".format(*changed_lines(old, new))


def front_block(records: list[Record], folder: Path) -> str:
    """The generated lines of the project's README.md: what each record is, in a row."""
    rows = []
    for record in records:
        name, minutes, *_ = ladder_row(record)
        link = f"[{name}]({folder.name}/{record.folder.name})"
        modelled = number(record.claim["modelled_minutes"], "g")
        rows.append([link, record.claim["change"], minutes, modelled, lines_words(record)])
    return markdown(FRONT, rows)


def machine_words(records: list[Record]) -> str:
    words = "{device}, torch {torch}, {threads} thread(s) a run, {jobs} run(s) at once"
    found = set()
    for record in records:
        for run in record.runs.get("loss", []):
            found.add(words.format(**run))
    return "; ".join(sorted(found)) or "nothing yet"


def ladder_block(records: list[Record], folder: Path) -> str:
    """The generated lines of records/README.md: the ladder, what it ran on, the rules' numbers."""
    rules = []
    for preset, rule in table.RULES.items():
        rules.append([preset])
        for value in rule.values():
            rules[-1].append(f"`{value or 'not known here'}`")
    parts = [linked_rows(records, ""), LADDER_LEGEND.strip(),
             f"Measured on {machine_words(records)}.",
             markdown(("preset", *table.RULES["record"]), rules)]
    path = folder / table.TABLE
    if path.exists():
        parts.append(f"[{path.name}]({path.name}), sha256 {sha256(read_text(path))}.")
    return "\n\n".join(parts)


def record_block(record: Record) -> str:
    """The generated lines of a record's README.md: its row beside its parent's, and the tests."""
    parent = record.parent
    measured = f"Measured on {machine_words([record])}."
    if not parent:
        return linked_rows([record], "../") + "\n\n" + measured
    parts = [linked_rows([parent, record], "../"), measured]
    for kind, runs in record.runs.items():
        difference, least, times = versus_words(versus_parent(record, kind))
        words = f"loss {difference}, shown from {least}"
        if kind == "time":
            words = f"each alone on the machine: times {times}"
        parts.append(f"Against the parent, {len(runs)} runs, {words}.")
    parts.append(f"Source above the banner: {lines_words(record)} lines.")
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


def results(contestants: list) -> list[dict]:
    """What `run` found, as numbers: each contestant, against its parent or the first one."""
    found, runs = [], {}
    for one in contestants:
        rows = [table.run_row(one.label, "loss", log) for log in one.logs]
        other, versus = contestants[0].label, None
        if one.folder:
            parent = table.read_claim(one.folder)["parent"]
            other = parent if parent in runs else other
        if runs:
            versus = {"name": other, **table.compare(rows, runs[other])}
        target = float(one.logs[0].header["target_loss"])
        losses = losses_of(rows)
        p = table.p_below(losses, target)
        found.append({"name": one.label, "losses": losses, "target": target, "p_target": p,
                      "against": versus, "runs": rows})
        runs[one.label] = rows
    return found


def result_cells(one: dict) -> list[str]:
    name = re.sub(r"^[\d-]{10}_", "", one["name"])
    return [name[:32], loss_words(one["losses"]), number(one["p_target"], ".1g"),
            *versus_words(one["against"])]


def foreign_row(group: Group, record: Group, previous: Group | None) -> dict:
    """What a group of runs is, as numbers; its lines against the record before it."""
    log, losses, times = group.logs[0], [], []
    for one in group.logs:
        losses.append(one.val_loss)
        times.append(one.train_time_ms)
    dated = DATED.fullmatch(group.folder.name) or ["", "", group.folder.name]
    steps = log.planned_steps or log.last_step
    tokens = log.tokens_until(steps)
    added = removed = None
    if previous and log.source:
        added, removed = changed_lines(previous.logs[0].source, log.source)
    return {
        "date": dated[1],
        "name": dated[2],
        "runs": group.words(record),
        "n": len(losses),
        "ranks": group.ranks or None,
        "steps": steps,
        "tokens_per_step": tokens and round(tokens / max(1, steps)),
        "val_loss_mean": round(statistics.fmean(losses), 6),
        "val_loss_std": table.std_of(losses),
        "p_target": table.p_below(losses, TARGET),
        "train_time_ms_median": median(times),
        "lines_added": added,
        "lines_removed": removed,
        "losses": losses,
    }


def foreign_cells(row: dict) -> list[str]:
    ms = row["train_time_ms_median"]
    return [
        f"{row['date']} {row['name'][:20]}".strip(),
        row["runs"].replace("source of ", "")[:31],
        loss_words(row["losses"]),
        number(row["p_target"], ".1g"),
        f"{row['steps']:,}",
        number(row["tokens_per_step"], ","),
        number(ms and ms / 60_000, ".3f"),
    ]


def median(values: list) -> float | None:
    return None if None in values or not values else statistics.median(values)


def time_to_loss(name: str, logs: list[Log], target: float) -> dict:
    """When runs first validated at or below a loss, in the median."""
    steps, tokens, times, last = [], [], [], []
    for log in logs:
        last.append(log.val_loss)
        for step in sorted(log.val):
            loss, ms = log.val[step]
            if loss <= target:
                steps.append(step)
                tokens.append(log.tokens_until(step))
                times.append(ms)
                break
    return {
        "name": name,
        "loss": target,
        "last_losses": last,
        "n": len(logs),
        "reached": len(steps),
        "step": int(median(steps) or 0),
        "tokens": median(tokens),
        "time_ms": median(times),
    }


def time_cells(one: dict) -> list[str]:
    ms = one["time_ms"]
    return [
        one["name"],
        loss_words(one["last_losses"]),
        f"{one['reached']} of {one['n']}",
        number(one["step"] or None, ","),
        number(one["tokens"], ",.0f"),
        number(ms and ms / 1000, ".2f"),
    ]


def curve_of(log: Log) -> list[tuple]:
    """(step, loss, time) of a run's validations; of its training, in pieces, if it has but one."""
    points = []
    for step, (loss, ms) in sorted(log.val.items()):
        if step or len(log.val) == 1:
            points.append((step, loss, ms))
    if len(points) == 1:
        size, losses = max(1, len(log.train) // 50), []
        for step, (loss, ms) in sorted(log.train.items()):
            losses.append(math.nan if loss is None else loss)
            if len(losses) == size:
                points.insert(-1, (step, statistics.fmean(losses), ms))
                losses = []
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
    names = [ladder_row(record)[0] for record in records]
    for y, record in enumerate(records):
        published = (record.claim["published"] or {}).get("minutes")
        modelled = record.claim["modelled_minutes"]
        for minutes, look, shift, side in ((published, "oC0", 9, "left"),
                                           (modelled, "DC1", -9, "right")):
            if minutes:
                axis.plot(minutes, y, look, markersize=8)
                axis.annotate(f"{minutes:g}", (minutes, y), (shift, 0), ha=side, va="center",
                              textcoords="offset points")
    axis.plot([], [], "oC0", label="published")
    axis.plot([], [], "DC1", label="modelled, not run")
    axis.set(xscale="log", xlim=(1.5, 20), xlabel="minutes on 8×H100 (logarithmic)",
             ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
    axis.set_xticks([2, 3, 5, 10, 20], ["2", "3", "5", "10", "20"])
    axis.minorticks_off()
    axis.legend(loc="lower right")
    save(figure, png)


def draw_curves(groups: dict[str, list[Log]], target: float, png: str) -> None:
    """Loss of each run over steps, tokens and training time, where its log has them."""
    figure, axes = picture(len(PANELS), 4.5)
    from matplotlib.ticker import EngFormatter

    top = bottom = target
    for index, (name, logs) in enumerate(groups.items()):
        missing, label = set(), name
        for log in logs:
            steps, losses, times = zip(*curve_of(log))
            tokens = [log.tokens_until(step) or math.nan for step in steps]
            seconds = [math.nan if ms is None else ms / 1000 for ms in times]
            for axis, panel, x in zip(axes, PANELS, (steps, tokens, seconds)):
                axis.plot(x, losses, "-o", color=f"C{index}", markevery=[-1], label=label,
                          alpha=0.4 + 0.6 / len(logs))
                if math.isnan(x[-1]):
                    missing.add(panel)
            label = None
            # A curve of training begins with the untrained model: what is above its tenth is cut.
            top = max(top, losses[len(losses) // 10])
            bottom = min(bottom, *losses)
        for panel in sorted(missing):
            print(f"{name} has no {panel}, so it is not in that panel", file=sys.stderr)
    margin = max(top - bottom, 0.01) * 0.06
    for axis, panel in zip(axes, PANELS):
        axis.axhline(target, color="#4a525a", linestyle=(0, (2, 2)))
        axis.set(xlabel=panel, ylim=(bottom - margin, top + margin))
        axis.locator_params(axis="x", nbins=4)
    axes[1].xaxis.set_major_formatter(EngFormatter())
    axes[0].set_ylabel("loss (nats per token; point: validation)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    save(figure, png)
