#!/usr/bin/env bash
# From a fresh clone to an EAGLE-3 drafter for a real model, with a report of what it is worth.
#   scripts/quickstart.sh [key=value ...]      for example  scripts/quickstart.sh train.epochs=3
#   scripts/quickstart.sh --help
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
for argument in "$@"; do
    case "$argument" in
        -h | --help)
            sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        run_dir=*) run_dir="${argument#run_dir=}" ;;
    esac
done
source "$here/setup.sh"

# One process on a small machine: all cores, and threads that spin for some microseconds while they wait, no longer. A
# product of one token takes a third more time when they sleep at once; where they spin for good, a second busy process
# makes two threads several times slower than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

cd "$root"
run_dir="${run_dir:-runs/quickstart}"
echo "[quickstart] data, training, evaluation and report go to $run_dir; the same command resumes an interrupted run"
python train/eagle.py recipe=smollm2 run_dir="$run_dir" "$@"

# The best checkpoint by measured acceptance is the one that was exported.
best="$(cat "$run_dir/checkpoints/best" 2>/dev/null || true)"
report="$run_dir/eval/$best/report.md"
echo "[quickstart] done in $(((SECONDS + 30) / 60)) minutes ($SECONDS s), installation included"
if [[ -f "$report" ]]; then
    echo "[quickstart] report:  $report"
    echo "[quickstart] drafter: $run_dir/drafter"
fi
