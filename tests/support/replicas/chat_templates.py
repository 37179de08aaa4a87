"""Chat templates that render what the released ones render, of pictures, videos and text.

All whitespace outside of strings is marked to be dropped, so that no setting of the Jinja environment matters.
"""

from mmpack.demo.chat_templates import DEFAULT_SYSTEM, QWEN2_5_VL, QWEN3_VL, QWEN_PART, filled

__all__ = ["QWEN2_5_VL", "QWEN3_VL"]  # beside those below

_AUDIO_PART = r"""      {%- elif part["type"] == "audio" or "audio" in part or "audio_url" in part -%}
        {%- set seen.audios = seen.audios + 1 -%}
        {%- if add_audio_id -%}{{- "Audio " ~ seen.audios ~ ": " -}}{%- endif -%}
        {{- "<|audio_start|><|audio_pad|><|audio_end|>" -}}
"""
_INTERNVL_PART = r"""      {%- if part["type"] == "image" -%}
        {{- "<IMG_CONTEXT>\n" -}}
      {%- elif part["type"] == "text" -%}
        {{- part["text"] -}}
      {%- endif -%}
"""

# parts on lines of their own, without thinking
MINICPM = r"""
{%- for message in messages -%}
  {{- "<|im_start|>" ~ message["role"] ~ "\n" -}}
  {%- if message["content"] is string -%}
    {{- message["content"] -}}
  {%- else -%}
    {%- for part in message["content"] -%}
      {%- if not loop.first -%}{{- "\n" -}}{%- endif -%}
      {%- if part["type"] == "image" -%}
        {{- "<|image_pad|>" -}}
      {%- elif part["type"] == "video" -%}
        {{- "<|video_pad|>" -}}
      {%- elif "text" in part -%}
        {{- part["text"] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- "<|im_end|>\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_start|>assistant\n<think>\n\n</think>\n\n" -}}
{%- endif -%}
"""
# roles as Kimi's template names them; a picture ends its line, as there
KIMI_K25 = r"""
{%- for message in messages -%}
  {%- set role = message["role"] if message["role"] in ("user", "assistant") else "system" -%}
  {{- "<|im_" ~ role ~ "|>" ~ message["role"] ~ "<|im_middle|>" -}}
  {%- if message["content"] is string -%}
    {{- message["content"] -}}
  {%- else -%}
    {%- for part in message["content"] -%}
      {%- if part["type"] == "image" -%}
        {{- "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n" -}}
      {%- elif part["type"] == "video" -%}
        {{- "<|kimi_k25_video_placeholder|>\n" -}}
      {%- elif "text" in part -%}
        {{- part["text"] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- "<|im_end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|im_assistant|>assistant<|im_middle|>" -}}
{%- endif -%}
"""


_VIDEO = '      {%- elif part["type"] == "video"'
_OMNI_PART = QWEN_PART.replace(_VIDEO, _AUDIO_PART + _VIDEO)
_COUNTS_OMNI = "\n{%- set seen = namespace(images=0, videos=0, audios=0) -%}"
QWEN3_OMNI = filled("", _OMNI_PART, _COUNTS_OMNI)
QWEN2_5_OMNI = filled(DEFAULT_SYSTEM, _OMNI_PART, _COUNTS_OMNI)
for _name, _own in (
    ("<|vision_start|>", "<|vision_bos|>"),
    ("<|vision_end|>", "<|vision_eos|>"),
    ("<|audio_start|>", "<|audio_bos|>"),
    ("<|audio_end|>", "<|audio_eos|>"),
    ("<|image_pad|>", "<|IMAGE|>"),
    ("<|video_pad|>", "<|VIDEO|>"),
    ("<|audio_pad|>", "<|AUDIO|>"),
):
    QWEN2_5_OMNI = QWEN2_5_OMNI.replace(_name, _own)
INTERNVL = filled("", _INTERNVL_PART)  # in transformers' form, of images and text
GLM = r"""
{{- "[gMASK]<sop>" -}}
{%- for message in messages -%}
  {{- "<|" ~ message["role"] ~ "|>\n" -}}
  {%- if message["content"] is string -%}
    {{- message["content"] -}}
  {%- else -%}
    {%- for part in message["content"] -%}
      {%- if part["type"] == "video" or "video" in part -%}
        {{- "<|begin_of_video|><|video|><|end_of_video|>" -}}
      {%- elif part["type"] == "image" or "image" in part -%}
        {{- "<|begin_of_image|><|image|><|end_of_image|>" -}}
      {%- elif part["type"] == "text" -%}
        {{- part["text"] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "<|assistant|>\n" -}}
{%- endif -%}
"""
MISTRAL = r"""
{{- "<s>" -}}
{%- for message in messages -%}
  {%- set ends = {"system": "[/SYSTEM_PROMPT]", "user": "[/INST]", "assistant": "</s>"} -%}
  {{- {"system": "[SYSTEM_PROMPT]", "user": "[INST]", "assistant": ""}[message["role"]] -}}
  {%- if message["content"] is string -%}
    {{- message["content"] -}}
  {%- else -%}
    {%- for part in message["content"] -%}
      {%- if part["type"] == "image" or "image" in part -%}
        {{- "[IMG]" -}}
      {%- elif part["type"] == "text" -%}
        {{- part["text"] -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- ends[message["role"]] -}}
{%- endfor -%}
"""

_GEMMA = r"""
{{- bos_token -}}
SYSTEM
{%- for message in rest -%}
  {%- set role = "model" if message["role"] == "assistant" else message["role"] -%}
  {{- "OPEN" ~ role ~ "\n" -}}
  {%- if loop.first -%}{{- first -}}{%- endif -%}
  {%- if message["content"] is string -%}
    {{- message["content"] | trim -}}
  {%- else -%}
    {%- for part in message["content"] -%}
      {%- if part["type"] == "image" -%}
        {{- "IMAGE" -}}
      {%- elif part["type"] == "video" -%}
        {{- "VIDEO" -}}
      {%- elif part["type"] == "text" -%}
        {{- part["text"] | trim -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- "CLOSE\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "OPENmodel\n" -}}
{%- endif -%}
"""
# the system's text goes before the first turn's
_SYSTEM_FIRST = r"""
{%- set system = messages[0]["role"] == "system" -%}
{%- set rest = messages[1:] if system else messages -%}
{%- set first = messages[0]["content"] ~ "\n\n" if system else "" -%}
"""
_SYSTEM_TURN = r"""
{%- set rest = messages -%}
{%- set first = "" -%}
"""


def _gemma(system: str, start: str, end: str, image: str, video: str) -> str:
    text = _GEMMA.replace("SYSTEM", system).replace("OPEN", start).replace("CLOSE", end)
    return text.replace("IMAGE", image).replace("VIDEO", video)


GEMMA3 = _gemma(_SYSTEM_FIRST, "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "")
GEMMA4 = _gemma(
    _SYSTEM_TURN, "<|turn>", "<turn|>", r"\n\n<|image|>\n\n", r"\n\n<|video|>\n\n"
)  # of turns without tools or thoughts
