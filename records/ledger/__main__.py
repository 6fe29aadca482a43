"""The ledger of records: measure, file, list, compare and verify them, and read others' logs.

A and B are record folders, scripts or logs, of this project or of the public speedrun. P-values
need scipy (requirements-dev.txt). Exit status: 1 where a claim fails, 2 where input cannot be used
or a run fails. records/README.md has the rules.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger import logs, pages, run, scripts, steps, tune, verify
from ledger.logs import LedgerError
from ledger.records import PRESETS, find_records, ladder_of

RECORDS = run.REPO / "records"


def split_folder(name: str):
    """(a folder of records, the one record in it that is meant, or None for all)."""
    folder = Path(name).resolve()
    if not (folder / "record.json").exists():
        return folder, None
    is_by_steps = ladder_of(folder) == "steps"
    return folder.parent.parent if is_by_steps else folder.parent, folder.name


def tell(lines):
    for line in lines:
        print(f"ledger: {line}", file=sys.stderr)


# ---- Verbs: each returns the exit status ----
def run_verb(args) -> int:
    if importlib.util.find_spec("scipy") is None:
        tell(["scipy is not there, so no p-values: pip install -r requirements-dev.txt"])
    if args.tune and (args.values < 3 or args.seeds < 2):
        raise LedgerError("--tune needs --values 3 at least, and --seeds 2 for a standard error")
    args.out = Path(args.out).resolve()
    args.store = Path(args.store or args.out / "runs.jsonl").resolve()
    args.rows = run.read_store(args.store)
    # Small models are the quicker for one thread where other programs take a core.
    args.threads = os.environ.get("OMP_NUM_THREADS", "1")
    contestants = run.contestants_of(args.operands, args.preset)
    if args.tune:
        contestants, tried = tune.tune(contestants, args.tune, args)
        print(pages.plain(tried) + "\n")
    run.run_all(contestants, range(args.seeds), args, "comparing")
    print(pages.plain(pages.contest(contestants, args.target)))
    args.operands = [log.path for one in contestants for log in one.logs]
    return file_verb(args) if args.file else 0


def file_verb(args) -> int:
    folder, _ = split_folder(args.folder)
    known, took, refused = find_records(folder), [], []
    for path in sorted(map(Path, args.operands)):
        try:
            took.append(verify.file_log(path, folder, known))
        except verify.UNREADABLE as error:
            refused.append(f"refused: {error}")
    tell(refused)
    print("\n".join(took) or "nothing is filed")
    return 2 if refused else 0


def list_verb(args) -> int:
    folder, only = split_folder(args.folder)
    records = find_records(folder)
    if args.write and records:
        for path, parts in pages.blocks(folder, records).items():
            text = pages.filled(path, parts)
            if text != logs.read_text(path):
                path.write_text(text, encoding="utf-8", newline="")
                print(f"wrote {path}")
    elif records:
        shown = [record for record in records if only in (None, record.folder.name)]
        print(pages.plain(pages.runs_table(shown, PRESETS)))
    else:
        found, left_out = logs.read_folder(folder)  # of other people
        tell(left_out)
        if all(log.last_step is None for log in found):
            raise LedgerError(f"{folder} has no records and no logs; known are {logs.FORMS}")
        print(pages.plain(pages.others(found, folder, args.target)))
    return 0


def judge_verb(args) -> int:
    for folder in map(Path, args.folder):
        print(*steps.judge(folder.resolve(), args.preset, args.target), sep="\n")
    return 0


def diff_verb(args) -> int:
    found = scripts.diff_sources(scripts.source_of(args.a), scripts.source_of(args.b))
    print(f"{args.a} → {args.b}: {scripts.count_changes(*found.values())} lines")
    for title, lines in found.items():
        print(f"\n--- {title}: {scripts.count_changes(lines)} ---", *lines, sep="\n")
    return 0


def verify_verb(args) -> int:
    records, faults, doubts, notes = verify.verify(*split_folder(args.folder))
    tell(notes)
    if args.replay and not faults:
        faults = run.replay_all(records, args.replay)
    verdict = f"{len(records)} record(s) verified: the logs bear every claim on our own runs"
    print("\n".join(faults or doubts) or verdict)
    return 1 if faults else 0


def site_verb(args) -> int:
    from website.build import write_site  # it needs packages that no other verb does

    written = write_site(find_records(Path(args.folder)), Path(args.out), args.source)
    print(f"wrote {len(written)} pages; open {args.out}/index.html")
    return 0


# ---- Command line ----
class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help shows the usage\n")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return int(text)


def positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def names(text: str) -> list:
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} does not name settings as NAME,NAME")
    return found


def make_parser() -> Parser:
    parser = Parser(prog="ledger", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(action, summary):
        name = action.__name__.removesuffix("_verb")
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.set_defaults(action=action)
        return verb.add_argument

    flag = add(run_verb, "train scripts on this machine, interleaved, and compare them")
    flag("operands", nargs="+", metavar="A", help="record folder or script, also with flags: "
         "A:name=value,name=value; a folder of records stands for all of them")
    flag("--preset", default="pocket", choices=PRESETS, help="of every run (default: pocket)")
    flag("--seeds", type=count, default=10, metavar="N", help="runs of each (default: 10)")
    flag("--jobs", type=count, default=1, metavar="N", help="runs at once, which share the cores")
    flag("--nproc", type=count, default=1, metavar="N", help="processes of a run (default: 1)")
    flag("--tune", type=names, metavar="NAME,NAME",
         help="first find each script's best values of settings")
    flag("--values", type=count, default=5, metavar="N", help="to try of each setting (default: 5)")
    flag("--target", type=positive, help="count the steps to this loss (default: the first one's)")
    flag("--out", default="logs/ledger", help="keeps the logs (default: logs/ledger)")
    flag("--store", metavar="FILE", help="of the losses of all runs (default: OUT/runs.jsonl)")
    flag("--file", action="store_true", help="also file the logs, as the verb does")
    flag("--folder", default=RECORDS, help="where --file looks for records (default: records/)")
    flag = add(file_verb, "put finished logs into the folders of the records they are of")
    flag("operands", nargs="+", metavar="LOG", help="logs/RUN/log.txt")
    flag("--folder", default=RECORDS, help="of records (default: records/)")
    flag = add(list_verb, "the table of records, or of other people's logs beside their baseline")
    flag("folder", nargs="?", default=RECORDS, help="default: records/")
    flag("--write", action="store_true", help="also make the READMEs' blocks anew")
    flag("--target", type=positive, default=3.28, help="of other people's losses (default: 3.28)")
    flag = add(judge_verb, "the first step at which the mean of all runs is below a loss")
    flag("folder", nargs="+", help="of logs, or a log, also of others' with many runs")
    flag("--target", type=positive, default=3.28, help="the loss (default: 3.28)")
    flag("--preset", default="record", choices=PRESETS, help="of our own runs (default: record)")
    flag = add(diff_verb, "what changed between two sources, section by section")
    flag("a", metavar="A", help="folder, script or log")
    flag("b", metavar="B")
    flag = add(verify_verb, "hold every claim to its logs; exit 1 if one fails")
    flag("folder", nargs="?", default=RECORDS, help="default: records/")
    flag("--replay", type=count, metavar="N", help="run N of each record's seeds again")
    flag = add(site_verb, "a static site with a page for each record")
    flag("folder", nargs="?", default=RECORDS, help="default: records/")
    flag("--out", required=True, metavar="SITE", help="folder to write it to")
    flag("--source", metavar="URL", help="of the repository's files, for links to them")
    return parser


def main(argv: list | None = None) -> int:
    """Run a verb; the exit status."""
    args = make_parser().parse_args(argv)
    try:
        return args.action(args)
    except KeyboardInterrupt:
        message = "stopped"
    except OSError as error:
        message = f"{error.filename or 'its output'}: {error.strerror}; give another path"
    except ImportError as error:
        message = f"{error}; pip install -r requirements.txt -r requirements-dev.txt"
    except (LedgerError, ValueError) as error:
        message = error
    tell([message])
    return 2


if __name__ == "__main__":
    for name in ("stdout", "stderr"):
        if getattr(sys, name):  # a daemon's are closed
            getattr(sys, name).reconfigure(errors="replace")  # an ASCII terminal has no ±
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `run` stops as by ctrl-C
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ledger diff A B | head`
    sys.exit(main())
