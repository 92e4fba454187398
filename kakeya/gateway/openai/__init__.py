"""OpenAI's dialect: requests checked and turned into generations, and chunks on the way out."""
