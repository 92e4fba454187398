"""Text to token ids and back: templates, encoders, stop strings. It loads a tokenizer, never a
model.
"""
