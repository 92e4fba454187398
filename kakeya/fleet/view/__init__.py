"""The view: which cards a node holds, which nodes it believes alive, and how two views merge.
Merges commute, associate and repeat without effect. Its files are one idea: everything that
one node believes.
"""
