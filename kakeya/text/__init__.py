"""Text to token ids and back: templates, encoders, stop strings. It loads a tokenizer, never a
model.

These files are one idea: each is a step from what a client wrote to a prompt, or back from tokens
to what it reads.
"""
