# The public names: what type checkers see, and `mmpack.exports` loads.
from mmpack.demo.clips import clip_exercises as clip_exercises
from mmpack.demo.datasets import Exercise as Exercise
from mmpack.demo.datasets import load_exercises as load_exercises
from mmpack.demo.qwen_processor import qwen_vl_processor as qwen_vl_processor
from mmpack.demo.tiny_models import tiny_model as tiny_model
