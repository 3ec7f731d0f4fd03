"""The target behind an OpenAI-compatible server (vLLM, SGLang): token ids in, token ids out.

`/completions` is asked and not `/chat/completions`: the prompt is then the very tokens that the template renders here,
whatever the server's own template and defaults are, and what comes back is not parsed into reasoning and tool calls.
"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx

from data_prep.dialogue import Dialogue
from data_prep.progress import meter
from data_prep.template import tokenise
from data_prep.writer import Begin, Done, Request, noise_seed
from recipes.schema import ServerConfig, UserError

ATTEMPTS = 8  # for one answer: about two minutes of waiting in all
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds between attempts; doubled from one to the next
WAVES = 16  # rows of a shard for each request in flight
OPEN_SHARDS = 2  # the next shard begins while the last answers of one are waited for
LOST = 8  # requests in a row, or as many as are in flight, that are given up before the server counts as down
FEW = 0.5  # share of a shard's dialogues; a shard of which more have failed is not written
# neutral values, sent because vLLM would otherwise take its defaults from the model's generation_config.json
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
PLAIN |= {"frequency_penalty": 0.0, "n": 1, "stream": False}
MEND = "Mend the server or data.server and run the same command again."
KEY = "It wants a key, or another one than this: set OPENAI_API_KEY in the environment."

T = TypeVar("T")


class Trouble(Exception):
    """What asking again may mend; `kind` is what it is counted under."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Refused(Exception):
    """A request that the server will not take however often it is asked."""


class Server:
    """The server's model, found when it is made; every call opens connections of its own."""

    def __init__(self, config: ServerConfig, tokenizer: Any, end_id: int, vocab_size: int, longest: int) -> None:
        self.config, self.tokenizer, self.end_id, self.vocab_size = config, tokenizer, end_id, vocab_size
        key = os.environ.get("OPENAI_API_KEY", "")
        self.options: dict[str, Any] = {
            "base_url": config.url.rstrip("/") + "/",
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": config.timeout,
        }
        entry, alike = self._find_model(longest)
        # of the entry in /models, what does not change from start to start
        self.served = {key: entry[key] for key in ("id", "root") if entry.get(key)}
        self.names = alike

    def describe(self) -> dict[str, Any]:
        return {"writer": "server", "served": self.served, "rows_a_shard": WAVES * self.config.concurrency}

    def follow(self, manifest: Mapping[str, Any]) -> None:
        """A server's schedule is its own."""

    def write(self, requests: list[Request], stop_ids: frozenset[int], seed: int, label: str) -> list[list[int] | None]:
        troubles = Counter[str]()

        async def ask(session: Session) -> list[list[int] | None]:
            with meter(label, len(requests)) as progress:
                total = Counter[str]()

                async def one(i: int, request: Request) -> list[int] | None:
                    answer, _ = await session.complete(request, stop_ids, noise_seed(seed, i), troubles)
                    total.update(done=1, tokens=len(answer or []))
                    progress(total["done"], total["tokens"])
                    return answer

                return await _all(one(i, r) for i, r in enumerate(requests))

        answers = self._run(ask)
        if requests and not any(answers):
            raise UserError(f"the server at {self.config.url} answered nothing: {dict(troubles)}. {MEND}")
        return answers

    def answer(self, shards: Mapping[int, range], begin: Begin, seed: int, done: Done) -> None:
        async def all_shards(session: Session) -> None:
            queue, total = iter(shards.items()), Counter[str]()
            with meter("the server answers", sum(map(len, shards.values()))) as progress:

                async def lead(dialogue: Dialogue, troubles: Counter[str]) -> None:
                    while dialogue.ask():
                        request = Request(dialogue.ids, dialogue.budget, dialogue.temperature)
                        noise = noise_seed(seed, dialogue.source, dialogue.conversation.id, dialogue.turn)
                        answer, why = await session.complete(request, dialogue.terms.stop_ids, noise, troubles)
                        dialogue.take(answer, why)
                        total["tokens"] += len(answer or [])
                    total["done"] += 1
                    progress(total["done"], total["tokens"])

                async def work_off() -> None:
                    for number, span in queue:
                        dialogues, troubles = begin(span), Counter[str]()
                        await _all(lead(d, troubles) for d in dialogues)
                        self._refuse_ruins(number, dialogues)
                        done(number, dialogues, troubles)

                await _all(work_off() for _ in range(OPEN_SHARDS))

        self._run(all_shards)

    def logprobs(self, rows: list[tuple[list[int], int]]) -> list[float] | None:
        async def score(session: Session) -> list[list[float] | None]:
            return await _all(session.score(ids) for ids, _ in rows)

        scores = self._run(score)
        parts = [s[start : len(ids)] for s, (ids, start) in zip(scores, rows, strict=True) if s is not None]
        if len(parts) < len(rows):
            return None
        return [sum(part) / len(part) for part in parts]

    def _refuse_ruins(self, number: int, dialogues: list[Dialogue]) -> None:
        failed = [d for d in dialogues if d.fate == "failed"]
        if len(failed) > FEW * len(dialogues):
            raise UserError(
                f"the server at {self.config.url} failed {len(failed)} of the {len(dialogues)} dialogues of shard "
                f"{number + 1}, one of them with: {failed[-1].why}. Finished shards are kept. {MEND}"
            )

    def _run(self, work: Callable[["Session"], Awaitable[T]]) -> T:
        async def inside() -> T:
            limits = httpx.Limits(max_connections=self.config.concurrency)
            async with httpx.AsyncClient(**self.options, limits=limits) as client:
                return await work(Session(self, client))

        try:
            return asyncio.run(inside())
        except ExceptionGroup as group:  # of the first that failed and stopped the others
            error: BaseException = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    def _find_model(self, longest: int) -> tuple[dict[str, Any], set[str]]:
        """The entry of `/models` that is asked for, and every name that its model goes by there."""
        url, wanted = self.config.url, self.config.model
        try:
            with httpx.Client(**self.options) as client:
                reply = client.get("models")
        except httpx.HTTPError as error:
            raise UserError(f"data.server.url={url}: no answer ({error or type(error).__name__}). {MEND}") from error
        if reply.status_code in (401, 403):
            raise UserError(f"data.server.url={url}: {url}/models answers {reply.status_code}. {KEY}")
        try:
            entries = reply.json()["data"] if reply.status_code != 404 else [{"id": wanted}] * bool(wanted)
            found = {str(entry["id"]): entry for entry in entries}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"data.server.url={url}: {url}/models answers {reply.status_code} and no list of models, but "
                f"{reply.text[:200]!r}. Give the address of an OpenAI-compatible server, up to and with /v1."
            ) from error
        if (wanted and wanted not in found) or (not wanted and len(found) != 1):
            raise UserError(f"data.server.model={wanted!r}: {url} serves {', '.join(found) or 'nothing'}. Name one.")
        entry = found[wanted or next(iter(found))]
        room = entry.get("max_model_len")
        if isinstance(room, int) and room < longest:
            raise UserError(
                f"the server at {url} takes {room} tokens, data.max_length={longest}. Lower data.max_length."
            )
        return entry, {
            name for name, other in found.items() if other.get("root") == entry.get("root") or other is entry
        }


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first failure stops all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(w) for w in work]
    return [t.result() for t in tasks]


class Session:
    """Requests in flight: as many and as fast as the recipe allows, all paused when the server says so."""

    def __init__(self, server: Server, client: httpx.AsyncClient) -> None:
        self.server, self.client = server, client
        self.room = asyncio.Semaphore(server.config.concurrency)
        self.free_at = 0.0  # when the next request may go, on the loop's clock
        self.lost = 0  # requests given up since the last answer

    async def complete(
        self, request: Request, stop_ids: frozenset[int], seed: int, troubles: Counter[str]
    ) -> tuple[list[int] | None, str]:
        """(the continuation, '') or (None, why there is none); what was mended by asking again is counted."""
        body = {
            **PLAIN,
            "model": self.server.served["id"],
            "prompt": request.prompt,
            "max_tokens": request.limit,
            "temperature": request.temperature,
            "seed": seed % (1 << 31),
            "stop_token_ids": sorted(stop_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        why = ""
        async with self.room:
            for attempt in range(ATTEMPTS):
                if attempt:
                    wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
                    await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                try:
                    answer = self._read(await self._post(body), request, stop_ids, troubles)
                    self.lost = 0
                    return answer, ""
                except Trouble as trouble:
                    why = f"{trouble.kind}: {trouble}"
                    troubles[trouble.kind] += 1
                except Refused as error:
                    troubles["refused"] += 1
                    return None, str(error)
        troubles["given up"] += 1
        self.lost += 1
        if self.lost >= max(LOST, self.server.config.concurrency):
            raise UserError(
                f"the server at {self.server.config.url} has left {self.lost} requests in a row unanswered, each asked "
                f"{ATTEMPTS} times, the last with {why}. Finished shards are kept. {MEND}"
            )
        return None, why

    async def score(self, ids: list[int]) -> list[float] | None:
        """Log-probability of each token after the first, where the server gives those of a prompt (vLLM does)."""
        body = {"model": self.server.served["id"], "prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 0}
        try:
            async with self.room:
                reply = await self._post(body)
            values = reply["choices"][0]["logprobs"]["token_logprobs"]
            return [0.0, *(float(v) for v in values[1:])] if len(values) >= len(ids) else None
        except (Trouble, Refused, KeyError, IndexError, TypeError, ValueError):
            return None

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply as JSON. UserError where no request at all can succeed."""
        loop, pace = asyncio.get_running_loop(), self.server.config.requests_per_minute
        while (wait := self.free_at - loop.time()) > 0:
            await asyncio.sleep(wait)
        if pace:
            self.free_at = loop.time() + 60 / pace
        try:
            reply = await self.client.post("completions", json=body)
        except httpx.TimeoutException as error:
            raise Trouble("timeout", f"no answer within {self.server.config.timeout} s") from error
        except httpx.RemoteProtocolError as error:
            raise Trouble("half a body", str(error)) from error
        except httpx.TransportError as error:
            raise Trouble("no connection", str(error)) from error
        except httpx.RequestError as error:  # a body that does not decompress, a ring of redirects
            raise Trouble("garbage", str(error)) from error
        status, text = reply.status_code, reply.text[:300]
        if status == 429 or status >= 500 or status in (408, 425):
            pause = reply.headers.get("retry-after", "")
            if pause.isdigit():
                self.free_at = max(self.free_at, loop.time() + min(LONGEST_WAIT, int(pause)))
            raise Trouble(str(status), text)
        if status in (401, 403, 404):
            mend = MEND if status == 404 else KEY
            raise UserError(f"the server at {self.server.config.url} answers {status}: {text}. {mend}")
        if status != 200:
            raise Refused(f"the server answers {status}: {text}")
        try:
            value = reply.json()
        except ValueError as error:
            raise Trouble("garbage", f"not JSON: {text!r}") from error
        if not isinstance(value, dict):
            raise Trouble("garbage", f"not an object: {text!r}")
        return value

    def _read(
        self, reply: dict[str, Any], request: Request, stop_ids: frozenset[int], troubles: Counter[str]
    ) -> list[int]:
        """The token ids of a reply, the end token included when it came."""
        server, model = self.server, reply.get("model", self.server.served["id"])
        if model not in server.names:
            raise UserError(
                f"{server.config.url} was asked for {server.served['id']!r} and answers as {model!r}. {MEND}"
            )
        try:
            choice, seen = reply["choices"][0], (reply.get("usage") or {}).get("prompt_tokens", len(request.prompt))
            ids, text, reason = choice.get("token_ids"), choice.get("text"), choice["finish_reason"]
            stopped_by = choice.get("stop_reason") or choice.get("matched_stop")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise Trouble("garbage", f"not a completion: {json.dumps(reply)[:300]}") from error
        if isinstance(seen, int) and seen != len(request.prompt):
            raise UserError(
                f"{server.config.url} counts {seen} tokens in a prompt of {len(request.prompt)}: it adds to the "
                "prompt, or serves another model than the recipe's target."
            )
        if reason not in ("stop", "length"):
            raise Trouble("broken off", f"finish_reason {reason!r}")
        if ids is None and isinstance(text, str):
            troubles["tokenised here"] += 1  # the server gave text alone
            ids = tokenise(server.tokenizer, text)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < server.vocab_size for i in ids):
            raise Trouble("garbage", f"no token ids of the target's vocabulary: {json.dumps(reply)[:300]}")
        if reason == "stop" and (not ids or ids[-1] not in stop_ids):
            known = isinstance(stopped_by, int) and stopped_by in stop_ids
            ids = [*ids, stopped_by if known else server.end_id]
        return ids[: request.limit]
