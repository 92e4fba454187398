"""Images: diffusers pipelines in a worker process, which the memory arbiter starts and ends. Only
`pipeline`, which runs in that process, imports torch."""
