"""LoRA adapters: registered by name, kept on disk, in pages and in the slots of an engine, and
used side by side in one batch. An adapter in use is never replaced under a request.
"""
