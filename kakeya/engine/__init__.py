"""The engine process: one model, one thread that computes, and the service on its unix socket. It
decides which sequence runs; it never touches mlx itself.
"""
