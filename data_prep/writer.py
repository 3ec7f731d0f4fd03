"""Whoever writes as the target, questions and answers alike: this machine (`local`) or a server (`server`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from data_prep.dialogue import Dialogue
from recipes.files import sha256_json

Begin = Callable[[range], list[Dialogue]]  # the dialogues of a shard, from the places that it spans
Done = Callable[[int, list[Dialogue], Mapping[str, int]], None]  # (shard, its dialogues, troubles that were mended)


@dataclass(frozen=True)
class Request:
    """Token ids to go on from, at most `limit` of them, the end token included."""

    prompt: list[int]
    limit: int
    temperature: float


class Writer(Protocol):
    def describe(self) -> dict[str, Any]:
        """For the manifest: what it is, and the schedule it works on."""

    def follow(self, manifest: Mapping[str, Any]) -> None:
        """Work on the schedule of an earlier run."""

    def write(self, requests: list[Request], stop_ids: frozenset[int], seed: int, label: str) -> list[list[int] | None]:
        """The target's continuations, the end token included when it came; None where it could not be had."""

    def answer(self, shards: Mapping[int, range], begin: Begin, seed: int, done: Done) -> None:
        """Lead every dialogue to its end, shard by shard; `done` is called once for each shard."""

    def logprobs(self, rows: list[tuple[list[int], int]]) -> list[float] | None:
        """Mean log-probability (nats, temperature 1) of each row's tokens from an index on; None if not to be had."""


def noise_seed(*parts: object) -> int:
    """A seed that belongs to these parts (the recipe's seed, a shard, a turn) and to no others."""
    return int(sha256_json(list(parts))[:12], 16)
