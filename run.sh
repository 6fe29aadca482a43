#!/usr/bin/env bash
# usage: ./run.sh [--record NAME] [flags of train_gpt.py]
#            train the root, or a record of records/, on all CUDA devices, or the pocket on the CPU
#        ./run.sh sample [flags of data/sample.py]    print text from the newest checkpoint
#        ./run.sh test [flags of pytest]              run the tests
#
# What is missing is set up first: the data, and the packages, in .venv, unless the active Python
# (python3, or $PYTHON where that is set) has them. Logs go to logs/ in the current folder.

set -euo pipefail  # in bash 3.2, so that it runs on macOS as it is
self=${BASH_SOURCE[0]}
while link=$(readlink "$self"); do  # BSD's follows one link at a time
    case $link in /*) self=$link ;; *) self=$(dirname "$self")/$link ;; esac
done
repo=$(CDPATH='' cd -- "$(dirname "$self")" && pwd -P)
oldest_torch=2.11  # the code runs from here on; requirements.txt pins the one that is measured
python=${PYTHON:-python3} venv=$repo/.venv

say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
has_nvidia() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }
is_new() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }

# has_packages PYTHON FILE...: whether PYTHON is new enough and has what the requirement files ask.
# It reads the packages' metadata alone, since importing torch takes seconds.
has_packages() {
    is_new "$1" && OLDEST_TORCH=$oldest_torch "$1" - "${@:2}" >&2 2>/dev/null <<'PYTHON'
import os, re, sys
from importlib.metadata import version
def numbers(text): return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]
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
    is_new "$python" || die "needs Python 3.11 or newer, and $python is" \
        "$("$python" -V 2>/dev/null | grep . || echo none): name one: PYTHON=/path/to/python"
    say "setting up $venv with ${wanted##*/}; torch is a large download"
    { is_new "$venv/bin/python" && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1 ||
        "$python" -m venv --clear "$venv" >/dev/null ||
        die "$python cannot make $venv: install its venv module (Debian: python3-venv)"
    python=$venv/bin/python
    # pip writes INSTALLER last: a package without it was cut short, which pip does not notice.
    for info in "$venv"/lib/python*/site-packages/*.dist-info; do
        [ -e "$info/INSTALLER" ] || rm -rf "$info"
    done
    # A machine without an NVIDIA driver needs none of the CUDA libraries, gigabytes on Linux.
    has_nvidia || [ "$(uname -s)" != Linux ] || "$python" -m pip install --no-deps --retries 0 \
        -i https://download.pytorch.org/whl/cpu "$(grep ^torch= "$1")" 2>/dev/null || true
    "$python" -m pip install -r "$wanted" 2>"$venv/pip-errors.txt" ||
        die "pip could not install ${wanted##*/} ($(grep ^ERROR "$venv/pip-errors.txt" |
            tail -n 1)): check the network, or name a Python that has them: PYTHON=/path/to/python"
    cp "$@" "$venv"
}

# A thread that waits for a core holds up all others. Two hyperthreads are one core.
limits_of_threads() {
    nproc
    sort -u /sys/devices/system/cpu/cpu*/topology/thread_siblings_list 2>/dev/null | wc -l
    awk '/^cpu / { idle = $5 - idle }  # in hundredths of a second
         END { print int(idle < 30 ? 1 : idle / 20 + 0.5) }' /proc/stat <(sleep 0.2; cat /proc/stat)
}

script=$repo/train_gpt.py gpus=0 processes=1 data=
case ${1-} in
    test)
        cd "$repo"; shift; last=
        for word; do
            [[ $last = -[km] || $word != [!-]*.py* || -e ${word%%::*} ]] || die "no $word in $repo"
            last=$word
        done
        set_up "$repo/requirements.txt" "$repo/requirements-dev.txt"
        "$python" data/pocket.py
        exec "$python" -m pytest -n auto --maxprocesses 8 "$@" ;;
    sample)
        shift
        set_up "$repo/requirements.txt"
        exec "$python" "$repo/data/sample.py" "$@" ;;
    --record)
        script=$(cd "$repo/records" && ls -d -- "${2-}" *_"${2-}" 2>/dev/null) || true
        script=$repo/records/$script/train_gpt.py
        [ -f "$script" ] || die "--record ${2:-NAME}: name one of" \
            "$(cd "$repo/records" && echo [0-9]*_*)"
        shift 2 ;;
    [!-]*) die "$1: give test, sample, or flags of train_gpt.py; --help lists them" ;;
esac

words=" $* "
given() { [[ $words = *" $1"[\ =]* ]]; }
resumed() { given --resume && [[ $words != *" --resume"[\ =]"auto "* ]]; }  # with data of its own
! given --record || die "--record NAME comes before all other flags"
if given --help || given -h; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$self"
    find_python "$repo/requirements.txt" || exit 0  # after the set-up, all flags are listed
    exec "$python" "$script" --help 2>/dev/null  # where a pipe was closed, Python would say so
fi

set_up "$repo/requirements.txt"
if has_nvidia; then
    plan=$(PYTHONPATH=${script%/*}${PYTHONPATH:+:$PYTHONPATH} "$python" -P "$repo/data/plan.py" \
        "$@" 2>/dev/null) || plan='1 1 1 1'  # the script itself says what is wrong
    { read -r gpus processes most sequences smaller; data=$(cat); } <<<"$plan"
    [ "$smaller" != none ] || die "a GPU of 8 GB is the least for the record (docs/gpus.md);" \
        "--preset pocket trains a small model on this one"
    [ -z "$smaller" ] || { say "with $smaller, for this GPU's memory;" \
        "losses of shorter sequences do not compare (docs/gpus.md)"; set -- $smaller "$@"; }
fi
if [ "$gpus" = 0 ]; then
    data=pocket.py
    given --preset || resumed || set -- --preset pocket --save_every 240 "$@"
    [ ! -r /proc/stat ] || [ -n "${OMP_NUM_THREADS-}" ] ||
        OMP_NUM_THREADS=$(limits_of_threads | sort -n | grep -m 1 -v '^0$')
fi
given --train_files || resumed || [ -z "$data" ] ||
    while read -r name shards; do "$python" "$repo/data/$name" ${shards:+"$shards"}; done <<<"$data"

# glibc keeps freed memory. Asking for new pages costs 8 % of the pocket's time.
: "${MALLOC_TRIM_THRESHOLD_=2147483647}" "${MALLOC_MMAP_MAX_=0}"
# Compiled kernels survive a reboot there.
: "${TORCHINDUCTOR_CACHE_DIR=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/train_gpt}"
export MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_MAX_ OMP_NUM_THREADS TORCHINDUCTOR_CACHE_DIR
[ "$processes" != 1 ] || exec "$python" "$script" "$@"
[ "$processes" = "$most" ] || say "$processes of $most GPUs: a step has $sequences sequences"
# torchrun by its functions, since after an error or a signal it would add 40 lines of its own.
exec "$python" -c '
import sys
from torch.distributed.elastic.multiprocessing import api, errors
from torch.distributed.run import parse_args, run
try:
    run(parse_args(sys.argv[1:]))
except errors.ChildFailedError as error:
    sys.exit(max(1, error.get_first_failure()[1].exitcode))
except api.SignalException as signal:
    sys.exit(128 + signal.sigval)
' --standalone --nproc_per_node="$processes" "$script" "$@"
