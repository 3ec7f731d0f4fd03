#!/usr/bin/env bash
# Sets up what the tests need, then checks style and types and runs the tests.
#   scripts/test.sh [pytest arguments]           style, types, and every test on tiny models
#   scripts/test.sh --slow [pytest arguments]    the tests that take long or train and decode the real model, and nothing else
set -euo pipefail
case "${1:-}" in
    -h | --help)
        sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

# One thread: two on a busy two-core machine were several times slower. Nothing is fetched from a hub, nothing sent.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline

workers=()
if [[ "${1:-}" != --slow ]]; then
    workers=(-n auto --maxprocesses 4 --dist worksteal) # the slow ones use the whole machine by themselves
    echo "[test] style"
    ruff check .
    ruff format --check .
    echo "[test] types"
    mypy
fi
echo "[test] pytest $*"
python -m pytest ${workers[@]+"${workers[@]}"} "$@"
