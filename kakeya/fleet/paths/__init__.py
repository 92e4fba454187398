"""The addresses of a node, found by mDNS, configuration or hearsay, and the best of them by
measured round-trip time.
"""
