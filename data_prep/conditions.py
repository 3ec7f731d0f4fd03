"""Under which conditions the training conversations stand: system turns, tools, arguments of the chat template."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from data_prep.schemas import Conversation, Record

SWITCHES = ("enable_thinking", "thinking")  # arguments by which templates turn reasoning on and off


def conditions(records: Iterable[Record], args: Mapping[str, Any]) -> dict[str, Any]:
    """Counts for the provenance of the data and of every drafter that is trained on them."""
    kinds, names, used = Counter[str](), set[str](), Counter[str]()
    for record in records:
        kinds["records"] += 1
        if not isinstance(record, Conversation):
            kinds["rendered_or_tokenised"] += 1
            continue
        kinds["with_system"] += record.messages[0]["role"] == "system"
        kinds["with_tools"] += bool(record.tools)
        kinds["with_tool_calls"] += any("tool_calls" in m for m in record.messages)
        names |= {str(tool.get("function", tool).get("name")) for tool in record.tools}
        used[json.dumps({**args, **record.template_args}, sort_keys=True)] += 1
    arguments = [{"arguments": json.loads(text), "records": count} for text, count in used.most_common()]
    return {**kinds, "tools": sorted(names), "template_args": arguments}


def unread(template: str, known: Collection[str], found: Mapping[str, Any]) -> list[str]:
    """A warning of everything that the conversations bring for the template and the template does not look at.

    `known`: the names that it takes from outside.
    """
    out = []
    given = Counter[str]()
    for used in found["template_args"]:
        given.update(dict.fromkeys(used["arguments"], used["records"]))
    for name, count in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            out.append(
                f"{count} training conversations give the template argument {name}, which the target's chat template "
                f"does not read: it changes nothing.{hint}"
            )
    for what, key, seen in (
        ("tools", "with_tools", "tools" in known),
        ("tool calls", "with_tool_calls", "tool_calls" in template),
    ):
        if found.get(key) and not seen:
            out.append(
                f"{found[key]} training conversations hold {what}, which the target's chat template does not show: nor "
                "will a server that uses it. Leave them out, or give a target whose template knows them"
            )
    return out


def one_sided(template: str, found: Mapping[str, Any]) -> list[str]:
    """A warning where the template can turn reasoning on and off and the data know one of the two alone."""
    out = []
    for switch in SWITCHES:
        if re.search(rf"(?<![.\w]){switch} is (not )?defined", template) is None:
            continue
        settings = {used["arguments"].get(switch) for used in found["template_args"]}
        if len(settings) == 1:
            (only,) = settings
            said = "the template's default" if only is None else json.dumps(only)
            out.append(
                f"the chat template has a switch {switch}, and all training conversations have it at {said}. A drafter "
                "is much worse in the mode that it was not trained on: add conversations of the other one "
                '("template_args" in their rows) if you serve both'
            )
    return out
