#!/usr/bin/env bash
# usage: ./run.sh [--record NAME] [flags of train_gpt.py]
#            train the root, or a record of records/, on all CUDA devices, or the pocket on the CPU
#        ./run.sh sample [flags of data/sample.py]    print text from the newest checkpoint
#        ./run.sh test [flags of pytest]              run the tests
#
# What is missing is set up first: the data, and the packages, in .venv, unless the active Python
# (python3, or $PYTHON where that is set) has them. Logs go to logs/ in the current folder.

# `sh run.sh` goes on in bash.
case ${BASH_VERSION:+$SHELLOPTS} in '' | *posix*)
    unset POSIXLY_CORRECT
    exec bash "$0" "$@" ;;
esac
set -euo pipefail  # in bash 3.2, so that it runs on macOS as it is
self=${BASH_SOURCE[0]}
while link=$(readlink "$self"); do  # BSD's follows one link at a time
    case $link in /*) self=$link ;; *) self=$(dirname "$self")/$link ;; esac
done
repo=$(CDPATH='' cd -- "$(dirname "$self")" && pwd -P)
oldest_torch=2.11  # the code runs from here on; requirements.txt pins the one that is measured
oldest_driver=580  # of NVIDIA's, for CUDA 13, which the pinned torch is built for
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
    local wanted=${!#} info said
    is_new "$python" || die "needs Python 3.11 or newer, and $python is" \
        "$("$python" -V 2>/dev/null | grep . || echo none): name one: PYTHON=/path/to/python" \
        "(uv python install 3.12 gets one, uv python find 3.12 tells where it is)"
    say "setting up $venv with ${wanted##*/}; torch is a large download"
    { is_new "$venv/bin/python" && "$venv/bin/python" -m pip --version; } >/dev/null 2>&1 ||
        said=$("$python" -m venv --clear "$venv" 2>&1) || case $said in
            *ensurepip* | *"No module named venv"*)
                die "$python cannot make $venv: install its venv module (Debian: python3-venv)" ;;
            *) die "$python cannot make $venv: ${said##*$'\n'}" ;;
        esac
    python=$venv/bin/python
    export PIP_USER=0  # where pip's settings have `user = true`, it would refuse a venv
    # pip writes INSTALLER last: a package without it was cut short, which pip does not notice.
    for info in "$venv"/lib/python*/site-packages/*.dist-info; do
        [ -e "$info/INSTALLER" ] || rm -rf "$info"
    done
    # A machine without an NVIDIA driver needs none of the CUDA libraries, gigabytes on Linux.
    has_nvidia || [ "$(uname -s)" != Linux ] || "$python" -m pip install --no-deps --retries 0 \
        -i https://download.pytorch.org/whl/cpu "$(grep ^torch= "$1")" 2>/dev/null || true
    "$python" -m pip install -r "$wanted" 2>"$venv/pip-errors.txt" ||
        die "pip could not install ${wanted##*/} ($(grep ^ERROR "$venv/pip-errors.txt" |
            tail -n 1)); all that it said is in $venv/pip-errors.txt." \
            "A Python that has the packages can be named: PYTHON=/path/to/python"
    cp "$@" "$venv"
}

# check_gpu_machine: ends where the record cannot run on this machine's GPUs, before packages of
# gigabytes are fetched. With packages that are there, the script asks CUDA itself.
check_gpu_machine() {
    local driver headers
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    [[ ! $driver =~ ^[0-9]+ ]] || ((BASH_REMATCH >= oldest_driver)) || die "NVIDIA's driver is" \
        "$driver, and torch needs $oldest_driver or newer: update it, or name a Python with a" \
        "torch for this one: PYTHON=/path/to/python"
    is_new "$python" || return 0  # which the set-up tells
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')
    [ -n "${CC-}" ] || command -v gcc clang >/dev/null ||
        die "no C compiler, which Triton needs: install gcc, or set CC"
    [ -e "$headers/Python.h" ] || die "no $headers/Python.h, which Triton needs: install" \
        "python3-dev, or name a Python of uv's: PYTHON=/path/to/python"
}

# quotas: threads that the control groups of this process have time for, version 2 and version 1.
quotas() {
    local group
    group=/sys/fs/cgroup$(cat /proc/self/cgroup | sed -n 's/^0:://p')
    group=${group%/}
    while [ "$group" != /sys/fs ]; do
        cat "$group/cpu.max" || true
        group=${group%/*}
    done
    group=/sys/fs/cgroup/cpu/cpu.cfs
    echo "$(cat "${group}_quota_us") $(cat "${group}_period_us")"
} 2>/dev/null

# A thread that waits for a core holds up all others. Two hyperthreads are one core.
limits_of_threads() {
    local quota period
    quotas | while read -r quota period; do
        [[ ! $quota$period =~ ^[0-9]+$ ]] || echo $((quota < period ? 1 : quota / period))
    done
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

on_gpu=
! has_nvidia || [[ $words = *" --device"[\ =]"cpu "* ]] || on_gpu=1
[ -z "$on_gpu" ] || find_python "$repo/requirements.txt" || check_gpu_machine
set_up "$repo/requirements.txt"
if [ -n "$on_gpu" ]; then
    plan=$(PYTHONPATH=${script%/*}${PYTHONPATH:+:$PYTHONPATH} "$python" -P "$repo/data/plan.py" \
        "$@") || exit  # it has said why
    { read -r gpus processes most sequences smaller; data=$(cat); } <<<"$plan"
    [ "$smaller" != none ] || die "a GPU of 8 GB is the least for the record (docs/gpus.md);" \
        "--preset pocket trains a small model on this one"
    [ -z "$smaller" ] || { say "with $smaller, for this GPU's memory;" \
        "losses of shorter sequences do not compare (docs/gpus.md)"; set -- $smaller "$@"; }
fi
if [ "$gpus" = 0 ]; then
    data=pocket.py
    given --preset || resumed || set -- --preset pocket --save_every 120 "$@"
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
import os, signal, sys
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup, which torchrun undoes
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
from torch.distributed.elastic.multiprocessing import api, errors
from torch.distributed.run import parse_args, run
try:
    run(parse_args(sys.argv[1:]))
except errors.ChildFailedError as error:
    sys.exit(max(1, error.get_first_failure()[1].exitcode))
except api.SignalException as told:
    # A rank that torchrun was about to start when the signal came
    for child in open("/proc/thread-self/children").read().split():
        os.kill(int(child), told.sigval)
    sys.exit(128 + told.sigval)
' --standalone --local-addr=127.0.0.1 --nproc_per_node="$processes" "$script" "$@"
