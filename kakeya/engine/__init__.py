"""The engine child's side: sequences, their scheduling, and the service on the unix socket."""
