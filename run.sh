#!/usr/bin/env bash
# Sets up what is missing, then trains or runs the tests: `./run.sh --help` says how.
# Written for bash 3.2 and later, so that it runs on macOS as it is.
set -euo pipefail

usage='usage: ./run.sh [flags of train_gpt.py]    train: the record on all CUDA devices, or the
                                           pocket preset on the CPU where there is none
       ./run.sh sample [flags of data/sample.py]
                                           print text from the newest checkpoint
       ./run.sh test [flags of pytest]     run the tests

What is missing is set up first: the data, and the packages, in .venv, unless the active Python
(python3, or $PYTHON where that is set) has them. Logs go to logs/ in the current folder.'

repo=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=$repo/.venv
oldest_torch=2.11  # the code runs from here on; requirements.txt pins the one that is measured
python=${PYTHON:-python3}
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
has_nvidia() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }

# has_packages PYTHON FILE...: whether PYTHON is new enough and has what the requirement files ask.
# It reads the packages' metadata alone, since importing torch takes seconds.
has_packages() {
    OLDEST_TORCH=$oldest_torch "$1" - "${@:2}" >&2 2>/dev/null <<'PYTHON'
import os, re, sys
from importlib.metadata import version

def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]

assert sys.version_info >= (3, 11)
for path in sys.argv[1:]:
    for name, wanted in re.findall(r"^([\w-]+)[=>]=(\S+)", open(path).read(), re.MULTILINE):
        found, least = version(name), os.environ["OLDEST_TORCH"] if name == "torch" else wanted
        assert numbers(found) >= numbers(least)
        if name == "torch" and numbers(found) != numbers(wanted):
            print(f"run.sh: using torch {found} of {sys.executable}; the project pins {wanted}")
PYTHON
}

# find_python FILE...: sets `python` to one that has what the requirement files ask, if there is.
# Their copies in .venv are made when an install is whole.
find_python() {
    has_packages "$python" "$@" && return
    local file
    for file in "$@"; do cmp -s "$file" "$venv/${file##*/}" || return; done
    [ -x "$venv/bin/python" ] && python=$venv/bin/python
}

# set_up FILE...: as find_python, but installs what is missing. The last file includes the others.
set_up() {
    find_python "$@" && return
    local wanted=${!#} info
    command -v "$python" >/dev/null ||
        die "no $python here: install Python 3.11 or newer, or name one: PYTHON=/path/to/python"
    "$python" -c "$new_enough" ||
        die "$python is $("$python" -V 2>&1); name a 3.11 or newer one: PYTHON=/path/to/python"
    say "setting up $venv with ${wanted##*/}; torch is a large download"
    if ! "$venv/bin/python" -c "$new_enough" 2>/dev/null; then
        "$python" -m venv --clear "$venv" >/dev/null ||
            die "$python cannot make $venv: install its venv module (Debian: python3-venv)"
    fi
    python=$venv/bin/python
    # pip writes INSTALLER last: a package without it was cut short, which pip does not notice.
    for info in "$venv"/lib/python*/site-packages/*.dist-info; do
        [ -e "$info/INSTALLER" ] || rm -rf "$info"
    done
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
    # A machine without an NVIDIA driver needs none of the CUDA libraries, gigabytes on Linux.
    if [ "$(uname -s)" = Linux ] && ! has_nvidia; then
        "$python" -m pip install --no-deps --retries 0 --timeout 15 --extra-index-url \
            https://download.pytorch.org/whl/cpu "$(grep ^torch= "$1")" 2>/dev/null || true
    fi
    "$python" -m pip install -r "$wanted" 2>"$venv/pip-errors.txt" ||
        die "pip could not install ${wanted##*/} ($(grep ^ERROR "$venv/pip-errors.txt" |
            tail -n 1)): check the network, or name a Python that has them: PYTHON=/path/to/python"
    cp "$@" "$venv"
}

if [ "${1-}" = test ]; then
    shift
    set_up "$repo/requirements.txt" "$repo/requirements-dev.txt"
    cd "$repo"
    "$python" data/pocket.py
    exec "$python" -m pytest -n auto --maxprocesses 8 "$@"
fi

if [ "${1-}" = sample ]; then
    shift
    set_up "$repo/requirements.txt"
    exec "$python" "$repo/data/sample.py" "$@"
fi

preset='' data=pocket previous=''
for word in "$@"; do
    case $previous in --resume | --preset) word=$previous=$word ;; esac
    case $word in
        -h | --help)
            printf '%s\n\n' "$usage"
            find_python "$repo/requirements.txt" && exec "$python" "$repo/train_gpt.py" --help
            printf 'After the set-up, this shows the flags of train_gpt.py too.\n'
            exit ;;
        --preset) ;;
        --preset=*) preset=named ;;
        --train_files | --train_files=*) data=own ;;
        --resume | --resume=auto) ;;
        --resume=*) preset=named data=own ;;  # a checkpoint brings its own hyperparameters
    esac
    previous=$word
done

set_up "$repo/requirements.txt"
gpus=0
if has_nvidia; then
    # Wrong flags make no plan: the script itself says what is wrong with them.
    plan=$(PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH} "$python" -c '
import sys, torch, train_gpt
gpus = torch.cuda.device_count()
try:
    cfg = train_gpt.parse_args(sys.argv[1:])
    data = next((name for name in ("pocket", "fineweb") if name in cfg.train_files), "own")
    most = gpus if cfg.preset == "record" else 1
    fits = [n for n in range(1, most + 1) if cfg.sequences_per_step % n == 0]
    print(gpus, max(fits, default=1), most, cfg.sequences_per_step, data)
except train_gpt.UserError:
    print(gpus, 1, 1, 1, "own")' "$@")
    read -r gpus processes most sequences plan_data <<<"$plan"
fi
if [ "$gpus" = 0 ]; then
    processes=1
    [ "$preset" = named ] || set -- --preset pocket --save_every 240 "$@"
else
    [ "$data" = own ] || data=$plan_data
fi

[ "$data" = own ] || "$python" "$repo/data/$data.py"
[ "$processes" = 1 ] && exec "$python" "$repo/train_gpt.py" "$@"
[ "$processes" = "$most" ] || say "$processes of $most GPUs: a step has $sequences sequences"
# torchrun by its functions, since after an error of the script it would add 40 lines of its own.
exec "$python" -c '
import sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run
try:
    run(parse_args(sys.argv[1:]))
except ChildFailedError as error:
    sys.exit(max(1, error.get_first_failure()[1].exitcode))
' --standalone --nproc_per_node="$processes" "$repo/train_gpt.py" "$@"
