"""Ollama's API: chats, prompts, vectors and models, for clients that know no other."""
