"""Give every record the harness of the root's train_gpt.py: what stands below the banner.

    python records/ledger/share_harness.py

It says which records it changed. Above the banner nothing is touched.
"""

import argparse
import sys
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(RECORDS))

from ledger.records import record_folders  # noqa: E402

BANNER = "\n# ==== Harness"


def main():
    argparse.ArgumentParser(description=__doc__).parse_args()  # it takes none
    root = (RECORDS.parent / "train_gpt.py").read_text("utf-8")
    harness = root.partition(BANNER)[2]
    changed = 0
    for folder in record_folders(RECORDS):
        script = folder / "train_gpt.py"
        source = script.read_text("utf-8")
        record, _, old_harness = source.partition(BANNER)
        if old_harness != harness:
            script.write_text(record + BANNER + harness, encoding="utf-8", newline="")
            print(f"changed {folder.name}")
            changed += 1
    print(f"{changed} record(s) changed")


if __name__ == "__main__":
    main()
