"""Models in GGUF files, run by llama.cpp's llama-server as the child of an engine.

find      the program                     plan        its arguments, and the memory of its KV
wire      requests and answers as JSON    http        HTTP over the child's UNIX socket
gbnf      grammars as llama.cpp's         json_gbnf   JSON schemas as rules of these
slots     which slot a prompt takes       keeper      slots saved and restored
archive   what is saved, in the store     client      what an engine's life calls
"""
