#!/usr/bin/env python3
"""The ledger: list, diff, compare, measure and verify the records, and read anyone's logs.

    python records/ledger.py list [FOLDER] [--write]                the table of records
    python records/ledger.py diff A B [--stat] [--html OUT]         sources, section by section
    python records/ledger.py curves A B ... [--png OUT]             loss over steps, tokens, time
    python records/ledger.py run A B ... --preset pocket --seeds 10     measure, in turns
    python records/ledger.py run S.py S.py:muon_lr=0.1 --seeds 5    try a change, in turns
    python records/ledger.py ablate [NAME ...] --seeds 5 --jobs 2   take one thing out at a time
    python records/ledger.py verify [FOLDER] [--replay N]           hold every claim to its logs
    python records/ledger.py extract LOG [--file NAME]              the source inside a log
    python records/ledger.py lineage [--png OUT]                    the ladder in one picture

A and B are record folders, scripts or logs: this project's or those of the public lineage, from
the first `s:0 tel:` logs to today's. P-values need scipy and pictures matplotlib, both in
requirements-dev.txt; the rest needs the standard library only. Exit status: 1 where a claim or a
run fails, 2 where the input cannot be used. README.md beside it has the rules and the schema.
"""

import argparse
import math
import signal
import statistics
import sys
import time
from pathlib import Path

from ledger_ablations import ablation_findings, contestants, keep, page, read_results, tables_of
from ledger_base import LedgerError, write_file
from ledger_groups import foreign_rows, logs_of, record_name, source_of
from ledger_logs import read_log
from ledger_pictures import common_losses, draw_ablations, draw_curves, draw_lineage
from ledger_records import find_records, read_record, run_facts
from ledger_runs import (
    Contestant,
    Turns,
    contestants_of,
    replay,
    write_measured,
    write_measurements,
)
from ledger_sources import banners, diff_html, diff_sources, sections, split_files
from ledger_stats import compare, p_below, scipy_stats, smallest_difference, summarize
from ledger_tables import (
    FOREIGN_COLUMNS,
    REGION,
    RULES_REGION,
    columns,
    decimal,
    duration,
    foreign_cells,
    lines_words,
    p_words,
    parent_words,
    print_json,
    print_table,
    ratio_words,
    record_numbers,
    record_region,
    record_rows,
    rules_region,
    shown_records,
    split_region,
    table_region,
    test_words,
)
from ledger_verify import verify

__all__ = ["banners", "diff_sources", "main", "sections"]  # what other tools may import
RECORDS = Path(__file__).resolve().parent


def say(text: str) -> None:
    """A line for the reader, beside what a program reads from standard output."""
    print(text, file=sys.stderr)


def write_region(readme: Path, text: str, region: tuple = REGION) -> None:
    before, _, after = split_region(readme, region)
    write_file(readme, before + text + after)


def write_generated(folder: Path) -> None:
    """Make all that is generated from the logs anew: record.json's measured block, the READMEs."""
    for record in find_records(folder):
        if record.measured and write_measured(record):
            say(f"{record.folder.name}: wrote record.json from its logs")
    records = shown_records(folder)
    for record in records:
        write_region(record.folder / "README.md", record_region(record))
    if not (folder / "record.json").exists():
        write_region(folder / "README.md", table_region(records))
        write_region(folder / "README.md", rules_region(), RULES_REGION)


def list_verb(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if args.write:
        write_generated(folder)
    records = shown_records(folder)
    foreign = [] if records else foreign_rows(folder)
    if args.json:
        print_json(list(map(record_numbers, records)) or foreign)
    elif records:
        print_table(columns(records), record_rows(records))
    elif foreign:
        print_table(FOREIGN_COLUMNS, list(map(foreign_cells, foreign)))
    else:
        print(f"no records in {folder}")
    return 0


def diff_verb(args: argparse.Namespace) -> int:
    diff = diff_sources(source_of(args.a), source_of(args.b))
    if args.html:
        write_file(Path(args.html), diff_html(diff, args.a, args.b))
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        print_json({"a": args.a, "b": args.b, **diff})
        return 0
    print(f"{args.a} → {args.b}: {lines_words(diff)} lines in {len(diff['sections'])} of "
          f"{diff['sections_in_all']} sections")
    for note in diff["notes"]:
        print(note)
    fields = [f"{h['name']}: {h['a'] or '(none)'} → {h['b'] or '(none)'}"
              for h in diff["hyperparameters"]]
    for kind, names in {"hyperparameters": fields, **diff["definitions"]}.items():
        if names:
            print(f"\n{kind}\n  " + "\n  ".join(names))
    if diff["sections"]:
        print()
        print_table(("section", "added", "removed"), [
            (s["title"], f"+{s['added']}", f"−{s['removed']}") for s in diff["sections"]])
    if not args.stat and not args.html:
        for section in diff["sections"]:
            print(f"\n--- {section['title']} ---", *section["lines"], sep="\n")
    return 0


def curve_names(operands: list[str]) -> list[str]:
    """What the curves are called: the records' names, with more where two are equal."""
    paths = [Path(operand).resolve() for operand in operands]
    names = [record_name(path) for path in paths]
    return [name if names.count(name) == 1 else operand if path.is_dir() else f"{name} {path.stem}"
            for name, operand, path in zip(names, operands, paths)]


def time_to_losses(groups: dict[str, list], target: float) -> tuple[list[dict], list[tuple]]:
    """When each group first validated at or below each loss: as numbers, and as a table's rows."""
    found, rows = [], []
    logs = [log for group in groups.values() for log in group]
    for loss in common_losses(logs, target):
        cells = []
        for name, group in groups.items():
            hits = [hit for log in group if (hit := log.reach(loss))]
            timed = [ms for _, ms in hits if ms is not None]
            step = statistics.median_low(step for step, _ in hits) if hits else None
            ms = statistics.median(timed) if timed else None
            found.append({"loss": loss, "name": name, "step": step, "time_ms": ms,
                          "reached": len(hits), "n": len(group)})
            share = f" ({len(hits)} of {len(group)})" if len(hits) < len(group) else ""
            cells.append(f"{duration(ms)}, step {step}{share}" if hits else "not reached")
        rows.append((f"{loss:g}" + " (target)" * (loss == target), *cells))
    return found, rows


def curves_verb(args: argparse.Namespace) -> int:
    groups = {}
    for operand, name in zip(args.operands, curve_names(args.operands)):
        groups[name if name not in groups else operand] = logs_of(operand)
    logs = [log for group in groups.values() for log in group]
    for log in logs:
        log.val = {step: pair for step, pair in log.val.items() if math.isfinite(pair[0])}
        if not log.val:
            raise LedgerError(f"{log.path} has no validation in its {log.last_step} steps; "
                              "give a longer run")
    for log in logs:
        for note in log.notes:
            say(f"{log.path}: {note}")
    target = args.target if args.target is not None else min(log.target for log in logs)
    found, rows = time_to_losses(groups, target)
    if args.json:
        print_json(found)
    else:
        print("time and step of the first validation at or below a loss, median of the seeds\n")
        print_table(("loss", *groups), rows)
    if args.png:
        draw_curves(groups, target, args.png)
    return 0


def run_results(contestants: list[Contestant]) -> list[dict]:
    """What `run` found, as numbers: each contestant, and against its parent or the first one."""
    runs = {c.name: list(map(run_facts, c.logs.values())) for c in contestants}
    target, results = read_log(next(iter(contestants[0].logs.values()))).target, []
    for index, contestant in enumerate(contestants):
        parent = read_record(contestant.folder).claim["parent"] if contestant.folder else None
        other = parent if parent in runs else contestants[0].name
        found = {"name": contestant.name, "flags": contestant.flags,
                 **summarize(runs[contestant.name]), "target": target,
                 "p_target": p_below([run["val_loss"] for run in runs[contestant.name]], target)}
        found["against"] = None
        if index:
            found["against"] = {"name": other, **compare(runs[contestant.name], runs[other])}
        found["runs"] = runs[contestant.name]
        results.append(found)
    return results


def print_results(results: list[dict], jobs: int) -> None:
    target = results[0]["target"]
    heading = ("script", "flags", "n", "mean loss", "std", f"mean < {target:g}", "loss (against)",
               "median time", "time ratio")
    rows = []
    for found in results:
        versus = found["against"]
        flags = " ".join(f"{name}={value}" for name, value in found["flags"].items())
        cells = [found["name"], flags or "–", str(found["n"]), decimal(found["val_loss_mean"]),
                 decimal(found["val_loss_std"]), p_words(found["p_target"]),
                 f"{parent_words(versus)} ({versus['name']})" if versus else "–",
                 duration(found["train_time_ms_median"]), ratio_words(versus) if versus else "–"]
        rows.append(cells)
    print_table(heading, rows)
    print()
    for found in results[1:]:
        print(f"{found['name']} against {found['against']['name']}: {test_words(found['against'])}")
    n, std = results[0]["n"], results[0]["val_loss_std"]
    if len(results) == 1 and std:
        least = smallest_difference(std * (2 / n) ** 0.5, 2 * n - 2)
        print(f"against {n} runs of another script with this spread, a difference of "
              f"{decimal(least)} would be shown")
    if jobs > 1:
        print(f"times are those of {jobs} runs at once, on one thread each")


def folder_of_runs(args: argparse.Namespace, kind: str) -> Path:
    scipy_stats()  # it should be missing before hours of training, not after
    return Path(args.out or f"logs/{kind}-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


def run_verb(args: argparse.Namespace) -> int:
    if args.times and args.jobs > 1:
        raise LedgerError(f"--jobs {args.jobs}: --times are of one run alone; leave --jobs out")
    contestants, out = contestants_of(args.operands), folder_of_runs(args, "ledger")
    settings = {"preset": args.preset, "nproc": args.nproc, "jobs": args.jobs,
                "args": args.script_args}
    Turns(contestants, out, args.seeds, settings).run()
    results = run_results(contestants)
    if args.json:
        print_json(results)
    else:
        print_results(results, args.jobs)
    if not any(contestant.folder for contestant in contestants):
        return 0
    if args.script_args:
        say("record.json is not written: a record runs its preset as it is")
    else:
        write_measurements(contestants, args.preset, args.times, say)
    return 0


def ablate_verb(args: argparse.Namespace) -> int:
    kept, newest = RECORDS / "ablations.json", find_records(RECORDS)[-1].folder
    if not args.write:
        out = folder_of_runs(args, "ablations")
        runs = contestants(newest, args.names, out, args.steps)
        settings = {"preset": args.preset, "nproc": 1, "jobs": args.jobs, "args": []}
        Turns(runs, out, args.seeds, settings).run()
        keep(kept, newest, args.preset, runs)
    results = read_results(kept)
    write_file(RECORDS / "ablations.md", page(results))
    draw_ablations(tables_of(results), str(RECORDS / "ablations.png"))
    return 0


def verify_verb(args: argparse.Namespace) -> int:
    folder = Path(args.folder).resolve()
    report = verify(folder)
    if newest := [] if (folder / "record.json").exists() else find_records(folder)[-1:]:
        found, notes = ablation_findings(folder, newest[0].folder)
        report.findings += found
        report.notes += notes
    if args.replay:
        findings, notes = replay(find_records(folder), args.replay)
        report.findings += findings
        report.notes += notes
    if args.json:
        print_json({"records": report.records, "findings": report.findings,
                    "notes": report.notes})
        return 1 if report.findings else 0
    for note in report.notes:
        say(note)
    if report.findings:
        print("\n".join(report.findings))
        return 1
    print(f"{report.records} record(s) verified: the logs bear every claim" if report.records else
          f"no records in {args.folder}: nothing to verify")
    return 0


def extract_verb(args: argparse.Namespace) -> int:
    log = read_log(Path(args.log))
    if log.source is None:
        known = f", but the sha256 of one, {log.sha256}" if log.sha256 else ""
        raise LedgerError(f"{log.path} has no source in it{known}; try another seed's log")
    files = split_files(log.source)
    if args.file and args.file not in files:
        raise LedgerError(f"--file {args.file}: the log has {', '.join(files)}")
    if len(files) > 1 and not args.file:
        print(f"{log.path} has {len(files)} files joined: {', '.join(files)}; "
              "--file NAME gives one", file=sys.stderr)
    sys.stdout.write(files[args.file] if args.file else log.source)
    return 0


def lineage_verb(args: argparse.Namespace) -> int:
    records = shown_records(Path(args.folder))
    if not records:
        raise LedgerError(f"{args.folder} has no records to draw; give a folder of records")
    draw_lineage(records, args.png or str(Path(args.folder) / "lineage.png"))
    return 0


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help shows the usage\n")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def build_parser() -> Parser:
    parser = Parser(prog="ledger.py", description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(action, summary: str, *operands: str, folder: bool = False, table: bool = True):
        name = action.__name__.removesuffix("_verb")
        sub = verbs.add_parser(name, help=summary, description=summary)
        sub.set_defaults(action=action)
        for operand in operands:
            sub.add_argument(operand.lower(), metavar=operand, help="folder, script or log")
        if folder:
            sub.add_argument("folder", nargs="?", default=RECORDS, help="default: records/")
        if table:
            sub.add_argument("--json", action="store_true", help="JSON in place of a table")
        return sub.add_argument

    flag = verb(list_verb, "the table of records", folder=True)
    flag("--write", action="store_true",
         help="also make record.json's measured block and the READMEs' tables anew, from the logs")
    flag = verb(diff_verb, "what changed between two sources, section by section", "A", "B")
    flag("--stat", action="store_true", help="the summary without the lines")
    flag("--html", metavar="OUT", help="write a page that needs nothing else")
    flag = verb(curves_verb, "loss over steps, tokens and time; time to a loss")
    flag("operands", nargs="+", metavar="A", help="folder or log")
    flag("--png", metavar="OUT", help="draw it")
    flag("--target", type=float, metavar="LOSS", help="default: the logs' own target_loss")
    flag = verb(run_verb, "measure scripts on this machine, in turns")
    flag("operands", nargs="+", metavar="A",
         help="record folder or script, also with flags of its own: A:name=value,name=value")
    flag("--preset", default="pocket", help="of every run (default: pocket)")
    flag("--seeds", type=count, default=10, metavar="N", help="runs of each (default: 10)")
    flag("--nproc", type=count, default=1, metavar="N", help="processes of a run (default: 1)")
    flag("--jobs", type=count, default=1, metavar="N",
         help="runs at once, above 1 on one thread each, which the logs then tell (default: 1)")
    flag("--times", action="store_true",
         help="keep the runs as the records' times, beside the losses that they have")
    flag("--out", metavar="FOLDER", help="keeps the runs; finished ones in it are used")
    flag("--script-args", nargs=argparse.REMAINDER, default=[], metavar="...",
         help="the rest goes to the scripts, and record.json is not written")
    flag = verb(ablate_verb, "the newest record with one thing taken out or put back at a time",
                table=False)
    flag("names", nargs="*", metavar="NAME", help="rows of ablations.md (default: all)")
    flag("--preset", default="lab", help="of every run (default: lab)")
    flag("--steps", type=count, metavar="N", help="of every run (default: the preset's)")
    flag("--seeds", type=count, default=5, metavar="N", help="runs of each (default: 5)")
    flag("--jobs", type=count, default=1, metavar="N",
         help="runs at once, above 1 on one thread each (default: 1)")
    flag("--out", metavar="FOLDER", help="keeps the runs; finished ones in it are used")
    flag("--write", action="store_true", help="run nothing: page and picture from ablations.json")
    flag = verb(verify_verb, "hold every claim to its logs; exit 1 if one fails", folder=True)
    flag("--replay", type=count, metavar="N",
         help="also run the first N seeds of each record again and compare their losses")
    flag = verb(extract_verb, "the source inside a log, to standard output", "LOG", table=False)
    flag("--file", metavar="NAME", help="one of several files joined")
    flag = verb(lineage_verb, "draw the ladder of records", folder=True, table=False)
    flag("--png", metavar="OUT", help="default: lineage.png in the folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a verb; the exit status."""
    args = build_parser().parse_args(argv)
    try:
        return args.action(args)
    except LedgerError as error:
        print(f"ledger.py: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        name = str(error.filename).removesuffix(".tmp")
        print(f"ledger.py: {name}: {error.strerror}; give another path", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger.py diff A B | head`
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
