# Sourced after setup.sh by scripts that run another project's code, which wants an environment of its own.

# own_env NAME FOLDER GIVEN MAKE: sets `peer` to the Python of GIVEN, or of FOLDER, made by MAKE if it is not there yet.
own_env() {
    local name="$1" folder="$2" given="$3" make="$4"
    if [[ -n "$given" ]]; then
        [[ -x "$given/bin/python" ]] || { echo "error: the environment given for $name, $given, holds no bin/python" >&2; exit 2; }
        folder="$given"
    elif [[ ! -f "$folder/.ready" ]]; then
        say "making $folder for $name, with torch's CPU build (once)"
        rm -rf "$folder"
        "$(find_python)" -m venv "$folder"
        peer_torch "$folder"
        "$make" "$folder"
        touch "$folder/.ready"
    fi
    peer="$folder/bin/python"
}

peer_pip() { local folder="$1"; shift; "$folder/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }

peer_torch() {
    peer_pip "$1" "torch==2.13.0+cpu" 2>/dev/null ||
        peer_pip "$1" torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
        peer_pip "$1" torch==2.13.0
}
