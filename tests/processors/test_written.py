"""Nothing in messages vanishes: what a chat template does not write is an error that names it.

Templates are released ones, as TRL ships them; what they should say is written by hand.
"""

import importlib.resources
import io
import json
import warnings

import numpy as np
import pytest
from support.replicas import chat_templates

import mmpack as mp
from mmpack.errors import ArgumentError
from mmpack.trajectory import Record, from_calls, from_chat, from_records

pytestmark = pytest.mark.adapter
TOOLS = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}]
VISION = ("qwen2_5_vl", "qwen3_vl", "gemma4_v5", "own:MINICPM", "own:KIMI_K25")
TEXT_ONLY = ("qwen3", "llama3_2", "gptoss")


def template(name):
    if name.startswith("own:"):
        return getattr(chat_templates, name.removeprefix("own:"))
    pytest.importorskip("trl")
    path = importlib.resources.files("trl") / "chat_templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


@pytest.fixture
def by(hf):
    return lambda name: mp.wrap_processor(hf, chat_template=template(name))


def user(*parts, **more):
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": "user", "content": content, **more}


def said(text, role="user"):
    return {"role": role, "content": text}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments=None, **more):
    return {
        "function": {
            "name": "zoom",
            "arguments": {"box": [1, 2]} if arguments is None else arguments,
        },
        **more,
    }


def lost(act, match):
    with pytest.raises(ArgumentError, match=match) as caught:
        act()
    assert "\n" not in str(caught.value) and "Fix: " in str(caught.value)


# ---------------------------------------------------------------- what is lost


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([user("x", {"type": "note", "note": "y"})], r"'note' of content\[1\] \(of type 'note'\)"),
        ([user("x", {"type": "image", "caption": "a cat"})], r"'caption' of content\[1\]"),
        ([user({"type": "text", "text": "x", "weight": 0})], r"'weight' of content\[0\]"),
        ([user("x", images=["a.png"])], r"the key 'images' of messages\[0\].*write one part"),
        ([user("x", name="bob")], r"the key 'name' of messages\[0\] \('user'\)"),
        ([user("x"), answer("y", refusal="no")], r"'refusal' of messages\[1\]"),
        ([user("x"), answer("y", train=False)], r"'train' of messages\[1\]"),
        ([user("x"), answer("", function_call={"name": "f"})], r"'function_call' of messages\[1\]"),
        ([user("x"), answer("", tool_calls=[call()])], r"tool_calls\[0\] of messages\[1\].*as the text that"),
],
)  # fmt: skip
def test_what_a_template_leaves_out_is_named(by, messages, match):
    name = "qwen2_5_vl"
    lost(lambda: by(name).render(messages), match)
    if messages[-1]["role"] == "assistant":
        whole = {"assistant_loss": True, "sample_id": "s"}
        lost(lambda: by(name)(messages, **whole), match)
        lost(lambda: from_chat(messages, by(name), trajectory_id="t", group_id="g"), match)


@pytest.mark.parametrize(
    ("name", "messages", "match"),
    [

        # content as parts where strings are read, and the other way round
("qwen3", [user("x")], r"leaves out content\[0\]"),
        ("llama3_2", [user("x")], r"content\[0\].*of messages\[0\] not as it is, but in Python's notation"),
        ("smolvlm", [said("x")], "leaves out the content of messages"),

        # beside a call Llama writes no text
("llama3_2", [said("x"), answer("look", tool_calls=[call()])], r"the content of messages\[1\]"),
],
)  # fmt: skip
def test_contents_in_another_form_are_named(by, name, messages, match):
    lost(lambda: by(name).render(messages), match)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("qwen3", {"tools": [len]}, r"can't write these messages \(Tools should"),
        ("qwen2_5_vl", {"tools": TOOLS}, "'tools' of template_kwargs. Fix: leave it out"),
        ("qwen3", {"enable_thinkin": False}, "'enable_thinkin'.*Fix: write enable_thinking"),
        ("qwen3_vl", {"padding": True}, "'padding'"),
    ],
)
def test_keywords_that_no_template_reads(by, name, options, match):
    asked = [said("x")]
    lost(lambda: by(name)(asked, [1], sample_id="s", template_kwargs=options), match)


@pytest.mark.parametrize(
    ("field", "fix"),
    [
        ("tools", r'as template_kwargs=\{"tools": …\}'),
        ("chat_template_kwargs", r'as template_kwargs=\{"tools": …\}'),
        ("reward", "write rewards"),
        ("family", "leave it out"),
    ],
)
def test_keywords_of_no_field(processor, field, fix):
    ids, log = {"trajectory_id": "t", "group_id": "g"}, [said("x"), answer("y")]
    calls = [{"messages": log[:1], "choices": [{"message": log[1]}]}]
    match = f"'{field}' is not a field of .*Fix: .*{fix}"
    lost(lambda: processor(log[:1], [1], sample_id="s", **{field: []}), match)
    lost(lambda: from_chat(log, processor, **ids, **{field: []}), match)
    lost(lambda: from_calls(calls, processor, **ids, **{field: []}), match)
    records = [Record([1, 2], [3])]
    with pytest.raises(ArgumentError, match=f"'{field}' is not a field of"):
        from_records(records, processor, **ids, **{field: []})


# ---------------------------------------------------------------- what is lost in part

WHOLE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{{- m.content }}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
THOUGHT = "<think>long thought</think>The answer is 42."


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ("m.content.split('</think>')[-1]", "'<think>long thought</think>'"),
        ("m.content[:41]", "'42.'"),
        ("m.content | replace('thought', '')", "'thought'"),
    ],
)
def test_a_text_that_is_written_in_part(hf, written, part):
    """The policy would learn to answer without its thoughts, as with the template of DeepSeek-R1."""
    processor = mp.wrap_processor(hf, chat_template=WHOLE.replace("m.content", written))
    log = [said("q"), answer(THOUGHT)]
    named = rf"leaves out {part} in the content of messages?.?1\]? \('assistant'\)"
    lost(lambda: processor(log, assistant_loss=True, sample_id="s"), named + ", so the policy")
    lost(lambda: from_chat(log, processor, trajectory_id="t", group_id="g"), named)
    lost(lambda: processor([said(THOUGHT)], [1], sample_id="s"), rf"leaves out {part} .*\('user'\)")
    with pytest.warns(mp.errors.TemplateWarning, match=named):
        processor([*log, said("r")], [1], sample_id="s")


@pytest.mark.parametrize("written", ["m.content | trim", "m.content | trim | tojson"])
def test_a_text_that_is_written_in_other_whitespace(hf, written):
    processor = mp.wrap_processor(hf, chat_template=WHOLE.replace("m.content", written))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor([said(' a "b"\n\u00e9 ')], [1], sample_id="s")


# ---------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("name", [*VISION, *TEXT_ONLY])
def test_what_has_no_content_is_not_missed(by, name):
    """Rows of `datasets` have all columns, clients' answers all fields; ids tie calls to answers."""
    nothing = {"refusal": None, "annotations": [], "tool_calls": [], "reasoning_content": None}
    messages = [
        {"role": "user", "content": "x", "name": None, "images": [], "tool_calls": None},
        answer("y", id="msg_1", audio=None, **nothing),
        {"role": "user", "content": "  "},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = by(name).render(messages)
    bare = [{"role": m["role"], "content": m["content"]} for m in messages]
    assert text == by(name).render(bare)


@pytest.mark.parametrize("name", ["qwen3_vl", "glm4moe", "gptoss", "gemma4_v5", "deepseekv3"])
def test_calls_and_their_answers(by, name):
    messages = [
        said("x"),
        answer("", tool_calls=[call(json.dumps({"box": [1, 2]}), id="abcdefghi", type="function", index=0)]),
        {"role": "tool", "content": "done", "tool_call_id": "abcdefghi", "name": "zoom"},
    ]  # fmt: skip
    text = by(name).render(messages)
    assert "zoom" in text and "box" in text and '\\"' not in text


def test_thoughts_of_earlier_turns_are_a_warning(by):
    """Qwen3's template leaves them out by its own rule, as the engine's does."""
    messages = [said("x"), answer("y", reasoning_content="hm"), said("z")]
    named = r"leaves out the key 'reasoning_content' of messages\[1\]"
    with pytest.warns(mp.errors.TemplateWarning, match=named) as caught:
        by("qwen3").render(messages)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by("qwen3").render(messages[:2], add_generation_prompt=False)


def test_a_prompt_is_rendered_once_more(by, picture, monkeypatch):
    """However many parts it has: asking costs as much as rendering, not as many times as there are parts."""
    processor = by("qwen3_vl")
    shown = [user({"type": "image", "image": picture(k % 3)}, "x") for k in range(5)]
    log = [m for prompt in shown for m in (prompt, answer("y", tool_calls=[call()]))][:-1]
    calls = []
    real = type(processor.tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(processor.tokenizer),
        "apply_chat_template",
        lambda *a, **k: calls.append(1) or real(*a, **k),
    )
    processor(log, [1], sample_id="s")
    assert len(calls) == 2


# ---------------------------------------------------------------- forms that are read


def test_arguments_as_openai_writes_them(by):
    """JSON text of an object is the object, not text to encode once more."""
    log = [said("x"), answer("", tool_calls=[call('{"box":[1,2]}')])]
    sample = by("qwen3_vl")(log, assistant_loss=True, sample_id="s")
    turn = by("qwen3_vl").tokenizer.decode(sample.input_ids[sample.loss_indices])
    wanted = '<tool_call>\n{"name": "zoom", "arguments": {"box": [1, 2]}}\n</tool_call><|im_end|>'
    assert turn == wanted
    (made,) = from_chat(log, by("qwen3_vl"), trajectory_id="t", group_id="g").turns
    assert by("qwen3_vl").tokenizer.decode(made.response_ids) == wanted


CALLED = """{%- for m in messages %}{{ m.role ~ ": " ~ m.content }}{% for c in m.tool_calls or [] -%}
{{ c.function.name ~ " " }}{{ ARGUMENTS }}{% endfor %}{% endfor %}"""


def test_arguments_as_a_template_reads_them(hf):
    """One writes objects as JSON, another texts as they are; neither is written as Python's dict or JSON in JSON."""
    texts = mp.wrap_processor(hf, chat_template=CALLED.replace("ARGUMENTS", "c.function.arguments"))
    both = CALLED.replace("ARGUMENTS", "c.function.arguments | tojson")
    objects = mp.wrap_processor(hf, chat_template=both)

    def log(arguments):
        return [said("x"), answer("", tool_calls=[call(arguments)])]

    for arguments in ('{"box": [1]}', {"box": [1]}):
        assert objects.render(log(arguments)).endswith(': zoom {"box": [1]}')
    assert texts.render(log('{"box": [1]}')).endswith(': zoom {"box": [1]}')
    assert texts.render(log('{"box": [1')).endswith(': zoom {"box": [1')  # as the model wrote it
    named = r"the key 'arguments' of tool_calls\[0\] of messages\[1\] not as it is, but in "
    lost(lambda: texts.render(log({"box": [1]})), named + "Python's")
    lost(
        lambda: objects.render(log('{"box": [1')),
        named + "JSON's notation. Fix: pass the call as text",
    )


@pytest.fixture
def png(picture):
    out = io.BytesIO()
    picture(0).save(out, "PNG")
    return out.getvalue()


def test_pictures_as_people_write_them(processor, picture, png, tmp_path, hf):
    (tmp_path / "a.png").write_bytes(png)
    reader = mp.wrap_processor(hf, media_root=tmp_path)
    wanted = processor([user({"type": "image", "image": png})], sample_id="s")
    for part in (
        {"type": "image", "image": {"bytes": png, "path": "gone.png"}},
        {"type": "image", "image": {"bytes": png}},
        {"type": "image_pil", "image_pil": picture(0)},
        {"image_pil": picture(0)},
        {"image": png},
    ):
        found = processor([user(part)], sample_id="s")
        assert np.array_equal(found.input_ids, wanted.input_ids)
        assert found.media[0].content_hash == wanted.media[0].content_hash
    for cell in ({"bytes": None, "path": "a.png"}, {"path": "a.png"}):
        found = reader([user({"type": "image", "image": cell})], sample_id="s")
        assert found.media[0].content_hash == wanted.media[0].content_hash
        assert reader([user({"type": "image"})], sample_id="s", media=[cell]) == found
    empty = user({"type": "image", "image": {"bytes": None, "path": None}})
    lost(lambda: processor([empty], sample_id="s"), "neither bytes nor a path")


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "holds 'file_id', which mmpack can't read"),
        ({"inline_data": {"mime_type": "audio/wav", "data": "AAAA"}}, '"type": "audio", "base64"'),
        ({"type": "image", "source": {"data": "AAAA"}}, "holds no image, and 'source' is not read"),
        ({"type": "text", "text": "y", "image": "PNG"}, r"the key 'text' of content\[1\] \(of type 'image'\)"),
        ({"type": "image_url", "image_url": {"url": "data:,", "foo": 3}}, "has 'foo' beside the image"),
        ({"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}, "has the detail 'low'"),
        ({"type": "image", "image": {"bytes": b"", "rotate": 90}}, "holds 'rotate' beside bytes"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "start": 3}}, "'start' beside the audio.*cut"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,QQ==,QQ=="}}, "a list of JPEGs"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "'image_embeds'"),
        ({"type": "input_image", "image_url": "https://example.com/a.png"}, "mmpack fetches nothing"),
        ({"type": "image", "image": "PNG", "image_url": "data:,"}, "'image' and 'image_url'.*one part for each"),
        ({"type": "video", "image": "PNG"}, "of type 'video' holds 'image'"),
        ({"type": "image", "image": "PNG", "video": "PNG"}, "holds 'image' and 'video'"),
],
)  # fmt: skip
def test_media_that_cannot_be_read_are_named(processor, png, part, match):
    part = {k: png if v == "PNG" else v for k, v in part.items()}
    lost(lambda: processor([user("x", part)], sample_id="s"), match)


# ---------------------------------------------------------------- turns that begin with the template's words

OPENED = '"<|im_start|>" ~ message["role"] ~ "\\n"'
CLOSED = ' ~ ("<think>\\n\\n</think>\\n\\n" if message["role"] == "assistant" else "")'
TWICE = (
    template("own:QWEN3_VL")
    .replace(OPENED, OPENED + CLOSED)
    .replace('"<|im_start|>assistant\\n"', '"<|im_start|>assistant\\n<think>\\n"')
)


def test_a_template_that_opens_thinking_in_both_places(hf):
    processor = mp.wrap_processor(hf, chat_template=TWICE)
    log = [said("2 + 2?"), answer("Four.")]
    for act in (
        lambda: processor(log, assistant_loss=True, sample_id="s"),
        lambda: from_chat(log, processor, trajectory_id="t", group_id="g"),
    ):
        with pytest.warns(
            mp.errors.TemplateWarning, match=r"begins with '</think>\\n\\nFour"
        ) as caught:
            act()
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_vl", answer("Four.")),
        ("qwen3_vl", answer([{"type": "text", "text": "Fo"}, {"type": "text", "text": "ur."}])),
        ("qwen3_vl", answer("", tool_calls=[call()])),
        ("qwen3_5_think", answer("<think>\nhm\n</think>\n\nFour.")),
        ("qwen3", answer("Four.", reasoning_content="hm")),
        ("gemma3", answer("Four.")),
    ],
)
def test_turns_that_begin_with_their_own_text(by, name, message):
    log = [said("2 + 2?"), message]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by(name)(log, assistant_loss=True, sample_id="s")
        from_chat(log, by(name), trajectory_id="t", group_id="g")


# ---------------------------------------------------------------- ids without loss


def test_ids_without_loss_spans_warn(processor):
    with pytest.warns(
        mp.errors.LossWarning, match="from_ids: 's' has no loss_spans.*Fix: "
    ) as caught:
        processor.from_ids([5, 6, 7], sample_id="s")
    assert caught[0].filename == __file__
    choice = {"message": answer("y"), "token_ids": [6]}
    calls = [{"messages": [user("x")], "prompt_token_ids": [5], "choices": [choice]}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor.from_ids([5, 6, 7], loss_spans=(), sample_id="s")
        processor.from_ids([5, 6, 7], loss_spans=[(1, 2)], sample_id="s")
        from_calls(calls, processor, trajectory_id="t", group_id="g")
