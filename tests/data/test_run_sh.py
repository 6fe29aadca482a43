"""run.sh in a copy of the repository: which Python it finds, and a set-up from nothing by pip."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import PATIENCE, REPO

NOTE = """import os, sys
print(os.getcwd(), *sys.argv[1:], sep="|")
"""
PYTHON_OF_AGE = f"""#!/bin/sh
case "$1" in -c) exit {{}} ;; esac
echo {{}}
exec {sys.executable} "$@"
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path):
    """A repository with run.sh, in a path with spaces; its start says what it is called with."""
    root = tmp_path / "a clone"
    write(root / "data" / "start.py", NOTE)
    shutil.copy(REPO / "run.sh", root)
    return root


@pytest.fixture
def start(clone, tmp_path):
    """`start(*words, by=(), code=0, **variables)` runs run.sh in another folder; what it says."""

    def run(*words, by=(), code=0, **variables):
        known = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        done = subprocess.run([*by, clone / "run.sh", *words], cwd=tmp_path, text=True,
                              capture_output=True, env=known | variables)
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines() if code == 0 else done.stderr

    return run


@pytest.mark.parametrize("by", [[], ["sh"], ["bash"], ["bash", "--posix"]])
def test_words_are_handed_to_the_start_in_any_shell(start, tmp_path, by):
    said = start("--val_files", "two  words", "--run_id=a b", by=by, PYTHON=sys.executable)
    assert said == [f"{tmp_path}|--val_files|two  words|--run_id=a b"]


def test_the_python_that_is_named_is_taken_from_the_current_folder(start, tmp_path):
    write(tmp_path / "mine" / "python", PYTHON_OF_AGE.format(0, "mine"))
    assert start("test", PYTHON="mine/python")[0] == "mine"


def test_an_old_python_gives_way_to_that_of_venv_unless_it_was_named(start, tmp_path, clone):
    old = write(tmp_path / "bin" / "python3", PYTHON_OF_AGE.format(1, "old"))
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    assert "needs a Python 3.11 or newer, which python3 is not" in start(code=2, PATH=path)
    write(clone / ".venv" / "bin" / "python", PYTHON_OF_AGE.format(0, "of venv"))
    assert start(PATH=path)[0] == "of venv"
    assert f"which {old} is not: name one" in start(code=2, PATH=path, PYTHON=str(old))


@pytest.mark.parametrize(("python", "said"), [
    ("/no/python", "not found"),
    ("python", "Fatal Python error")])
def test_a_python_that_does_not_start_says_why(start, tmp_path, python, said):
    write(tmp_path / "python", "#!/bin/sh\necho Fatal Python error >&2; exit 1\n")
    errors = start(code=2, PYTHON=python, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert said in errors and f"which {python} is not" in errors


# ---- From nothing ----


def make_wheel(folder, name, version, code):
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(f"{info}/METADATA",
                       f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL",
                       "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_set_ups_at_once_wait_for_each_other_and_one_that_was_killed_goes_on(clone, tmp_path):
    """Packages come from wheels that are made here. Nothing is downloaded or trained."""
    for name in "start", "machine", "launch":
        shutil.copy(REPO / "data" / f"{name}.py", clone / "data")
    write(clone / "data" / "pocket.py", NOTE)
    write(clone / "requirements.txt", "torch==2.13.0\n")
    write(clone / "requirements-dev.txt", "pytest>=8.0\n")
    make_wheel(tmp_path, "torch", "2.13.0", "")
    make_wheel(tmp_path, "pytest", "9.0", NOTE)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    variables = dict(os.environ, PYTHON=str(tmp_path / "bare" / "bin" / "python"),
                     PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))

    def begin():
        return subprocess.Popen([clone / "run.sh", "test", "-k", "a b"], text=True, cwd=tmp_path,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables)

    def ends_well(run):
        printed, errors = run.communicate(timeout=PATIENCE)
        assert run.returncode == 0, errors
        assert printed.splitlines()[-1].startswith(f"{clone}|") and printed.endswith("|-k|a b\n")
        return "setting up" in errors

    at_once = [begin() for _ in range(2)]
    assert sorted(ends_well(run) for run in at_once) == [False, True]
    (info,) = clone.glob(".venv/lib/*/site-packages/torch-2.13.0.dist-info")
    (info / "METADATA").unlink()  # which pip writes late
    (clone / ".venv" / "mine").touch()
    assert ends_well(begin()) and not ends_well(begin())
    assert (clone / ".venv" / "mine").exists()
