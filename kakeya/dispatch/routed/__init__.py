"""The models of the whole fleet for the front doors of one node: each request is served where it is
served best, and goes on elsewhere when its node is lost."""
