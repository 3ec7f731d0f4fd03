"""Tiny random targets and a tiny tokenizer: everything a test needs without a download."""

from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9",
]


def tiny_tokenizer(vocab_size: int = 320) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXT * 4, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_config(family: str = "llama", **changes: Any) -> Any:
    """A config of 8 layers, so that the default taps are distinct."""
    from transformers import AutoConfig

    options: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "initializer_range": 0.2,
        "tie_word_embeddings": family.startswith("gemma"),
    }
    if family.startswith("gemma"):
        options["query_pre_attn_scalar"] = 8
    if family in ("gemma2", "gemma3_text", "mistral"):
        options["sliding_window"] = 8
    return AutoConfig.for_model(family, **(options | changes))


def tiny_model_folder(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a random target with its tokenizer as a local folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(min(320, model.config.get_text_config().vocab_size))
    tokenizer.save_pretrained(folder)
    return folder


def tiny_drafter(target: Any, kept: list[int] | None = None, noise: float = 0.1, seed: int = 0, **flags: bool) -> Any:
    """A random drafter whose every tensor differs from its initial value, gains widely; `kept` None = full
    vocabulary."""
    from models.eagle3 import Eagle3, Eagle3Config
    from models.vocab import VocabMap

    vocab = VocabMap.identity(target.vocab_size) if kept is None else VocabMap.from_ids(kept, target.vocab_size)
    torch.manual_seed(seed)
    drafter = Eagle3(Eagle3Config.from_target(target, vocab, **flags), vocab)
    drafter.init_from_target(target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * (noise if parameter.dim() > 1 else 3 * noise))
    return drafter.eval()
