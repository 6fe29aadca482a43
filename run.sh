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
trap 'exit 130' INT  # else it would go on where a program that it asks was interrupted
self=${BASH_SOURCE[0]}
for stream in 1 2; do  # a daemon's are closed, and the first such may be this file by now
    [ -e /dev/fd/$stream ] && [ ! /dev/fd/$stream -ef "$self" ] || eval "exec $stream>/dev/null"
done
while link=$(readlink "$self"); do  # BSD's follows one link at a time
    case $link in /*) self=$link ;; *) self=$(dirname "$self")/$link ;; esac
done
repo=$(CDPATH='' cd -- "$(dirname "$self")" && pwd -P)
oldest_torch=2.11  # the code runs from here on; requirements.txt pins the one that is measured
python=${PYTHON:-python3} venv=$repo/.venv launch=$repo/data/launch.py

say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
has_nvidia() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }
is_new() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }
has_packages() { "$1" "$repo/data/machine.py" packages "${@:2}" >&2 2>/dev/null; }

# find_python FILE...: sets `python` to one that has what the requirement files ask, if there is.
find_python() {
    has_packages "$python" "$oldest_torch" "$@" && return
    [ ! -e "$venv/unfinished" ] || return 1  # a set-up was killed
    # It follows the pin.
    has_packages "$venv/bin/python" "$(sed -n 's/^torch==//p' "$1")" "$@" &&
        python=$venv/bin/python
}

# set_up FILE...: as find_python, but installs what is missing. Set-ups wait for each other.
set_up() {
    find_python "$@" && return
    is_new "$python" || die "needs Python 3.11 or newer, and $python is" \
        "$("$python" -V 2>/dev/null | grep . || echo none): name one: PYTHON=/path/to/python" \
        "(uv python install 3.12 gets one, uv python find 3.12 tells where it is)"
    [ -z "$on_gpu" ] || "$python" "$repo/data/machine.py" gpu || exit
    { exec 9<>"$1"; } 2>/dev/null && "$python" "$repo/data/machine.py" lock 9
    find_python "$@" || install "$@"
    exec 9>&-
}

install() {
    local file files=() said failed=
    for file; do files+=(-r "$file"); done
    say "setting up $venv with ${file##*/}; torch is a large download"
    { [ ! -e "$venv/unfinished" ] && is_new "$venv/bin/python" &&
        "$venv/bin/python" -m pip --version; } >/dev/null 2>&1 ||
        said=$("$python" -m venv --clear "$venv" 2>&1) || case $said in
            *"ensurepip is not"* | *"No module named venv"*)
                die "$python cannot make $venv: install its venv module (Debian: python3-venv)" ;;
            *) die "$python cannot make $venv: ${said##*$'\n'}" ;;
        esac
    python=$venv/bin/python
    touch "$venv/unfinished"
    # A machine without an NVIDIA driver needs none of the CUDA libraries, gigabytes on Linux.
    has_nvidia || [ "$(uname -s)" != Linux ] || pip_install --no-deps --retries 0 \
        -i https://download.pytorch.org/whl/cpu "$(grep ^torch= "$1")" 2>/dev/null || true
    pip_install "${files[@]}" 2>"$venv/pip-errors.txt" || failed=1
    rm "$venv/unfinished"
    said=$(grep ^ERROR "$venv/pip-errors.txt" | tail -n 1) || true
    [ -z "$failed" ] || die "pip could not install ${file##*/} (${said:-is the disk full?});" \
        "all that it said is in $venv/pip-errors.txt." \
        "A Python that has the packages can be named: PYTHON=/path/to/python"
    has_packages "$python" "$oldest_torch" "$@" || die "$venv lacks packages that pip says are" \
        "there: remove it, see whether 'pip config list' sends them elsewhere, and run this again"
}

# Neither the user's settings nor a variable may send the packages elsewhere.
pip_install() {
    env -u PIP_PYTHON -u PIP_ROOT PIP_USER=0 PIP_DRY_RUN=0 \
        "$python" -m pip install --target= --prefix="$venv" "$@"
}

command -v "$python" >/dev/null || [ -z "${PYTHON-}" ] || die "PYTHON=$PYTHON: no such program"
script=$repo/train_gpt.py gpus=0 processes=1 data= on_gpu=
case ${1-} in
    test)
        cd "$repo"; shift; last=
        for word; do
            [[ $last = -[km] || $word != [!-]*.py* || -e ${word%%::*} ]] || die "no $word in $repo"
            last=$word
        done
        set_up "$repo/requirements.txt" "$repo/requirements-dev.txt"
        "$python" "$launch" data/pocket.py >&2
        exec "$python" -m pytest -n auto --maxprocesses 8 "$@" ;;
    sample)
        shift
        set_up "$repo/requirements.txt"
        exec "$python" "$launch" "$repo/data/sample.py" "$@" ;;
    --record)
        script=$(cd "$repo/records" && ls -d -- "${2-}" *_"${2-}" 2>/dev/null) || true
        script=$repo/records/$script/train_gpt.py
        [ -f "$script" ] || die "--record ${2:-NAME}: give the end of one folder's name," \
            "such as DenseConnections; ls records/ shows all"
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

! has_nvidia || [[ $words = *" --device"[\ =]"cpu "* ]] || on_gpu=1
set_up "$repo/requirements.txt"
if [ -n "$on_gpu" ]; then
    plan=$("$python" "$launch" "$repo/data/plan.py" "$script" "$@") || exit  # it has said why
    { read -r gpus processes flags; data=$(cat); } <<<"$plan"
    [ -z "$flags" ] || set -- $flags "$@"
fi
if [ "$gpus" = 0 ]; then
    data=pocket.py
    given --preset || resumed || set -- --preset pocket --save_every 120 "$@"
    [ ! -r /proc/stat ] || [ -n "${OMP_NUM_THREADS-}" ] ||
        OMP_NUM_THREADS=$("$python" "$repo/data/machine.py" threads 2>/dev/null)
fi
given --train_files || resumed || [ -z "$data" ] ||
    while read -r name shards; do
        "$python" "$launch" "$repo/data/$name" ${shards:+"$shards"} >&2
    done <<<"$data"

# glibc keeps freed memory. Asking for new pages costs 8 % of the pocket's time.
: "${MALLOC_TRIM_THRESHOLD_=2147483647}" "${MALLOC_MMAP_MAX_=0}"
export MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_MAX_ OMP_NUM_THREADS
# Compiled kernels survive a reboot there.
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/train_gpt
[ -n "${TORCHINDUCTOR_CACHE_DIR+set}" ] || ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ] ||
    export TORCHINDUCTOR_CACHE_DIR=$cache
set -- "$script" "$@"
[ "$processes" = 1 ] ||
    set -- --standalone --local-addr=127.0.0.1 --nproc_per_node="$processes" "$@"
exec "$python" "$launch" "$@"
