"""The gates that `eval.calibrate` stored beside a drafter, read back where they belong to it."""

import json
from pathlib import Path
from typing import Any

from eval.settings import CALIBRATED
from models.layouts import read_provenance
from models.weights import weights_hash
from recipes.schema import UserError

FILE = "calibrated.json"
MATRIX_FILE = "graft/matrix.safetensors"  # not beside model.safetensors: vLLM would load it as weights of the drafter


def read(folder: Path) -> dict[str, Any] | None:
    """calibrated.json, if there is one for this very drafter and its target; else None, said aloud where it is
    another's. Raises UserError for a damaged file."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        gates = {name: tuple(found["gates"][name]) for name in CALIBRATED}
        if not all(len(g) == 3 and all(type(x) in (int, float) and 0 <= x <= 1 for x in g) for g in gates.values()):
            raise ValueError("gates must be three numbers from 0 to 1")
        of_drafter, of_target = found["drafter"], found["target"]
        found |= {"gates": gates, "words": words(found)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(
            f"{path} is not a calibrated.json of ours ({error!r}). Delete it, or write it again with eval.calibrate"
        ) from error
    if of_drafter != weights_hash(folder):
        print(f"{path} is set aside: it was measured with other weights of the drafter")
        return None
    if of_target != read_provenance(folder).get("fingerprint", of_target):  # others' drafters state none
        print(f"{path} is set aside: it was measured with another target")
        return None
    return found


def words(found: dict[str, Any]) -> str:
    """What the gates were calibrated on, for the report."""
    shape, env = found["shape"], found["measured_on"]
    tree = f"{shape['nodes']} nodes, depth {shape['depth']}, top-{shape['branch']}"
    where = f"batch {found['batch_size']}, T = {found['temperature']:g}, {env['dtype']}, {env['hardware']}"
    return f"calibrated on {found['prompts']} prompts ({found['rounds']} rounds; {tree}; {where})"
