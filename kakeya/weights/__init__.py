"""The files of models: what lies on this disk, and what is fetched from peers or from the hub. All
of it is one idea, bytes that are proven by a digest: `manifest` says what is proven, `found` and
`index` where it lies, `schedule` and `choice` decide, `pull`, `partial` and `hub` bring it, and
`weights` is the whole for a node."""
