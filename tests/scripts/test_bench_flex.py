"""FlexDraft's benches on a tiny shape: a training step beside its products, and both modes among the timed rounds."""

import pytest

from recipes.schema import UserError
from scripts import bench_decode, bench_flex

SMALL = ["shape=tiny", "rows=2", "length=24", "rounds=1", "warm=0", "device=cpu", "flex.anchors=3"]


@pytest.mark.parametrize("way", ["full", "lora", "layers"])
def test_a_step_stands_beside_its_products(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_flex.main([*SMALL, f"flex.parametrisation={way}", "flex.lora_rank=2"])
    assert found.keys() == {"masks", "products of masks", "step", "products of target"} and min(found.values()) > 0
    said = capsys.readouterr().out
    assert "6 groups of 16 in 3 layers" in said and "bare products over masks: 0." in said
    count = int(said.split(" trained parameters")[0].splitlines()[-1].replace(",", ""))
    assert count == {"full": 32 + 3 * (2 * 32 * 32 + 2 * 32 * 16), "lora": 32 + 3 * 2 * (6 * 32 + 2 * 16)}.get(
        way, count
    )


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(UserError, match="no such key: size"):
        bench_flex.main(["size=3"])


def test_both_modes_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    bench_decode.main(["shape=tiny", "context=16", "rounds=2", "device=cpu", "decoders=ar,flex,flex-parallel"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[0] for row in rows] == ["ar", "flex", "flex-parallel"] and all(float(row[1]) > 0 for row in rows)
