#!/usr/bin/env bash
# Lets two other trainers read Espalier's exports and compares the logits and the loss of every slot, in float32:
# speculators 0.9.0 reads the speculators layout, SpecForge 0.2.0 the native one where its drafter has the parts.
#   scripts/check_peers.sh recipe=smollm2
# Without drafters it makes some, one for each combination of flags, with random gains; named ones may follow. out=DIR
# keeps the table. The two get environments of their own, .venv-speculators and .venv-specforge (2 to 2.5 GB and a minute
# each); ESPALIER_SPECULATORS_ENV and ESPALIER_SPECFORGE_ENV name ones that are there. Exit code 1 above 1e-5.
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

install_speculators() {
    peer_pip "$1" transformers==5.19.0 loguru pydantic pydantic-settings datasets httpx openai typer rich aiohttp click psutil
    peer_pip "$1" --no-deps speculators==0.9.0 hs-connectors==0.9.0
}

install_specforge() { # without SGLang, which only its servers use
    peer_pip "$1" transformers==5.8.1 datasets accelerate tensorboard pyyaml psutil triton
    peer_pip "$1" --no-deps specforge==0.2.0 yunchang
}

cd "$from"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python "$root/scripts/check_peers.py" write "$work" "$@"
export HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1
own_env speculators "$root/.venv-speculators" "${ESPALIER_SPECULATORS_ENV:-}" install_speculators
PYTHONPATH='' "$peer" "$root/scripts/check_peers_theirs.py" speculators "$work"
own_env SpecForge "$root/.venv-specforge" "${ESPALIER_SPECFORGE_ENV:-}" install_specforge
TRITON_INTERPRET=1 PYTHONPATH='' "$peer" "$root/scripts/check_peers_theirs.py" specforge "$work"
python "$root/scripts/check_peers.py" compare "$work" "$@"
