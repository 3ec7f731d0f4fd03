"""The README is run: every command in dry-run form, every key, file and recipe that it names looked up."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.prompts import load_prompts
from eval.matrix import SuccessorMatrix
from eval.matrix_file import save_matrix
from models.eagle3 import Eagle3, Eagle3Config
from models.layouts import save_drafter
from models.vocab import VocabMap
from recipes.loading import known_keys, load, recipe_names
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def lines(language: str) -> list[str]:
    joined = "".join(blocks(language)).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


COMMANDS = lines("sh")
MODELS = [c for c in COMMANDS if c.startswith("python -m models.")]  # those that take no recipe
PROGRAMS = [c for c in COMMANDS if not c.startswith("scripts/") and c not in MODELS]
LOCAL = [c for c in PROGRAMS if "recipe=smollm2" in c]
HUB = [c for c in PROGRAMS if c not in LOCAL]


def overrides(command: str) -> list[str]:
    return [word for word in shlex.split(command) if "=" in word and not word.startswith("-")]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """In another folder than the repository's, with this environment's programs and a cache that holds no target: one
    that is there would tell that the drafter of these tests is none of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["ESPALIER_CACHE"] = str(folder.parent / "cache")
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the README's example of a prompt file, and a drafter and a matrix where commands look."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "prompts.jsonl").write_text("".join(blocks("json")))
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = Eagle3Config(8, 16, 2, 1, 4, 1e-5, 32, 32, 64, rope, taps=(2, 4, 5), target_layers=8)
    drafter = Eagle3(config, VocabMap.identity(32))
    save_drafter(drafter, folder / "runs" / "smollm2" / "drafter", {"fingerprint": "of no target"})
    save_matrix(
        SuccessorMatrix(32), folder / "runs" / "smollm2" / "drafter" / "graft" / "matrix.safetensors", "of no target"
    )
    return folder


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_there_are_commands_of_every_sort() -> None:
    assert {shlex.split(c)[0] for c in COMMANDS} == {
        "scripts/quickstart.sh",
        "scripts/test.sh",
        "scripts/prompts.sh",
        "scripts/check_engines.sh",
        "scripts/check_peers.sh",
        "accelerate",
        "python",
    }
    assert LOCAL
    assert HUB


def test_the_prompt_example_is_a_prompt_file(folder: Path) -> None:
    assert load_prompts(str(folder / "prompts.jsonl"))[0].turns


@pytest.mark.parametrize("command", PROGRAMS)
def test_documented_keys_exist_and_the_recipe_resolves(command: str) -> None:
    assert load(overrides(command)).target.path
    words = shlex.split(command)
    for word in words:
        if word.endswith((".py", ".yaml")):
            assert (ROOT / word).is_file()
    if words[:2] == ["python", "-m"]:
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()


def measuring(command: str) -> list[pytest.MarkDecorator]:
    """Dry runs of training measure the device for ten seconds each; that of data preparation stays as an example."""
    return [pytest.mark.slow] if re.search(r"train/\w+\.py", command) else []


@pytest.mark.parametrize("command", [pytest.param(c, marks=measuring(c), id=c) for c in LOCAL])
def test_documented_command_runs_dry_from_another_folder(command: str, folder: Path) -> None:
    words = [str(ROOT / w) if w.endswith((".py", ".yaml")) else w for w in shlex.split(command)]
    before = files(folder)
    done = run([*words, "dry_run=true"], folder)
    assert done.returncode == 0, done.stderr
    assert "dry_run: true" in done.stdout
    assert files(folder) == before, "a dry run writes nothing"


@pytest.mark.parametrize("command", [c for c in MODELS if "models.export" in c])
def test_documented_command_without_a_recipe_runs_from_another_folder(command: str, folder: Path) -> None:
    done = run(shlex.split(command), folder)
    assert done.returncode == 0, done.stderr
    for word in overrides(command):
        if word.startswith("out="):
            assert (folder / word.removeprefix("out=") / "config.json").is_file()


@pytest.mark.parametrize("command", [c for c in MODELS if c.startswith("python -m models.doctor ")])
def test_documented_doctor_says_what_is_wrong_and_writes_nothing(command: str, folder: Path, tmp_path: Path) -> None:
    before = files(folder)
    # the folder of this test is fit to serve, but for no target in particular: a tiny one stands for all
    against = "target=" in command
    if against:
        command = re.sub(r"target=\S+", f"target={tiny_model_folder(tmp_path)} --json", command)
    done = run(shlex.split(command), folder)
    assert done.returncode == against, done.stdout + done.stderr
    if "--json" in command:
        told = json.loads(done.stdout)
        assert told["kind"].startswith("EAGLE-3")
        assert against == any("another target" in finding["what"] for finding in told["findings"])
    else:
        assert done.stdout.startswith("fit to serve") and "vllm serve" in done.stdout
    assert files(folder) == before


@pytest.mark.parametrize("command", [c for c in PROGRAMS if c.startswith("accelerate ")])
def test_launcher_flags_are_known_to_accelerate(command: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    words = shlex.split(command)
    assert words[1] == "launch"
    parsed = launch_command_parser().parse_args(words[2:])
    assert re.fullmatch(r"train/(eagle|flexdraft|calibrator)\.py", parsed.training_script)
    if parsed.config_file:
        assert load_config_from_file(str(ROOT / parsed.config_file)).num_machines == 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("scripts/")])
def test_documented_script_parses_and_explains_itself(command: str, tmp_path: Path) -> None:
    script = ROOT / shlex.split(command)[0]
    assert os.access(script, os.X_OK)
    assert run(["bash", "-n", str(script)], tmp_path).returncode == 0
    done = run([str(script), "--help"], tmp_path)
    assert done.returncode == 0
    assert command in done.stdout


def test_every_script_is_documented_or_called_by_one_that_is() -> None:
    texts = [README, *(p.read_text() for p in (ROOT / "scripts").glob("*.sh"))]
    for script in (ROOT / "scripts").glob("*.sh"):
        assert any(script.name in text for text in texts if text != script.read_text())


def test_ci_runs_the_documented_test_commands_and_nothing_else() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    called = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert (
        called
        == [c for c in COMMANDS if c.startswith("scripts/test.sh")]
        == ["scripts/test.sh", "scripts/test.sh --slow"]
    )
    assert "set -euo pipefail" in script


def test_keys_named_in_the_text_exist() -> None:
    named = set(re.findall(r"`((?:data|eval|train|target|eagle)\.[a-z_.]+)(?:=[^`]*)?`", README))
    modules = {word for word in named if (ROOT / f"{word.replace('.', '/')}.py").is_file()}
    assert named - modules
    assert named - modules - set(known_keys()) == set()


def test_recipes_and_files_named_in_the_text_exist() -> None:
    table = README[README.index("### Recipes") : README.index("### Several processes")]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == recipe_names()
    for path in re.findall(r"`((?:docs|recipes|scripts)/[\w./-]*)`", README):
        assert (ROOT / path).exists(), path


def test_serving_commands_are_well_formed() -> None:
    vllm, sglang = [shlex.split(line) for line in lines("text") if line.startswith(("vllm ", "python -m sglang"))]
    config = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert config["method"] == "eagle3"
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "EAGLE3"
