"""`python -m chain`: what each layout of a step leaves at each stage of a transformers Qwen-VL."""
