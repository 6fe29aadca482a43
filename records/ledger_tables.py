"""Tables and generated text: what the ledger prints, and what it writes into the READMEs."""

import json
import re
from pathlib import Path

from ledger_base import LedgerError, read_text
from ledger_records import Record, find_records, timed
from ledger_rules import PUBLIC_TARGET, RULES
from ledger_stats import is_shown, is_significant

REGION = ("<!-- ledger:begin -->", "<!-- ledger:end -->")  # around the generated text of a README
RULES_REGION = ("<!-- rules:begin -->", "<!-- rules:end -->")  # around the rules' table
COLUMNS = ("#", "Date", "Record", "Change", "Published", "Modelled", "{preset} loss ± std (n)",
           "Steps", "Tokens", "Time", "Tokens against parent", "Time against parent", "Lines")
FOREIGN_COLUMNS = ("Date", "Record", "Runs", "Loss ± std (n)", f"p (mean < {PUBLIC_TARGET:g})",
                   "Steps", "Tokens per step", "Ranks", "Training time", "Lines")


def decimal(value: float | None, digits: int = 4, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.{digits}f}".replace("-", "−")


def p_words(p: float | None) -> str:
    return "no p" if p is None else f"p = {p:.2g}"


def duration(ms: float | None) -> str:
    return "–" if ms is None else f"{ms / 1000:.2f} s" if ms < 600_000 else f"{ms / 60_000:.2f} min"


def minutes_words(minutes: float | None) -> str:
    return "–" if minutes is None else f"{minutes:g} min"


def lines_words(lines: dict | None) -> str:
    return f"+{lines['added']} −{lines['removed']}" if lines else "–"


def parent_words(parent: dict | None) -> str:
    """The difference from the parent: the number, its p-value, and no more than they say."""
    if parent is None:
        return "–"
    p, difference = parent["p_differs"], parent["difference"]
    better = "better" if difference < 0 else "worse"
    verdict = better if is_shown(parent) else "no difference shown"
    return f"{decimal(difference, sign='+')}, {p_words(p)}: {verdict}"


def test_words(versus: dict) -> str:
    """The test behind a p-value, and what so many seeds can show."""
    r, least = versus["correlation"], versus["smallest_shown"]
    seeds = "" if r is None else f", correlation of the seeds' losses {decimal(r, 2)}"
    shown = "" if least is None else f"; these seeds would show a difference of {least:.2g}"
    return versus["test"] + seeds + shown


def ratio_words(parent: dict) -> str:
    ratios = (decimal(parent[f"time_ratio_{name}"], 3) for name in ("median", "min", "max"))
    return "×{} in the median, {} to {}".format(*ratios)


def target_words(measured: dict) -> str:
    """Median time to the target, over how many of the seeds."""
    reached, n = measured["reached_target"], measured["n"]
    share = f" ({reached} of {n} seeds)" if reached < n else ""
    return duration(measured["target_time_ms_median"]) + share if reached else "not reached"


def missed_words(measured: dict) -> str:
    """What stands beside a loss that is not shown to lie below the target."""
    p = measured["p_target"]
    return "" if is_significant(p) else f", {p_words(p)}"


def runs_words(measured: dict) -> str:
    """How many runs at a time there were, on how many threads."""
    threads = f"{measured['threads']} thread" + "s" * (measured["threads"] != "1")
    jobs = f"{measured['jobs']} runs at once, each on " if measured["jobs"] > 1 else ""
    return jobs + threads


def machine_words(measured: dict) -> str:
    """What a measurement ran on."""
    ranks = f"{measured['world_size']} ranks, " if measured["world_size"] != "1" else ""
    runs = runs_words(measured)
    if measured["times"]:
        runs = f"losses of {runs}, times of one run alone on {runs_words(measured['times'])}"
    return f"{measured['device']}, {ranks}{runs}, torch {measured['torch']}"


def machines(records: list[Record]) -> list[str]:
    """The different machines that records were measured on."""
    return sorted({machine_words(record.measured) for record in records if record.measured})


def columns(records: list[Record]) -> tuple[str, ...]:
    """The table's heading; with the machine where rows differ in it."""
    presets = {record.measured["preset"] for record in records if record.measured}
    preset = presets.pop().capitalize() if len(presets) == 1 else "Measured"
    heading = tuple(column.format(preset=preset) for column in COLUMNS)
    return heading + ("Machine",) * (len(machines(records)) > 1)


def record_row(record: Record, with_machine: bool = False) -> list[str]:
    """One row of the table, as `columns`."""
    claim, measured, published = record.claim, record.measured, record.claim["published"] or {}
    modelled, cells = claim["modelled"] or {}, ["–"] * 7
    if measured:
        parent, times = measured["parent"] or {}, timed(measured)
        tokens = parent and f"×{measured['tokens'] / parent['runs'][0]['tokens']:.3f}"
        ratio = (times["parent"] or {}).get("time_ratio_median")
        cells = [f"{decimal(measured['val_loss_mean'])} ± {decimal(measured['val_loss_std'])} "
                 f"({measured['n']}){missed_words(measured)}", f"{measured['steps']:,}",
                 f"{measured['tokens']:,}",
                 duration(times["train_time_ms_median"]), tokens or "–",
                 f"×{ratio:.3f}" if ratio else "–", lines_words(measured["lines"])]
    if with_machine:
        cells.append(machine_words(measured) if measured else "–")
    return [str(claim["number"] or "–"), record.date, record.name, claim["change"] or "–",
            *(minutes_words(told.get("minutes")) for told in (published, modelled)), *cells]


def record_rows(records: list[Record]) -> list[list[str]]:
    return [record_row(record, len(machines(records)) > 1) for record in records]


def without_runs(measured: dict | None) -> dict | None:
    """A measured block, or one inside it, without the single runs."""
    return measured and {name: without_runs(value) if name in ("parent", "times") else value
                         for name, value in measured.items() if name != "runs"}


def record_numbers(record: Record) -> dict:
    """A row as numbers, for `list --json`."""
    return {"date": record.date, "name": record.name, **record.claim,
            "measured": without_runs(record.measured)}


def foreign_cells(row: dict) -> list[str]:
    """A row of `foreign_rows`, as FOREIGN_COLUMNS."""
    tokens, lines = row["tokens_per_step"], row["lines_added"] is not None
    return [row["date"], row["name"], row["runs"],
            f"{decimal(row['val_loss_mean'])} ± {decimal(row['val_loss_std'])} ({row['n']})",
            "–" if row["p_target"] is None else f"{row['p_target']:.2g}", f"{row['steps']:,}",
            f"{tokens:,}" if tokens else "–", str(row["ranks"] or "–"),
            duration(row["train_time_ms_median"]),
            lines_words({"added": row["lines_added"], "removed": row["lines_removed"]} if lines
                        else None)]


def markdown(header: tuple, rows: list) -> str:
    cells = [[c.replace("|", r"\|") for c in row] for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def print_table(header: tuple, rows: list) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def print_json(value) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def shown_records(folder: Path) -> list[Record]:
    """`find_records`, all of them fit to be shown. Raises LedgerError where one is not."""
    records = find_records(folder)
    for record in records:
        try:
            record_row(record), record_region(record), machines([record])
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"{record.folder / 'record.json'} cannot be shown: {error!r}; "
                              "`list --write` makes it from the logs, and `verify` says what is "
                              "wrong in it") from None
    return records


def rules_region() -> str:
    """The generated table of the rules' numbers."""
    rows = [(f"`{preset}`", f"{rule.target_loss:g}", f"`{rule.val_files}`", f"{rule.val_tokens:,}",
             str(rule.seeds_newest), str(rule.seeds)) for preset, rule in RULES.items()]
    return markdown(("Preset", "Target loss", "Validation set", "Its tokens",
                     "Seeds of the newest record", "Seeds of an older one"), rows)


def table_region(records: list[Record]) -> str:
    """The generated part of records/README.md."""
    if not records:
        return "No records yet."
    rows = [(*row[:2], f"[{row[2]}]({record.folder.name})", *row[3:])
            for record, row in zip(records, record_rows(records))]
    found = machines(records)
    note = f"\n\nMeasured on {found[0]}." if len(found) == 1 else ""
    return markdown(columns(records), rows) + note


def record_region(record: Record) -> str:
    """The generated part of a record's README.md: what was published, measured, and with what."""
    m, published, claim = record.measured, record.claim["published"], record.claim
    if m is None:
        return "Not measured yet."
    times = m["times"]
    rows = [(str(run["seed"]), f"{run['val_loss']:.6f}", duration(run["train_time_ms"]),
             "–" if run["target_step"] is None
             else f"{duration(run['target_time_ms'])}, step {run['target_step']}")
            for run in m["runs"]]
    parts = [
        f"Measured with `--preset {m['preset']}`: {m['steps']:,} steps, {m['tokens']:,} tokens, "
        f"{m['parameters']:,} parameters; torch {m['torch']}, world size {m['world_size']}, "
        f"{runs_words(m)}, {m['device']}; peak memory {m['peak_memory_mib']:,} MiB.",
        markdown(("Seed", "Validation loss", "Training time", f"To {m['target']:g}"), rows),
        f"Mean {decimal(m['val_loss_mean'])}, standard deviation {decimal(m['val_loss_std'])}, "
        f"n = {m['n']}; that the mean lies below {m['target']:g}: {p_words(m['p_target'])}. "
        f"Time to the target: {target_words(m)}.",
    ]
    if published:
        parts.insert(0, f"Published as #{published['number']}: {published['minutes']:g} minutes, "
                        f"validation loss {published['val_loss']} on {published['hardware']} "
                        f"({published['source']}).")
    if modelled := claim["modelled"]:
        parts.insert(0 if not published else 1, f"Modelled, not measured, on 8×H100: "
                     f"{modelled['minutes']:g} minutes ({modelled['source']}).")
    if parent := m["parent"]:
        parts.append(
            f"Against {claim['parent']}{'' if times else ', run in turns'} "
            f"(mean {decimal(parent['val_loss_mean'])}, "
            f"standard deviation {decimal(parent['val_loss_std'])}, n = {parent['n']}): "
            f"{parent_words(parent)} ({test_words(parent)})."
            + (f" Time {ratio_words(parent)}." if not times else ""))
    parts += times_parts(times, claim["parent"]) if times else []
    if m["lines"]:
        parts.append(f"Source: {lines_words(m['lines'])} lines against {claim['parent']}.")
    return "\n\n".join(parts)


def times_parts(times: dict, parent: str | None) -> list[str]:
    """What a record's README tells of the runs that were made for their times."""
    others = {run["seed"]: run for run in times["parent"]["runs"]} if times["parent"] else {}
    beside = f", in turns with {parent}" if others else ""
    heading, rows = ["Seed", "Validation loss", "Training time"], []
    for run in times["runs"]:
        rows.append([str(run["seed"]), f"{run['val_loss']:.6f}", duration(run["train_time_ms"])])
        if other := others.get(run["seed"]):
            ms = other["train_time_ms"]
            rows[-1] += [duration(ms), f"×{run['train_time_ms'] / ms:.3f}"]
    heading += ["Its parent's", "Ratio"] if others else []
    ratio = f" Time {ratio_words(times['parent'])}." if others else ""
    return [
        f"Times, of one run alone on {runs_words(times)}{beside}, torch {times['torch']}, "
        f"{times['device']}:",
        markdown(tuple(heading), rows),
        f"Median {duration(times['train_time_ms_median'])}, n = {times['n']}.{ratio}",
    ]


def split_region(path: Path, region: tuple = REGION) -> tuple[str, str, str]:
    """A README's text before, in and after its generated part. Raises LedgerError without one."""
    match = re.fullmatch(rf"(.*{region[0]}\n)(.*?)(\n{region[1]}.*)", read_text(path), re.S)
    if not match:
        raise LedgerError(f"{path} has no lines {region[0]} and {region[1]}; add them")
    return match.groups()


