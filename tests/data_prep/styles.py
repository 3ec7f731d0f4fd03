"""Chat templates in the styles of a dozen families, small, each with a slow account of the same in Python strings."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Messages = list[Message]


@dataclass(frozen=True)
class Style:
    """`past(messages, tools)`: the history as a server shows it. `opening`: what it adds when an answer is due.

    `written(message)`: what the model then wrote, its end marker included. `reasoning`: how a dialogue carries it.
    """

    name: str
    template: str
    special: tuple[str, ...]
    past: Callable[[Messages, list[Any]], str]
    opening: str
    written: Callable[[Message], str]
    args: dict[str, Any] = field(default_factory=dict)
    reasoning: str = ""  # "" | field | text
    tools: bool = False
    system: bool = True


def block(head: str, tail: str, roles: dict[str, str] | None = None, trim: bool = False, first: str = "") -> Any:
    """The usual shape: `first`, then each turn between a head that names its role and a tail."""
    names = roles or {}

    def past(messages: Messages, tools: list[Any]) -> str:
        out = first
        for m in messages:
            text = m["content"].strip() if trim else m["content"]
            out += head.format(names.get(m["role"], m["role"])) + text + tail
        return out

    return past


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<bos>' }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{% set text = (system if loop.first else '') + m.content %}"
    "{{ '<start_of_turn>' + role + '\n' + text | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set text = m.content %}"
    "{% set why = m.reasoning_content or '' %}{% if not why and '</think>' in text %}"
    "{% set why = text.split('</think>')[0].split('<think>')[-1] %}{% set text = text.split('</think>')[-1] %}"
    "{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + why.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}"
    "{% else %}{{ text }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{{ '<BOS>' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<EOS>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' + opening }}{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.last and m.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT = "Be kind."
WITH_DEFAULT = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_WHOLE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + m.content | trim + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def joined_system(messages: Messages) -> Messages:
    """A system turn put in front of the first question, as Mistral and Gemma have it."""
    if messages[0]["role"] != "system":
        return messages
    first = {"role": "user", "content": messages[0]["content"] + "\n\n" + messages[1]["content"]}
    return [first, *messages[2:]]


def mistral_past(messages: Messages, tools: list[Any]) -> str:
    out = "<s>"
    for m in joined_system(messages):
        out += f"[INST] {m['content']} [/INST]" if m["role"] == "user" else f" {m['content'].strip()}</s>"
    return out


def gemma_past(messages: Messages, tools: list[Any]) -> str:
    roles = {"assistant": "model"}
    past: str = block("<start_of_turn>{}\n", "<end_of_turn>\n", roles, True, "<bos>")(joined_system(messages), tools)
    return past


def after_thought(text: str) -> str:
    return text.split("</think>")[-1]


def qwen3_past(messages: Messages, tools: list[Any]) -> str:
    """Every answer here is followed by a question, so that none of them shows its reasoning."""
    plain = [{**m, "content": after_thought(m["content"])} if m["role"] == "assistant" else m for m in messages]
    past: str = block("<|im_start|>{}\n", "<|im_end|>\n")(plain, tools)
    return past


def qwen3_written(m: Message) -> str:
    why, text = m.get("reasoning_content", ""), m["content"]
    if "</think>" in text:
        why, text = text.split("</think>")[0].split("<think>")[-1], after_thought(text)
    return "<think>\n" + why.strip("\n") + "\n</think>\n\n" + text.lstrip("\n") + "<|im_end|>"


def deepseek_past(messages: Messages, tools: list[Any]) -> str:
    out = "<BOS>"
    for m in messages:
        if m["role"] == "assistant":
            out += "<|Assistant|>" + after_thought(m["content"]) + "<EOS>"
        else:
            out += ("<|User|>" if m["role"] == "user" else "") + m["content"]
    return out


def gpt_oss_past(messages: Messages, tools: list[Any]) -> str:
    out = ""
    for m in messages:
        name = "assistant<|channel|>final" if m["role"] == "assistant" else m["role"]
        out += f"<|start|>{name}<|message|>{m['content']}<|end|>"
    return out


def gpt_oss_written(m: Message) -> str:
    thought = f"<|channel|>analysis<|message|>{m['thinking']}<|end|><|start|>assistant" if "thinking" in m else ""
    return thought + f"<|channel|>final<|message|>{m['content']}<|return|>"


def tools_text(m: Message) -> str:
    calls = [json.dumps(c["function"], ensure_ascii=False) for c in m.get("tool_calls", [])]
    return str(m["content"]) + "".join(f"<tool_call>\n{c}\n</tool_call>" for c in calls)


def tools_past(messages: Messages, tools: list[Any]) -> str:
    out = f"<|im_start|>system\n{json.dumps(tools, ensure_ascii=False)}<|im_end|>\n" if tools else ""
    for m in messages:
        out += f"<|im_start|>{m['role']}\n{tools_text(m)}<|im_end|>\n"
    return out


def default_past(messages: Messages, tools: list[Any]) -> str:
    first = [] if messages[0]["role"] == "system" else [{"role": "system", "content": DEFAULT}]
    return str(chatml_past([*first, *messages], tools))


def marked_past(messages: Messages, tools: list[Any]) -> str:
    trimmed = [{**m, "content": m["content"].strip()} if m["role"] == "assistant" else m for m in messages]
    return str(chatml_past(trimmed, tools))


def ends(marker: str, trim: bool = False, lead: str = "") -> Callable[[Message], str]:
    return lambda m: lead + (m["content"].strip() if trim else m["content"]) + marker


IM = ("<|im_start|>", "<|im_end|>")
THINK = "<think>\n"
chatml_past = block("<|im_start|>{}\n", "<|im_end|>\n")
llama_past = block("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", trim=True, first="<|begin_of_text|>")
llama_special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
gemma_special = ("<bos>", "<start_of_turn>", "<end_of_turn>")
deepseek_special = ("<BOS>", "<EOS>", "<|User|>", "<|Assistant|>")
oss_special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
phi_special = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
granite_special = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
ASSISTANT = "<|im_start|>assistant\n"

STYLES = [
    Style("chatml", CHATML, IM, chatml_past, ASSISTANT, ends("<|im_end|>")),
    Style(
        "llama3",
        LLAMA3,
        llama_special,
        llama_past,
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ends("<|eot_id|>", trim=True),
    ),
    Style("mistral", MISTRAL, ("<s>", "</s>"), mistral_past, "", ends("</s>", trim=True, lead=" ")),
    Style("gemma", GEMMA, gemma_special, gemma_past, "<start_of_turn>model\n", ends("<end_of_turn>", trim=True)),
    Style("qwen3 thinking", QWEN3, IM, qwen3_past, ASSISTANT, qwen3_written, reasoning="field"),
    Style("qwen3 thinking in the text", QWEN3, IM, qwen3_past, ASSISTANT, qwen3_written, reasoning="text"),
    Style(
        "qwen3 not thinking",
        QWEN3,
        IM,
        qwen3_past,
        ASSISTANT + "<think>\n\n</think>\n\n",
        lambda m: m["content"].lstrip("\n") + "<|im_end|>",
        {"enable_thinking": False},
    ),
    Style(
        "deepseek r1",
        DEEPSEEK,
        deepseek_special,
        deepseek_past,
        "<|Assistant|>",
        ends("<EOS>"),
        {"opening": ""},
        reasoning="text",
    ),
    Style(
        "deepseek r1, later",
        DEEPSEEK,
        deepseek_special,
        deepseek_past,
        "<|Assistant|><think>\n",
        lambda m: m["content"].removeprefix(THINK) + "<EOS>",
        {"opening": THINK},
        reasoning="text always",
    ),
    Style("gpt-oss", GPT_OSS, oss_special, gpt_oss_past, "<|start|>assistant", gpt_oss_written, reasoning="thinking"),
    Style("phi", PHI, phi_special, block("<|{}|>\n", "<|end|>\n"), "<|assistant|>\n", ends("<|end|>")),
    Style("zephyr", ZEPHYR, ("</s>",), block("<|{}|>\n", "</s>\n"), "<|assistant|>\n", ends("</s>")),
    Style(
        "granite",
        GRANITE,
        granite_special,
        block("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
        "<|start_of_role|>assistant<|end_of_role|>",
        ends("<|end_of_text|>"),
    ),
    Style("tools", TOOLS, IM, tools_past, ASSISTANT, lambda m: tools_text(m) + "<|im_end|>", tools=True),
    Style("default system", WITH_DEFAULT, IM, default_past, ASSISTANT, ends("<|im_end|>")),
    Style("marked", MARKED, IM, chatml_past, ASSISTANT, ends("<|im_end|>")),
    Style(
        "marked with its header",
        MARKED_WHOLE,
        IM,
        marked_past,
        ASSISTANT,
        ends("<|im_end|>", trim=True),
    ),
]
