"""The real model of the embedded default, in fp32, once a session."""

from pathlib import Path

import pytest
import torch

from models.target import Target, load_target
from recipes.loading import load
from tests.tiny import tiny_model_folder

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours.",
]


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(load(["recipe=smollm2"]).target, "cpu", torch.float32)


@pytest.fixture(scope="session")
def prompts(target: Target) -> list[list[int]]:
    return [chat(target, question) for question in QUESTIONS]


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("other"))


def chat(target: Target, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
