"""The engine of an encoder: texts that wait become batches, and batches vectors."""
