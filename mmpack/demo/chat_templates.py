"""The chat templates of Qwen2.5-VL and Qwen3-VL: they render what the released ones do, of pictures, videos and text.

All whitespace outside of strings is marked to be dropped, so that no setting of the Jinja environment matters.
"""

TEMPLATE = r"""
{%- for message in messages -%}
SYSTEM  {{- "<|im_start|>" ~ message["role"] ~ "\n" -}}
  {%- if message["content"] is string -%}
    {{- message["content"] -}}
  {%- else -%}
    {%- for part in message["content"] -%}
PART    {%- endfor -%}
  {%- endif -%}
  {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\n" -}}
{%- endif -%}
"""
DEFAULT_SYSTEM = r"""  {%- if loop.first and message["role"] != "system" -%}
    {{- "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" -}}
  {%- endif -%}
"""
QWEN_PART = r"""      {%- if part["type"] == "image" or "image" in part or "image_url" in part -%}
        {%- set seen.images = seen.images + 1 -%}
        {%- if add_vision_id -%}{{- "Picture " ~ seen.images ~ ": " -}}{%- endif -%}
        {{- "<|vision_start|><|image_pad|><|vision_end|>" -}}
      {%- elif part["type"] == "video" or "video" in part -%}
        {%- set seen.videos = seen.videos + 1 -%}
        {%- if add_vision_id -%}{{- "Video " ~ seen.videos ~ ": " -}}{%- endif -%}
        {{- "<|vision_start|><|video_pad|><|vision_end|>" -}}
      {%- elif "text" in part -%}
        {{- part["text"] -}}
      {%- endif -%}
"""


def filled(system: str, part: str, before: str = "") -> str:
    return before + TEMPLATE.replace("SYSTEM", system).replace("PART", part)


COUNTS = "\n{%- set seen = namespace(images=0, videos=0) -%}"
QWEN2_5_VL = filled(DEFAULT_SYSTEM, QWEN_PART, COUNTS)
QWEN3_VL = filled("", QWEN_PART, COUNTS)  # no system prompt of its own
