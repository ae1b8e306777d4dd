"""Turns text into token ids and back: tokenizers, chat templates, prompts with images, and parts of replies."""
