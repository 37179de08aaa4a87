"""Hugging Face processors, wrapped: messages, media and response ids become samples."""
