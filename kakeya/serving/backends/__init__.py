"""How one kind of model is served: start, stop, health, decode. No policy about which models."""
