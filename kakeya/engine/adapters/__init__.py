"""The adapters in an engine's slots: loads from pages, and which sequence uses which."""
