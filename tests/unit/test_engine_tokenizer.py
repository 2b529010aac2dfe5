"""Tokenizer, chat template and the growing conversation."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachesvc.engine.convert import ensure_model
from cachesvc.engine.errors import CheckpointError
from cachesvc.engine.tokenizer import ChatTokenizer, Conversation
from cachesvc.engine.transcript import load_transcript

pytestmark = pytest.mark.timeout(400)

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Naïve 東京 \t code:\n    x = {'a': 1}  # ✓"},
    {"role": "assistant", "content": "Yes."},
    {"role": "tool", "content": "{}"},
]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return ensure_model()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> ChatTokenizer:
    return ChatTokenizer(checkpoint)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """The tokenizer's files alone, to damage them."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint / name, tmp_path)
    return tmp_path


def test_template_and_tokens_are_those_of_transformers(checkpoint: Path, tokenizer: ChatTokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.render(CHAT)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.eos_token_id == theirs.eos_token_id


def test_turns_extend_each_other_and_never_tokenise_again(tokenizer: ChatTokenizer) -> None:
    conversation = Conversation(tokenizer)
    answers = [tokenizer.encode("Par") + tokenizer.encode("is"), tokenizer.encode("Rome"), []]
    assert answers[0] != tokenizer.encode("Paris")  # The model may cut words as the tokenizer never would.
    previous: list[int] = []
    for number, answer in enumerate(answers):
        prompt = conversation.ask([{"role": "user", "content": f"Question {number}?"}])
        assert prompt[: len(previous)] == previous
        assert len(prompt) > len(previous)
        conversation.answer(answer)
        previous = prompt + answer
    assert conversation.tokens == previous
    assert tokenizer.decode(previous).count("Question") == 3


def test_the_conversation_reads_as_the_template_would_write_it(tokenizer: ChatTokenizer) -> None:
    """With answers that tokenise back to themselves, the pieces must give the tokens of the whole."""
    conversation = Conversation(tokenizer)
    first, second = [{"role": "user", "content": "One?"}], [{"role": "user", "content": "Two?"}]
    conversation.ask(first)
    conversation.answer(tokenizer.encode("Yes."))
    whole = [*first, {"role": "assistant", "content": "Yes."}, *second]
    assert conversation.ask(second) == tokenizer.encode(tokenizer.render(whole))


def test_an_answer_that_ended_itself_is_not_ended_twice(tokenizer: ChatTokenizer) -> None:
    end = tokenizer.eos_token_id
    assert end is not None
    prompts = []
    for answer in (tokenizer.encode("Yes."), [*tokenizer.encode("Yes."), end]):
        conversation = Conversation(tokenizer)
        conversation.ask([{"role": "user", "content": "One?"}])
        conversation.answer(answer)
        prompts.append(conversation.ask([{"role": "user", "content": "Two?"}]))
    assert prompts[0] == prompts[1]


def test_a_template_that_rewrites_the_past_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    conversation = Conversation(ChatTokenizer(copy))
    conversation.ask([{"role": "user", "content": "One?"}])
    conversation.answer([5])
    with pytest.raises(CheckpointError, match="changes earlier messages"):
        conversation.ask([{"role": "user", "content": "Two?"}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ raise_exception('no tools here') }}", "refuses the messages: no tools here"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{% for %}", "is not valid"),
    ],
)
def test_templates_run_in_a_sandbox(copy: Path, template: str, message: str) -> None:
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=message):
        ChatTokenizer(copy).render(CHAT)


def test_the_template_may_lie_in_the_configuration(copy: Path, tokenizer: ChatTokenizer) -> None:
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert ChatTokenizer(copy).render(CHAT) == tokenizer.render(CHAT)


def test_missing_and_damaged_files_are_named(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        ChatTokenizer(copy)
    (copy / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        ChatTokenizer(copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        ChatTokenizer(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        ChatTokenizer(copy)


def test_the_transcript_is_a_long_agent_session(tokenizer: ChatTokenizer) -> None:
    turns = load_transcript().turns
    assert len(turns) >= 14
    assert turns[0][0]["role"] == "system"
    assert len(tokenizer.encode(turns[0][0]["content"])) >= 1400
    conversation = Conversation(tokenizer)
    for turn in turns:
        roles = [message["role"] for message in turn if message["role"] != "system"]
        assert roles[0] == "user"
        assert roles[1:] == ["assistant", "tool"] * (len(roles) // 2)
        assert len(roles) >= 3
        for message in turn:
            if message["role"] == "assistant":
                text = message["content"].removeprefix("<tool_call>").removesuffix("</tool_call>")
                assert set(json.loads(text)) == {"name", "arguments"}
        length = len(conversation.ask(turn))
        conversation.answer([100] * 32)
    assert 6500 <= length <= 8192 - 32


def test_the_engine_runs_without_transformers() -> None:
    code = (
        "import sys\n"
        "for name in ('transformers', 'gguf', 'accelerate'): sys.modules[name] = None\n"
        "import cachesvc.engine.demo, cachesvc.engine.__main__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
