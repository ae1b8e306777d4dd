"""The tokenizer: ids, text, chat templates and the mask of the assistant's text, against transformers if it is
installed, and against committed text everywhere.
"""

import datetime
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import zoo
from zoo.text import templates, trial
from zoo.text.tokenizer import Tokenizer


SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# In the manner of Llama 2: no generation prompt, the system message inside the first instruction.
INST = """\
{% if messages[0]['role'] == 'system' %}
    {% set system, turns = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n', messages[1:] %}
{% else %}
    {% set system, turns = '', messages %}
{% endif %}
{% for message in turns %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {% elif message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' -}}
    {% else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token -}}
    {% endif %}
{% endfor %}
"""
# In the manner of Llama 3: headers, a date, tools as JSON, trimmed contents.
HEADERS = """\
{{- bos_token }}{{- "Today: " + strftime_now("%Y") + "\\n" }}
{%- if tools is defined and tools %}
    {%- for tool in tools %}{{- tool | tojson(indent=2) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "skip" %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message['role'] + "\\n\\n" + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n\\n" }}{%- endif %}
"""
# Marks the content, but not the end token, of the assistant's turns; a set inside the mark stays inside.
MARKED = """\
{%- set name = "outer" %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{% set name = "inner" %}{{ message.content }}{%- endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' if name == 'outer' else 'leaked' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# In the manner of Qwen3.5: contents of parts, the last question sought from the end, calls as tags, and reasoning kept
# after it. The prompt opens <think>, or closes it at once for no reasoning.
STEPS = """\
{%- macro text(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}{{- part.text if 'text' in part else raise_exception('a picture') }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set ns = namespace(seek=true, last=0) %}
{%- for message in messages[::-1] %}
    {%- set content = text(message.content) | trim %}
    {%- if ns.seek and message.role == 'user' and not content.startswith('<tool_response>') %}
        {%- set ns.seek = false %}{%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.seek %}{{- raise_exception('no question') }}{%- endif %}
{%- if tools and tools is not mapping %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson ~ '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = text(message.content) | trim %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' ~ reasoning | trim ~ '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '<function=' ~ call.name ~ '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {%- set value = value | string if value is string else value | tojson | safe %}
                {{- '<parameter=' ~ name ~ '>' ~ value ~ '</parameter>\\n' }}
            {%- endfor %}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>' ~ content ~ '</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' ~ ('' if enable_thinking | default(true) else '\\n</think>\\n\\n') }}
{%- endif %}
"""
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "<b>What's 2 & 2?</b>"},
    {"role": "assistant", "content": "4, été\n\nyes"},
    {"role": "user", "content": "And 3?"},
    {"role": "assistant", "content": " 6 "},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {}}}]


def folder(path: pathlib.Path, template: str | list | None = CHATML, around: str = "$A", **config) -> pathlib.Path:
    """Writes a folder in Hub layout with a byte-level tokenizer of 300-odd tokens."""
    path.mkdir(exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=SPECIAL, initial_alphabet=alphabet, vocab_size=320, show_progress=False
    )
    tokenizer.train_from_iterator(["the user and the assistant said yes, What's the answer?"] * 4, trainer)
    bos_and_eos = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos_and_eos])
    tokenizer.enable_truncation(4)  # a saved file may contain truncation, which must have no effect
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    if template:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def runs(tokenizer: Tokenizer, ids: list[int], mask: list[int]) -> list[tuple[int, str]]:
    """Returns mask and text of each longest run of tokens with equal mask; every token is in exactly one run."""
    assert len(ids) == len(mask)
    starts = [i for i in range(len(ids)) if i == 0 or mask[i] != mask[i - 1]]
    pairs = zip(starts, [*starts[1:], len(ids)], strict=True)
    return [(mask[a], tokenizer.decode(ids[a:b], special=True)) for a, b in pairs]


def test_encode_decode_and_stream(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", around="<s> $A"))
    text = "Das heißt: été, 日本 🎉\n\n the end"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos == 0 and tokenizer.encode(text, special=False) == ids[1:] and len(ids) > 20
    assert tokenizer.decode(ids) == text and tokenizer.decode(ids, special=True) == "<s>" + text
    stream = tokenizer.stream(ids[:5])
    pushed = [stream.push(i) for i in ids[5:]]
    assert tokenizer.decode(ids[:5]) + "".join(pushed) == text
    assert "" in pushed and "🎉" in pushed  # no half characters
    file = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
    assert tokenizer.vocab_size == 1 + max(file["model"]["vocab"].values()) > 7 + 256


def test_the_end_tokens_come_from_the_most_specific_file(tmp_path):
    path = folder(tmp_path / "a", pad_token={"content": "<|endoftext|>"}, add_bos_token=True)
    assert (Tokenizer(path).eos, Tokenizer(path).pad, Tokenizer(path).bos) == ((1, 3), 4, 0)
    (path / "config.json").write_text('{"eos_token_id": 3}')
    assert Tokenizer(path).eos == (3,)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert Tokenizer(path).eos == (3, 4)
    bare = folder(tmp_path / "b", None, bos_token=None, eos_token=None)
    assert (Tokenizer(bare).eos, Tokenizer(bare).bos, Tokenizer(bare).pad) == ((), None, None)
    (bare / "special_tokens_map.json").write_text('{"pad_token": "<s>"}')
    assert Tokenizer(bare).pad == 0


@pytest.mark.parametrize(
    "template, ends",
    [
        (CHATML, (4, 3)),
        (MARKED, (4, 3)),
        (HEADERS, (4, 3)),
        (INST, (4, 1)),
        (None, (4,)),
        ("{{ messages[0].content }}<|im_end|> {{ messages[1].content }} yes", (4,)),  # no token there
        ("{{ raise_exception('never') }}", (4,)),
        ("{% for %}", (4,)),
    ],
)
def test_the_token_that_ends_a_turn_ends_a_generation(tmp_path, template, ends):
    """Files of base models name only the token that ends a text."""
    path = folder(tmp_path / "a", template)
    (path / "generation_config.json").write_text('{"eos_token_id": 4, "do_sample": false}')
    assert Tokenizer(path).eos == ends
    exported = tmp_path / "exported"
    shutil.copytree(path, exported)
    Tokenizer(path).save_changes(exported)
    written = json.loads((exported / "generation_config.json").read_text())
    assert written == {"eos_token_id": 4 if ends == (4,) else list(ends), "do_sample": False}
    assert Tokenizer(exported).eos == ends


def test_where_the_template_comes_from(tmp_path):
    path = folder(tmp_path / "a", [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}])
    assert Tokenizer(path).chat_template == "plain"
    (path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer(path).render(CHAT) == "file"


def test_another_template(tmp_path):
    """A template may come from a file or another model. Exports have it, and so have models with merged adapters."""
    own = folder(tmp_path / "own", INST)
    other = folder(tmp_path / "other", MARKED)
    (tmp_path / "mine.jinja").write_text(HEADERS)
    exported = tmp_path / "exported"
    exported.mkdir()
    zoo.tokenizer(own).save_changes(exported)
    assert not (exported / "chat_template.jinja").exists()
    for given, text in ((other, MARKED), (tmp_path / "mine.jinja", HEADERS)):
        tokenizer = zoo.tokenizer(own, chat_template=given)
        assert tokenizer.chat_template == text and tokenizer.eos == (*zoo.tokenizer(own).eos[:1], 3)
        tokenizer.save_changes(exported)
        assert (exported / "chat_template.jinja").read_text() == text
        assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": list(tokenizer.eos)}
    assert zoo.peft.template_of(exported) == exported / "chat_template.jinja"
    assert zoo.peft.template_of(own) is None and zoo.peft.template_of(None) is None


def test_another_template_that_does_not_fit(tmp_path):
    own = folder(tmp_path / "own", INST)
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}")
    with pytest.warns(UserWarning, match=r"mine.jinja writes '<\|end\|>' after an answer, which is no token of .*own"):
        zoo.tokenizer(own, chat_template=tmp_path / "mine.jinja")
    with pytest.raises(ValueError, match=r"none has no chat template: name another model, or a .jinja file"):
        zoo.tokenizer(own, chat_template=folder(tmp_path / "none", None))
    with pytest.raises(FileNotFoundError, match=r"absent.jinja"):
        zoo.tokenizer(own, chat_template="absent.jinja")


def test_rendered_text(tmp_path):
    assert Tokenizer(folder(tmp_path / "a")).render(CHAT[:2], add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<b>What's 2 & 2?</b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert Tokenizer(folder(tmp_path / "b", INST)).render(CHAT) == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\n<b>What's 2 & 2?</b> [/INST] 4, été\n\nyes </s>"
        "<s>[INST] And 3? [/INST] 6 </s>"
    )
    text = Tokenizer(folder(tmp_path / "c", HEADERS)).render([{"role": "skip"}, *CHAT[3:]], tools=TOOLS)
    assert re.sub(r"\d{4}", "YYYY", text) == (
        '<s>Today: YYYY\n{\n  "type": "function",\n  "function": {\n    "name": "add",\n'
        '    "description": "a < b & \'c\' é",\n    "parameters": {}\n  }\n}'
        "<|im_start|>user\n\nAnd 3?<|im_end|><|im_start|>assistant\n\n6<|im_end|>"
    )
    assert Tokenizer(folder(tmp_path / "d", MARKED)).render(CHAT[3:]) == (
        "<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n 6 <|im_end|>\n"
    )
    # Null values equal absent keys, and the caller's variables reach the template.
    template = "{{ 'x' if messages[0].content is defined else 'absent' }}{{ mood }}"
    assert Tokenizer(folder(tmp_path / "e", template)).render([{"role": "a", "content": None}], mood="!") == "absent!"


@pytest.mark.live
@pytest.mark.parametrize(
    "template",
    [CHATML, INST, HEADERS, MARKED, STEPS, "qwen3"],
    ids=["chatml", "inst", "headers", "marked", "steps", "qwen3"],
)
def test_text_ids_and_masks_equal_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    if template == "qwen3":
        template = qwen3_template()
    path = folder(tmp_path / "a", template, around="<s> $A")
    ours, theirs = Tokenizer(path), transformers.AutoTokenizer.from_pretrained(path)
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n7", "tool_calls": None}
    chats = [CHAT, CHAT[1:], CHAT[:2], CHAT[1:4], [CHAT[1], thinking, CHAT[3], thinking]]
    for chat in chats:
        for options in {}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"enable_thinking": False}:
            text = theirs.apply_chat_template(chat, tokenize=False, **options)
            assert ours.render(chat, **options) == text
            assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text) == theirs(text)["input_ids"]
        if template == MARKED:
            # transformers loses a turn with white space at its ends, and omits the end tokens, as this template does.
            chat = [message | {"content": message["content"].strip()} for message in chat]
            them = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
            ((ids, mask),) = ours.encode_chat(chat)
            assert ids == them["input_ids"]
            end = theirs.convert_tokens_to_ids("<|im_end|>")
            assert [int(m and i != end) for i, m in zip(ids, mask, strict=True)] == them["assistant_masks"]


def qwen3_template() -> str:
    file = SHARED / "tokenizers" / "qwen3.tokenizer_config.json"
    if not file.exists():
        pytest.skip(f"needs {file}")
    return json.loads(file.read_text())["chat_template"]


def test_mask_by_prefixes(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", eos_token="<|im_end|>"))
    ((ids, mask),) = tokenizer.encode_chat(CHAT)
    assert runs(tokenizer, ids, mask) == [
        (
            0,
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<b>What's 2 & 2?</b><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (1, "4, été\n\nyes<|im_end|>"),
        (0, "\n<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n"),
        (1, " 6 <|im_end|>"),
        (0, "\n"),
    ]
    assert ids == tokenizer.encode(tokenizer.render(CHAT), special=False)
    # The given part is not learnt, even if the assistant wrote it.
    assert [text for on, text in runs(tokenizer, *tokenizer.encode_chat(CHAT, given=4)[0]) if on] == [" 6 <|im_end|>"]
    assert not any(tokenizer.encode_chat(CHAT[:2])[0][1])


def test_mask_of_templates_without_a_generation_prompt(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", INST))
    assert runs(tokenizer, *tokenizer.encode_chat(CHAT)[0]) == [
        (0, "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\n<b>What's 2 & 2?</b> [/INST]"),
        (1, " 4, été\n\nyes </s>"),
        (0, "<s>[INST] And 3? [/INST]"),
        (1, " 6 </s>"),
    ]
    tokenizer = Tokenizer(folder(tmp_path / "b", HEADERS))
    assert [text for on, text in runs(tokenizer, *tokenizer.encode_chat(CHAT)[0]) if on] == [
        "4, été\n\nyes<|im_end|>",
        "6<|im_end|>",
    ]


def test_mask_by_marks(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", MARKED, eos_token="<|im_end|>"))
    ((ids, mask),) = tokenizer.encode_chat(CHAT)
    assert tokenizer.decode(ids, special=True) == tokenizer.render(CHAT)
    expected = ["4, été\n\nyes<|im_end|>", " 6 <|im_end|>"]
    assert [text for on, text in runs(tokenizer, ids, mask) if on] == expected
    assert [text for on, text in runs(tokenizer, *tokenizer.encode_chat(CHAT[:4], given=1)[0]) if on] == expected[:1]
    assert [text for on, text in runs(tokenizer, *tokenizer.encode_chat(CHAT, given=4)[0]) if on] == expected[1:]


def test_mask_of_white_space_and_split_characters(tmp_path):
    """White space has an empty range, a character several tokens, and a normalizer makes one character of two."""
    tokenizer = Tokenizer(folder(tmp_path / "a"))
    chat = [{"role": "user", "content": " \n e\u0301"}, {"role": "assistant", "content": "\n\n  🎉 e\u0301\n\t"}]
    assert runs(tokenizer, *tokenizer.encode_chat(chat)[0]) == [
        (0, "<|im_start|>user\n \n \u00e9<|im_end|>\n<|im_start|>assistant\n"),
        (1, "\n\n  🎉 \u00e9\n\t<|im_end|>"),
        (0, "\n"),
    ]


def test_mask_of_spans_leaves_added_tokens_out(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", around="<s> $A </s>"))
    text = "the answer yes"
    ids, mask = tokenizer.encode_spans(text, [(0, 3), (10, len(text))])
    assert runs(tokenizer, ids, mask) == [(0, "<s>"), (1, "the"), (0, " answer"), (1, " yes"), (0, "</s>")]
    assert tokenizer.encode_spans("", [(0, 0)]) == ([0, 1], [0, 0])


def written(tokenizer: Tokenizer, chat, **options) -> list[list[str]]:
    """Returns the learnt texts in each example of a chat."""
    return [[text for on, text in runs(tokenizer, *each) if on] for each in tokenizer.encode_chat(chat, **options)]


THOUGHT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6", "reasoning_content": "easy"},
]


def test_qwen3_drops_earlier_reasoning_and_each_answer_is_learnt_with_its_own(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", qwen3_template(), eos_token="<|im_end|>"))
    ask, asked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>user\n3+3?<|im_end|>\n"
    first, last = tokenizer.encode_chat(THOUGHT)
    assert runs(tokenizer, *first) == [(0, ask), (1, "<think>\nhm\n</think>\n\n4<|im_end|>")]
    assert runs(tokenizer, *last) == [
        (0, ask + "4<|im_end|>\n" + asked + "<|im_start|>assistant\n"),
        (1, "<think>\neasy\n</think>\n\n6<|im_end|>"),
        (0, "\n"),
    ]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3}}}]}
    work = [THOUGHT[0], call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>'
    none, four = "<think>\n\n</think>\n\n", "<think>\n\n</think>\n\nfour<|im_end|>"
    assert written(tokenizer, work, tools=TOOLS) == [[none + called], [four]]
    # Reasoning before a tool's answer is kept when the tool has answered, and dropped when the user speaks again.
    call["reasoning_content"] = "use the tool"
    called = "<think>\nuse the tool\n</think>\n\n" + called
    assert written(tokenizer, work) == [[called, four]]
    assert written(tokenizer, [*work, *THOUGHT[2:]]) == [[called, four], ["<think>\neasy\n</think>\n\n6<|im_end|>"]]
    assert written(tokenizer, [*THOUGHT[:2], THOUGHT[3]]) == [
        ["<think>\nhm\n</think>\n\n4<|im_end|>", "<think>\neasy\n</think>\n\n6<|im_end|>"]
    ]


@pytest.mark.parametrize("thinks", [True, False])
def test_qwen3_5_keeps_reasoning_after_the_last_question(tmp_path, thinks):
    """The prompt opens <think>. Small models' prompts have an empty block there, but an answer with reasoning is learnt
    with it.
    """
    template = STEPS if thinks else STEPS.replace("default(true)", "default(false)")
    tokenizer = Tokenizer(folder(tmp_path / "a", template, eos_token="<|im_end|>"))
    call = {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": []}
    call["tool_calls"] = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": ["x"]}}}]
    parts = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}
    said = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\nadd\n</think>\n\n<function=add>\n"
    said += '<parameter=a>3</parameter>\n<parameter=b>["x"]</parameter>\n<|im_end|>\n'
    said += "<|im_start|>user\n<tool_response>4</tool_response>\n<tool_response>5</tool_response><|im_end|>\n"
    tools = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    assert tokenizer.render([parts, call, *tools]) == said
    opening = "" if thinks else "<think>\n"
    called, four = said.partition("<think>\n")[2].partition("\n<|im_start|>")[0], "hm\n</think>\n\n4<|im_end|>"
    assert written(tokenizer, [parts, call, *tools, THOUGHT[1]]) == [[opening + called, opening + four]]
    first, last = tokenizer.encode_chat(THOUGHT)
    prompt = OPENED if opening else OPENED + "<think>\n"
    assert runs(tokenizer, *first) == [(0, QUESTION + prompt), (1, opening + four)]
    assert runs(tokenizer, *last)[1] == (1, opening + "easy\n</think>\n\n6<|im_end|>")
    plain = [THOUGHT[0], {"role": "assistant", "content": "4"}]
    assert written(tokenizer, plain) == [["\n</think>\n\n4<|im_end|>" if thinks else "4<|im_end|>"]]
    with pytest.raises(ValueError, match="refuses the messages: no question"):
        tokenizer.render(plain[1:])


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINK = PROMPT.replace("assistant\n", "assistant\n<think>\n")
DROPPED = TURNS.replace("m.content", "m.content.split('</think>')[-1]")
QUESTION, OPENED = "<|im_start|>user\n2+2?<|im_end|>\n", "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template, examples",
    [
        (  # another end, as gpt-oss has
            TURNS.replace("<|im_end|>", "{{ '</s>' if loop.last and loop.length > 1 else '<|im_end|>' }}") + PROMPT,
            [("<|im_start|>user\nWell?<|im_end|>\n" + OPENED, "x</s>")],
        ),
        (
            "{{ messages[-1].role }}\n" + TURNS + PROMPT,
            [("user\n<|im_start|>user\nWell?<|im_end|>\n" + OPENED, "x<|im_end|>")],
        ),
        (
            "{{ messages | length }}\n" + TURNS + PROMPT,
            [("1\n<|im_start|>user\nWell?<|im_end|>\n" + OPENED, "x<|im_end|>")],
        ),
    ],
)
def test_a_turn_that_a_template_rewrites_is_learnt_as_the_last(tmp_path, template, examples):
    tokenizer = Tokenizer(folder(tmp_path / "a", template))
    chat = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "x"}, CHAT[0]]
    assert [[text for _, text in runs(tokenizer, *each)] for each in tokenizer.encode_chat(chat)] == [
        *map(list, examples)
    ]


@pytest.mark.parametrize("opens", [True, False])
def test_reasoning_that_a_template_drops_is_learnt(tmp_path, opens):
    """DeepSeek R1's template drops it from earlier turns. Its prompt opens <think>; its first version's does not."""
    tokenizer = Tokenizer(folder(tmp_path / "a", DROPPED + (THINK if opens else PROMPT)))
    think = OPENED + "<think>\n" if opens else OPENED
    hm, easy = ("hm\n</think>\n\n4<|im_end|>", "easy\n</think>\n\n6<|im_end|>")
    if not opens:
        hm, easy = "<think>\n" + hm, "<think>\n" + easy
    first, last = tokenizer.encode_chat(THOUGHT)
    assert runs(tokenizer, *first) == [(0, QUESTION + think), (1, hm)]
    said = QUESTION + OPENED + "\n\n4<|im_end|>\n" + QUESTION.replace("2+2", "3+3")
    assert runs(tokenizer, *last) == [(0, said + think), (1, easy)]
    plain = [THOUGHT[0], {"role": "assistant", "content": "4"}]
    assert written(tokenizer, plain) == [["\n</think>\n\n4<|im_end|>" if opens else "4<|im_end|>"]]


# In the manner of Qwen3: other roles, other contents, and all further fields of a message are dropped.
DROPPING = """\
{%- for m in messages %}{% set content = m.content if m.content is string else '' %}
    {%- if m.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + m.role + '\n' + content | trim + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}{{- content | tojson + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
ADD = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]


@pytest.mark.parametrize(
    "added, lost",
    [
        ({"role": "developer", "content": "Be kind, always."}, "the content of message 1, by 'developer'"),
        ({"role": "developer", "content": "2"}, "the content of message 1, by 'developer'"),  # the question has it
        ({"role": "tool", "content": {"sum": 9}}, "the content of message 1, by 'tool'"),
        ({"role": "assistant", "content": "2", "tool_calls": ADD}, "the tool calls of message 1, by 'assistant'"),
        ({"role": "assistant", "content": "2", "function_call": ADD[0]["function"]}, "the function call of message 1"),
        ({"role": "assistant", "content": "2", "reasoning": "hm"}, "the reasoning of message 1, by 'assistant'"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x, y"}]}, "the content of message 1, by 'user'"),
        (None, "the tools"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tmp_path, added, lost):
    tokenizer = Tokenizer(folder(tmp_path / "a", DROPPING))
    chat, tools = [*([added] if added else []), THOUGHT[0], THOUGHT[1] | {"content": "4"}], None if added else TOOLS
    encoders = [tokenizer.encode_chat, tokenizer.encode_all]
    # The assistant's earlier reasoning is no part of a prompt.
    for encode in encoders if "reasoning" in lost else [*encoders, tokenizer.encode_prompt]:
        with pytest.raises(ValueError, match=f"leaves out {lost}"):
            encode(chat, tools=tools)


def test_what_a_template_rewrites_or_moves_is_not_refused(tmp_path, monkeypatch):
    said = [
        {"role": "user", "content": " 2 <|im_end|>\n"},
        {"role": "assistant", "content": "<think>hm</think> 4 "},
        {"role": "tool", "content": '{"é": "4\n"}'},
        {"role": "tool", "content": "  "},
    ]
    tokenizer = Tokenizer(folder(tmp_path / "a", DROPPING))
    rendered = []
    monkeypatch.setattr(templates, "render", lambda *given, real=templates.render: rendered.append(1) or real(*given))
    tokenizer.encode_prompt([{"role": "system", "content": "2"}, *said])
    assert len(rendered) == 1  # finding it takes no further rendering
    # An answer beside calls is dropped by design: gpt-oss's template treats it as reasoning.
    calls = CHATML.replace(
        "message.content", "(message.tool_calls | tojson if message.tool_calls else message.content)"
    )
    chat = [said[0], said[1] | {"tool_calls": ADD}, said[0], said[1]]
    Tokenizer(folder(tmp_path / "b", calls)).encode_prompt(chat)
    with pytest.raises(ValueError, match="leaves out the content of message 2"):
        Tokenizer(folder(tmp_path / "b", calls)).encode_chat(chat)
    # Each message is in other words, and the system's is last.
    shout = "{% for m in messages[1:] %}{{ m.content | upper }}{% endfor %}{{ messages[0].content }}"
    chat = [{"role": "system", "content": "Be kind."}, said[0], {"role": "user", "content": "one, two"}]
    assert Tokenizer(folder(tmp_path / "c", shout)).encode_prompt(chat)


def test_an_answer_that_only_the_next_header_ends_is_learnt_with_it(tmp_path):
    """GLM-4.5's template writes no end token, and generation ends at the header of a user or of a tool's answer."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    path = folder(tmp_path / "a", template)
    core = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    core.add_special_tokens(["<|user|>", "<|assistant|>", "<|tool|>"])
    core.save(str(path / "tokenizer.json"))
    ends = [core.token_to_id(token) for token in ("</s>", "<|user|>", "<|tool|>")]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = Tokenizer(path)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert runs(tokenizer, *tokenizer.encode_chat(chat * 2)[0]) == [
        (0, "<|user|>hi<|assistant|>"), (1, "yo<|user|>"), (0, "hi<|assistant|>"), (1, "yo<|user|>")
    ]  # fmt: skip
    assert tokenizer.encode_all(chat) == tokenizer.encode_chat(chat)[0][0]
    called = [chat[0], {"role": "assistant", "content": "", "tool_calls": ADD}]
    assert written(tokenizer, called)[0][0].endswith("}]<|tool|>")
    assert tokenizer.encode_prompt(chat, add_generation_prompt=False)[-1] not in ends


def test_several_answers_without_a_word_between(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", TURNS + PROMPT))
    chat = [THOUGHT[2], *[{"role": "assistant", "content": "6"}] * 2]
    assert written(tokenizer, chat) == [["6<|im_end|>", "6<|im_end|>"]]
    # In the manner of Qwen3: only the last message has a place for reasoning.
    last = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    tokenizer = Tokenizer(folder(tmp_path / "b", TURNS.replace("{{ m.content }}", last) + PROMPT))
    six = "<think>\n\n</think>\n\n6<|im_end|>"
    assert written(tokenizer, chat) == [[six, six]]


def test_turns_that_cannot_be_told_apart_are_refused(tmp_path):
    tokenizer = Tokenizer(folder(tmp_path / "a", "{{ messages | length }}\n" + TURNS))
    with pytest.raises(ValueError, match=r"does not write the first 1 messages and then the next one.*generation"):
        tokenizer.encode_chat(CHAT[1:3])


def test_weight_0(tmp_path):
    """Turns of weight 0 are not learnt, with the template's marks and without them."""
    chat = [CHAT[1], CHAT[2] | {"weight": 0}, *CHAT[3:]]
    for name, template in ("a", CHATML), ("b", MARKED):
        tokenizer = Tokenizer(folder(tmp_path / name, template))
        assert written(tokenizer, chat) == [[" 6 <|im_end|>"]]
        assert written(tokenizer, chat, given=2) == [[" 6 <|im_end|>"]]


ROLES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Returns the control tokens among ids."""
    known = [*SPECIAL, "<|user|>", "<|assistant|>"]
    return [token for i in ids if (token := tokenizer.decode([i], special=True)) in known]


@pytest.mark.parametrize("template", [CHATML, INST, HEADERS, MARKED, "roles"])
def test_what_users_write_is_no_control_token(tmp_path, template):
    path = folder(tmp_path / "a", ROLES + "{# <|user|> <|assistant|> #}" if template == "roles" else template)
    file = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    file.add_tokens(["<|user|>", "<|assistant|>", "\n\n"])  # like DeepSeek's: not special, but the template writes them
    file.save(str(path / "tokenizer.json"))
    ours, theirs = Tokenizer(path), Tokenizer(path, special_in_content=True)
    known = [*SPECIAL[:5], *(["<|user|>", "<|assistant|>"] if template == "roles" else [])]
    asked = lambda text: [{"role": "user", "content": text}, CHAT[2], {"role": "user", "content": text}]
    usual = controls(ours, ours.encode_prompt(asked("x")))
    for i in range(60):  # every pair of tokens, and each with every form
        token, other = known[i % len(known)], known[i // 7 % len(known)]
        chat = asked(["{}", "a {} b{}", "{}{}\n\n", "\n{}", "<{}{}", "{}|>"][i % 6].format(token, other))
        ids, text = ours.encode_prompt(chat), theirs.render(chat, add_generation_prompt=True)
        assert controls(ours, ids) == usual and ours.decode(ids, special=True) == text == ours.render(
            chat, add_generation_prompt=True
        )
        assert theirs.encode_prompt(chat) == ours.encode(text, special=False) != ids
        ((ids, mask),) = ours.encode_chat(chat)
        assert [text.strip() for on, text in runs(ours, ids, mask) if on] == [
            text.strip() for on, text in runs(ours, *ours.encode_chat(asked("x"))[0]) if on
        ]
    # As text, it has the ids of text; other text has its usual ids.
    file.encode_special_tokens = True
    if template == CHATML:
        said = "user\nDo </s> and <|im_end|>!\n\n"
        ids = file.encode(said, add_special_tokens=False).ids
        assert ours.encode_prompt([{"role": "user", "content": said[5:]}])[1 : 1 + len(ids)] == ids
    for chat in CHAT, asked("if a < b: c <| d\n\n"), [CHAT[0] | {"content": "<|im_end|>"}, *CHAT[1:]]:
        assert ours.encode_prompt(chat) == theirs.encode_prompt(chat)


@pytest.mark.parametrize("template", [CHATML, HEADERS])
def test_drawn_tokens_stay(tmp_path, template):
    """A chat goes on from the tokens of a prompt and a reply, however they are cut, unless the template changes it."""
    tokenizer = Tokenizer(folder(tmp_path, template))
    asked, said = [{"role": "user", "content": "1 <|im_end|> <"}], {"role": "assistant", "content": "the user"}
    letters = [id for letter in said["content"] for id in tokenizer.encode(letter, special=False)]
    assert letters != tokenizer.encode(said["content"], special=False)
    before = [*tokenizer.encode_prompt(asked), *letters, *tokenizer.encode("<|im_end|>", special=False)]
    chat = [*asked, said, {"role": "user", "content": "<|im_end|>2"}]
    more, whole = tokenizer.encode_after(before, chat), tokenizer.encode_prompt(chat)
    assert more is not None and 0 < len(more) < len(whole) and more == whole[-len(more) :]
    assert tokenizer.decode([*before, *more], special=True) == tokenizer.decode(whole, special=True)
    assert tokenizer.encode_after(before, [*asked, {"role": "assistant", "content": "22"}, chat[-1]]) is None


def test_pieces_that_a_template_joins_are_no_control_token(tmp_path):
    parts = "{% for p in messages[0].content %}{{ p.text | trim }}{% endfor %}"
    cut = "{{ messages[0].content.replace('X', '') }}"
    written = "{{ messages[0].content | tojson }}{{ messages[0].content | tojson(ensure_ascii=True) }}"
    pieces = [{"type": "text", "text": text} for text in ("a< ", "|im_", "end|>", "<|im_end", "|>")]
    for name, template, content, text in (
        ("a", parts, pieces, "a<|im_end|><|im_end|>"),
        ("b", cut, "<X|im_X<X/s>end|>", "<|im_</s>end|>"),
        ("c", written, ["<s>"], '["<s>"]["<s>"]'),
    ):
        tokenizer = Tokenizer(folder(tmp_path / name, template))
        chat = [{"role": "tool", "content": content}]
        ids = tokenizer.encode_prompt(chat)
        assert tokenizer.decode(ids, special=True) == tokenizer.render(chat) == text and not controls(tokenizer, ids)


@pytest.mark.live
@pytest.mark.parametrize("name", ["tiny", "qwen3", "qwen2_5", "trained"])
def test_ids_of_ordinary_text_equal_transformers(tmp_path, name):
    """Ids of real texts are equal, also for a tokenizer like sentencepiece's, which puts a space before a text."""
    transformers = pytest.importorskip("transformers")
    source = SHARED / "aidreams260k" if name == "trained" else pathlib.Path(zoo.__file__).parent / "tiny"
    text = SHARED / "text" / "tinyshakespeare.txt"
    if not text.exists():
        pytest.skip(f"needs {text}")
    for file in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(source / file, tmp_path)
    if name != "tiny":
        templates = pathlib.Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
        template = INST if name == "trained" else (templates / f"{name}.jinja").read_text()
        (tmp_path / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    words, random = text.read_text()[:100_000] + pathlib.Path(__file__).read_text(), np.random.RandomState(0)
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    controls = [token["content"] for token in added if token["special"] or token["content"] in ours.chat_template]
    for token in controls:
        words = words.replace(token, "")
    for i in range(60):
        starts, ends = random.randint(0, len(words) - 400, 3), random.randint(1, 400, 3)
        contents = [words[start : start + end] for start, end in zip(starts, ends, strict=True)]
        chat = [{"role": ("user", "assistant")[j % 2], "content": content} for j, content in enumerate(contents)]
        for options in {"add_generation_prompt": True}, {"add_generation_prompt": False}:
            them = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
            assert ours.encode_prompt(chat, **options) == them, i
        control = controls[i % len(controls)]
        ids = ours.encode_prompt([{"role": "user", "content": contents[0] + control + contents[2]}])
        usual = ours.encode_prompt([{"role": "user", "content": "x"}])
        special = {ours.encode(token, special=False)[-1] for token in controls}
        assert [id for id in ids if id in special] == [id for id in usual if id in special]


def test_a_date_that_stays(tmp_path):
    path = folder(tmp_path / "a", HEADERS.replace("%Y", "%d %b %Y"))
    assert Tokenizer(path, date=datetime.date(2024, 7, 26)).render(CHAT).startswith("<s>Today: 26 Jul 2024\n")
    assert Tokenizer(path).render(CHAT).startswith("<s>Today: " + datetime.date.today().strftime("%d %b %Y"))


@pytest.mark.live
@pytest.mark.parametrize(
    "name",
    [
        *("gptoss", "deepseek_r1_distill", "deepseekv3", "qwen3", "qwen3_instruct_2507", "gemma3"),
        *("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super"),
    ],
)
def test_published_templates_teach_every_answer(tmp_path, name):
    """Each answer is learnt with its reasoning and its end, after the prompt that the model gets at that point.

    Reasoning for which a template has no place is refused.
    """
    trl = pytest.importorskip("trl")
    template = (pathlib.Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = Tokenizer(folder(tmp_path / "a", template, eos_token="<|im_end|>"))
    field = "thinking" if name == "gptoss" else "reasoning_content"
    chat = [
        {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four", field: "hm"},
        {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "six", field: "easy"},
    ]  # fmt: skip
    thinks = name not in ("qwen3_instruct_2507", "gemma3")
    if not thinks:
        with pytest.raises(ValueError, match="leaves out the reasoning of message 4, by 'assistant', so it would be"):
            tokenizer.encode_chat(chat)
        chat = [{key: message[key] for key in ("role", "content")} for message in chat]
    found = [text for each in written(tokenizer, chat) for text in each]
    assert len(found) == 2
    for i, (text, answer, reasoning) in enumerate(zip(found, ("four", "six"), ("hm", "easy"), strict=True)):
        turn = 2 * i + 1
        prompt = tokenizer.render(chat[:turn], add_generation_prompt=True)
        prompt = prompt.removesuffix("<think>\n\n</think>\n\n")  # small Qwen3.5's empty block, where there is reasoning
        ids, _ = tokenizer.encode_chat(chat[: turn + 1])[-1]
        said = tokenizer.decode(ids, special=True)
        assert said.startswith(prompt) and said[len(prompt) :].rstrip() == text
        assert answer in text and (reasoning in text) == thinks and not text.endswith(answer)


def test_bad_folders_and_templates(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no tokenizer.json. Copy"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(FileNotFoundError, match=r"only tokenizer.model. Convert it once with transformers: Auto"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a readable tokenizer: EOF"):
        Tokenizer(tmp_path)
    path = folder(tmp_path / "a", None)
    with pytest.raises(ValueError, match=r"a has no chat template.*chat_template.jinja"):
        Tokenizer(path).render(CHAT)
    (path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="is broken at line 1"):
        Tokenizer(path).render(CHAT)
    (path / "chat_template.jinja").write_text(INST)
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        Tokenizer(path).render([CHAT[2]])
    (path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ValueError, match=r"refuses the messages: .*unsafe"):
        Tokenizer(path).render(CHAT)
    for text, problem in ("[1]", "must hold a JSON object, not a list"), ("{", "not valid JSON"):
        (path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"tokenizer_config.json.*{problem}"):
            Tokenizer(path)


def test_files_that_end_a_process(tmp_path, monkeypatch):
    """tokenizers asks for 8 GiB in one, panics over another, and is slow; only the process that reads it ends."""
    path = folder(tmp_path / "a", None)
    file, good = path / "tokenizer.json", json.loads((path / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "none", "type_id": 0}}]
    for changed in (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        {"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}},
    ):
        file.write_text(json.dumps(good | changed))
        with pytest.raises(ValueError, match=r"a/tokenizer.json is no tokenizer that can be used: to read it ended a"):
            Tokenizer(path)
    file.write_text(
        json.dumps(good | {"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}})
    )
    with pytest.raises(ValueError, match="has no tokens"):
        Tokenizer(path)
    monkeypatch.setattr(trial, "LARGEST", 100)
    with pytest.raises(ValueError, match=r"bytes, more than any tokenizer \(100\): fetch it again"):
        Tokenizer(path)


@pytest.mark.live
def test_a_trained_llama_tokenizer(tmp_path):
    source = SHARED / "aidreams260k"
    if not source.exists():
        pytest.skip(f"needs {source}")
    tokenizer = Tokenizer(source)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (512, 1, (2,), None)
    text = "I sense a gentle hum of précision"
    ids = tokenizer.encode(text)
    assert ids[0] == 1 and tokenizer.decode(ids) == text
    stream = tokenizer.stream(ids[:9])
    assert tokenizer.decode(ids[:9]) + "".join(stream.push(i) for i in ids[9:]) == text
    for name in "tokenizer.json", "tokenizer_config.json", "config.json":
        shutil.copy(source / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(INST)
    chatty = Tokenizer(tmp_path)
    # The space that sentencepiece puts before a text is not one of the text's characters.
    assert [text for on, text in runs(chatty, *chatty.encode_chat(CHAT)[0]) if on] == ["4, été\n\nyes </s>", "6 </s>"]
    transformers = pytest.importorskip("transformers")
    assert ids == transformers.AutoTokenizer.from_pretrained(source)(text)["input_ids"]


def test_halves_of_surrogate_pairs_are_one_sentence():
    tokenizer = Tokenizer(pathlib.Path(zoo.__path__[0]) / "tiny")
    for encode in tokenizer.encode, lambda text: tokenizer.encode_spans(text, [(0, 1)]):
        with pytest.raises(
            ValueError, match=r"half of a surrogate pair, '\\ud83d' at character 2, which is no character"
        ):
            encode("an\ud83d emoji")
