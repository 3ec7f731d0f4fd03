"""How fast conversations become rows: `python scripts/bench_data.py [rows] [tokens] [messages]` (10000 1000 4).

Random dialogues in the tokenizer of the embedded target, at half the rows and at all of them, so that a cost which
grows faster than the data shows. "Work" is the time of all threads, which another load on the machine does not stretch.
Words are drawn from the prompts that ship with Espalier, one in ten is invented.
"""

import os
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data_prep.encode import encode_records
from data_prep.prompts import SHIPPED
from data_prep.schemas import Conversation
from data_prep.tally import Tally
from models.source import load_tokenizer, resolve
from recipes.loading import load

TOKENS_A_WORD = 1.45  # about; the tokens that came out are printed


def dialogues(rows: int, tokens: int, messages: int, seed: int = 0) -> list[Conversation]:
    """Of `messages` turns each, about `tokens` tokens long together."""
    draw = random.Random(seed)
    known = re.findall(r"[^\s\"\\]+", (SHIPPED / "report.jsonl").read_text(encoding="utf-8"))
    length = round(tokens / TOKENS_A_WORD / messages)

    def words() -> str:
        invented = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(3, 8))) for _ in range(length // 10)]
        said = draw.choices(known, k=length - len(invented)) + invented
        draw.shuffle(said)
        return " ".join(said)

    roles = ("user", "assistant")
    return [
        Conversation(str(row), [{"role": roles[i % 2], "content": words()} for i in range(messages)])
        for row in range(rows)
    ]


def main() -> None:
    rows, tokens, messages = [*map(int, sys.argv[1:]), *(10_000, 1_000, 4)[len(sys.argv) - 1 :]]
    tokenizer = load_tokenizer(resolve(load(["recipe=smollm2"]).target))
    records = dialogues(rows, tokens, messages)
    print(f"{os.cpu_count()} CPUs; {rows} dialogues of {messages} messages", flush=True)
    taken: list[tuple[float, ...]] = []
    for count in (rows // 2, rows):
        tally, made, marked, began, spent = Tally(), 0, 0, time.perf_counter(), time.process_time()
        for row in encode_records(tokenizer, records[:count], {}, tally):
            made += len(row.ids)
            marked += len(row.marks) - row.marks.count(0)
        seconds, work = time.perf_counter() - began, time.process_time() - spent
        print(
            f"{count} dialogues, {made:,} tokens ({made / count:,.0f} each), {marked:,} of answers: {seconds:.1f} s "
            f"({work:.1f} s of work), {made / seconds:,.0f} tokens/s, refused {tally.refused.total()}",
            flush=True,
        )
        taken.append((made, seconds, work))
    (tokens_half, *half), (tokens_all, *whole) = taken
    wall, cpu = (b / a for a, b in zip(half, whole, strict=True))
    print(
        f"{tokens_all / tokens_half:.2f} times the tokens took {wall:.2f} times the time and {cpu:.2f} times the work"
    )


if __name__ == "__main__":
    main()
