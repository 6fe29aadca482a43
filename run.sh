#!/usr/bin/env bash
# usage: ./run.sh [--record NAME] [flags of train_gpt.py]
#            train the root, or a record of records/, on all CUDA devices, or the pocket on the CPU;
#            a record has a number (53), a label (92h), or the end of its folder's name
#        ./run.sh sample [flags of data/sample.py]    print text from the newest checkpoint
#        ./run.sh test [flags of pytest]              run the tests
#
# What is missing is set up first: the data, and the packages, in .venv, unless the active Python
# (python3, or $PYTHON where that is set) has them. A .venv that run.sh did not make is never
# cleared. Logs go to logs/ in the current folder.

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
[[ $self = */* ]] || self=./$self
repo=$(CDPATH='' cd -- "${self%/*}" && pwd -P && echo .)  # $(...) strips ends of lines
repo=${repo%$'\n.'}
oldest_torch=2.11  # the code runs from here on; requirements.txt pins the one that is measured
python=${PYTHON:-python3} venv=$repo/.venv launch=$repo/data/launch.py
case $python in /*) ;; */*) python=$PWD/$python ;; esac  # `test` changes the folder
mark=$venv/made-by-run.sh  # without it, a .venv is a person's

say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
has_nvidia() { [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; }
# A program's answer is in its marked lines: a sitecustomize prints, too.
answers() { "$@" | sed -n 's/^answer: //p'; }
is_new() {
    local code='import sys; print("\nanswer:", sys.version_info >= (3, 11))'
    [ "$(answers "$1" -c "$code" 2>/dev/null)" = True ]
}
has_packages() {
    answers "$1" "$repo/data/machine.py" packages "${@:2}" 2>/dev/null | sed 's/^/run.sh: /' >&2
}

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
    is_new "$python" || refuse_python
    [ -z "$on_gpu" ] || "$python" "$repo/data/machine.py" gpu || exit
    { exec 9<>"$1"; } 2>/dev/null && "$python" "$repo/data/machine.py" lock 9
    find_python "$@" || install "$@"
    exec 9>&-
}

# Why $python will not do: its own error, or its age.
refuse_python() {
    local said
    said=$({ "$python" -c '' 2>&1 || true; } | grep -m 1 -i error) || true
    [ -z "$said" ] || die "$python does not start: $said"
    die "needs Python 3.11 or newer, and $python is" \
        "$("$python" -V 2>/dev/null | grep . || echo none): name one: PYTHON=/path/to/python" \
        "(uv python install 3.12 gets one, uv python find 3.12 tells where it is)"
}

# make_venv FILE: a .venv with a way to install. Only what has the mark, and is no link, is cleared.
make_venv() {
    local said
    local remedy="install ${1##*/} in it by yourself, move it away, or name a Python that has"
    remedy="$remedy the packages: PYTHON=/path/to/python"
    [ ! -L "$venv" ] || die "$venv is a link, and what it leads to lacks packages: $remedy"
    if is_new "$venv/bin/python" && has_installer; then
        [ -f "$mark" ] && [ -e "$venv/unfinished" ] || return 0
    fi
    if [ -e "$venv" ]; then
        [ -f "$mark" ] ||
            die "$venv was not made by run.sh, and has no Python 3.11 with pip: $remedy"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name "${mark##*/}" -exec rm -rf {} +
    fi
    mkdir -p "$venv" && touch "$mark" "$venv/unfinished" || die "cannot make $venv"
    said=$("$python" -m venv "$venv" 2>&1) || [ -z "$uv" ] ||
        said=$("$uv" venv -q --allow-existing --python "$python" "$venv" 2>&1) || true
    [ -x "$venv/bin/python" ] && has_installer || case $said in
        *"ensurepip is not"* | *"No module named venv"*)
            die "$python cannot make $venv: install its venv module (Debian: python3-venv)" ;;
        *) die "$python cannot make $venv: ${said##*$'\n'}" ;;
    esac
}

# uv makes environments without pip.
has_installer() {
    [ -n "$uv" ] || "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        "$venv/bin/python" -m ensurepip >/dev/null 2>&1
}

install() {
    local file files=() failed= uv errors=$venv/pip-errors.txt
    uv=$(command -v uv) || true
    for file; do files+=(-r "$file"); done
    trap 'say "interrupted; the next call goes on"; exit 130' INT
    say "packages: setting up $venv with ${file##*/}; torch comes first, a large download"
    make_venv "$file"
    python=$venv/bin/python
    touch "$venv/unfinished"
    install_torch "$(grep ^torch= "$1")"
    pip_install -q "${files[@]}" >&2 2>"$errors" || failed=1
    rm "$venv/unfinished"
    [ -z "$failed" ] || die "pip could not install ${file##*/} ($(why_not_installed "$errors"));" \
        "all that it said is in $errors." \
        "A Python that has the packages can be named: PYTHON=/path/to/python"
    has_packages "$python" "$oldest_torch" "$@" || die "$venv lacks packages that pip says are" \
        "there: remove it, see whether 'pip config list' sends them elsewhere, and run this again"
    trap 'exit 130' INT
}

# why_not_installed FILE: the cause among the errors of pip or uv.
why_not_installed() {
    local said lost
    said=$(grep -i '^ *\(ERROR\|error\|╰─▶\|Caused by\|cause:\)' "$1" | tail -n 1 | sed 's/^ *//') || true
    # An index that pip cannot reach is to it an index without packages.
    lost=$(sed -n "s/.* connection broken by '\(.*\)': .*/\1/p" "$1" | sed 's/<[^>]*>: //' |
        tail -n 1) || true
    case $said in *"No matching distribution"* | *ResolutionImpossible*)
        [ -z "$lost" ] || said="no network, or a wrong proxy or index: $lost" ;;
    esac
    printf %s "${said:-is the disk full?}"
}

# install_torch NAME: torch alone, with a bar. Where it fails, the next call of pip says why.
install_torch() {
    local source=() failed=
    # A machine without an NVIDIA driver needs none of the CUDA libraries, gigabytes on Linux.
    if [ "$(uname -s)" = Linux ] && ! has_nvidia; then
        source=(-i https://download.pytorch.org/whl/cpu)
        local -x PIP_RETRIES=0
    elif has_nvidia; then
        say "packages: after torch come NVIDIA's libraries, some gigabytes without a bar"
    fi
    # uv draws its bar on the stream of its errors.
    if [ -n "$uv" ] && [ -t 2 ]; then
        pip_install --no-deps ${source[@]+"${source[@]}"} "$1" >&2 || failed=1
    else
        pip_install --no-deps ${source[@]+"${source[@]}"} "$1" >&2 2>/dev/null || failed=1
    fi
    [ -z "$failed" ] || [ ${#source[@]} = 0 ] ||
        say "packages: download.pytorch.org gave no torch; trying the package index, whose torch" \
            "brings NVIDIA's libraries, some gigabytes without a bar"
}

# Neither the user's settings nor a variable may send the packages elsewhere.
pip_install() {
    if [ -n "$uv" ]; then
        "$uv" pip install --python "$python" "$@"
    else
        env -u PIP_PYTHON -u PIP_ROOT PIP_USER=0 PIP_DRY_RUN=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
            "$python" -m pip install --target= --prefix="$venv" "$@"
    fi
}

# find_record NAME: its folder, by the end of its name, its published number, or its label.
find_record() {
    local name=${1#\#} path found=()
    name=${name%/}
    for path in "$repo/records/$name" "$repo/records"/*_"$name" "$repo/records"/*_"$name"_*; do
        [ -z "$name" ] || [ ! -f "$path/train_gpt.py" ] || found+=("$path")
    done
    if [[ $name =~ ^[0-9]+$ ]]; then
        path=$(cd "$repo/records" && grep -slE "\"number\": *$name *[,}]" -- */record.json) || true
        [ -z "$path" ] || found=("$repo/records/${path%/record.json}")
    fi
    [ ${#found[@]} = 1 ] || die "--record ${1:-NAME}: ${#found[@]} records have this name; give" \
        "a number such as 53, a label such as 92h, or the end of one folder's name, such as" \
        "DenseConnections; ls records/ shows all"
    script=$found/train_gpt.py
}

[[ $repo != *$'\n'* ]] || die "$repo: a folder's name has an end of line: rename it"
command -v "$python" >/dev/null || [ -z "${PYTHON-}" ] || die "PYTHON=$PYTHON: no such program"
script=$repo/train_gpt.py gpus=0 processes=1 data= on_gpu= saves=
[[ ${1-} != --record=* ]] || set -- --record "${1#*=}" "${@:2}"
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
        find_record "${2-}"
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
    plan=$(answers "$python" "$launch" "$repo/data/plan.py" "$script" "$@") || exit  # it says why
    { read -r gpus processes flags; data=$(cat); } <<<"$plan"
    [ -z "$flags" ] || set -- $flags "$@"
fi
if [ "$gpus" = 0 ]; then
    data=pocket.py
    given --preset || resumed || { saves=1; set -- --preset pocket --save_every 120 "$@"; }
    [ ! -r /proc/stat ] || [ -n "${OMP_NUM_THREADS-}" ] ||
        OMP_NUM_THREADS=$(answers "$python" "$repo/data/machine.py" threads 2>/dev/null) || true
fi
given --train_files || resumed || [ -z "$data" ] ||
    while read -r name shards; do
        say "data: data/$name${shards:+ $shards}"
        "$python" "$launch" "$repo/data/$name" ${shards:+"$shards"} >&2
    done <<<"$data"

# glibc keeps freed memory. Asking for new pages costs 8 % of the pocket's time.
: "${MALLOC_TRIM_THRESHOLD_=2147483647}" "${MALLOC_MMAP_MAX_=0}"
export MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_MAX_ OMP_NUM_THREADS
# Compiled kernels survive a reboot there.
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/train_gpt
[ -n "${TORCHINDUCTOR_CACHE_DIR+set}" ] || ! mkdir -p "$cache" 2>/dev/null || [ ! -w "$cache" ] ||
    export TORCHINDUCTOR_CACHE_DIR=$cache
RUN_SH_NEXT="Next: $0 --help lists what can be set; README.md has a first experiment."
[ -z "$saves" ] && ! given --save_every ||
    RUN_SH_NEXT="Next: $0 sample --prompt 'def ' prints what the model writes."
export RUN_SH_NEXT  # launch.py says it when the run has ended
say "training: ${script#"$repo/"} $*"
set -- "$script" "$@"
[ "$processes" = 1 ] ||
    set -- --standalone --local-addr=127.0.0.1 --nproc_per_node="$processes" "$@"
exec "$python" "$launch" "$@"
