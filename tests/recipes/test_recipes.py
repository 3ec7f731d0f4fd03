"""Recipes: what resolves, what is refused, and in which words."""

import dataclasses
from pathlib import Path

import pytest

from recipes import cli
from recipes.loading import known_keys, load, recipe_names, save
from recipes.schema import Recipe, UserError

DELIVERED = ["llama3", "qwen3", "qwen3-0.6b", "smollm2", "smollm2-eagle31", "smollm2-gpu"]


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        load(list(argv))
    return str(caught.value)


def recipe_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return f"recipe={path}"


def test_the_recipes_are_the_documented_ones() -> None:
    assert recipe_names() == DELIVERED


@pytest.mark.parametrize("name", DELIVERED)
def test_every_recipe_resolves_and_names_target_and_data(name: str) -> None:
    recipe = load([f"recipe={name}"])
    assert recipe.recipe == name
    assert recipe.target.path
    assert recipe.data.sources
    assert recipe.data.max_length <= recipe.train.micro_batch_tokens <= recipe.train.batch_tokens
    assert recipe.data.answer_tokens < recipe.data.max_length


@pytest.mark.parametrize("name", DELIVERED)
def test_what_is_saved_loads_as_the_same_tree(name: str, tmp_path: Path) -> None:
    recipe = load(
        [f"recipe={name}", "train.learning_rate=3e-4", "target.taps=[1,4,9]", "data.sources.more.path=a.jsonl"]
    )
    save(recipe, tmp_path / "recipe.yaml")
    again = load([f"recipe={tmp_path / 'recipe.yaml'}"])
    assert dataclasses.replace(again, recipe=recipe.recipe) == recipe
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"]


def test_overrides_are_typed_and_the_last_one_wins() -> None:
    recipe = load(
        [
            "recipe=smollm2",
            "train.epochs=3",
            "train.epochs=4",
            "eval.gates=[0,0,0]",
            "target.template_args.thinking=false",
        ]
    )
    assert recipe.train.epochs == 4
    assert recipe.eval.gates == [0.0, 0.0, 0.0]
    assert recipe.target.template_args == {"thinking": False}


def test_a_source_can_be_added_from_the_command_line() -> None:
    recipe = load(["recipe=smollm2", "data.sources.mine.kind=file", "data.sources.mine.path=p.jsonl"])
    assert {"chat", "mine"} <= set(recipe.data.sources)
    assert recipe.data.sources["mine"].path == "p.jsonl"


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("train.epoch=2", "train.epochs"),
        ("train.learning-rate=1", "train.learning_rate"),
        ("epochs=2", "train.epochs"),
        ("data.sources.chat.kid=self", "data.sources.chat.kind"),
        ("drafer=x", "drafter"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(given: str, nearest: str, tmp_path: Path) -> None:
    message = refusal("recipe=smollm2", given)
    assert message.startswith(f"the command line: unknown key {given.split('=')[0]!r}")
    assert f"Did you mean {nearest!r}?" in message

    from omegaconf import OmegaConf

    argument = recipe_file(tmp_path, OmegaConf.to_yaml(OmegaConf.from_dotlist([given])))
    message = refusal(argument)
    assert "mine.yaml: unknown key" in message
    assert f"Did you mean {nearest!r}?" in message


def test_an_unknown_group_is_refused_with_the_nearest_known_one() -> None:
    assert "unknown key 'evaluate'. Did you mean 'eval'?" in refusal("recipe=smollm2", "evaluate.depth=2")


def test_an_unknown_recipe_names_the_nearest_and_all() -> None:
    message = refusal("recipe=smolm2")
    assert "Did you mean 'smollm2'?" in message
    assert all(name in message for name in DELIVERED)
    assert "no recipe=NAME" in refusal("train.epochs=2")
    assert "not of the form key=value" in refusal("recipe=smollm2", "--epochs")


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("train.epochs=two", "train.epochs"),
        ("train.learning_rate=fast", "train.learning_rate"),
        ("eval.tune=perhaps", "eval.tune"),
        ("eval.gates=0.5", "eval.gates"),
        ("train=3", "train"),
        ("data.sources.chat=3", "data.sources.chat"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_key(given: str, key: str) -> None:
    message = refusal("recipe=smollm2", given)
    assert message.startswith("the command line: key ")
    assert key in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("text", ["yes", "1e3", "null", "a b", "a: b", "", "[a]", "{a: b}"])
def test_text_is_taken_as_it_was_typed(text: str) -> None:
    recipe = load(["recipe=smollm2", f"out={text}", f"data.sources.chat.path={text}"])
    assert (recipe.out, recipe.data.sources["chat"].path) == (text, text)


@pytest.mark.parametrize(
    "given",
    [
        "eval.gates=[0.1,0.2]",
        "eval.gates=[0.1,0.2,1.5]",
        "eval.decoders=[ar,tree]",
        "eval.decoders=[]",
        "eval.top_p=0",
        "eval.temperature=-1",
        "eval.matrix=warm",
        "eval.nodes=0",
        "train.betas=[0.9]",
        "train.warmup=1",
        "train.learning_rate=0",
        "train.tracker=mlflow",
        "target.dtype=int8",
        "device=tpu",
        "decoder=medusa",
        "data.temperatures=[]",
        "data.max_length=0",
        "data.sources.chat.kind=web",
        "data.sources.chat.kind=file",
        "data.sources.chat.rows=0",
        "data.sources.chat.openings=[]",
        "eagle.step_decay=0",
        "eagle.unroll_steps=0",
        "eagle.init_vocab=mine",
        "seed=-1",
        "seed=9223372036854775808",
        "train.learning_rate=inf",
        "train.min_lr=nan",
    ],
)
def test_a_value_that_no_command_could_honour_is_refused_by_key(given: str) -> None:
    key = "data.sources.chat.path" if given == "data.sources.chat.kind=file" else given.split("=")[0]
    assert any(
        line.startswith(f"  {key}=") and "must be" in line for line in refusal("recipe=smollm2", given).splitlines()
    )


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("decoder=graf", "graft"),
        ("eval.decoders=[ar,eagel]", "eagle"),
        ("verifier=travesal", "traversal"),
        ("eval.verifier=blok", "block"),
        ("data.sources.chat.kind=files", "file"),
        ("target.dtype=bfloat", "bfloat16"),
    ],
)
def test_an_unknown_choice_is_refused_with_all_choices_and_the_nearest(given: str, nearest: str) -> None:
    message = refusal("recipe=smollm2", given)
    assert f"Did you mean {nearest!r}?" in message
    assert " of , " not in message and f" {nearest}," in message


@pytest.mark.parametrize("given", ["verifier=traversl", "eval.verifier=traversl"])
def test_a_wrong_rule_is_refused_once_with_the_known_ones(given: str) -> None:
    lines = refusal("recipe=smollm2", given).splitlines()
    assert len(lines) == 2 and lines[1].startswith("  eval.verifier='traversl': must be one of auto, match, tree")
    assert "one of ar, chain" in refusal("recipe=smollm2", "decoder=medusa")


def test_the_taps_have_one_sort_of_norm() -> None:
    message = refusal("recipe=smollm2-eagle31", "eagle.norm_before_fc=true")
    assert "eagle.norm_before_fc=True: must be false beside eagle.fc_norm" in message


def test_eagle_3_1_differs_from_the_default_recipe_by_its_flags_alone() -> None:
    recipe, plain = load(["recipe=smollm2-eagle31"]), load(["recipe=smollm2"])
    assert recipe.eagle == dataclasses.replace(plain.eagle, fc_norm=True, norm_output=True)
    assert dataclasses.replace(recipe, recipe=plain.recipe, eagle=plain.eagle) == plain


def test_all_broken_values_are_named_at_once() -> None:
    message = refusal("recipe=smollm2", "eval.top_p=2", "train.epochs=0")
    assert "eval.top_p=2.0" in message
    assert "train.epochs=0" in message


@pytest.mark.parametrize(
    "text", ["target: [1, 2", "- a\n- b\n", "just words", "\ttarget: 3", "target: {path: x, path: y", "\x00"]
)
def test_a_recipe_that_is_not_a_yaml_mapping_is_refused_by_file(text: str, tmp_path: Path) -> None:
    assert "mine.yaml" in refusal(recipe_file(tmp_path, text))


def test_bytes_that_are_not_text_are_refused_by_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\xfatarget")
    assert "mine.yaml" in refusal(f"recipe={path}")


def test_the_command_line_is_blamed_for_what_was_typed_there() -> None:
    assert refusal("recipe=smollm2", "eval.gates=[1,").startswith("the command line")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("eval.nodes=[1,2]", "'eval.nodes' takes one value, no list"),
        ("eval.gates=3", "'eval.gates' is a list: write it as eval.gates=[a,b]"),
        ("eval.gates={a: 1}", "a list and a group were mixed up"),
        ("target.template_args=[1]", "a list and a group were mixed up"),
    ],
)
def test_a_list_and_a_value_are_told_apart(given: str, words: str) -> None:
    assert words in refusal("recipe=smollm2", given)


def test_known_keys_are_the_leaves_and_groups_of_the_tree() -> None:
    keys = known_keys()
    assert {"target", "target.path", "eval.gates", "train.betas", "dry_run"} <= set(keys)
    assert len(keys) == len(set(keys))


def exit_of(main: object, argv: list[str]) -> int:
    assert callable(main)
    with pytest.raises(SystemExit) as stopped:
        cli.entry(main, argv)
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_a_mistake_is_one_screen_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def denied(recipe: Recipe) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere/runs")

    def mistaken(recipe: Recipe) -> None:
        raise UserError("the file a.jsonl, line 3: broken. Mend it.")

    assert exit_of(mistaken, ["recipe=smollm2"]) == 2
    assert capsys.readouterr().err == "error: the file a.jsonl, line 3: broken. Mend it.\n"
    assert exit_of(denied, ["recipe=smollm2"]) == 2
    assert "/somewhere/runs" in capsys.readouterr().err
    assert exit_of(mistaken, ["recipe=nothing"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) < 24


def test_ctrl_c_is_one_line_and_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(recipe: Recipe) -> None:
        raise KeyboardInterrupt

    assert exit_of(stopped, ["recipe=smollm2"]) == 130
    assert capsys.readouterr().err.splitlines() == [
        "interrupted: what is whole was kept, and the same command again goes on from there"
    ]


def test_help_lists_recipes_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    def never(recipe: Recipe) -> None:
        raise AssertionError

    cli.entry(never, ["--help"])
    shown = capsys.readouterr().out
    assert "smollm2" in shown
    assert "chain_length" in shown
    assert "data.sources.NAME.{kind, path," in shown
