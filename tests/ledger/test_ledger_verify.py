"""What people bring is filed; what a record claims and its logs do not bear is refused."""

import json
import re
import shutil
import subprocess

import pytest
from fake_records import CHILD, NEWEST, PARENT, edit, log_of, make_records, rename
from ledger import records as ledger_records
from ledger.__main__ import main
from ledger.logs import RULE
from ledger.scripts import ask_git

pytest_plugins = ["record_fixtures"]

OWN, CLAIM, FIRST = f"{NEWEST}/train_gpt.py", f"{NEWEST}/record.json", f"{PARENT}/record.json"
LOGS = f"{NEWEST}/logs"
SPOILED = [[  # a file, what is replaced there, by what, what is said; a list for each verification
    (OWN, "return loss", "return 0.9 * loss", "is not the root's from its banner on"),
    (OWN, PARENT, "2025-01-01_No", f"does not say `Parent: {PARENT}. Change:`"),
    (OWN, f"Record: {NEWEST}", f"Record: {PARENT}", f"does not say `Record: {NEWEST}`"),
    (CLAIM, '"change"', '"gain": "loss", "change"', "record.json has gain; known are"),
    (FIRST, "15.2", "14.2", f"{PARENT}: claims #5, 14.2 min; public.toml does not"),
    ("../README.md", "No GPU has", "A GPU has", "README.md is not what `list --write` gives"),
    (f"{NEWEST}/README.md", f"# {NEWEST}", f"# {PARENT}", "README.md's title is"),
    (f"{LOGS}/*-1-*", "\ndevice: Fake 1", "\ndevice: Fake 2", "resumed where device is Fake 1"),
    (f"{LOGS}/*-2-*", "step:3/40 ", "resumed at step:2 from a.pt, which another script wrote\n"
     "step:3/40 ", "was resumed by another script"),
    (f"{LOGS}/*-3-*", "\nseed: 3", "\nseed: 13", "was resumed where seed is 3; it began with 13"),
    (f"{LOGS}/*-4-*", "\nval_loss: 1.", "\nval_loss: 0.0", "its steps say 1."),
    (f"{LOGS}/*-5-*", "step:3/40 train_loss:", "step:3/40 train_loss:1", "is not called pocket-"),
    (f"{LOGS}/*-6-*", "num_iterations: 40", "num_iterations: 41", "a run of 41 steps and has 40"),
    (f"{LOGS}/*-7-*", "train_digest: 30", "train_digest: 03", "by the rules it is 30407b9a0e1c5"),
    (f"{LOGS}/*-8-*", "\nmuon_lr: 0.05", "\nmuon_lr: 0.06", "has muon_lr 0.06, its preset has 0.0"),
    (f"{LOGS}/*-9-*", "\ndevice: Fake", "\ndevice: host standing in for", "measures nothing")], [
    (f"{LOGS}/*-1-*", "\ntokens: 99", "\ntokens: 2", "was given 200 tokens; its plan has 9900"),
    (f"{LOGS}/*-2-*", "preset: pocket", "preset: large", "has preset large"),
    (f"{LOGS}/*-3-*", "step:3/40 train", "a step:3/40 train", "has 39 of its 40 steps"),
    (CLAIM, PARENT, "2026-01-01_No", "2026-01-01_No/record.json is missing")], [
    (OWN, "# ==== H", "# ---- H", "is not the root's from its banner on"),
    (FIRST, '"number": 5', '"number": 93', f"{PARENT}: claims #93, 15.2 min; public.toml does not"),
    (CLAIM, '"parent"', '"p\u0430rent"', "record.json has p\u0430rent; known are change, parent,"),
    (f"{NEWEST}/README.md", "<!-- ledger: begin -->", "", "has no lines")], [
    (OWN, "import random", "import random:", f"{NEWEST}: invalid syntax"),
    ("../train_gpt.py", "0.8**step", "0.7**step", "has the bytes of no record")]]
UNREADABLE = [
    (CLAIM, '"change"', '"change":', "record.json: Expecting value"),
    (FIRST, "15.2,", '"15.2",', f"{PARENT}/record.json: minutes is '15.2'"),
    (f"{LOGS}/*-0-*", "\nval_loss: ", "\nval_loss: nan\nx: ", "that is no finite number")]


def findings(folder, capsys):
    """What verify says is wrong, after its exit status is checked against it."""
    capsys.readouterr()
    status = main(["verify", str(folder)])
    out, err = capsys.readouterr()
    if status == 2:
        assert not out and err.count("\n") == 1, out + err
        return [err]
    assert status == (0 if "verified" in out.splitlines()[0] else 1), out
    return [] if status == 0 else out.splitlines()


def findings_anew(folder, capsys):
    """The same, after the pages are made from the logs."""
    assert main(["list", str(folder), "--write"]) == 0
    return findings(folder, capsys)


def log_in(records, seed):
    (path,) = records.glob(f"{LOGS}/*-seed-{seed}-*.txt")
    return path


def test_true_records_are_verified_and_not_written_otherwise_again(measured, tmp_path, capsys):
    folder = measured / "records"
    files = [*folder.glob("*/README.md"), folder / "README.md", measured / "README.md"]
    before = [path.read_bytes() for path in files]
    assert findings(folder / NEWEST, capsys) == findings_anew(folder, capsys) == []
    assert [path.read_bytes() for path in files] == before
    assert findings_anew(make_records(tmp_path), capsys) == []  # without runs


@pytest.mark.parametrize("spoiled", SPOILED)
def test_verify_finds_each_of_many_faults(spoiled, records, capsys):
    for file, old, new, _ in spoiled:
        (path,) = records.glob(file) if "*" in file else [records / file]
        edit(path, old, new)
    found = findings(records, capsys)
    for *_, words in spoiled:
        assert any(words in line for line in found), (words, found)
    assert main(["list", str(records)]) == 0


@pytest.mark.parametrize("file, old, new, words", UNREADABLE)
def test_what_cannot_be_read_is_told_in_a_line_and_no_page_is_written(
        file, old, new, words, records, capsys):
    (path,) = records.glob(file)
    edit(path, old, new)
    before = (records / "README.md").read_bytes()
    (found,) = findings(records, capsys)
    assert words in found and path.parts[-3 if "logs" in file else -2] in found
    assert main(["list", str(records), "--write"]) == 2
    assert (records / "README.md").read_bytes() == before


# ---- Cheats ----
def test_a_script_is_not_run(records, tmp_path, capsys):
    """Whatever it says of itself, by whatever type: verify, list and file read it alone."""
    for path in (records / OWN, records.parent / "train_gpt.py"):
        edit(path, "import random\n", f"import random\nopen({str(tmp_path / 'trap')!r}, 'w')\n")
    findings_anew(records, capsys)
    assert main(["file", str(log_in(records, 1)), "--folder", str(records)]) == 2
    assert not (tmp_path / "trap").exists()


def copy_record(records):
    """A copy under another name, with its logs."""
    third = records / "2026-03-03_Third"
    shutil.copytree(records / NEWEST, third)
    edit(third / "README.md", f"# {NEWEST}", f"# {third.name}")
    for path in (third / "train_gpt.py", *third.glob("logs/*")):
        edit(path, f"Record: {NEWEST}", f"Record: {third.name}")
    rename(third / "logs")
    return third


def test_two_records_of_one_meaning_are_found(records, capsys):
    """Also where words differ, and the logs' times."""
    third = copy_record(records)
    edit(third / "train_gpt.py", "import random\n", "import random  # of Python\n")
    for path in third.glob("logs/*"):
        path.write_text(re.sub(r"train_time:(\d+)", r"train_time:\g<1>1", path.read_text()))
    found = "\n".join(findings_anew(records, capsys))
    assert f"{third.name}: its script means the same above the banner as that of {NEWEST}" in found
    assert "is a copy of" not in found


def test_seeds_left_out_are_told(records, capsys):
    log_in(records, 9).unlink()
    log_in(records, 0).unlink()
    assert main(["list", str(records), "--write"]) == main(["verify", str(records)]) == 0
    words = f"ledger: {NEWEST} lacks seeds [0, 9]: Preset pocket on Fake 1"
    assert words in capsys.readouterr().err  # its parent has ten


def test_records_without_logs_are_not_praised(tmp_path, capsys):
    fakes = make_records(tmp_path)
    assert main(["list", str(fakes), "--write"]) == main(["verify", str(fakes)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"{NEWEST} has no logs: its runs are not verified\n")
    assert "bear every claim" not in out


def test_tokens_are_held_to_the_rate_of_the_last_step(records, capsys):
    """Where the plan and the results agree."""
    path = log_in(records, 1)
    path.write_text(path.read_text().replace("tokens: 9900\n", "tokens: 999999\n"))
    rename(path.parent)
    (found,) = findings(records, capsys)
    assert re.search(r"was given 999999 tokens; its last step says 9[89]\d\d$", found)


def test_spaces_make_no_other_machine(records, capsys):
    path = log_in(records, 1)
    path.write_text(path.read_text().replace("device: Fake 1 (", "device: Fake  1 ("))
    rename(path.parent)
    assert findings(records, capsys) == []  # the pages have one row, as before


def test_a_copied_record_is_found_with_its_logs(records, capsys):
    """Also where one expression is written otherwise, so that it seems to compute another thing."""
    third = copy_record(records)
    for path in (third / "train_gpt.py", *third.glob("logs/*")):
        edit(path, "4 * 0.8**step", "2 * 2 * 0.8**step")
    found = findings_anew(records, capsys)
    assert len(found) == 10 and f"is a copy of {LOGS}/pocket-seed-" in found[0]
    shutil.copy(records / FIRST, third)
    assert f"{third.name}: its public number is that of {PARENT}" in findings(records, capsys)


@pytest.mark.parametrize("old, new", [
    ("\nseed: 1\n", "\nseed: 99\n"), ("\ndevice: Fake 1", "\ndevice: Fake 2")])
def test_one_run_counts_once(old, new, measured, records, capsys):
    """Also under another seed's number, or as another machine's."""
    path = log_in(records, 1)
    path.with_name("copy.txt").write_text(path.read_text().replace(old, new))
    rename(path.parent)
    (found,) = findings_anew(records, capsys)
    assert f"is a copy of {LOGS}/" in found
    log = log_of(measured / "out", NEWEST, 1)
    assert main(["file", str(log), "--folder", str(records)]) == 0
    assert f"is there: {LOGS}/pocket-seed-" in capsys.readouterr().out


@pytest.mark.parametrize("old, new", [
    ("\nseed: 1\n", "\nseed: 99\n"), (r"(40/40 val_loss:|\nval_loss: )1\.\S", r"\g<1>1.1")])
def test_file_compares_seed_and_loss_with_those_of_the_same_steps(
        old, new, measured, records, tmp_path, capsys):
    log = tmp_path / "log.txt"
    log.write_text(re.sub(old, new, log_of(measured / "out", NEWEST, 1).read_text()))
    assert main(["file", str(log), "--folder", str(records)]) == 2
    assert "but another seed or val_loss" in capsys.readouterr().err


def test_validation_data_at_full_size_are_one(records, tmp_path, capsys):
    """No rule says which; the logs that were filed first do."""
    words = ["--preset", "record", "--seeds", "1", "--out", str(tmp_path / "gpu")]
    assert main(["run", str(records / PARENT), str(records / NEWEST), *words]) == 0
    first, second = sorted(tmp_path.glob("gpu/logs/*/log.txt"))
    for path in (first, second):
        text = re.sub(r"(_loss: ?)1\.", r"\g<1>3.", path.read_text())
        path.write_text(text.replace("val_digest: 14", f"val_digest: {int(CHILD in text)}"))
    assert main(["file", str(first), str(second), "--folder", str(records)]) == 0
    (found,) = findings_anew(records, capsys)
    assert found.startswith(NEWEST) and "has val_digest 107c02db97ab9a7, and older logs" in found


def test_links_hidden_files_and_others_are_found(records, tmp_path, capsys):
    """Python would import a module that lies beside a script in the place of its own or torch's."""
    names = ("platform.py", ".hidden.py", "__pycache__", "logs/.w.pt")
    for name in names:
        (records / NEWEST / name).touch()
    shutil.move(log_in(records, 1), tmp_path / "log.txt")
    (records / LOGS / "a.txt").symlink_to(tmp_path / "log.txt")
    found = "\n".join(findings(records, capsys))
    for name in (*names[:3], ".w.pt", "a.txt"):
        assert f"{NEWEST}: its folder has {name}, a link or what no record needs" in found


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=b"]
    done = subprocess.run(["git", *identity, *words], check=True, cwd=folder, text=True,
                          stdout=subprocess.PIPE)
    return done.stdout.strip()


def commit_all(folder):
    """Commit what is in a folder; the commit. It becomes a repository where it is none."""
    git(folder, "init", "-q", "-b", "trunk")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all", "--allow-empty")
    ask_git.cache_clear()
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def of_old(records):
    """Records with a log of another source; `of_old(commit)` lets it name a commit."""
    log = log_in(records, 1)
    edit(log, "0.8**step", "0.7**step")

    def name(commit):
        path = log_in(records, 1)
        path.write_text(re.sub("\n(commit: .*\n)?run_id: ", f"\ncommit: {commit}\nrun_id: ",
                               path.read_text(), count=1))
        rename(records / LOGS)

    return name


@pytest.mark.parametrize("commit", [None, "fatal: not a git repository"])
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_copy_in_another_repository_accuses_nobody(
        of_old, commit, is_committed, records, tmp_path_factory, capsys):
    if commit:
        of_old(commit)
    outer = tmp_path_factory.mktemp("outer")
    commit_all(outer)
    shutil.copytree(records.parent, outer / "copy")
    if is_committed:
        commit_all(outer)
    assert main(["verify", str(outer / "copy/records")]) == 0
    assert capsys.readouterr().out.startswith("1 log(s) are not verified: another version of")


def test_a_fresh_history_accuses_only_what_it_reaches(of_old, records, capsys):
    """As that of a repository made from a template, which is one commit of all files."""
    first = commit_all(records.parent)
    of_old("0" * 40)
    commit_all(records.parent)
    assert main(["verify", str(records)]) == 0
    assert capsys.readouterr().out.startswith("1 log(s) are not verified")
    of_old(first)
    assert main(["verify", str(records)]) == 1
    assert "was not written by this train_gpt.py, nor by an earlier" in capsys.readouterr().out


def test_variables_of_git_lead_nowhere_else(records, tmp_path_factory, monkeypatch, capsys):
    """In a worktree's hook git sets them."""
    commit_all(records.parent)
    root = records.parent / "train_gpt.py"
    for path in (*records.glob("*/train_gpt.py"), root):
        edit(path, "return loss", "return 1 * loss")
    other = tmp_path_factory.mktemp("other")
    commit_all(other)
    for name in "GIT_DIR", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY":
        monkeypatch.setenv(name, str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "none"))
    assert findings_anew(records, capsys) == []


def test_git_knows_old_harnesses(measured, records, tmp_path, capsys):
    for step in range(2):  # the harness is maintained; logs of the old one stay
        commit_all(tmp_path)
        for path in (*records.glob("*/train_gpt.py"), records.parent / "train_gpt.py"):
            text = path.read_text().replace("return loss", f"return {step + 1} * loss")
            path.write_text(text.replace("import os\n", "import os.path as os_path, os\n"))
    assert findings_anew(records, capsys) == []
    assert main(["verify", str(records)]) == 0 and capsys.readouterr().err == ""
    for old, new in ("import random", "import evil"), ("0.8**step", "0.7**step"):
        log = next((records / LOGS).glob("*-1-*"))
        edit(log, old, new)
        said = "".join(findings(records, capsys))
        assert "was not written by this train_gpt.py, nor by an earlier version" in said
        edit(log, new, old)
    for path in (records / OWN, records.parent / "train_gpt.py"):
        edit(path, "0.8**step", "0.8 ** (step + 0)")
    log_in(records, 1).unlink()  # of an earlier version
    log = log_of(measured / "out", NEWEST, 1)
    assert main(["file", str(log), "--folder", str(records)]) == 0, capsys.readouterr()
    assert findings_anew(records, capsys) == []
    for path in (records / OWN, records.parent / "train_gpt.py"):
        edit(path, "0.8 ** (step + 0)", "0.8**step")
    long = "# a comment that makes it too long for a command\n" * 4000
    for old, new in (("return loss", "return 0.99 * loss"), ("import sys\n", "import cheat\n"),
                     ("return loss\n", f"return loss / 2\n{long}"),
                     (r"\n# ==== H(.*\n)*?(?====)", "\n"),  # none at all
                     (r"\nif __name__(.*\n)*?(?====)", "\n")):  # a part of it
        log = log_of(measured / "out", NEWEST, 1).read_text()
        (tmp_path / "log.txt").write_text(re.sub(old, new, log, count=1))
        shutil.copy(tmp_path / "log.txt", log_in(records, 1))
        assert "nor by an earlier version of it or its harness" in "".join(
            findings(records, capsys))
        assert main(["file", str(tmp_path / "log.txt"), "--folder", str(records)]) == 2
        assert "no record's, now or earlier" in capsys.readouterr().err


@pytest.mark.parametrize("name, is_folder", [
    ("README.md", False), ("README.md", True), ("train_gpt.py", False), ("train_gpt.py", True)])
def test_one_bad_folder_hides_nothing_and_stops_no_log(
        name, is_folder, measured, records, capsys):
    """Neither what verify finds elsewhere, nor the filing of another record's log."""
    edit(records / PARENT / "README.md", f"# {PARENT}\n", "# Another\n")
    shutil.rmtree(records / PARENT / "logs")
    (records / NEWEST / name).unlink()
    if is_folder:
        (records / NEWEST / name).mkdir()
    found = findings(records, capsys)
    assert any(line.startswith(f"{PARENT}: README.md's title is not") for line in found), found
    assert any(NEWEST in line for line in found), found
    log = log_of(measured / "out", PARENT, 3)
    assert main(["file", str(log), "--folder", str(records / PARENT)]) == 0


@pytest.mark.parametrize("name", ["2026-02-02_Second/logs/a folder.txt", "2026-03-03_Fourth"])
def test_folders_in_the_place_of_others_are_named(name, records, capsys):
    (records / name).mkdir()
    (found,) = findings(records, capsys)
    assert name in found


# ---- Filing, and what is shown ----
@pytest.mark.parametrize("old, new, words", [
    ("\nval_loss: ", "\nval_lo", "is no finished run"),
    ("import random\n", "import random\nimport cheat\n", "its source is no record's"),
    # What Python reads as two lines
    (r"\A", r"# -*- coding: raw_unicode_escape -*-\n# \\u000aimport cheat\n", "is no record's"),
    (r"\ntrain_digest: \S+", "\ntrain_digest: 99", "has train_digest 99, by the rules it is 3040"),
    ("step:", "a step:", "has no step")])
def test_a_log_that_is_no_records_run_is_refused_in_one_line(old, new, words, measured, records,
                                                             tmp_path, capsys):
    log = tmp_path / "log.txt"
    log.write_text(re.sub(old, new, log_of(measured / "out", NEWEST, 3).read_text()))
    before = sorted(records.rglob("*"))
    assert main(["file", str(log), "--folder", str(records)]) == 2
    out, err = capsys.readouterr()
    assert out == "nothing is filed\n" and words in err and err.count("\n") == 1
    assert err.startswith(f"ledger: refused: {log}")
    assert sorted(records.rglob("*")) == before


def test_gpus_of_several_people_are_rows_of_one_table(records, tmp_path, capsys):
    """Most GPUs first; a seed counts once."""
    words = ["--preset", "record", "--seeds", "1", "--out", str(tmp_path / "gpu")]
    assert main(["run", str(records / NEWEST), *words]) == 0
    text = log_of(tmp_path / "gpu", NEWEST, 0).read_text()
    source, rule, text = text.replace("train_loss:1.", "train_loss:9.").partition(RULE)
    h100 = "NVIDIA H100 80GB HBM3"
    for ranks, device, driver, seed, loss in (
            (1, "NVIDIA A100", 580, 0, 3.5), (8, h100, 580, 0, 3.1), (8, h100, 580, 0, 3.2),
            (16, "NVIDIA GeForce RTX 4090", 1, 0, 3.4), (8, h100, 580, 1, 3.25),
            (8, h100, 570, 0, 3.3)):
        own = re.sub(r"(step:80/80 val_loss:|\nval_loss: )\S+", rf"\g<1>{loss}", text)
        for old, new in (("\nseed: 0", f"\nseed: {seed}"), ("train_loss:9.", f"train_loss:{loss}"),
                         ("\nworld_size: 1", f"\nworld_size: {ranks}"),
                         ("Fake 1 (x86_64)", f"{device}\ncuda: 13.0\ndriver: {driver}")):
            own = own.replace(old, new)
        (tmp_path / f"{loss}.txt").write_text(source + rule + own)
    brought = map(str, tmp_path.glob("3.*.txt"))
    assert main(["file", *brought, "--folder", str(records)]) == 0, capsys.readouterr()
    assert findings_anew(records, capsys) == []
    front = (records.parent / "README.md").read_text()
    assert re.search(r"H100 80GB HBM3, 8 rank\(s\).* \| 3.2000 ± 0.0707 \(2\) \| 0.18 \|", front)
    assert f"](records/{NEWEST}) | record on NVIDIA" in front and "No GPU" not in front
    page = (records / "README.md").read_text()
    row = r"^\| \[Second\].*? \| record on NVIDIA (.*?), .*driver (\d+)"
    machines = re.findall(row, page, re.M)
    assert machines == [("GeForce RTX 4090", "1"), ("H100 80GB HBM3", "580"),
                        ("H100 80GB HBM3", "570"), ("A100", "580")]
    assert "| 3.2000 ± 0.0707 (2) | 0.18 |" in page and page.count("| Record | Machine |") == 1
    assert "No GPU" not in (records / NEWEST / "README.md").read_text()


def test_pockets_of_more_ranks_or_gpus_change_no_result(records):
    """The front page tells of GPUs at full size."""
    path = log_in(records, 1)
    front = records.parent / "README.md"
    before = front.read_text()
    assert "No GPU has run one of our scripts" in before
    for old, new in (("\nworld_size: 1", "\nworld_size: 2"), ("Fake 1 (x86_64)", "A\ncuda: 13.0")):
        path.with_name("new.txt").write_text(path.read_text().replace(old, new))
        rename(path.parent)
    assert main(["list", str(records), "--write"]) == 0
    assert front.read_text() == before


def test_a_column_has_pockets_of_one_machine(records):
    """Here of the one that came first; the record's own page has the other."""
    for log in (records / NEWEST / "logs").iterdir():
        edit(log, "\ndevice: Fake 1", "\ndevice: Fake 2")
    assert main(["list", str(records), "--write"]) == 0
    assert (records / "README.md").read_text().count("(10) |") == 1
    assert "Fake 2" in (records / NEWEST / "README.md").read_text()


def test_the_pages_tell_what_is_here_and_what_it_gave(records, capsys):
    """A record of our own has its result; a step names the public record it leads to."""
    page = (records / "README.md").read_text()
    own = next(line for line in page.splitlines() if line.startswith(f"| [Second]({NEWEST})"))
    cells = own.strip("| ").split(" | ")
    assert cells[1:3] == ["less loss", "own"] and "+3 −3" in cells[-1]
    assert re.fullmatch(r"1.5\S+ ± 0.\S+ \(10\)", cells[4])
    assert f"| [#5 First]({PARENT}) | the first | 15.20 | 3.2741 (1) | 1.60" in page
    machine = "Fake 1 (x86_64), 1 rank(s), 1 thread(s), torch 2.13.0+cpu"
    assert f"Small model (the preset pocket): on {machine}." in page
    pulls = "https://github.com/KellerJordan/modded-nanogpt/pull/7"
    assert (f"| [#5]({pulls}) | 2024-10-14 | 15.20 | the first | @a | [#5 First]({PARENT}) |\n"
            f"| #6 | 2024-10-15 | 15.1 | a twin | @b | [#5 First]({PARENT}) |\n"
            "| #7 | 2024-10-16 | 14 | types |  | rounding |\n") in page
    assert page.endswith("\nEnd.\n") and "(p " not in page  # the pocket's evidence has none
    assert "(10) |  | 0.0" in (records / NEWEST / "README.md").read_text()
    third = records / "2026-03-03_7a_Third"
    shutil.copytree(records / NEWEST, third, ignore=shutil.ignore_patterns("logs"))
    claim = json.loads((records / FIRST).read_text()) | {"parent": NEWEST}
    claim["published"] |= {"number": 7, "minutes": 14}
    (third / "record.json").write_text(json.dumps(claim))
    known = ledger_records.find_records(records)
    assert [one.name for one in known] == ["#5 First", "Second", "#7 Third"]
    assert main(["list", str(records), "--write"]) == 0
    assert "| [Second](2026-02-02_Second) | less loss | step to #7 |" in (
        records / "README.md").read_text()
    capsys.readouterr()
    assert main(["list", str(records / NEWEST)]) == 0
    out = capsys.readouterr().out
    assert "Second" in out and "First" not in out and "Below target" in out


def test_without_history_a_log_of_another_source_is_not_called_verified(measured, records, capsys):
    assert main(["verify", str(records)]) == 0
    assert "verified: the logs bear every claim" in capsys.readouterr().out
    log = next((records / LOGS).glob("*-1-*"))
    edit(log, "0.8**step", "0.7**step")
    assert main(["verify", str(records)]) == 0
    out = capsys.readouterr().out
    assert "1 log(s) are not verified" in out and "bear every claim" not in out
    assert main(["file", str(log), "--folder", str(records)]) == 2
