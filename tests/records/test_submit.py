"""The page's "Submit a record", played in a copy of the project with one constant changed."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, copy_project
from record_folders import LADDERS

TIME, STEPS = LADDERS.values()
# By the child's name. The first records' children are the newest ones.
PARENTS = {"2099-12-29_OfTheNewest": TIME[-1], "2099-12-30_OfOneBetween": TIME[len(TIME) // 2],
           "2099-12-30_OfTheNewestBySteps": STEPS[-1], "2099-12-31_OfTheFirst": TIME[0]}


def submit(project, name, parent):
    """Steps 1 to 4 of the page, for a child of a record."""
    folder = project / parent.relative_to(REPO).with_name(name)
    shutil.copytree(parent, folder, ignore=shutil.ignore_patterns("logs"))
    script = folder / "train_gpt.py"
    source = script.read_text()
    words = f"Parent: {parent.name}. Change: a rate is a thousandth higher."
    source = re.sub(r"^Parent: .*?\n\n", f"{words}\n\n", source, count=1, flags=re.M | re.S)
    rate = re.search(r"    \w+_lr: float = ([\d.]+)", source)
    higher = rate[0].replace(rate[1], str(1.001 * float(rate[1])))
    source = source.replace(rate[0], higher, 1)
    source = source.replace(f"Record: {parent.name}\n", f"Record: {name}\n", 1)
    script.write_text(source)
    page = f"# {name}\n\n<!-- ledger: begin -->\n<!-- ledger: end -->\n"
    (folder / "README.md").write_text(page)
    claim = dict(change="a rate is a thousandth higher", parent=parent.name, published=None)
    (folder / "record.json").write_text(json.dumps(claim))


@pytest.mark.slow
def test_a_copy_of_any_record_with_another_constant_is_a_record(tmp_path, pocket_data):
    """Its tests, those of all records together and `verify` pass with nothing else changed."""
    # With the history, in which `verify` looks for earlier versions of the scripts
    clone = ["git", "clone", "-q", "--no-checkout", str(REPO), str(tmp_path)]
    subprocess.run(clone, check=True)
    copy_project(tmp_path)
    for name, parent in PARENTS.items():
        submit(tmp_path, name, parent)
    ledger = [sys.executable, "records/ledger"]
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    golden = [sys.executable, "tests/records/golden.py", "--write", *PARENTS]
    chosen = ["tests/records", "-k", "2099 or not 202"]  # none of another record alone
    for command, words in ((golden, "2099-12-31"), ([*ledger, "list", "--write"], "OfTheNewest"),
                           ([*ledger, "verify"], "2099-12-29_OfTheNewest has no logs"),
                           ([*tests, *chosen], r"\d+ passed")):
        done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(words, done.stdout), done.stdout
