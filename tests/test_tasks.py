"""Tasks: the same items everywhere, disjoint splits, scores in [0, 1], errors that name the key."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from areal_hpc.config import ConfigError, DatasetConfig
from areal_hpc.tasks import Task, load, prompts
from areal_hpc.tasks.files import last_number

ARITHMETIC = DatasetConfig(size=1000, options={"digits": 2})
CHAIN_SUM = DatasetConfig(type="reasoning_gym", path="chain_sum", size=200, options={"min_digits": 1, "max_digits": 2})


def questions(task: Task) -> list[str]:
    return [task.item(i).prompt for i in range(len(task))]


@pytest.mark.parametrize("config", [ARITHMETIC, CHAIN_SUM], ids=lambda c: c.type)
def test_splits_are_disjoint_whatever_the_seeds(config: DatasetConfig) -> None:
    train = set(questions(load(config, 1, "train"))) | set(questions(load(config, 2, "train")))
    valid = set(questions(load(config, 1, "valid"))) | set(questions(load(config, 7, "valid")))
    assert train and valid and not train & valid


@pytest.mark.parametrize("config", [ARITHMETIC, CHAIN_SUM], ids=lambda c: c.type)
def test_items_are_the_same_in_another_process_and_order(config: DatasetConfig) -> None:
    code = (
        "import sys, json; from areal_hpc.config import DatasetConfig; from areal_hpc.tasks import load\n"
        "config = DatasetConfig(**json.loads(sys.argv[1])); task = load(config, 3, 'train')\n"
        "print(task.item(9).prompt, task.item(2).prompt, task.fingerprint(), sep='|')"
    )
    arguments = json.dumps({"type": config.type, "path": config.path, "size": config.size, "options": config.options})
    out = subprocess.run([sys.executable, "-c", code, arguments], capture_output=True, text=True, check=True).stdout
    task = load(config, 3, "train")
    assert out.strip() == "|".join([task.item(9).prompt, task.item(2).prompt, task.fingerprint()])
    assert load(config, 4, "train").fingerprint() != task.fingerprint()
    assert load(config, 3, "valid").fingerprint() != task.fingerprint()


def test_arithmetic_answers_and_scores() -> None:
    task = load(DatasetConfig(size=300, options={"digits": 3, "operators": "+-*"}), 5, "train")
    for i in range(len(task)):
        item = task.item(i)
        assert item.answer == str(eval(item.prompt.rstrip("=")))
        assert task.score(item, f" {item.answer}\n") == 1
        assert task.score(item, item.answer + "0") == 0


def test_a_thousand_different_held_out_questions_of_two_digits() -> None:
    assert len(set(questions(load(ARITHMETIC, 1, "valid")))) == 1000


def test_reasoning_gym_scores_as_the_package_does() -> None:
    task = load(CHAIN_SUM, 1, "train")
    item = task.item(17)
    assert task.score(item, item.answer) == 1
    assert task.score(item, f"I add them up. <answer>{item.answer}</answer> Done.") == 1
    assert 0 < task.score(item, f"it is {item.answer}") < 1  # the package's credit for an answer in a longer text
    assert task.score(item, "no idea") == 0


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    rows = [{"question": "1+1", "value": "2"}, {"question": "Ünï + 0", "value": "1,024"}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    options = {"prompt_column": "question", "answer_column": "value", "score": "number"}
    task = load(DatasetConfig(type="file", path=str(path), options=options), 1, "train")
    assert questions(task) == ["1+1", "Ünï + 0"]
    assert task.score(task.item(1), "That makes 1024.0.") == 1
    assert task.score(task.item(1), "1024 or 7") == 0
    before = task.fingerprint()
    path.write_text(path.read_text().replace("1+1", "1+ 1"))
    assert load(DatasetConfig(type="file", path=str(path), options=options), 1, "train").fingerprint() != before


@pytest.mark.parametrize(
    ("text", "value"), [("a -3.50 b", Decimal("-3.5")), ("1,000,000 apples", Decimal(1_000_000)), ("none", None)]
)
def test_last_number(text: str, value: Decimal | None) -> None:
    assert last_number(text) == value


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DatasetConfig(type="arithmetics"), "train_dataset.type=arithmetics: expected one of arithmetic"),
        (DatasetConfig(options={"digit": 2}), "train_dataset.options.digit: unknown to type arithmetic"),
        (DatasetConfig(options={"digits": "2"}), "train_dataset.options.digits=2: expected a int"),
        (DatasetConfig(options={"digits": 0}), "train_dataset.options.digits=0: expected 1 to 9"),
        (DatasetConfig(options={"operators": "+/"}), "train_dataset.options.operators=+/"),
        (DatasetConfig(type="reasoning_gym", path="chain_sums"), "near it are chain_sum"),
        (DatasetConfig(type="reasoning_gym", path="chain_sum", options={"terms": 2}), "train_dataset.options="),
        (DatasetConfig(type="file", path="nowhere.jsonl"), "train_dataset.path=nowhere.jsonl"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_name_the_key(config: DatasetConfig, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(config, 1, "train")
    assert says in str(error.value)


def test_too_few_held_out_questions() -> None:
    with pytest.raises(ConfigError, match=r"valid_dataset.size=90: only \d+ held-out questions found with digits=1"):
        load(DatasetConfig(size=90, options={"digits": 1}), 1, "valid")


class Tokenizer:
    """A character tokenizer with the two calls that `encode` makes."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>", False)


def test_prompts() -> None:
    item = load(ARITHMETIC, 1, "train").item(0)
    assert prompts.encode(Tokenizer(None), item, "ignored") == [ord(c) for c in item.prompt]
    chat = "".join(map(chr, prompts.encode(Tokenizer("template"), item, "Be brief.")))
    assert chat == f"<system>Be brief.<user>{item.prompt}<assistant>"


def test_a_missing_tokenizer_is_a_matter_of_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_path=.*nowhere: no such directory"):
        prompts.load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"tokenizer_path=.*: no tokenizer that can be loaded"):
        prompts.load_tokenizer(str(tmp_path))
