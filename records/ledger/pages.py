"""What is shown: tables on the terminal, the generated lines of the READMEs, the ladder."""

import re
import statistics
import sys
import textwrap
from pathlib import Path

from ledger.logs import LedgerError, Log, machine_words, read_text
from ledger.records import RULES, Record, compare, is_retuned, p_below
from ledger.scripts import diff_sources

WIDTH = 100  # columns of a terminal
# The newest public record and its minutes, by the table of github.com/KellerJordan/modded-nanogpt
# as it stood on 2026-10-03.
NEWEST, NEWEST_MONTH, NEWEST_MINUTES = 92, "September 2026", 0.665
GREY = "#8a9299"

LADDER = ("Record", "Public record (min), not run here", "Its loss (n)", "Float64")
LADDER_LEGEND = """\
Minutes and losses are those of the public record's n runs on 8×H100 (#91's loss: on one H100), by
its own files. Float64: the largest difference of our script from the public one."""
RUNS = ("Record", "Loss ± std (n)", "Target", "Minutes", "Difference", "Time")
RUNS_LEGEND = """\
Loss: all runs of a setting. Target: p that the mean lies below the rules' target. Difference: from
the parent's mean in the same setting, with the two-sided p of the paired t-test; * where p < 0.01;
"equal" where each seed's loss is the parent's to the digit. †: the record also changes this
preset's rates or its validation, so the difference is not the idea's alone. Minutes (median), Time
(its ratio to the parent's; the smallest and largest ratio by seed): of whole runs alone on their
machine."""
FRONT = ("Record", "Idea", "Public record (min), not run here", "Changed lines")
CONTEST = ("Contestant", "Loss ± std (n)", "Target", "Difference", "Shown from", "Time")
CONTEST_LEGEND = """\
Target: p of a one-sided t-test that the mean lies below target_loss. Difference: from the parent's
mean, or else the first contestant's, with the p of a two-sided t-test, paired by seed; * where
p < 0.01. Shown from: the smallest difference that would reach that. Time: ratio of the medians,
and range of the ratios by seed, which only runs alone on the machine (--jobs 1) measure."""
FOREIGN = ("Log", "Source", "Steps", "Loss", "Minutes")  # Source: of its sha256


# ---- Cells ----
def signed(number: float) -> str:
    return f"{number:+.4f}".replace("-", "−")


def loss_cell(losses: list) -> str:
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.4f}{spread} ({len(losses)})"


def p_cell(p: float | None) -> str:
    return "" if p is None else f"{p:.1g}".replace("-", "−")


def minutes_cell(times: list) -> str:
    times = [ms for ms in times if ms]
    return f"{statistics.median(times) / 60_000:.3f}" if times else ""


def difference_cell(against: dict | None, mark: str = "") -> str:
    """From the parent's mean; without a p where there is but one pair."""
    if not against:
        return ""
    if against["equal"]:
        return "equal"
    words = signed(against["difference"])
    if against["p"] is not None:
        words += f" (p {against['p']:.2g})".replace("-", "−")
    return words + "*" * against["shown"] + mark


def time_cell(against: dict | None) -> str:
    if not against or not against["timed"]:
        return ""
    return "×{time:.3f} ({fastest:.3f}–{slowest:.3f})".format(**against)


# ---- Rows ----
def ladder_row(record: Record):
    """What is published of a record, and how far ours is from it."""
    published, equality = record.published, record.claim.get("equality")
    loss = ""
    if published.get("val_loss"):
        loss = "{val_loss:.4f} ({n})".format(**published)
    return [record.name, f"{published['minutes']:g}" if published else "", loss,
            f"{equality['largest']:.0e}" if equality else ""]


def runs_row(record: Record, logs: list, others: list):
    """What logs of one setting give, against the parent's there."""
    losses = [log.val_loss for log in logs]
    target = float(RULES[logs[0].preset]["target_loss"])
    mark = "†" if others and is_retuned(record, logs[0].preset) else ""
    against = compare(logs, others)
    return [record.name, loss_cell(losses), p_cell(p_below(losses, target)),
            minutes_cell([log.measured_ms for log in logs]),
            difference_cell(against, mark), time_cell(against)]


def front_row(record: Record):
    """A record on the front page, with the number of lines that were changed."""
    lines = ""
    if record.parent:
        lines = "+{added} −{removed}".format(**diff_sources(record.parent.script, record.script))
    minutes = f"{record.published['minutes']:g}" if record.published else "not public"
    return [record.name, record.claim["change"], minutes, lines]


def contest_row(found: dict):
    """A contestant of `run`."""
    against = found["against"]
    shown_from = against and against["smallest_shown"]
    label = re.sub(r"^[\d-]{10}_", "", found["name"])
    return [label, loss_cell(found["losses"]), p_cell(found["p_target"]), difference_cell(against),
            f"{shown_from:.2g}" if shown_from else "", time_cell(against)]


def foreign_row(log: Log, folder: Path):
    """Another people's log."""
    steps = f"{log.last_step:,}"
    if not log.finished:
        steps += f" of {log.planned_steps:,}"
    name = log.path.relative_to(folder).as_posix()
    return [name, (log.source_sha256 or "")[:6], steps, f"{log.val_loss:.4f}",
            minutes_cell([log.train_time_ms])]


# ---- Tables ----
def text_table(heading: tuple, rows: list) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(heading, *rows)]
    lines = []
    for row in (heading, ["-" * width for width in widths], *rows):
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    return "\n".join(lines)


def markdown(heading: tuple, rows: list) -> str:
    lines = []
    for row in (heading, ["---"] * len(heading), *rows):
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def linked(row: list, record: Record, above: str):
    """A row whose name leads to its record; `above` is the way to the records' folders."""
    return [f"[{row[0]}]({above}{record.folder.name})", *row[1:]]


def settings(records: list):
    """Setting: (record, its logs, its parent's) of each record that was run in it."""
    found = {}
    for record in records:
        for logs, others in record.measured():
            found.setdefault(logs[0].setting, []).append((record, logs, others))
    return found


def shown_settings(records: list):
    """(settings that the table of all records shows, how many it leaves to the records' pages).

    All of the record's preset, then those in which a third of the records was run.
    """
    found = settings(records)
    shown = [setting for setting, rows in found.items()
             if setting[0] == "record" or 3 * len(rows) >= len(records)]
    shown.sort(key=lambda setting: (setting[0] != "record", -len(found[setting])))
    return {setting: found[setting] for setting in shown}, len(found) - len(shown)


def ladder_text(chosen: list) -> str:
    """Claims, then the runs of each setting, for a terminal."""
    parts = [text_table(LADDER, map(ladder_row, chosen)), LADDER_LEGEND]
    shown, left = (settings(chosen), 0) if len(chosen) == 1 else shown_settings(chosen)
    for setting, rows in shown.items():
        parts.append(textwrap.fill(machine_words(setting) + ":", WIDTH))
        parts.append(text_table(RUNS, [runs_row(*row) for row in rows]))
    if left:
        parts.append(f"Runs in {left} more setting(s) stand on the records' pages.")
    return "\n\n".join([*parts, RUNS_LEGEND])


# ---- Pages ----
def blocks(folder: Path, records: list):
    """README: the generated lines of each of its blocks, by the block's name."""
    found = {folder / "README.md": {"": records_block(records)}}
    if (folder.parent / "README.md").exists():
        rows = [linked(front_row(one), one, f"{folder.name}/") for one in records]
        front = {"": markdown(FRONT, rows), "gpus": gpus_block(records)}
        found[folder.parent / "README.md"] = front
    for record in records:
        found[record.folder / "README.md"] = {"": record_block(record)}
    return found


def records_block(records: list) -> str:
    """All claims, the runs of the settings that count most, and the rules."""
    parts = [markdown(LADDER, [linked(ladder_row(one), one, "") for one in records]), LADDER_LEGEND]
    shown, left = shown_settings(records)
    for setting, rows in shown.items():
        cells = [linked(runs_row(*row), row[0], "") for row in rows]
        parts += [machine_words(setting) + ":", markdown(RUNS, cells)]
    if left:
        parts.append(f"Runs in {left} more setting(s) stand on the records' pages.")
    rules = []
    for preset, rule in RULES.items():
        rules.append([preset, *(f"`{value or 'not known here'}`" for value in rule.values())])
    return "\n\n".join([*parts, RUNS_LEGEND, markdown(("preset", *RULES["record"]), rules)])


def record_block(record: Record) -> str:
    """A record beside its parent: claims, and the runs of each of its settings."""
    both = [one for one in (record.parent, record) if one]
    parts = [markdown(LADDER, [linked(ladder_row(one), one, "../") for one in both])]
    if not any(log.on_gpu for log in record.logs):
        parts.append("No GPU has run this record yet.")
    for logs, others in record.measured():
        rows = []
        if others:
            rows.append(linked(runs_row(record.parent, others, []), record.parent, "../"))
        rows.append(linked(runs_row(record, logs, others), record, "../"))
        parts += [machine_words(logs[0].setting) + ":", markdown(RUNS, rows)]
    parts.append("[What the columns and marks mean](../README.md).")
    return "\n\n".join(parts)


def gpus_block(records: list) -> str:
    """What GPUs have run, or that none has."""
    logs = [log for record in records for log in record.logs if log.on_gpu]
    if not logs:
        return "**No GPU has run it yet.**"
    names = [record.name for record in records if any(log.on_gpu for log in record.logs)]
    devices = sorted({log.header["device"] for log in logs})
    return textwrap.fill(f"**On GPUs** there are {len(logs)} runs here: of {', '.join(names)}, on "
                         f"{', '.join(devices)}.", 110, break_on_hyphens=False)


def filled(path: Path, text: str, parts: dict) -> str:
    """A README's text with its blocks filled. Raises LedgerError where it lacks one."""
    for name, part in parts.items():
        begin, end = f"<!-- ledger: begin{' ' * bool(name)}{name} -->\n", "<!-- ledger: end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise LedgerError(f"{path} has no lines {begin.strip()} and {end}; add them")
        text = f"{before}{begin}{part}\n{end}{rest.partition(end)[2]}"
    return text


def write_pages(folder: Path, records: list):
    """Make the READMEs' generated lines and the ladder's picture anew. Raises LedgerError."""
    texts = {}
    for path, parts in blocks(folder, records).items():  # all are made before one is written
        texts[path] = filled(path, read_text(path), parts)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="")
    save(ladder_figure(records), str(folder / "ladder.png"))


# ---- Pictures ----
def picture(height: float, width: float):
    import matplotlib.style
    from matplotlib.figure import Figure

    matplotlib.style.use(["tableau-colorblind10", {
        "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.color": "#e3e6e9", "legend.frameon": False}])
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def save(figure, png: str):
    figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    print(f"wrote {png}", file=sys.stderr)


def ladder_figure(records: list, width: float = 9):
    """Published minutes of each record, and of the newest public one in grey."""
    rows, numbers = [], set()
    for record in records:
        if record.published:
            rows.append((record.name, record.published["minutes"], "C0"))
            numbers.add(record.published["number"])
    if NEWEST not in numbers:
        rows.append((f"#{NEWEST} ({NEWEST_MONTH})", NEWEST_MINUTES, GREY))
    figure, axis = picture(0.36 * len(rows) + 1.1, width)
    for y, (_, minutes, color) in enumerate(rows):
        axis.plot(minutes, y, "o", color=color, markersize=8)
        axis.text(minutes * 1.06, y, f"{minutes:g}", va="center")
    fastest = min(minutes for _, minutes, _ in rows)
    axis.set(xscale="log", xlabel="published minutes on 8×H100 (logarithmic)")
    axis.set(xlim=(0.9 * fastest, 22), ylim=(len(rows) - 0.5, -0.5))
    axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axis.set_xticks([tick for tick in (0.7, 1, 1.5, 2, 3, 5, 10, 20) if tick > 0.9 * fastest])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    return figure


def curve_of(log: Log):
    """(steps, losses): of a run's validations; of its training in 50 pieces, if it has but one."""
    points = [(step, loss) for step, (loss, _) in sorted(log.val.items()) if step]
    train = [(step, loss) for step, (loss, _) in sorted(log.train.items()) if loss is not None]
    if len(points) < 2 and train:
        size = max(1, len(train) // 50)
        pieces = [train[i : i + size] for i in range(0, len(train) - size + 1, size)]
        means = [(piece[-1][0], statistics.fmean(loss for _, loss in piece)) for piece in pieces]
        points = means + points
    return tuple(zip(*points))
